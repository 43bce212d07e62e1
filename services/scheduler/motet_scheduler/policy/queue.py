"""The order in which requests of one group get their turn.

Class first, then age. Inside a class every tenant has a line of its own, and the lines take turns by the age of the
request at their head: the place where fair share exchanges age for a tenant's counter. A tenant's line is strictly
first come, first served, so a request is only ever passed by other tenants' or classes', at most `max_passed_over`
times; then it is the only one that may go (C2).
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator

from motet.fleet import RequestClass
from motet.model import Tenant
from motet_scheduler.policy.requests import QueueKey, Request

Line = tuple[QueueKey, Tenant]


class Lane:
    """The requests of one class. Additions and removals cost O(log n), and a short memmove."""

    def __init__(self) -> None:
        self._lines: dict[Tenant, list[tuple[QueueKey, Request]]] = {}
        self._heads: list[Line] = []
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Request]:
        """In order of age; for reports, not for decisions."""
        every = [pair for line in self._lines.values() for pair in line]
        return (request for _, request in sorted(every, key=lambda pair: pair[0]))

    def unordered(self) -> Iterator[Request]:
        return (request for line in self._lines.values() for _, request in line)

    def add(self, request: Request) -> None:
        line = self._lines.setdefault(request.tenant, [])
        before = line[0][0] if line else None
        insort(line, (request.key, request), key=lambda pair: pair[0])
        self._size += 1
        self._move_head(request.tenant, before, line[0][0])

    def remove(self, request: Request) -> None:
        line = self._lines[request.tenant]
        before = line[0][0]
        at = bisect_left(line, request.key, key=lambda pair: pair[0])
        assert line[at][1] is request, f"{request.id} is not where its age says"
        del line[at]
        self._size -= 1
        self._move_head(request.tenant, before, line[0][0] if line else None)
        if not line:
            del self._lines[request.tenant]

    def head(self, turn: int = 0) -> Request | None:
        """The oldest request of the tenant whose turn is `turn`-th."""
        if turn >= len(self._heads):
            return None
        return self._lines[self._heads[turn][1]][0][1]

    def first_of(self, tenant: Tenant) -> Request | None:
        line = self._lines.get(tenant)
        return line[0][1] if line else None

    def _move_head(self, tenant: Tenant, before: QueueKey | None, after: QueueKey | None) -> None:
        if before == after:
            return
        if before is not None:
            del self._heads[bisect_left(self._heads, (before, tenant))]
        if after is not None:
            insort(self._heads, (after, tenant))


class Queue:
    def __init__(self, max_passed_over: int) -> None:
        self._max_passed_over = max_passed_over
        self._lanes = {one: Lane() for one in RequestClass}
        self._passes: list[QueueKey] = []
        """Ages of those that went before an older one that still waits, sorted."""
        self.stuck = False
        """Nothing here fits anywhere, and no room has come up since that was found."""

    def __len__(self) -> int:
        return sum(len(lane) for lane in self._lanes.values())

    def __iter__(self) -> Iterator[Request]:
        for lane in self._lanes.values():
            yield from lane

    def unordered(self) -> Iterator[Request]:
        """All of them, for sums."""
        for lane in self._lanes.values():
            yield from lane.unordered()

    def size_of(self, request_class: RequestClass) -> int:
        return len(self._lanes[request_class])

    def add(self, request: Request) -> None:
        self._lanes[request.request_class].add(request)

    def remove(self, request: Request) -> None:
        self._lanes[request.request_class].remove(request)
        self._forget_passes()

    def went(self, request: Request) -> None:
        """`request` got its place: take it out, and count it against those older ones that still wait."""
        self._lanes[request.request_class].remove(request)
        oldest = self.oldest()
        if oldest is not None and oldest.key < request.key:
            insort(self._passes, request.key)
        self._forget_passes()

    def oldest(self) -> Request | None:
        heads = [head for lane in self._lanes.values() if (head := lane.head()) is not None]
        return min(heads, key=lambda request: request.key, default=None)

    def passed_over(self, request: Request) -> int:
        """How many younger requests went before this one."""
        return len(self._passes) - bisect_right(self._passes, request.key)

    def overdue(self) -> Request | None:
        """The one that must go next, because it has been passed over often enough."""
        oldest = self.oldest()
        if oldest is None or self.passed_over(oldest) < self._max_passed_over:
            return None
        return oldest

    def lanes(self) -> Iterator[Lane]:
        """From the most urgent class down."""
        yield from self._lanes.values()

    def has_turn(self, request: Request) -> bool:
        """Whether nobody of its own tenant and class waits before it."""
        return self._lanes[request.request_class].first_of(request.tenant) is request

    def _forget_passes(self) -> None:
        if self._passes:
            oldest = self.oldest()
            keep = len(self._passes) if oldest is None else bisect_right(self._passes, oldest.key)
            del self._passes[:keep]
