"""A request's life: it begins, waits, is moved, and ends, each time with all books set right."""

from heapq import heappop, heappush
from typing import Any

from motet.errors import DeadlineExceeded, NoRunner
from motet.fleet import Failure
from motet.model import BASE, RequestId
from motet_scheduler.policy import effects as do
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
        self._deadlines: list[tuple[float, RequestId]] = []
        self._wakeups: list[tuple[float, GroupName]] = []
        """When a request may ask again a runner that it avoids."""
        self._sequence = 0

    def begin(self, name: RequestId, **fields: Any) -> Request:
        self._sequence += 1
        request = Request(id=name, sequence=self._sequence, **fields)
        self._state.requests[name] = request
        if request.digest != BASE:
            self._state.uses[request.digest] += 1
        return request

    def wait(self, request: Request) -> None:
        """Join the queue with the age it has, and with its patience whole."""
        request.deadline_at = self._state.now + request.patience if request.patience > 0 else None
        if request.deadline_at is not None:
            heappush(self._deadlines, (request.deadline_at, request.id))
        for until in request.avoid.values():
            heappush(self._wakeups, (until, request.group))
        self._state.queue(request.group).add(request)

    def end(self, request: Request) -> None:
        """Forget a request: it is over, or its gateway will tell of it anew."""
        if request.waiting:
            self._state.queues[request.group].remove(request)
        else:
            self.strike(request)
        del self._state.requests[request.id]
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
        runner = self._state.runner_of(placement)
        if runner is None:
            return
        runner.strike(key)
        parked = runner.parked.get(request.id)
        if parked is not None and parked.epoch == placement.epoch:
            del runner.parked[request.id]
        room_at(self._state, runner)

    def refuse(self, request: Request, failure: Failure) -> None:
        self._state.note(request.id, "refused", failure.message)
        self._state.do(do.Refuse(request.gateway, request.id, failure, request.tenant))
        self.end(request)

    def avoid(self, request: Request, instance: str) -> None:
        pause = min(self._state.policy.avoid * 2**request.declines, self._state.policy.avoid_longest)
        request.declines = min(request.declines + 1, 16)
        request.avoid = {name: until for name, until in request.avoid.items() if until > self._state.now}
        request.avoid[instance] = self._state.now + pause
        heappush(self._wakeups, (self._state.now + pause, request.group))

    def move_everything(self, runner: Runner, why: str) -> None:
        here = [
            r
            for r in self._state.requests.values()
            if r.placement is not None and self._state.runner_of(r.placement) is runner
        ]
        for request in here:
            if request.gateway in self._state.gateways:
                self.move(request, runner, why)

    def move(self, request: Request, runner: Runner, why: str) -> None:
        """Cancel there, then place elsewhere under a new epoch (PU-17)."""
        assert request.placement is not None
        self._state.note(request.id, "moving", why)
        self.cancel_at_runner(request.placement, request.id, why)
        self.strike(request)
        request.placement = None
        request.moved_because = why
        self.wait(request)
        self._state.queue(runner.group).stuck = False

    def cancel_at_runner(self, placement: Placement, request: RequestId, reason: str) -> None:
        runner = self._state.runner_of(placement)
        if runner is not None and runner.attached:
            self._state.do(do.CancelAtRunner(runner.instance, request, placement.epoch, reason))

    def tick(self) -> None:
        self._expire_deadlines()
        while self._wakeups and self._wakeups[0][0] <= self._state.now:
            self._state.queue(heappop(self._wakeups)[1]).stuck = False
        for key in [key for key, at in self.ended.items() if self._state.now - at > self._state.policy.unsubmitted]:
            del self.ended[key]

    def _expire_deadlines(self) -> None:
        while self._deadlines and self._deadlines[0][0] <= self._state.now:
            at, name = heappop(self._deadlines)
            request = self._state.requests.get(name)
            if request is None or not request.waiting or request.deadline_at != at:
                continue
            waited = f"no place within {request.patience:.3g} seconds: {request.why or SETTLING}"
            up = any(runner.takes_work for runner in self._state.runners_of(request.group))
            self.refuse(request, Failure.of(DeadlineExceeded(waited) if up else NoRunner(waited)))
