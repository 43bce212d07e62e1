"""Places queued requests: which are tried, in which order, and what is recorded. Also reports their positions."""

from collections.abc import Sequence

from motet.errors import ContextLengthExceeded
from motet.runner_info import Failure, Tier
from motet_scheduler.policy import effects
from motet_scheduler.policy.queue import Queue
from motet_scheduler.policy.request_lifecycle import RequestLifecycle
from motet_scheduler.policy.requests import Placement, Request
from motet_scheduler.policy.runner_choice import STARTING, Chosen, MustWait, NeverFits, choose, nearest
from motet_scheduler.policy.runners import Runner
from motet_scheduler.policy.state import SchedulerState
from motet_scheduler.policy.values import GroupName, Promise

EXACT_POSITIONS = 100
"""Positions up to this one are reported when they change, later ones when they change by a tenth."""

POSITIONS_PERIOD = 1.0
"""Seconds between two reports of all positions."""

OTHERS_FIRST = "other requests wait before it"


class Placer:
    def __init__(self, state: SchedulerState, lifecycle: RequestLifecycle) -> None:
        self._state = state
        self._lifecycle = lifecycle

    def place_all(self) -> None:
        if not self._state.settled:
            return
        for group, queue in self._state.queues.items():
            if not queue.blocked:
                self.place_group(group, queue)

    def place_group(self, group: GroupName, queue: Queue) -> None:
        """Place all requests that fit, then mark the queue as blocked until capacity is freed."""
        if not self._state.settled:
            return
        while self._scan(group, queue):
            pass
        queue.blocked = True

    def place_new(self, queue: Queue, request: Request) -> None:
        """Place a request that has just joined the queue."""
        if not queue.blocked:
            self.place_group(request.group, queue)
        elif queue.has_turn(request):
            # All other requests have been tried; only this one is new.
            self.place(queue, request)
            queue.blocked = queue.overdue() is queue.reserved_for

    def _scan(self, group: GroupName, queue: Queue) -> bool:
        """Try each tenant's oldest request. True if a placement made another request overdue: a runner must be reserved
        for it first."""
        queue.scans += 1
        self._reserve(queue)
        config = self._state.config
        first_tried = False
        for request_class, class_queue in queue.class_queues():
            turn = queue.next_turn(request_class, 0, config)
            while turn < config.tenants_examined and (head := class_queue.head(turn)) is not None:
                placed = self.place(queue, head)
                if placed and queue.overdue() is not queue.reserved_for:
                    return True
                # Placing only reduces the capacity.
                if (placed or not first_tried) and not self._any_capacity(group):
                    self._explain(queue)
                    return False
                first_tried = True
                turn = queue.next_turn(request_class, turn if placed else turn + 1, config)
        queue.end_scan()
        return False

    def _reserve(self, queue: Queue) -> None:
        """Reserve the runner where the overdue request lacks least. In the next scan that may be another one."""
        overdue = queue.overdue()
        runner = None
        if overdue is not None:
            runners, holders = self._runners_for(overdue)
            if overdue is queue.reserved_for and queue.reserved_runner is not None and queue.freed_runners is not None:
                # On no other runner it lacks less than before.
                nearby = (queue.reserved_runner, *queue.freed_runners)
                runners = [runner for runner in nearby if runner.serves(overdue.base)]
            runner = nearest(overdue, runners, self._state.config, self._state.now, holders=holders)
        queue.reserve(overdue, runner)

    def _any_capacity(self, group: GroupName) -> bool:
        return any(runner.has_capacity for runner in self._state.runners_of(group))

    def _explain(self, queue: Queue) -> None:
        """Record why the oldest request waits, if no runner has capacity."""
        oldest = queue.oldest()
        if oldest is not None:
            outcome = self._choose(queue, oldest)
            if not isinstance(outcome, Chosen):
                oldest.waiting_reason = outcome.why

    def place(self, queue: Queue, request: Request) -> bool:
        """Place a request, refuse it, or record why it waits. False if it still waits."""
        if not self._state.settled:
            request.waiting_reason = STARTING
            return False
        outcome = self._choose(queue, request)
        if isinstance(outcome, Chosen):
            queue.remove_placed(request)
            self._assign(request, outcome.runner, outcome.promise)
            return True
        if isinstance(outcome, NeverFits):
            self._lifecycle.refuse(request, Failure.of(ContextLengthExceeded(outcome.why)))
            return True
        request.waiting_reason = outcome.why
        request.tried_in_scan = -1 if outcome.limited else queue.scans
        return False

    def _choose(self, queue: Queue, request: Request) -> Chosen | MustWait | NeverFits:
        runners, holders = self._runners_for(request)
        return choose(
            request,
            runners,
            self._state.config,
            self._state.now,
            near=self._state.families.near(request),
            reserved=queue.reserved_from(request),
            holders=holders,
        )

    def _runners_for(self, request: Request) -> tuple[Sequence[Runner], Sequence[Runner] | None]:
        """The runners of its group that have its base model, and those of them that alone serve its adapter; None: any
        does."""
        runners = [runner for runner in self._state.runners_of(request.group) if runner.serves(request.base)]
        adapters, now = self._state.adapters, self._state.now
        return runners, adapters.holders_at_limit(request.digest, request.adapter, runners, now)

    def _assign(self, request: Request, runner: Runner, promise: Promise) -> None:
        source = self._state.adapters.source_of(request.digest, request.adapter)
        if source is not None and runner.tier_of(request.digest) is not Tier.DEVICE:
            promise = Promise(promise.pages, promise.tokens, source.bytes)
            if not runner.load_ordered_since(
                self._state.now - self._state.config.load_retry, request.digest, source.ref
            ):
                self._state.emit(self._state.adapters.load(runner, request.digest, source, self._state.now))
        request.epoch += 1
        request.base = request.base or runner.base.digest
        request.placement = Placement(runner.instance, runner.identity.incarnation, request.epoch, self._state.now)
        self._state.families.placed(request, runner.instance)
        request.deadline_at = None
        request.waiting_reason, request.reported_position = "", (0, "")
        self._lifecycle.placed(request.id, request.epoch)
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
                base=runner.base.digest,
                moved_reason=request.moved_reason,
                engine_hung=request.engine_hung,
            )
        )
        request.moved_reason, request.engine_hung = "", False
        self._state.note_event(request.id, "placed", f"{runner.instance}, epoch {request.epoch}, {promise.pages} pages")


class Positions:
    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._reported_at = state.now

    def tick(self) -> None:
        if self._state.now - self._reported_at < POSITIONS_PERIOD:
            return
        self._reported_at = self._state.now
        for queue in self._state.queues.values():
            for position, request in enumerate(queue, 1):
                self.report(request, position)

    def report(self, request: Request, position: int) -> None:
        previous, why = request.reported_position
        request.waiting_reason = request.waiting_reason or OTHERS_FIRST
        moved = abs(position - previous) > (0 if position <= EXACT_POSITIONS else previous // 10)
        if moved or (request.waiting_reason != why and position <= EXACT_POSITIONS):
            request.reported_position = (position, request.waiting_reason)
            self._state.emit(effects.SendPosition(request.gateway, request.id, position, request.waiting_reason))
