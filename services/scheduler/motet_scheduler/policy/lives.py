"""A request's life: it begins, waits, is moved, and ends, each time with all books set right."""

from heapq import heappop, heappush
from typing import Any

from motet.errors import DeadlineExceeded, NoRunner
from motet.fleet import Failure
from motet.model import BASE, RequestId
from motet_scheduler.policy import effects as do
from motet_scheduler.policy.deadlines import Deadlines
from motet_scheduler.policy.placement import SETTLING
from motet_scheduler.policy.requests import Placement, Request
from motet_scheduler.policy.room import room_at
from motet_scheduler.policy.runners import Key, Runner
from motet_scheduler.policy.state import State
from motet_scheduler.policy.values import GroupName


class Lives:
    def __init__(self, state: State) -> None:
        self._state = state
        self.ended: dict[Key, float] = {}
        """Placements that ended a moment ago: a report that left before that still lists them."""
        self.unlisted: dict[Key, float] = {}
        """Placements that their runner does not list, and since when; the longest first."""
        self.deadlines = Deadlines()
        self._wakeups: list[tuple[float, GroupName]] = []
        """When a request may ask again a runner that it avoids."""
        self._sequence = 0

    def begin(self, name: RequestId, **fields: Any) -> Request:
        self._sequence += 1
        request = Request(id=name, sequence=self._sequence, **fields)
        self._state.requests[name] = request
        self._state.timelines.begin(name, self._state.now)
        if request.digest != BASE:
            self._state.uses[request.digest] += 1
        return request

    def wait(self, request: Request) -> None:
        """Join the queue with the age it has, and with its patience whole."""
        request.deadline_at = self._state.now + request.patience if request.patience > 0 else None
        self.deadlines.add(request)
        for until in request.avoid.values():
            heappush(self._wakeups, (until, request.group))
        request.tried = -1
        self._state.queue(request.group).add(request)

    def end(self, request: Request) -> None:
        """Forget a request: it is over, or its gateway will tell of it anew."""
        if request.waiting:
            self._state.queues[request.group].remove(request)
        else:
            self.strike(request)
        request.deadline_at = None
        del self._state.requests[request.id]
        self._state.timelines.end(request.id)
        if request.digest != BASE:
            self._state.uses[request.digest] -= 1
            if not self._state.uses[request.digest]:
                del self._state.uses[request.digest]

    def strike(self, request: Request) -> None:
        """Release what is promised to its placement."""
        placement = request.placement
        if placement is None:
            return
        key = (request.id, placement.epoch)
        self.ended[key] = self._state.now
        self.unlisted.pop(key, None)
        runner = self._state.runner_of(placement)
        if runner is None:
            return
        runner.strike(key)
        parked = runner.parked.get(request.id)
        if parked is not None and parked.epoch == placement.epoch:
            del runner.parked[request.id]
        room_at(self._state, runner)

    def placed(self, request: RequestId, epoch: int) -> None:
        """From here on its runner has to list it before long."""
        self.ended.pop((request, epoch), None)
        self.unlisted.pop((request, epoch), None)
        self.unlisted[request, epoch] = self._state.now

    def runner_is_gone(self, runner: Runner) -> None:
        """It will list nothing any more. The gateways notice, and tell what was lost; what they do not tell of is taken
        back."""
        for request in self._placed_on(runner):
            assert request.placement is not None
            self.unlisted.setdefault((request.id, request.placement.epoch), self._state.now)

    def refuse(self, request: Request, failure: Failure) -> None:
        self._state.note(request.id, "refused", failure.message)
        self._state.do(do.Refuse(request.gateway, request.id, request.epoch, failure, request.tenant))
        self.end(request)

    def avoid(self, request: Request, instance: str) -> None:
        pause = min(self._state.policy.avoid * 2**request.declines, self._state.policy.avoid_longest)
        request.declines = min(request.declines + 1, 16)
        request.avoid = {name: until for name, until in request.avoid.items() if until > self._state.now}
        request.avoid[instance] = self._state.now + pause
        heappush(self._wakeups, (self._state.now + pause, request.group))

    def move_everything(self, runner: Runner, why: str) -> None:
        for request in self._placed_on(runner):
            if request.gateway in self._state.gateways:
                self.move(request, why)

    def _placed_on(self, runner: Runner) -> list[Request]:
        return [
            request
            for request in self._state.requests.values()
            if request.placement is not None and self._state.runner_of(request.placement) is runner
        ]

    def move(self, request: Request, why: str) -> None:
        """Cancel there, then place elsewhere under a new epoch (PU-17)."""
        assert request.placement is not None
        runner = self._state.runner_of(request.placement)
        self._state.note(request.id, "moving", why)
        self.cancel_at_runner(request.placement, request.id, why)
        self.strike(request)
        request.placement = None
        request.moved_because, request.engine_hung = why, runner is not None and runner.hung
        self.wait(request)
        self._state.queue(request.group).stuck = False

    def cancel_at_runner(self, placement: Placement, request: RequestId, reason: str) -> None:
        runner = self._state.runner_of(placement)
        if runner is not None and runner.attached:
            self._state.do(do.CancelAtRunner(runner.instance, request, placement.epoch, reason))

    def tick(self) -> None:
        self._expire_deadlines()
        self._take_back()
        while self._wakeups and self._wakeups[0][0] <= self._state.now:
            self._state.queue(heappop(self._wakeups)[1]).look_everywhere()
        for key in [key for key, at in self.ended.items() if self._state.now - at > self._state.policy.unsubmitted]:
            del self.ended[key]

    def _take_back(self) -> None:
        """Place again what neither its runner nor its gateway knows of."""
        patience = self._state.policy.placed_patience
        for (name, _), since in list(self.unlisted.items()):
            if self._state.now - since <= patience:
                return
            request = self._state.requests[name]
            assert request.placement is not None
            runner = self._state.runner_of(request.placement)
            # One that has said nothing since may serve it all the same, and the gateway knows: it is away, or we have
            # stood still ourselves, and what it said is still to be read.
            silent = runner is not None and (not runner.attached or runner.heard_at - since < patience)
            if silent or request.gateway not in self._state.gateways:
                continue
            if isinstance(request.fatal, Failure):
                self.refuse(request, request.fatal)
                continue
            self.avoid(request, request.placement.instance)
            self.move(request, f"its runner has not had it for {patience:.3g} seconds")

    def _expire_deadlines(self) -> None:
        self.deadlines.sweep(sum(len(queue) for queue in self._state.queues.values()))
        for request in self.deadlines.expired(self._state.now):
            waited = f"no place within {request.patience:.3g} seconds: {request.why or SETTLING}"
            up = any(runner.takes_work for runner in self._state.runners_of(request.group))
            self.refuse(request, Failure.of(DeadlineExceeded(waited) if up else NoRunner(waited)))
