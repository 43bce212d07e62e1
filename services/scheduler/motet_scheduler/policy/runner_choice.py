"""Which runner takes a request (PU-12): of those where it fits, the fullest, so that whole runners become idle.

| it fits when              | otherwise it waits because                    |
|---------------------------|-----------------------------------------------|
| the runner takes work     | no runner is up, or all of them drain         |
| nothing parked waits there| parked requests go first                      |
| batch cap not reached     | every batch is full                           |
| an adapter slot is free   | all adapter slots are in use                  |
| its promise fits          | so many pages are wanted, so many are free    |
| it did not just decline   | the runner declined a moment ago              |

Ties go to the runner that holds the adapter nearest to the model, then to the highest name.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from motet.runner_info import Tier
from motet_scheduler.policy.requests import Request
from motet_scheduler.policy.runners import Runner
from motet_scheduler.policy.values import Promise, SchedulerConfig


@dataclass(frozen=True, slots=True)
class Chosen:
    runner: Runner
    promise: Promise


@dataclass(frozen=True, slots=True)
class MustWait:
    why: str


@dataclass(frozen=True, slots=True)
class NeverFits:
    """No runner of the group could hold it even when empty (OR-09)."""

    why: str


def choose(
    request: Request, runners: Iterable[Runner], policy: SchedulerConfig, now: float
) -> Chosen | MustWait | NeverFits:
    best: tuple[int, Tier, str] | None = None
    chosen: Chosen | None = None
    obstacles: set[str] = set()
    short = ""
    too_small = ""
    could = False
    for runner in runners:
        need = request.requirement_on(runner.capacity, policy)
        if need.never:
            too_small = too_small or need.never
            continue
        could = True
        obstacle = _obstacle(request, runner, need.promise.pages, now)
        if obstacle:
            if obstacle is _TOO_FEW_PAGES:
                short = short or f"{need.promise.pages} pages are wanted and {max(0, runner.ledger.free)} are free"
            else:
                obstacles.add(obstacle)
            continue
        rank = (runner.sequences, runner.tier_of(request.digest), runner.instance)
        if best is None or rank > best:
            best, chosen = rank, Chosen(runner, need.promise)
    if chosen is not None:
        return chosen
    if too_small and not could:
        return NeverFits(too_small)
    # Pages first: among several runners the one that is merely short of memory says most.
    return MustWait(short or min(obstacles, key=_BY_USEFULNESS.index, default=NO_RUNNER))


STARTING = "the scheduler has just started and waits for its runners"
NO_RUNNER = "no runner of this model is up"
_TOO_FEW_PAGES = "too few pages are free"
_DOWN = "its runners are down"
_DRAINING = "its runners are draining"
_PARKED = "parked requests go first"
_FULL = "every batch is full"
_SLOTS = "all adapter slots are in use"
_DECLINED = "the runner declined a moment ago"
_BY_USEFULNESS = (_DECLINED, _PARKED, _SLOTS, _FULL, _DRAINING, _DOWN, NO_RUNNER)


def _obstacle(request: Request, runner: Runner, pages: int, now: float) -> str:
    if not runner.takes_work:
        if runner.drain is None:
            return _DOWN
        return _DRAINING if runner.attached else NO_RUNNER  # it went as it was told to
    if runner.parked:
        return _PARKED
    if runner.sequences >= runner.max_sequences:
        return _FULL
    if not runner.slot_for(request.digest):
        return _SLOTS
    if pages > runner.ledger.free:
        return _TOO_FEW_PAGES
    if request.avoids(runner.instance, now):
        return _DECLINED
    return ""
