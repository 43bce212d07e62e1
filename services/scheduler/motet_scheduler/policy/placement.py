"""Giving queued requests their places: who is tried, in which order, and what is written when one goes."""

from motet.errors import ContextLengthExceeded
from motet.runner_info import Failure, Tier
from motet_scheduler.policy import effects
from motet_scheduler.policy.adapters import ensure
from motet_scheduler.policy.queue import Queue
from motet_scheduler.policy.request_lifecycle import RequestLifecycle
from motet_scheduler.policy.requests import Placement, Request
from motet_scheduler.policy.runner_choice import STARTING, Chosen, NeverFits, choose
from motet_scheduler.policy.runners import Runner
from motet_scheduler.policy.state import SchedulerState
from motet_scheduler.policy.values import GroupName, Promise

EXACT_POSITIONS = 100
"""Positions up to this are told whenever they change, later ones when they changed by a tenth."""

POSITIONS_PERIOD = 1.0
"""Seconds between two looks at all positions."""

OTHERS_FIRST = "others wait before it"


class Placer:
    def __init__(self, state: SchedulerState, lives: RequestLifecycle) -> None:
        self._state = state
        self._lives = lives

    def place_all(self) -> None:
        if not self._state.settled:
            return
        for group, queue in self._state.queues.items():
            if len(queue) and not queue.blocked:
                self.place_group(group, queue)

    def place_group(self, group: GroupName, queue: Queue) -> None:
        """Place all that fits, then call the queue stuck until room comes up somewhere."""
        if not self._state.settled:
            return
        while self._place_until_overdue(group, queue):
            pass
        queue.blocked = True

    def _place_until_overdue(self, group: GroupName, queue: Queue) -> bool:
        """One look at the heads of all lines; True when a placement made somebody overdue, who comes first now."""
        queue.scans += 1
        policy = self._state.policy
        looked = False
        for request_class, lane in queue.lanes():
            while (overdue := lane.overdue()) is not None:
                if not self.place(queue, overdue):
                    return False  # what is less urgent would take the room it waits for
            turn = queue.next_turn(lane, 0, policy)
            while turn < policy.tenants_examined and (head := lane.head(turn)) is not None:
                placed = self.place(queue, head)
                if placed and queue.overdue(request_class) is not None:
                    return True
                # Room only becomes less while we place.
                if (placed or not looked) and not self._any_capacity(group):
                    self._explain(queue, group)
                    return False
                looked = True
                turn = queue.next_turn(lane, turn if placed else turn + 1, policy)
        queue.end_scan()
        return False

    def _any_capacity(self, group: GroupName) -> bool:
        return any(runner.has_capacity for runner in self._state.runners_of(group))

    def _explain(self, queue: Queue, group: GroupName) -> None:
        """Say why the first in line waits, when a look at the runners was enough to know that nobody can go."""
        oldest = queue.oldest()
        if oldest is not None:
            outcome = choose(oldest, self._state.runners_of(group), self._state.policy, self._state.now)
            if not isinstance(outcome, Chosen):
                oldest.waiting_reason = outcome.why

    def place(self, queue: Queue, request: Request) -> bool:
        """Place a request, or refuse it, or note why it waits; False when it still waits."""
        if not self._state.settled:
            request.waiting_reason = STARTING
            return False
        outcome = choose(request, self._state.runners_of(request.group), self._state.policy, self._state.now)
        if isinstance(outcome, Chosen):
            queue.remove_placed(request)
            self._assign(request, outcome.runner, outcome.promise)
            return True
        if isinstance(outcome, NeverFits):
            self._lives.refuse(request, Failure.of(ContextLengthExceeded(outcome.why)))
            return True
        request.waiting_reason = outcome.why
        request.tried_in_scan = queue.scans
        return False

    def _assign(self, request: Request, runner: Runner, promise: Promise) -> None:
        source = self._state.adapters.source_of(request.digest)
        if source is not None and runner.tier_of(request.digest) is not Tier.DEVICE:
            promise = Promise(promise.pages, promise.tokens, source.bytes)
            ordered = runner.loads_ordered.get(request.digest)
            if ordered is None or self._state.now - ordered > self._state.policy.load_retry:
                runner.loads_ordered[request.digest] = self._state.now
                self._state.emit(ensure(runner, request.digest, source))
        request.epoch += 1
        request.placement = Placement(runner.instance, runner.identity.incarnation, request.epoch, self._state.now)
        request.deadline_at = None
        request.waiting_reason, request.reported_position = "", (0, "")
        self._lives.placed(request.id, request.epoch)
        runner.record_promise((request.id, request.epoch), promise.pages, request.digest, self._state.now)
        self._state.emit(effects.ExpectRequest(runner.instance, request.id, request.epoch, promise, request.digest))
        self._state.emit(
            effects.SendPlaced(
                gateway=request.gateway,
                request=request.id,
                tenant=request.tenant,
                epoch=request.epoch,
                instance=runner.instance,
                incarnation=runner.identity.incarnation,
                address=runner.address,
                promise=promise,
                moved_because=request.moved_because,
                engine_hung=request.engine_hung,
            )
        )
        request.moved_because, request.engine_hung = "", False
        self._state.note_event(request.id, "placed", f"{runner.instance}, epoch {request.epoch}, {promise.pages} pages")


class Positions:
    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._told_at = state.now

    def tick(self) -> None:
        if self._state.now - self._told_at < POSITIONS_PERIOD:
            return
        self._told_at = self._state.now
        for queue in self._state.queues.values():
            for position, request in enumerate(queue, 1):
                self.tell(request, position)

    def tell(self, request: Request, position: int) -> None:
        told, why = request.reported_position
        request.waiting_reason = request.waiting_reason or OTHERS_FIRST
        moved = abs(position - told) > (0 if position <= EXACT_POSITIONS else told // 10)
        if moved or (request.waiting_reason != why and position <= EXACT_POSITIONS):
            request.reported_position = (position, request.waiting_reason)
            self._state.emit(effects.SendPosition(request.gateway, request.id, position, request.waiting_reason))
