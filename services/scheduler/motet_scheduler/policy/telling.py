"""What is told to people and peers about the state: where a request stands in line, how a runner is."""

from motet_scheduler.policy.effects import ReportRunner, SendPosition
from motet_scheduler.policy.requests import Request
from motet_scheduler.policy.runners import Runner
from motet_scheduler.policy.state import SchedulerState

EXACT_POSITIONS = 100
"""Positions up to this are told whenever they change, later ones when they changed by a tenth."""

POSITIONS_PERIOD = 1.0
"""Seconds between two looks at all positions."""

OTHERS_FIRST = "others wait before it"


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
            self._state.emit(SendPosition(request.gateway, request.id, position, request.waiting_reason))


def runner_report(runner: Runner) -> ReportRunner:
    return ReportRunner(
        identity=runner.identity,
        address=runner.address,
        attached=runner.attached,
        capacity=runner.capacity,
        running=runner.running,
        waiting=runner.waiting,
        pages_free=runner.pages_free,
        condemned=runner.unhealthy,
    )
