"""The last things of everybody, at most a number of them: whoever has most loses the oldest one. Pure.

Nobody can push out what belongs to others, however often something happens to him.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class LastOfEach(Generic[K, V]):
    """Each step takes the same time, however many owners there are."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._owner: dict[K, str] = {}
        self._of: dict[str, OrderedDict[K, V]] = {}
        """By owner, the oldest first."""
        self._by_count: defaultdict[int, dict[str, None]] = defaultdict(dict)
        """Which owners have how many."""
        self._highest = 0
        """What anybody has."""

    def __len__(self) -> int:
        return len(self._owner)

    def get(self, key: K) -> V | None:
        owner = self._owner.get(key)
        return None if owner is None else self._of[owner][key]

    def add(self, owner: str, key: K, value: V) -> V | None:
        """`key` must be new. Returns what is not kept any more, if it is full."""
        self._owner[key] = owner
        if (mine := self._of.get(owner)) is None:
            mine = self._of[owner] = OrderedDict()
        mine[key] = value
        full = len(self._owner) > self._most
        if full and len(mine) > self._highest > 0:  # often: nobody else has as many
            oldest, gone = mine.popitem(last=False)
            del self._owner[oldest]
            return gone
        self._recount(owner, len(mine) - 1)
        if not full:
            return None
        return self.pop(next(iter(self._of[next(iter(self._by_count[self._highest]))])))

    def pop(self, key: K) -> V | None:
        """None: it is not there."""
        owner = self._owner.pop(key, None)
        if owner is None:
            return None
        mine = self._of[owner]
        value = mine.pop(key)
        self._recount(owner, len(mine) + 1)
        if not mine:
            del self._of[owner]
        return value

    def _recount(self, owner: str, before: int) -> None:
        if before:
            with_as_many = self._by_count[before]
            del with_as_many[owner]
            if not with_as_many:
                del self._by_count[before]
        if now := len(self._of[owner]):
            self._by_count[now][owner] = None
        if now > self._highest or self._highest not in self._by_count:
            self._highest = now
