"""When what waits gives up. Pure."""

from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import Generic, TypeVar

SWEPT_AT_ONCE = 1000
"""Entries that a sweep looks at in one tick."""

SLACK = 64
"""A heap with fewer stale entries than this is not swept."""

Item = TypeVar("Item")


class Deadlines(Generic[Item]):
    """Most items get what they wait for long before. Removing an entry from the middle of a heap is expensive, so
    entries stay where they are. When more than half are stale, a sweep moves the others to a new heap, some in each
    tick.
    """

    def __init__(self, stands: Callable[[float, Item], bool]) -> None:
        """`stands`: whether the item still waits until this time; if not, its entry is stale."""
        self._stands = stands
        self._heap: list[tuple[float, int, Item]] = []
        self._unswept: list[tuple[float, int, Item]] = []
        """What is left of the heap of before."""
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._heap) + len(self._unswept)

    def add(self, at: float | None, item: Item) -> None:
        """None: it waits for any time."""
        if at is not None:
            heappush(self._heap, (at, next(self._numbers), item))

    def sweep(self, waiting: int) -> None:
        """Remove stale entries if they are the majority; at most `waiting` items still wait."""
        if not self._unswept and len(self._heap) > 2 * waiting + SLACK:
            self._heap, self._unswept = [], self._heap
        for _ in range(min(SWEPT_AT_ONCE, len(self._unswept))):
            entry = self._unswept.pop()  # without its last entry, a heap is still one
            if self._stands(entry[0], entry[2]):
                heappush(self._heap, entry)

    def next_due(self) -> float:
        """When the next entry expires; it may be stale. It stays nevertheless: what an event ends must not depend on
        who has asked before."""
        return min((heap[0][0] for heap in (self._heap, self._unswept) if heap), default=inf)

    def expired(self, now: float, most: int) -> Iterator[Item]:
        """Looks at `most` entries at most."""
        for _ in range(most):
            if self.next_due() > now:
                return
            at, _, item = heappop(min(filter(None, (self._heap, self._unswept))))
            if self._stands(at, item):
                yield item
