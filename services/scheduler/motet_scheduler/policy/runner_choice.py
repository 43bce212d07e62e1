"""Chooses a runner for a request (PU-12): the fullest one where it fits, so that other runners become idle.

| it fits if                | else it waits because                         |
|---------------------------|-----------------------------------------------|
| the runner takes work     | no runner of its base model is up, or all of  |
|                           | them drain                                    |
| no parked request waits   | parked requests go first                      |
| its batch is not full     | every batch is full                           |
| an adapter slot is free   | all adapter slots are in use                  |
| its promise fits          | it needs more pages than are free: those that |
|                           | its adapter would take are not                |
| it did not just decline   | the runner declined recently                  |
| it is not reserved        | it is reserved for an overdue request         |
| its last places stay free | they are kept for tenants with smaller shares |

Last comes a runner that is emptied (PU-18). Before fullness counts what the request could share there: the runner has
other choices of the same call (or room for all of them, if this is the first), more of its prompt in the prefix cache,
or, if it is busy, its adapter. A busy runner's last place is left to requests for the adapters that it has, as long as
another busy one has room: on the fullest runners each place would else be taken at once, and adapters be loaded
elsewhere that are there. But for those choices, a runner beyond its limits (`fill_limits.py`) comes behind those
within them, and of such ones the emptiest is the first. Ties after fullness: the adapter on the device, on the host, on
disk; then the highest name.
"""

from collections.abc import Collection, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from motet.domain import BASE
from motet.runner_info import Tier
from motet.value import value
from motet_scheduler.policy.fill_limits import Beyond
from motet_scheduler.policy.headroom import NOTHING_KEPT, KeptFrom
from motet_scheduler.policy.requests import Request
from motet_scheduler.policy.runners import Runner
from motet_scheduler.policy.values import Promise, SchedulerConfig

BUSY_ONE_IN = 8
"""A runner is busy if at least one in this number of its places is in use. If fewer sufficed, requests for its adapters
would keep it from becoming idle; if it took more, more adapters would be loaded again elsewhere. One in 8 keeps both
targets of `benchmarks.cluster` (`cold_loads`); one in 11 takes too many hours, and one in 5 too many loads."""


class Because(NamedTuple):
    """Which limit decided where a request runs."""

    beyond: Beyond
    instance: str
    """Not here. Empty: it runs there all the same."""

    def __str__(self) -> str:
        if self.instance:
            return f"; not on {self.instance}: {self.beyond}"
        return f"; {self.beyond}, and no other one with room is better"


@value()
class Chosen:
    runner: Runner
    promise: Promise
    because: Because | None = None
    """Of the limits of runners, if they mattered."""


@dataclass(frozen=True, slots=True)
class NeverFits:
    """Even an empty runner of the group could not hold it (OR-09)."""

    why: str


def choose(
    request: Request,
    runners: Iterable[Runner],
    config: SchedulerConfig,
    now: float,
    *,
    near: str = "",
    reserved: Collection[Runner] = (),
    kept: KeptFrom = NOTHING_KEPT,
) -> Chosen | NeverFits | None:
    """None: it must wait. `near` is the runner of the other choices of the same call; empty if there is none.
    `reserved` are the runners that are kept for other requests, and `kept` is `Queue.kept_from` it."""
    fits: list[Chosen] = []
    too_small = ""
    could = False
    need = None
    for runner in runners:
        capacity = runner.capacity
        adapter_pages = runner.adapter_pages(request.digest) if capacity.adapter_rank_bytes else 0  # mostly
        if need is None or need.capacity is not capacity or need.adapter_pages != adapter_pages:
            need = request.requirement_on(capacity, config, adapter_pages)
        if need.never:
            too_small = too_small or need.never
            continue
        could = True
        pages = need.room
        # The first comparison is the fast one, for the many that wait; what most of the others lack comes next.
        if pages > runner.ledger.free or runner in reserved:
            continue
        if kept.one_in and not kept.allows(runner, pages, request.digest):
            continue
        if _obstacle(request, runner, pages, now, NOTHING_KEPT):
            continue
        fits.append(Chosen(runner, need.promise))
    if not fits:
        return NeverFits(too_small) if too_small and not could else None
    return _best(request, fits, near)


