"""Empties the emptiest runners of a group by moving their requests to fuller ones, so that they can leave (PU-18).

Only in pools that need fewer runners than they have, by the autoscaler's rule, and may shrink now. Elsewhere an empty
runner costs as much as a busy one, and each move costs a client: its answer pauses while prompt and delivered tokens
are computed again (PU-17).

Runners are emptied while nothing waits and the others stay at most as full as the autoscaler wants them. Nothing moves
to a runner beyond its limits (`fill_limits.py`). Where the pool has an SLO for the time of a token, that counts and not
the knee: whatever a sequence takes, the fixed part of an iteration is spent once where two runners spent it. Those that
are emptied get new requests only if no other one has room; then the load has returned, and that runner is not emptied
any more.

A runner is busy until its longest answer ends. So those that are expected to go on for longest move first, some at each
look, if that saves twice the time that computing them again takes. Shorter ones end where they are.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from math import inf
from typing import NamedTuple

from motet.domain import InstanceName
from motet.promises import LENGTH_OF_MAX_TOKENS
from motet.runner_info import Tier
from motet_scheduler.policy.autoscaler import Autoscaler
from motet_scheduler.policy.placement import Placer
from motet_scheduler.policy.request_lifecycle import RequestLifecycle
from motet_scheduler.policy.requests import Request
from motet_scheduler.policy.runner_choice import Chosen, beyond_limits, choose
from motet_scheduler.policy.runners import Runner
from motet_scheduler.policy.scaling_rule import TARGET
from motet_scheduler.policy.state import SchedulerState
from motet_scheduler.policy.values import GroupName

MAX_PLACEMENTS = 3
"""What was placed as often does not move: no answer pauses more than twice for this."""

SAVED_PER_COST = 2.0
"""Moves save this many times what they cost, at least."""

MAX_SECONDS_AGAIN = 0.25
"""What takes longer to compute again, by the time of a prompt's tokens alone, does not move. Beside the decodes of the
other runner it takes about four times as long, and its answer pauses."""

SECONDS_AT_ONCE = MAX_SECONDS_AGAIN / 2
"""That a runner computes again after one look, unless one request alone takes longer."""

MAX_SLOWER = 4.0
"""Than the runner that is emptied, in an iteration or a token of a prompt: no answer moves to a slower one."""

MAX_EMPTIED = MAX_TARGETS = 16
"""Runners of a group that are emptied at once, and to which their requests may move."""

MAX_MOVES = 16
"""At one look: more would delay everything else."""

WHY = "the load has fallen, and fuller runners have room for all requests of this one"


class Running(NamedTuple):
    """On a runner that is emptied."""

    left: float
    """Tokens that it is still expected to get."""
    again: float
    """Seconds of the next runner, which computes it again."""
    request: Request | None
    """None: it stays."""


class Consolidation:
    def __init__(
        self, state: SchedulerState, lifecycle: RequestLifecycle, placer: Placer, autoscaler: Autoscaler
    ) -> None:
        self._state = state
        self._lifecycle = lifecycle
        self._placer = placer
        self._autoscaler = autoscaler
        self._next_at = state.now
        self._emptied: list[Runner] = []
        self._may_move = MAX_MOVES
        """How many more at this look."""

    def next_due(self) -> float:
        return self._next_at if self._state.may_place and self._state.pools else inf

    def tick(self) -> None:
        now = self._state.now
        if not self._state.may_place or now < self._next_at:
            return
        self._next_at = now + self._state.config.capacity_every
        self._may_move = MAX_MOVES
        for runner in self._emptied:
            runner.emptied = False
        self._emptied = []
        for group in dict.fromkeys(pool.group for pool in self._state.pools.values() if pool.scalable):
            busy = sorted(filter(takes_more, self._state.runners_of(group)), key=fullness)
            emptied = self._to_empty(group, busy)
            for runner in emptied:
                runner.emptied = True
            others = [runner for runner in reversed(busy) if not runner.emptied and runner.has_capacity]
            self._move_some(emptied, others[:MAX_TARGETS])
            self._emptied += emptied

    def _to_empty(self, group: GroupName, busy: Sequence[Runner]) -> list[Runner]:
        """As many of the emptiest as the others have room for. `busy`: the emptiest first."""
        queue = self._state.queues.get(group)
        if queue is not None and len(queue):
            return []
        needed = self._autoscaler.needed
        left = Counter(runner.identity.pool for runner in busy)
        sequences, places = sum(one.sequences for one in busy), sum(one.max_sequences for one in busy)
        promised, pages = sum(one.ledger.promised for one in busy), sum(one.ledger.limit for one in busy)
        emptied: list[Runner] = []
        for runner in busy:
            pool = runner.identity.pool
            if left[pool] <= needed.get(pool, len(busy)):
                continue
            places, pages = places - runner.max_sequences, pages - runner.ledger.limit
            if sequences > TARGET * places or promised > TARGET * pages or len(emptied) == MAX_EMPTIED:
                break
            emptied.append(runner)
            left[pool] -= 1
        return emptied

    def _move_some(self, emptied: Iterable[Runner], others: Sequence[Runner]) -> None:
        """`others`: the fullest first."""
        computes: defaultdict[InstanceName, float] = defaultdict(float)
        for runner in emptied:
            targets = [one for one in others if fullness(one) > fullness(runner) and is_fast(one, runner)]
            running = self._running_on(runner, max((one.prompt_token_seconds for one in targets), default=0.0))
            for _, again, request in running[: worth_moving(running, runner.step_seconds)]:
                assert request is not None
                able = [
                    one
                    for one in targets
                    if not computes[one.instance] or computes[one.instance] + again <= SECONDS_AT_ONCE
                ]
                if not able or not self._may_move:
                    break  # at the next look
                target = self._move(request, able)
                if target is None:
                    runner.emptied = False
                    break
                computes[target.instance] += again

    def _move(self, request: Request, others: Sequence[Runner]) -> Runner | None:
        """To which of these. None: none has room for it."""
        state = self._state
        able = [
            one
            for one in state.runners_for(request, others)
            if one.adapters.tier_of(request.digest) >= Tier.HOST and beyond_limits(request, one, by_target=True) is None
        ]
        kept = state.queue(request.group).kept_from(request)
        found = choose(request, able, state.config, state.now, kept=kept) if others else None
        if not isinstance(found, Chosen):
            return None
        self._may_move -= 1
        self._lifecycle.take_away(request, WHY)
        self._placer.assign(request, found.runner, found.promise)
        return found.runner

    def _running_on(self, runner: Runner, prompt_token_seconds: float) -> list[Running]:
        """The longest first. `prompt_token_seconds`: of the slowest runner to which they may move."""
        found = []
        for name, epoch in runner.entries:
            request = self._state.requests.get(name)
            placement = request.placement if request is not None and request.max_tokens else None
            if request is None or placement is None or placement.epoch != epoch:
                found.append(Running(inf, 0.0, None))
                continue
            again = (request.prompt_tokens + request.delivered) * prompt_token_seconds
            stays = not 0 < again <= MAX_SECONDS_AGAIN or not request.delivered or epoch >= MAX_PLACEMENTS
            stays |= request.choices > 1 or request.parent is not None  # they share the pages of their prompt
            stays |= request.forgotten or request.gateway not in self._state.gateways
            stays |= (name, epoch) in self._lifecycle.unlisted  # it may not even have come here
            found.append(Running(expected_left(request), again, None if stays else request))
        return sorted(found, key=lambda one: (-one.left, one.request is not None))


def takes_more(runner: Runner) -> bool:
    """Whether it is busy, and requests may move there."""
    return runner.takes_work and not runner.empty and not runner.parked


def is_fast(runner: Runner, than: Runner) -> bool:
    """Whether it is not much slower. One that does not say may be."""
    steps, prompts = MAX_SLOWER * than.step_seconds, MAX_SLOWER * than.prompt_token_seconds
    return 0 < runner.step_seconds <= steps and 0 < runner.prompt_token_seconds <= prompts


def fullness(runner: Runner) -> tuple[int, str]:
    """A request goes only to a fuller one."""
    return runner.sequences, runner.instance


def expected_left(request: Request) -> int:
    """Tokens: up to the next quantile of the estimate. One that is longer than all of them, or has no estimate, is
    expected to get as many again."""
    delivered, estimate = request.delivered, request.estimate
    known = () if estimate.source == LENGTH_OF_MAX_TOKENS else estimate.quantiles
    end = next((length for length in known if length > delivered), 2 * delivered)
    return max(0, min(end, request.max_tokens) - delivered)


def worth_moving(running: Sequence[Running], step_seconds: float) -> int:
    """How many of the longest to move, so that most is saved: then the runner is busy only for as long as the next
    one."""
    best, most, again = 0, 0.0, 0.0
    ends = [*(one.left for one in running[1:]), 0.0]
    for count, (one, end) in enumerate(zip(running, ends, strict=False), 1):
        if one.request is None:
            break
        again += one.again
        saved = (running[0].left - end) * step_seconds - SAVED_PER_COST * again
        if saved > most:
            best, most = count, saved
    return best
