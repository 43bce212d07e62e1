"""Which tenants a seed limits, and how far. All that a limit makes wait must have ended before the last look."""

from collections.abc import Sequence
from math import ceil
from random import Random

from motet_simulator.trials.plan import Ask, Grant

MAX_WORK_SECONDS = 15.0
"""How long a tenant's requests take at least, if as many run at once as it may have."""


def draw_grants(random: Random, asks: Sequence[Ask], step_seconds: float) -> tuple[Grant, ...]:
    if random.random() >= 0.25:
        return ()
    grants = []
    for tenant in sorted({ask.tenant for ask in asks}):
        work = sum(ask.max_tokens for ask in asks if ask.tenant == tenant) * step_seconds
        most_at_once = max(1, ceil(work / MAX_WORK_SECONDS)) * random.choice((1, 1, 3))
        grants.append(
            Grant(
                tenant,
                requests_per_minute=random.choice((0, 0, 30, 60, 120)),
                tokens_per_minute=random.choice((0, 0, 6_000, 20_000)),
                concurrency=random.choice((0, most_at_once)),
            )
        )
    return tuple(grants)