def _best(request: Request, fits: Sequence[Chosen], near: str) -> Chosen:
    first = fits[0]
    if len(fits) > 1:  # mostly it is one, which needs no rank
        first = max(fits, key=lambda one: _rank(request, one, near, ()))
    limit = beyond_limits(request, first.runner)
    if limit is None:
        return first  # the limits of the others only put them behind it
    beyond = {one.runner for one in fits if beyond_limits(request, one.runner) is not None}
    best = max(fits, key=lambda one: _rank(request, one, near, beyond))
    if best.runner not in beyond:
        return Chosen(best.runner, best.promise, Because(limit, first.runner.instance))
    of_best = limit if best is first else beyond_limits(request, best.runner)
    assert of_best is not None
    return Chosen(best.runner, best.promise, Because(of_best, ""))


def beyond_limits(request: Request, runner: Runner, *, by_target: bool = False) -> Beyond | None:
    """Which limit of a runner it would exceed (`FillLimits.beyond`)."""
    if (limits := runner.limits) is None:
        return None
    tokens = request.prompt_tokens + request.delivered
    prompts = runner.prompt_tokens_left
    return limits.beyond(len(runner.entries), runner.context_tokens, prompts, tokens, by_target=by_target)


def never_fits(request: Request, runners: Iterable[Runner], config: SchedulerConfig) -> NeverFits | None:
    """None: one of these runners could hold it when empty, or there is none."""
    too_small = ""
    for runner in runners:
        need = request.requirement_on(runner.capacity, config, runner.adapter_pages(request.digest))
        if not need.never:
            return None
        too_small = too_small or need.never
    return NeverFits(too_small) if too_small else None


def _rank(
    request: Request, fit: Chosen, near: str, beyond: Container[Runner]
) -> tuple[bool, bool, bool, int, int, int, Tier, str]:
    runner = fit.runner
    within = runner not in beyond
    return (
        not runner.emptied,
        _keeps_choices_together(request, runner, fit.promise, near),
        within,
        runner.cached_tokens(request.prefix_hints),
        _by_adapter(request, runner),
        runner.sequences if within else -runner.sequences,
        runner.adapters.tier_of(request.digest),
        runner.instance,
    )


def _by_adapter(request: Request, runner: Runner) -> int:
    """2: its adapter is on a busy runner. 1: it would be loaded on one, which keeps a place for those that it has."""
    if request.digest == BASE or runner.sequences * BUSY_ONE_IN < runner.max_sequences:
        return 0
    if request.digest in runner.adapters.having:
        return 2
    return int(runner.sequences + 1 < runner.max_sequences)


class Obstacle(NamedTuple):
    """Why a request is not placed on a runner."""

    kind: str
    """In words, but for numbers."""
    pages: int = 0
    """Where too few are free: that it needs."""
    free: int = 0

    def __str__(self) -> str:
        return f"it needs {self.pages} pages and {self.free} are free" if self.pages else self.kind


def why_it_waits(
    request: Request,
    runners: Iterable[Runner],
    config: SchedulerConfig,
    now: float,
    *,
    reserved: Collection[Runner] = (),
    kept: KeptFrom = NOTHING_KEPT,
) -> Obstacle:
    obstacles: set[Obstacle] = set()
    too_small = ""
    for runner in runners:
        obstacle = obstacle_on(request, runner, config, now, reserved=reserved, kept=kept)
        # Pages first: with several runners, the one that lacks only memory gives the most useful reason.
        if obstacle.kind is _TOO_FEW_PAGES:
            return obstacle
        if obstacle.kind in _OBSTACLES:
            obstacles.add(obstacle)
        else:
            too_small = obstacle.kind
    return min(obstacles, key=_usefulness, default=Obstacle(too_small or NO_RUNNER))


def _usefulness(obstacle: Obstacle) -> int:
    return _BY_USEFULNESS.index(obstacle.kind)


