"""Uses of adapters by Zipf's law, and how many of them find their adapter in the disk cache."""

from random import Random

from motet.domain import Digest
from motet_runner.adapters.policy.eviction import CacheLimits, Eviction
from motet_runner.adapters.policy.values import CacheContents, Cached

PLACES, ADAPTERS, USES = 64, 2000, 20_000


def uses_of(exponent: float, seed: int = 7) -> list[Digest]:
    weights = [1 / rank**exponent for rank in range(1, ADAPTERS + 1)]
    return [Digest(f"sha256:{one:064x}") for one in Random(seed).choices(range(ADAPTERS), weights, k=USES)]


def hits(uses: list[Digest]) -> int:
    """With the eviction of the disk cache"""
    eviction = Eviction(CacheLimits(PLACES))
    cached: dict[Digest, None] = {}
    found = 0
    for one in uses:
        eviction.frequency.used(one)
        found += one in cached
        cached.pop(one, None)
        cached[one] = None
        if eviction.answered(one):
            eviction.listed(CacheContents(tuple(map(Cached, cached))), lambda _: False, lambda _: False)
            while (gone := eviction.next(lambda _: False)) is not None:
                del cached[gone]
                eviction.removed()
            eviction.ended()
    return found


def best_hits(uses: list[Digest]) -> int:
    """Belady's: whatever is used last, or never again, leaves."""
    later: dict[Digest, list[int]] = {}
    for at in range(len(uses) - 1, -1, -1):
        later.setdefault(uses[at], []).append(at)
    cached: dict[Digest, int] = {}
    found = 0
    for one in uses:
        later[one].pop()
        found += one in cached
        cached[one] = later[one][-1] if later[one] else len(uses)
        if len(cached) > PLACES:
            del cached[max(cached, key=lambda digest: cached[digest])]
    return found
