"""The order in which requests of one group get their turn.

Class first, then age. Inside a class every tenant has a line of its own, and the lines take turns by the age of the
request at their head. A tenant's line is strictly first come, first served. A request that does not fit may
be passed, by younger ones of its class and by less urgent ones, at most `max_passed_over` times; then neither its class
nor a less urgent one gets anything before it. That a more urgent request goes first is what classes are for, and counts
as nothing.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator

from motet.domain import Tenant
from motet.runner_info import RequestClass
from motet_scheduler.policy.requests import QueueKey, Request
from motet_scheduler.policy.runners import Runner
from motet_scheduler.policy.values import SchedulerConfig

Head = tuple[QueueKey, Request]
"""Keys are unique, so that requests themselves are never compared."""


class ClassQueue:
    """The requests of one class. Additions and removals cost O(log n), and a short memmove."""

    def __init__(self, max_passed_over: int) -> None:
        self._max_passed_over = max_passed_over
        self._lines: dict[Tenant, list[Head]] = {}
        self._heads: list[Head] = []
        self._size = 0
        self._youngest: QueueKey = (0.0, 0)
        """The largest key that has ever been here."""
        self._passes: list[QueueKey] = []
        """Sorted: each was passed by a placement whoever waits here with a smaller key."""

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
        before = line[0] if line else None
        insort(line, (request.key, request))
        self._size += 1
        self._youngest = max(self._youngest, request.key)
        self._move_head(before, line[0])

    def remove(self, request: Request) -> None:
        line = self._lines[request.tenant]
        before = line[0]
        at = bisect_left(line, (request.key, request))
        assert line[at][1] is request, f"{request.id} is not where its age says"
        del line[at]
        self._size -= 1
        self._move_head(before, line[0] if line else None)
        if not line:
            del self._lines[request.tenant]
        if self._passes:
            oldest = self.head()
            del self._passes[: len(self._passes) if oldest is None else bisect_right(self._passes, oldest.key)]

    def head(self, turn: int = 0) -> Request | None:
        """The oldest request of the tenant whose turn is `turn`-th."""
        if turn >= len(self._heads):
            return None
        return self._heads[turn][1]

    def oldest_of_each_tenant(self, first: int, end: int) -> list[Head]:
        """The oldest of each tenant, in the order of their turns."""
        return self._heads[first:end]

    def first_of(self, tenant: Tenant) -> Request | None:
        line = self._lines.get(tenant)
        return line[0][1] if line else None

    def passed_by_younger(self, key: QueueKey) -> None:
        """One of this class has gone."""
        oldest = self.head()
        if oldest is not None and oldest.key < key:
            insort(self._passes, key)

    def passed_by_less_urgent(self) -> None:
        """One of another class has gone, and would not have if those who wait here had fitted."""
        if self._size:
            asked_at, sequence = self._youngest
            insort(self._passes, (asked_at, sequence + 1))

    def passed_over(self, request: Request) -> int:
        """How often this one was passed because it did not fit."""
        return len(self._passes) - bisect_right(self._passes, request.key)

    def overdue(self) -> Request | None:
        """The one that must go next, because it has been passed over often enough: nobody has been more often."""
        if len(self._passes) < self._max_passed_over:
            return None
        oldest = self.head()
        return oldest if oldest is not None and self.passed_over(oldest) >= self._max_passed_over else None

    def _move_head(self, before: Head | None, after: Head | None) -> None:
        if before is after:
            return
        if before is not None:
            del self._heads[bisect_left(self._heads, before)]
        if after is not None:
            insort(self._heads, after)


class Queue:
    def __init__(self, max_passed_over: int) -> None:
        self._lanes = {one: ClassQueue(max_passed_over) for one in RequestClass}
        self.blocked = False
        """Nothing here fits anywhere, and no room has come up since that was found."""
        self.room: list[Runner] | None = None
        """Where room has come up since the heads of all lines were tried; None: look everywhere."""
        self.scans = 0
        """At the heads of the lines, so far."""
        self._whole_look = 0
        """The last in which all lines had their turn."""

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

    def retry_on(self, runner: Runner) -> None:
        """Something came free there."""
        self.blocked = False
        if self.room is not None and runner not in self.room:
            self.room.append(runner)

    def retry_everywhere(self) -> None:
        self.blocked = False
        self.room = None

    def end_scan(self) -> None:
        self.room = []
        self._whole_look = self.scans

    def next_turn(self, lane: ClassQueue, turn: int, policy: SchedulerConfig) -> int:
        """The next whose head may fit now, from this turn on.

        Left out are those that fitted nowhere when they were tried last, where nothing has come free since that is
        enough for them. That is nearly everybody, so it is asked here and quickly.
        """
        if self.room is None:
            return turn
        room = [(runner, runner.capacity, free) for runner in self.room if (free := runner.ledger.free) > 0]
        whole_look, this_look = self._whole_look, self.scans
        for _, head in lane.oldest_of_each_tenant(turn, policy.tenants_examined):
            if head.tried_in_scan < whole_look:
                return turn
            need = head.need
            for runner, capacity, free in room:
                if need is None or need.capacity is not capacity:
                    need = head.requirement_on(capacity, policy)
                if need.promise.pages <= free and runner.slot_for(head.digest):
                    return turn
            head.tried_in_scan = this_look
            turn += 1
        return turn

    def remove(self, request: Request) -> None:
        """It waits no longer, and has got no place."""
        if self.has_turn(request):
            self.blocked = False  # whoever stood behind it, or was held back for it, has not been tried
        self._lanes[request.request_class].remove(request)

    def remove_placed(self, request: Request) -> None:
        """`request` got its place: take it out, and count it against those that still wait and were before it."""
        for request_class, lane in self._lanes.items():
            if request_class is request.request_class:
                lane.remove(request)
                lane.passed_by_younger(request.key)
                return
            lane.passed_by_less_urgent()

    def oldest(self) -> Request | None:
        heads = [head for lane in self._lanes.values() if (head := lane.head()) is not None]
        return min(heads, key=lambda request: request.key, default=None)

    def passed_over(self, request: Request) -> int:
        return self._lanes[request.request_class].passed_over(request)

    def overdue(self, least_urgent: RequestClass) -> Request | None:
        """Who must go before anybody of this class does."""
        for request_class, lane in self._lanes.items():
            overdue = lane.overdue()
            if overdue is not None or request_class is least_urgent:
                return overdue
        return None

    def lanes(self) -> Iterator[tuple[RequestClass, ClassQueue]]:
        """From the most urgent class down."""
        yield from self._lanes.items()

    def has_turn(self, request: Request) -> bool:
        """Whether nobody of its own tenant and class waits before it."""
        return self._lanes[request.request_class].first_of(request.tenant) is request