def obstacle_on(
    request: Request,
    runner: Runner,
    config: SchedulerConfig,
    now: float,
    *,
    reserved: Collection[Runner] = (),
    kept: KeptFrom = NOTHING_KEPT,
) -> Obstacle:
    """Why this runner does not get it now."""
    need = request.requirement_on(runner.capacity, config, runner.adapter_pages(request.digest))
    if need.never:
        return Obstacle(need.never)
    kind = RESERVED if runner in reserved else _obstacle(request, runner, need.room, now, kept)
    if kind is _TOO_FEW_PAGES:
        return Obstacle(kind, need.room, max(0, runner.free_for(request.digest)))
    return _OBSTACLES[kind or OTHERS_FIRST]


def nearest(
    request: Request, runners: Iterable[Runner], config: SchedulerConfig, now: float, *, held: Runner | None = None
) -> Runner | None:
    """The runner that lacks least for a request, of those where room alone keeps it back. None: there is none. `held`
    has been reserved for it and lacks a slot: it stays so, however many pages are free elsewhere, where the adapter
    that leaves first may not have begun to."""
    best: tuple[bool, bool, bool, int, str] | None = None
    found: Runner | None = None
    need = None
    for runner in runners:
        if not runner.takes_work or (request.avoid and request.avoids(runner.instance, now)):
            continue
        capacity = runner.capacity
        adapter_pages = runner.adapter_pages(request.digest) if capacity.adapter_rank_bytes else 0  # mostly
        if need is None or need.capacity is not capacity or need.adapter_pages != adapter_pages:
            need = request.requirement_on(capacity, config, adapter_pages)
        if need.never:
            continue
        rank = (
            not runner.parked,
            runner.slot_for(request.digest),
            runner is held,
            runner.free_for(request.digest) - need.room,
            runner.instance,
        )
        if best is None or rank > best:
            best, found = rank, runner
    return found


def _keeps_choices_together(request: Request, runner: Runner, promise: Promise, near: str) -> bool:
    """Whether the other choices of the call are here or, if none is placed yet, all of them fit here."""
    if near:
        return runner.instance == near
    return request.choices > 1 and _has_room_for_all(request, runner, promise)


def _has_room_for_all(request: Request, runner: Runner, promise: Promise) -> bool:
    """Whether all choices of the call fit, if each gets this promise."""
    return (
        request.choices * promise.pages <= runner.free_for(request.digest)
        and runner.sequences + request.choices <= runner.max_sequences
    )


OTHERS_FIRST = "other requests wait before it"
NO_RUNNER = "no runner of this model is up"
_TOO_FEW_PAGES = "too few pages are free"
_DOWN = "its runners are down"
_DRAINING = "its runners are draining"
_PARKED = "parked requests go first"
_FULL = "every batch is full"
_SLOTS = "all adapter slots are in use"
_DECLINED = "it could not run there a moment ago"
RESERVED = "a runner is reserved for a request that has waited for longer"
_KEPT = "the last places are kept for tenants that were given less"
_BY_USEFULNESS = (OTHERS_FIRST, _DECLINED, _PARKED, _SLOTS, _FULL, _KEPT, RESERVED, _DRAINING, _DOWN, NO_RUNNER)
_OBSTACLES = {kind: Obstacle(kind) for kind in _BY_USEFULNESS}


def _obstacle(request: Request, runner: Runner, pages: int, now: float, kept: KeptFrom) -> str:
    if not runner.takes_work:
        if runner.drain is None:
            return _DOWN
        return _DRAINING if runner.attached else NO_RUNNER  # it left because it was drained
    if runner.parked:
        return _PARKED
    if len(runner.entries) >= runner.max_sequences:
        return _FULL
    if not runner.slot_for(request.digest):
        return _SLOTS
    if pages > runner.free_for(request.digest):
        return _TOO_FEW_PAGES
    if request.avoid and request.avoids(runner.instance, now):
        return _DECLINED
    if kept.one_in and not kept.allows(runner, pages, request.digest):
        return _KEPT
    return ""
