"""What is told to people and peers about the state: where a request stands in line, how a runner is."""

from motet_scheduler.policy.effects import TellPosition, TellRunner
from motet_scheduler.policy.requests import Request
from motet_scheduler.policy.runners import Runner
from motet_scheduler.policy.state import State

TOLD_EXACTLY = 100
"""Positions up to this are told whenever they change, later ones when they changed by a tenth."""

TOLD_EVERY = 1.0
"""Seconds between two looks at all positions."""

OTHERS_FIRST = "others wait before it"


class Positions:
    def __init__(self, state: State) -> None:
        self._state = state
        self._told_at = state.now

    def tick(self) -> None:
        if self._state.now - self._told_at < TOLD_EVERY:
            return
        self._told_at = self._state.now
        for queue in self._state.queues.values():
            for position, request in enumerate(queue, 1):
                self.tell(request, position)

    def tell(self, request: Request, position: int) -> None:
        told, why = request.told
        request.why = request.why or OTHERS_FIRST
        moved = abs(position - told) > (0 if position <= TOLD_EXACTLY else told // 10)
        if moved or (request.why != why and position <= TOLD_EXACTLY):
            request.told = (position, request.why)
            self._state.do(TellPosition(request.gateway, request.id, position, request.why))


def report_of(runner: Runner) -> TellRunner:
    return TellRunner(
        identity=runner.identity,
        address=runner.address,
        attached=runner.attached,
        capacity=runner.capacity,
        running=runner.running,
        waiting=runner.waiting,
        pages_free=runner.pages_free,
        condemned=runner.condemned,
    )
