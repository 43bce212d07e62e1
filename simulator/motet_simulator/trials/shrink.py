"""Makes the plan of a failed trial smaller: what has nothing to do with its problem goes."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from motet_simulator.trials.plan import Plan
from motet_simulator.trials.run import run_trial

Drawn = TypeVar("Drawn")
Fails = Callable[[Plan], bool]

LIMITS = "max_sequences", "adapter_slots", "cached_adapters", "pages"
"""Settings that fewer requests reach when they are smaller."""

MAX_WORK_SECONDS = 10.0
"""With smaller limits, all requests must end in this time: a plan must not fail as its runners have too much to do."""


def kind_of(problem: str) -> str:
    """Equal for problems that differ only in numbers, digests, names of hosts and requests, and how many are listed."""
    without = re.sub(r"0x[0-9a-f]+|\b(?=[a-f]*\d)[0-9a-f]+\b|\d+(\.\d+)?", "#", problem)
    return re.sub(r"\[[^]]*\]", "[#]", without)


def fails_alike(problem: str) -> Fails:
    """Whether a plan has a problem of the same kind: another one would make a plan small that shows something else."""
    return lambda plan: kind_of(run_trial(plan).problem) == kind_of(problem)


def shrunk(plan: Plan, fails: Fails) -> Plan:
    """A smaller plan that fails, too: without the faults, changes and requests that have nothing to do with it."""
    smaller = _smaller(replace(plan, asks=tuple(sorted(plan.asks, key=lambda ask: ask.at))), fails)
    while smaller != plan:  # what was left out may make something else needless
        plan, smaller = smaller, _smaller(smaller, fails)
    return smaller


def _smaller(plan: Plan, fails: Fails) -> Plan:
    faults = _fewest(plan.faults, lambda kept: fails(replace(plan, faults=kept)))
    plan = replace(plan, faults=faults)
    plan = replace(plan, changes=_fewest(plan.changes, lambda kept: fails(replace(plan, changes=kept))))
    plan = replace(plan, asks=_fewest(plan.asks, lambda kept: fails(replace(plan, asks=kept))))
    return _with_smaller_limits(plan, fails)


def _with_smaller_limits(plan: Plan, fails: Fails) -> Plan:
    for limit in LIMITS:
        now = getattr(plan.settings, limit)
        for least in sorted({1, 2, now // 2} - {0}):
            if least >= now:
                continue
            smaller = replace(plan, settings=replace(plan.settings, **{limit: least}))
            if _work_seconds(smaller) <= MAX_WORK_SECONDS and fails(smaller):
                plan = smaller
                break
    return plan


def _work_seconds(plan: Plan) -> float:
    """How long one runner works that computes all requests, as many at once as it may."""
    return sum(ask.max_tokens for ask in plan.asks) * plan.settings.step_seconds / plan.settings.max_sequences


def _fewest(all_of_them: tuple[Drawn, ...], fails: Callable[[tuple[Drawn, ...]], bool]) -> tuple[Drawn, ...]:
    """Leave out half of them, then quarters and so on, while it still fails."""
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
