"""Makes the plan of a failed trial smaller: what has nothing to do with its problem goes."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf
from typing import Any, TypeVar

from motet_simulator.trials.plan import SECONDS, Plan
from motet_simulator.trials.run import SHORT_QUIET_SECONDS, Outcome, run_trial

Drawn = TypeVar("Drawn")
Fails = Callable[[Plan], bool]

LIMITS: dict[str, Any] = {
    "max_sequences": 1,
    "queue_limit": 1,
    "max_passed_over": 1,
    "adapter_slots": 1,
    "cached_adapters": 1,
    "pages": 1,
    "hang_seconds": 6,
}
"""Settings that less reaches when they are smaller, and the smallest of each."""

LONGER_STEPS = 0.1, 0.2, 0.4
"""Seconds. With longer steps fewer requests keep all runners busy."""

MAX_WORK_SECONDS = 10.0
"""With smaller limits, all requests must end in this time, if the problem is that something has not ended: a plan must
not fail as its runners have too much to do."""

LATER_SECONDS = 5.0
"""How much later a smaller plan may fail. It need not run for longer."""


def kind_of(problem: str) -> str:
    """Equal for problems that differ only in numbers, digests, names of hosts and requests, and how many are listed."""
    without = re.sub(r"0x[0-9a-f]+|\b(?=[a-f]*\d)[0-9a-f]+\b|\d+(\.\d+)?", "#", problem)
    return re.sub(r"\[[^]]*\]", "[#]", without)


def fails_alike(problem: str, until: float = inf) -> Fails:
    """Whether a plan has a problem of the same kind: another one would make a plan small that shows something else."""
    return lambda plan: kind_of(run_trial(plan, until=until).problem) == kind_of(problem)


def smaller_alike(outcome: Outcome) -> Plan:
    """A smaller plan that fails in the same way."""
    if outcome.at >= SECONDS + SHORT_QUIET_SECONDS:  # by a look whether all has ended
        return shrunk(outcome.plan, fails_alike(outcome.problem), max_work=MAX_WORK_SECONDS)
    return shrunk(outcome.plan, fails_alike(outcome.problem, outcome.at + LATER_SECONDS))


def shrunk(plan: Plan, fails: Fails, *, max_work: float = inf) -> Plan:
    """A smaller plan that fails, too: without the faults, changes and requests that have nothing to do with it."""
    smaller = _smaller(replace(plan, asks=tuple(sorted(plan.asks, key=lambda ask: ask.at))), fails, max_work)
    while smaller != plan:  # what was left out may make something else needless
        plan, smaller = smaller, _smaller(smaller, fails, max_work)
    return smaller


def _smaller(plan: Plan, fails: Fails, max_work: float) -> Plan:
    faults = _fewest(plan.faults, lambda kept: fails(replace(plan, faults=kept)))
    plan = replace(plan, faults=faults)
    plan = replace(plan, changes=_fewest(plan.changes, lambda kept: fails(replace(plan, changes=kept))))
    plan = replace(plan, asks=_fewest(plan.asks, lambda kept: fails(replace(plan, asks=kept))))
    plan = replace(plan, grants=_fewest(plan.grants, lambda kept: fails(replace(plan, grants=kept))))
    return _with_other_settings(plan, fails, max_work)


def _with_other_settings(plan: Plan, fails: Fails, max_work: float) -> Plan:
    for limit, least in LIMITS.items():
        now = getattr(plan.settings, limit)
        values = sorted({max(least, value) for value in (1, 2, int(now) // 2)})
        plan = _with_first(plan, limit, [value for value in values if value < now], fails, max_work)
    longer = [seconds for seconds in reversed(LONGER_STEPS) if seconds > plan.settings.step_seconds]
    return _with_first(plan, "step_seconds", longer, fails, max_work)


def _with_first(plan: Plan, setting: str, values: Sequence[Any], fails: Fails, max_work: float) -> Plan:
    """With the first of these values with which it still fails."""
    for value in values:
        smaller = replace(plan, settings=replace(plan.settings, **{setting: value}))
        if _work_seconds(smaller) <= max_work and fails(smaller):
            return smaller
    return plan


def _work_seconds(plan: Plan) -> float:
    """How long one runner works that computes all requests, as many at once as it may."""
    return sum(ask.max_tokens for ask in plan.asks) * plan.settings.step_seconds / plan.settings.max_sequences


def _fewest(all_of_them: tuple[Drawn, ...], fails: Callable[[tuple[Drawn, ...]], bool]) -> tuple[Drawn, ...]:
    """Leave out all of them; else half, then quarters and so on, while it still fails."""
    if all_of_them and fails(()):
        return ()
    kept, size = all_of_them, max(1, len(all_of_them) // 2)
    while kept:
        position = 0
        while position < len(kept):
            without = kept[:position] + kept[position + size :]
            if fails(without):
                kept = without
            else:
                position += size
        if size == 1:
            break
        size //= 2
    return kept
