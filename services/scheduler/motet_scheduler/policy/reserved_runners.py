"""What a runner that is reserved for an overdue request still has for others.

Nothing, if that request lacks pages or a place. If it lacks an adapter slot alone, pages and places would stay unused
until one is free: what it needs of them is kept, and the rest is for those that need no other slot, for the base model
or an adapter that runs there. But those for one of these adapters wait, the one that the fewest use: its slot is the
next to come free. No other of its requests comes meanwhile, so fewer and fewer of the least used one are left, however
often another one becomes that.

The tenant that it serves pays for the pages that are idle meanwhile, if other tenants wait: as if requests of the mean
size of those that run there had them, each with a token of an answer in each iteration. Else a tenant that always has
requests as large as a runner would take most of it, and pay for nothing but their tokens.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from motet.domain import BASE, Digest
from motet_scheduler.policy.requests import Request
from motet_scheduler.policy.rooms import Room
from motet_scheduler.policy.runners import Runner
from motet_scheduler.policy.token_costs import TokenCosts
from motet_scheduler.policy.values import SchedulerConfig

MIN_STEP_SECONDS = 1e-3
"""A runner that says less, whatever it is, costs a tenant no more for its idle pages than this."""


class Left(NamedTuple):
    """What an overdue request leaves to others."""

    pages: int
    leaving: Digest
    """The adapter whose requests wait, too. `BASE`: none runs there."""

    def allows(self, request: Request, runner: Runner, config: SchedulerConfig) -> bool:
        digest = request.digest
        if digest != BASE and (digest == self.leaving or digest not in runner.adapters_running):
            return False
        return request.requirement_on(runner.capacity, config, runner.adapter_pages(digest)).room <= self.pages

    def of(self, room: Room) -> Room:
        """The part of this room."""
        whole, leaving = min(room.whole, self.pages), self.leaving if self.leaving != BASE else None
        return Room(whole, min(room.small, whole), room.above, leaving)


def leaving_first(runner: Runner, overdue: Request) -> Digest | None:
    """The adapter whose requests wait, too. None: it lacks no slot, and leaves nothing to others."""
    return None if runner.slot_for(overdue.digest) else runner.least_used_adapter


def left_on(runner: Runner, overdue: Request, config: SchedulerConfig) -> Left | None:
    """None: nothing."""
    if runner.slot_for(overdue.digest) or runner.sequences + 1 >= runner.max_sequences:
        return None
    need = overdue.requirement_on(runner.capacity, config, runner.adapter_pages(overdue.digest))
    pages = runner.free_for(overdue.digest) - need.room
    return Left(pages, runner.least_used_adapter) if pages > 0 else None


class IdlePages:
    """Those that reserved runners keep, and what they have cost."""

    def __init__(self, config: SchedulerConfig, costs: TokenCosts) -> None:
        self._config = config
        self._costs = costs
        self._since = 0.0
        self._kept: dict[Runner, tuple[Request, float]] = {}
        """For which request each of these has kept pages since then, and the tokens of answers that others would have
        had there in a second."""

    def look(self, reserved: Mapping[Runner, Request], now: float, others_wait: Callable[[Request], bool]) -> None:
        """What was kept until now is paid for, with the next charge. Then `reserved` keep what is idle there.
        `others_wait`: whether a request of another tenant does."""
        if not reserved and not self._kept:  # mostly
            return
        for request, tokens in self._kept.values():
            # One that had a place before waits through no fault of its tenant.
            if request.waiting and request.share is not None and request.charge is None:
                request.share.owed += self._costs.answer * tokens * (now - self._since) / request.share.weight
        self._since, config = now, self._config
        self._kept = {
            runner: (overdue, _tokens_per_second(runner, overdue, config))
            for runner, overdue in reserved.items()
            if others_wait(overdue)
        }


def _tokens_per_second(runner: Runner, overdue: Request, config: SchedulerConfig) -> float:
    """Of the pages that are kept for it. 0: the runner does not say how long an iteration takes."""
    if not runner.step_seconds:
        return 0.0
    need = overdue.requirement_on(runner.capacity, config, runner.adapter_pages(overdue.digest)).room
    sequences = runner.sequences
    mean = runner.ledger.total / sequences if sequences else need
    idle = max(0, min(need, runner.free_for(overdue.digest))) / max(1.0, mean)
    places = max(0, runner.max_sequences - sequences)  # its cap on the batch may have fallen below what it has
    return min(idle, places) / max(runner.step_seconds, MIN_STEP_SECONDS)
