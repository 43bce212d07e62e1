"""How often requests use adapters. Old uses count less and less, also those of adapters that have left the cache."""

from motet.domain import Digest

HALF_LIFE = 32
"""A use counts half as much after this many further uses for each adapter that the cache may hold. With 64 of 2,000
adapters, Zipf 1.5 and 1.0, there are 98.0 and 89.3 % of the best possible hits; with 125, 98.1 and 89.5 %; with 8, 96.6
and 86.7 %; by last use alone 94.6 and 69.1 %."""

REMEMBERED = 16
"""How many adapters are counted for each one that the cache may hold, and at least 1,024."""

_LARGEST = 1e200


class Frequency:
    def __init__(self, adapters: int) -> None:
        self._growth = 2 ** (1 / (HALF_LIFE * max(1, adapters)))
        self._most = max(1024, REMEMBERED * adapters)
        self._weight = 1.0
        """What a use counts now. It grows, instead of what was counted shrinking."""
        self._counts: dict[Digest, float] = {}

    def used(self, digest: Digest) -> bool:
        """→ True if the counts of others have changed, too"""
        self._weight *= self._growth
        self._counts[digest] = self.of(digest) + self._weight
        if begins_anew := self._weight > _LARGEST:
            self._counts = {one: count / self._weight for one, count in self._counts.items()}
            self._weight = 1.0
        if len(self._counts) > self._most:
            most_used = sorted(self._counts, key=self.of, reverse=True)
            self._counts = {one: self._counts[one] for one in most_used[: self._most // 2]}
            return True
        return begins_anew

    def of(self, digest: Digest) -> float:
        return self._counts.get(digest, 0.0)
