"""The order in which the waiting requests of one group are tried.

Class first, then age, whoever asked: a tenant with many old requests is served before one with a single younger one. A
request never passes an older one of its own tenant and class, so only the oldest of each tenant is tried. Younger
requests of the same class and less urgent requests may pass a request that does not fit, at most `max_passed_over`
times. Then it is overdue, and one runner is reserved for it: there, nothing of its class and nothing less urgent is
placed before it. More urgent requests always go first, which is not counted.
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
        self._tenant_queues: dict[Tenant, list[Head]] = {}
        self._heads: list[Head] = []
        self._size = 0
        self._youngest: QueueKey = (0.0, 0)
        """The largest key that was ever added."""
        self._passes: list[QueueKey] = []
        """Sorted: each entry is a placement that passed all waiting requests with a smaller key. Only the largest
        `max_passed_over` are kept: a request with a smaller key than these is overdue anyway."""

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Request]:
        """In order of age. For reports; too slow for decisions."""
        every = [pair for tenant_queue in self._tenant_queues.values() for pair in tenant_queue]
        return (request for _, request in sorted(every, key=lambda pair: pair[0]))

    def unordered(self) -> Iterator[Request]:
        return (request for tenant_queue in self._tenant_queues.values() for _, request in tenant_queue)

    def add(self, request: Request) -> None:
        tenant_queue = self._tenant_queues.setdefault(request.tenant, [])
        before = tenant_queue[0] if tenant_queue else None
        insort(tenant_queue, (request.key, request))
        self._size += 1
        self._youngest = max(self._youngest, request.key)
        self._move_head(before, tenant_queue[0])

    def remove(self, request: Request) -> None:
        tenant_queue = self._tenant_queues[request.tenant]
        before = tenant_queue[0]
        at = bisect_left(tenant_queue, (request.key, request))
        assert tenant_queue[at][1] is request, f"{request.id} is not where its age says"
        del tenant_queue[at]
        self._size -= 1
        self._move_head(before, tenant_queue[0] if tenant_queue else None)
        if not tenant_queue:
            del self._tenant_queues[request.tenant]
        if self._passes:
            oldest = self.head()
            del self._passes[: len(self._passes) if oldest is None else bisect_right(self._passes, oldest.key)]

    def head(self, turn: int = 0) -> Request | None:
        """The oldest request of the tenant at this turn."""
        if turn >= len(self._heads):
            return None
        return self._heads[turn][1]

    def oldest_of_each_tenant(self, first: int, end: int) -> list[Head]:
        """The oldest request of each tenant, in the order of turns."""
        return self._heads[first:end]

    def first_of(self, tenant: Tenant) -> Request | None:
        tenant_queue = self._tenant_queues.get(tenant)
        return tenant_queue[0][1] if tenant_queue else None

    def passed_by_younger(self, key: QueueKey) -> None:
        """A request of this class was placed."""
        oldest = self.head()
        if oldest is not None and oldest.key < key:
            self._add_pass(key)

    def passed_by_less_urgent(self) -> None:
        """A less urgent request was placed because the requests here did not fit."""
        if self._size:
            asked_at, sequence = self._youngest
            self._add_pass((asked_at, sequence + 1))

    def _add_pass(self, key: QueueKey) -> None:
        insort(self._passes, key)
        if len(self._passes) > self._max_passed_over:
            del self._passes[0]

    def passed_over(self, request: Request) -> int:
        """How often other requests passed this one because it did not fit, up to `max_passed_over`."""
        return len(self._passes) - bisect_right(self._passes, request.key)

    def overdue(self) -> Request | None:
        """The oldest request, if it has been passed over too often."""
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
        self._class_queues = {one: ClassQueue(max_passed_over) for one in RequestClass}
        self.blocked = False
        """No request here fits on any runner, and no capacity has been freed since the last scan."""
        self.freed_runners: list[Runner] | None = None
        """Runners with capacity freed since the last full scan; None: try all runners."""
        self.reserved_for: Request | None = None
        """The overdue request that a runner is reserved for."""
        self.reserved_runner: Runner | None = None
        """None: no runner could ever take it."""
        self.scans = 0
        """Scans so far."""
        self._last_full_scan = 0
        """The last scan in which all tenants were tried."""

    def __len__(self) -> int:
        return sum(len(class_queue) for class_queue in self._class_queues.values())

    def __iter__(self) -> Iterator[Request]:
        for class_queue in self._class_queues.values():
            yield from class_queue

    def unordered(self) -> Iterator[Request]:
        """All requests, for sums."""
        for class_queue in self._class_queues.values():
            yield from class_queue.unordered()

    def size_of(self, request_class: RequestClass) -> int:
        return len(self._class_queues[request_class])

    def add(self, request: Request) -> None:
        self._class_queues[request.request_class].add(request)

    def retry_on(self, runner: Runner) -> None:
        """Try again on this runner: capacity was freed there."""
        self.blocked = False
        if self.freed_runners is not None and runner not in self.freed_runners:
            self.freed_runners.append(runner)

    def retry_everywhere(self) -> None:
        self.blocked = False
        self.freed_runners = None

    def reserve(self, overdue: Request | None, runner: Runner | None) -> None:
        """Reserve a runner for the overdue request, instead of the one that was reserved."""
        before, runner_before = self.reserved_for, self.reserved_runner
        self.reserved_for, self.reserved_runner = overdue, runner
        if runner_before is not None and (runner_before is not runner or before is not overdue):
            self.retry_on(runner_before)

    def reserved_from(self, request: Request) -> Runner | None:
        """The runner that this request has to leave to the overdue one."""
        return None if request is self.reserved_for else self._reserved_from_class(request.request_class)

    def _reserved_from_class(self, request_class: RequestClass) -> Runner | None:
        behind = self.reserved_for is not None and request_class >= self.reserved_for.request_class
        return self.reserved_runner if behind else None

    def end_scan(self) -> None:
        self.freed_runners = []
        self._last_full_scan = self.scans

    def next_turn(self, request_class: RequestClass, turn: int, config: SchedulerConfig) -> int:
        """The next turn of a class, from this one on, whose oldest request may fit now.

        Skips requests that fitted nowhere in their last scan, if the capacity freed since then is not enough for them.
        These are nearly all requests, so this check must be fast.
        """
        if self.freed_runners is None:
            return turn
        reserved = self._reserved_from_class(request_class)
        freed_runners = [
            (runner, runner.capacity, free) for runner in self.freed_runners if (free := runner.ledger.free) > 0
        ]
        last_full_scan, this_scan = self._last_full_scan, self.scans
        for _, head in self._class_queues[request_class].oldest_of_each_tenant(turn, config.tenants_examined):
            if head.tried_in_scan < last_full_scan:
                return turn
            need = head.need
            for runner, capacity, free in freed_runners:
                if runner is reserved and head is not self.reserved_for:
                    continue
                if need is None or need.capacity is not capacity:
                    need = head.requirement_on(capacity, config, runner.adapter_pages(head.digest))
                if need.promise.pages <= free and runner.slot_for(head.digest) and runner.serves(head.base):
                    return turn
            head.tried_in_scan = this_scan
            turn += 1
        return turn

    def remove(self, request: Request) -> None:
        """Remove a request that was not placed."""
        if self.has_turn(request):
            self.blocked = False  # requests behind it have not been tried
        self._class_queues[request.request_class].remove(request)

    def remove_placed(self, request: Request) -> None:
        """Remove a placed request, and count it for the waiting requests that it passed."""
        for request_class, class_queue in self._class_queues.items():
            if request_class is request.request_class:
                class_queue.remove(request)
                class_queue.passed_by_younger(request.key)
                return
            class_queue.passed_by_less_urgent()

    def oldest(self) -> Request | None:
        heads = [head for class_queue in self._class_queues.values() if (head := class_queue.head()) is not None]
        return min(heads, key=lambda request: request.key, default=None)

    def passed_over(self, request: Request) -> int:
        return self._class_queues[request.request_class].passed_over(request)

    def overdue(self) -> Request | None:
        """The most urgent request that has been passed over too often."""
        every = (class_queue.overdue() for class_queue in self._class_queues.values())
        return next((overdue for overdue in every if overdue is not None), None)

    def class_queues(self) -> Iterator[tuple[RequestClass, ClassQueue]]:
        """From the most urgent class down."""
        yield from self._class_queues.items()

    def has_turn(self, request: Request) -> bool:
        """Whether it is the oldest request of its tenant and class."""
        return self._class_queues[request.request_class].first_of(request.tenant) is request
