"""The numbers of orders to runners, and when orders may be due."""

import math
from heapq import heappop, heappush
from itertools import count


class Orders:
    def __init__(self, first: int) -> None:
        self._numbers = count(first)
        self.changed = False
        """Whether something has changed since orders were given last, so that others may be due."""
        self.times: list[float] = []
        """When an order is repeated, or given that could not be given yet. A heap; each once, and some out of date."""
        self._known: set[float] = set()
        """The same. An adapter that waits for its time says it each time that orders are given."""

    def number(self) -> int:
        """Of the next one."""
        return next(self._numbers)

    def look_at(self, at: float) -> None:
        """Another order may be due then."""
        if at not in self._known:
            self._known.add(at)
            heappush(self.times, at)

    def next_due(self) -> float:
        if self.changed:
            return -math.inf
        return self.times[0] if self.times else math.inf

    def begin(self, now: float) -> None:
        """What is due now is ordered."""
        self.changed = False
        while self.times and self.times[0] <= now:
            self._known.discard(heappop(self.times))
