"""No request waits beside room: what a scheduler can place, it places within a second.

It may wait although it fits: while the scheduler waits for the runners of the one before it, behind an older request of
its flow, and where a runner is reserved for another one. Runners that are away, drain, are silent or hang take no work,
one with parked requests takes no other, and one that declined a request is left alone for a moment: `choose` knows.
"""

from collections.abc import Iterator

from motet_scheduler.policy.runner_choice import Chosen, choose
from motet_scheduler.policy.scheduler import Scheduler
from motet_simulator.world import Process

MAX_WAIT_SECONDS = 1.0

Fit = tuple[str, int, str]
"""A request, how often it was placed before, and a runner."""


class WaitingChecks:
    """Of the scheduler that leads."""

    def __init__(self) -> None:
        self._since: dict[Fit, float] = {}

    def check(self, scheduler: Scheduler, process: Process) -> None:
        """Raises AssertionError."""
        now = process.loop.time()
        fits = () if process.loop.pauses else _fits(scheduler, now)
        self._since = {fit: self._since.get(fit, now) for fit in fits}
        for (request, _, runner), since in self._since.items():
            assert now - since <= MAX_WAIT_SECONDS, f"{request} waits although there is room on {runner}"


def _fits(scheduler: Scheduler, now: float) -> Iterator[Fit]:
    state = scheduler.state
    for queue in scheduler.queues.values() if scheduler.may_place else ():
        for request in queue.heads():
            if request.forgotten:
                continue
            able, reserved = state.runners_for(request), queue.reserved_from(request)
            found = choose(request, able, scheduler.config, now, reserved=reserved)
            if isinstance(found, Chosen):
                yield request.id, request.epoch, found.runner.instance
