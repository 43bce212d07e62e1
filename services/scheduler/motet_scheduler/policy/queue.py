"""The order in which the waiting requests of one group are tried, and when each is tried again.

Class first, then age, whoever asked: a tenant with many old requests is served before one with a single younger one. A
request never passes an older one of its own tenant and class, so only the oldest of each tenant is tried. Younger
requests of the same class and less urgent requests may pass a request that does not fit, at most `max_passed_over`
times. Then it is overdue, and one runner is reserved for it: there, nothing of its class and nothing less urgent is
placed before it. More urgent requests always go first, which is not counted.

A request that was tried and fits nowhere knows whose runners it waits for: those of its base model, or, as long as
`maxReplicas` allows no more, those that have its adapter. When one of these has room again, the oldest that wait for it
are looked at, of each base model and each adapter `tenants_examined` at most; where all adapter slots are in use, only
those for an adapter in one of them, or for none. So whoever waits for something else is in nobody's way. When other
runners than before may take a request, it counts as untried (`try_again`). Of untried ones that get no place, too, each
scan tries `tenants_examined` at most, and nothing younger or less urgent before the others; `TryMore` goes on.
"""

from bisect import bisect_left, bisect_right, insort
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from enum import Enum, auto
from itertools import chain

from motet.domain import BASE, Digest, Tenant
from motet.runner_info import Capacity, RequestClass
from motet_scheduler.policy.requests import QueueKey, Request
from motet_scheduler.policy.runners import Runner
from motet_scheduler.policy.values import SchedulerConfig

Head = tuple[float, int, Request]
"""A request behind its key: flat, as they are compared very often. Keys are unique, so requests never are."""

Room = tuple[Runner, Capacity, int, Collection[Digest] | None]
"""A runner, how many pages are free there, and which adapters alone may run there (None: any)."""


class Outcome(Enum):
    """How a request has left the queue."""

    PLACED = auto()
    REFUSED = auto()
    """Or it ended otherwise, without a place."""


Place = Callable[[Request, list[Runner]], Outcome | None]
"""Places a request on one of these runners, or of none: on any. None: it still waits."""

FEW_OF = 100
"""To remove fewer than one in a hundred from lists, each is searched for. For more it is faster to go through the lists
once: all that wait for an adapter may count as untried at once."""


class Waiting:
    """Heads that were tried and wait for the same, in order of age."""

    def __init__(self) -> None:
        self.heads: list[Head] = []
        self._examined = 0
        self._capacity: Capacity | None = None
        self._least = 0
        """The fewest pages that one of the oldest `_examined` needs on a runner of this capacity. Most lack pages, so
        this often spares looking at them."""

    def add(self, head: Head) -> None:
        insort(self.heads, head)
        self._least = min([self._least, *_pages([head], self._capacity)])

    def discard(self, head: Head) -> None:
        _discard(self.heads, head)
        last = self.heads[self._examined - 1 : self._examined]  # it is one of the oldest now
        self._least = min([self._least, *_pages(last, self._capacity)])

    def drop_untried(self) -> None:
        self.heads = _tried(self.heads)
        self._examined = 0

    def oldest(self, examined: int, capacity: Capacity | None, free: int) -> list[Head]:
        """Of the oldest `examined` heads, those that may need no more than the free pages of a runner of this capacity
        (None: of any)."""
        if capacity is self._capacity and examined == self._examined and free < self._least:
            return []
        heads = self.heads[:examined]
        pages = _pages(heads, capacity)
        self._examined, self._capacity, self._least = examined, capacity, min(pages)
        return [head for head, needed in zip(heads, pages, strict=True) if needed <= free]


def _head(request: Request) -> Head:
    return (request.asked_at, request.sequence, request)


def _pages(heads: list[Head], capacity: Capacity | None) -> list[int]:
    """How many pages they need on a runner of this capacity. 0: it is not known."""
    return [
        need.promise.pages if (need := head[2].need) is not None and need.capacity is capacity else 0 for head in heads
    ]


class ClassQueue:
    """The requests of one class. Additions and removals cost O(log n), and a short memmove."""

    def __init__(self, max_passed_over: int) -> None:
        self._max_passed_over = max_passed_over
        self._tenant_queues: dict[Tenant, list[Head]] = {}
        self._heads: list[Head] = []
        """The oldest request of each tenant."""
        self.untried_heads: list[Head] = []
        self.waiting: defaultdict[str, Waiting] = defaultdict(Waiting)
        """Those that were tried, by what they wait for."""
        self.by_adapter: defaultdict[Digest, defaultdict[str, list[Head]]] = defaultdict(lambda: defaultdict(list))
        """The same, by adapter first: where all slots are in use, only those that have one can go."""
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
        every = [head for tenant_queue in self._tenant_queues.values() for head in tenant_queue]
        return (request for _, _, request in sorted(every))

    def unordered(self) -> Iterator[Head]:
        return chain.from_iterable(self._tenant_queues.values())

    def add(self, request: Request) -> None:
        tenant_queue = self._tenant_queues.setdefault(request.tenant, [])
        before = tenant_queue[0] if tenant_queue else None
        insort(tenant_queue, _head(request))
        self._size += 1
        self._youngest = max(self._youngest, request.key)
        self._move_head(before, tenant_queue[0])

    def remove(self, request: Request) -> None:
        tenant_queue = self._tenant_queues[request.tenant]
        before = tenant_queue[0]
        at = bisect_left(tenant_queue, _head(request))
        assert tenant_queue[at][2] is request, f"{request.id} is not where its age says"
        del tenant_queue[at]
        request.deadline_at = None
        self._size -= 1
        self._move_head(before, tenant_queue[0] if tenant_queue else None)
        if not tenant_queue:
            del self._tenant_queues[request.tenant]
        if self._passes:
            oldest = self.head()
            del self._passes[: len(self._passes) if oldest is None else bisect_right(self._passes, oldest.key)]

    def head(self) -> Request | None:
        """The oldest request."""
        return self._heads[0][2] if self._heads else None

    def heads(self) -> list[Request]:
        """The oldest request of each tenant, in order of age."""
        return [request for _, _, request in self._heads]

    @property
    def untried(self) -> bool:
        return bool(self.untried_heads)

    def wait_for(self, request: Request, runners_of: str) -> None:
        """It was tried, and none of these runners has room for it."""
        if request.waits_for == runners_of:
            return
        head = _head(request)
        self._leave(head)
        request.waits_for = runners_of
        self.waiting[runners_of].add(head)
        insort(self.by_adapter[request.digest][runners_of], head)

    def try_again(self, requests: Iterable[Request]) -> None:
        again = [request for request in dict.fromkeys(requests) if request.waits_for is not None]
        if len(again) * FEW_OF < len(self._heads):
            for request in again:
                self._leave(head := _head(request))
                insort(self.untried_heads, head)
            return
        left = {(request.digest, request.waits_for) for request in again if request.waits_for is not None}
        for request in again:
            request.waits_for = None
        for runners_of in {runners_of for _, runners_of in left}:
            self.waiting[runners_of].drop_untried()
            if not self.waiting[runners_of].heads:
                del self.waiting[runners_of]
        for digest, runners_of in left:
            of_adapter = self.by_adapter[digest]
            of_adapter[runners_of] = _tried(of_adapter[runners_of])
            if not of_adapter[runners_of]:
                del of_adapter[runners_of]
            if not of_adapter:
                del self.by_adapter[digest]
        self.untried_heads += map(_head, again)
        self.untried_heads.sort()

    def try_all_again(self) -> None:
        self.untried_heads = self._heads.copy()
        self.waiting.clear()
        self.by_adapter.clear()
        for _, _, request in self._heads:
            request.waits_for = None

    def with_adapter(self, digest: Digest) -> list[Request]:
        """Those that were tried, of the oldest of each tenant."""
        return [head[2] for heads in self.by_adapter.get(digest, {}).values() for head in heads]

    def to_try(self, rooms: Sequence[Room], after: Head | None, examined: int, untried: int) -> list[Head]:
        """In order of age: untried requests, and those that wait for one of these runners. `after`: only younger ones.

        The work is bounded: at most `untried` untried ones, and at most `examined` that wait for the same base model or
        adapter. None is younger than an untried one that is left.
        """
        found = self.untried_heads[:untried]
        capacity, most = rooms[0][1] if rooms else None, 0
        runners_of: set[str] = set()
        adapters: set[tuple[Digest, str]] = set()
        for runner, its_capacity, free, only in rooms:
            if its_capacity is not capacity:
                capacity = None
            most = max(most, free)
            if only is None:
                runners_of.update(("", runner.base.digest), self.waiting.keys() & runner.adapters)
            else:
                for digest in (BASE, *(self.by_adapter.keys() & only)):
                    adapters.update(((digest, ""), (digest, runner.base.digest), (digest, digest)))
        for one in runners_of:
            if one in self.waiting:
                found += self.waiting[one].oldest(examined, capacity, most)
        for digest, one in adapters:
            of_adapter = self.by_adapter.get(digest)
            heads = of_adapter.get(one, [])[:examined] if of_adapter is not None else []
            found += [head for head, pages in zip(heads, _pages(heads, capacity), strict=True) if pages <= most]
        found.sort()
        if len(self.untried_heads) > untried:
            del found[bisect_left(found, self.untried_heads[untried]) :]
        return found[bisect_right(found, after) :] if after is not None else found

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
            _discard(self._heads, before)
            self._leave(before)
        if after is not None:
            insort(self._heads, after)
            insort(self.untried_heads, after)

    def _leave(self, head: Head) -> None:
        request = head[2]
        if request.waits_for is None:
            _discard(self.untried_heads, head)
            return
        waiting, of_adapter = self.waiting[request.waits_for], self.by_adapter[request.digest]
        waiting.discard(head)
        if not waiting.heads:
            del self.waiting[request.waits_for]
        alike = of_adapter[request.waits_for]
        _discard(alike, head)
        if not alike:
            del of_adapter[request.waits_for]
        if not of_adapter:
            del self.by_adapter[request.digest]
        request.waits_for = None


def _tried(heads: list[Head]) -> list[Head]:
    return [head for head in heads if head[2].waits_for is not None]


def _discard(heads: list[Head], head: Head) -> None:
    del heads[bisect_left(heads, head)]


class Queue:
    def __init__(self, max_passed_over: int) -> None:
        self.class_queues = {one: ClassQueue(max_passed_over) for one in RequestClass}
        self.bases: Counter[str] = Counter()
        """How many requests wait for each base model."""
        self.freed: dict[Runner, None] = {}
        """Runners that may have room since the last scan. In order, as a set would differ from process to process."""
        self.reserved_for: Request | None = None
        """The overdue request that a runner is reserved for."""
        self.reserved_runner: Runner | None = None
        """None: no runner could ever take it."""

    def __len__(self) -> int:
        return sum(len(class_queue) for class_queue in self.class_queues.values())

    def __iter__(self) -> Iterator[Request]:
        for class_queue in self.class_queues.values():
            yield from class_queue

    def unordered(self) -> Iterator[Head]:
        """All requests behind their keys, for sums: fast, as ten thousand may wait."""
        return chain.from_iterable(map(ClassQueue.unordered, self.class_queues.values()))

    def heads(self) -> list[Request]:
        """The oldest request of each tenant and class."""
        return [request for class_queue in self.class_queues.values() for request in class_queue.heads()]

    def size_of(self, request_class: RequestClass) -> int:
        return len(self.class_queues[request_class])

    def add(self, request: Request) -> None:
        self.class_queues[request.request_class].add(request)
        self.bases[request.base] += 1

    @property
    def changed(self) -> bool:
        """Whether a request may fit now that did not before, or a runner must be reserved for another one."""
        return bool(self.freed) or self.untried or self.overdue() is not self.reserved_for

    @property
    def untried(self) -> bool:
        return any(class_queue.untried for class_queue in self.class_queues.values())

    def retry_on(self, runner: Runner) -> None:
        """This runner may have room."""
        self.freed[runner] = None

    def try_again(self, requests: Collection[Request]) -> None:
        """Other runners may take these requests than before, if they wait."""
        for request_class, class_queue in self.class_queues.items() if requests else ():
            class_queue.try_again(request for request in requests if request.request_class is request_class)

    def with_adapters(self, digests: Iterable[Digest]) -> list[Request]:
        """Requests that wait and were tried, of the oldest of each tenant and class."""
        return [
            request
            for class_queue in self.class_queues.values()
            for digest in digests
            for request in class_queue.with_adapter(digest)
        ]

    def try_all_again(self) -> None:
        for class_queue in self.class_queues.values():
            class_queue.try_all_again()

    def wait_for(self, request: Request, runners_of: str) -> None:
        """It was tried, and waits for runners that have this base model, or this adapter."""
        self.class_queues[request.request_class].wait_for(request, runners_of)

    def reserve(self, overdue: Request | None, runner: Runner | None) -> None:
        """Reserve a runner for the overdue request, instead of the one that was reserved."""
        before, runner_before = self.reserved_for, self.reserved_runner
        self.reserved_for, self.reserved_runner = overdue, runner
        if runner_before is not None and (runner_before is not runner or before is not overdue):
            self.retry_on(runner_before)

    def reserved_from(self, request: Request) -> Runner | None:
        """The runner that this request has to leave to the overdue one."""
        overdue = self.reserved_for
        behind = overdue is not None and request is not overdue and request.request_class >= overdue.request_class
        return self.reserved_runner if behind else None

    def try_in_order(self, config: SchedulerConfig, place: Place) -> Iterator[Outcome]:
        """Have the requests placed that may fit now, the most urgent first, on the runners that have room; untried
        ones: on any. Yields the outcome of each that has left: the caller may stop after it.

        Skips those that wait for runners with too little room. These are nearly all, so this must be fast. Ends before
        anything that is younger or less urgent than an untried one that is left.
        """
        overdue, reserved = self.reserved_for, self.reserved_runner
        every = rooms = self._rooms()
        for request_class, class_queue in self.class_queues.items():
            if overdue is not None and request_class >= overdue.request_class and reserved in self.freed:
                tried = request_class is overdue.request_class and overdue.waits_for is not None
                if tried and (fits := _fits(overdue, every, config)) and (outcome := place(overdue, fits)) is not None:
                    yield outcome
                rooms = [room for room in every if room[0] is not reserved]
            last: Head | None = None
            untried, left = config.tenants_examined, True
            while left and (rooms or class_queue.untried):
                left = False
                for head in class_queue.to_try(rooms, last, config.tenants_examined, untried):
                    request = head[2]
                    first, fits = request.waits_for is None, []
                    if not first and not (fits := _fits(request, rooms, config)):
                        continue
                    outcome = place(request, fits)
                    if outcome is None:
                        untried -= first
                        continue
                    yield outcome
                    if outcome is Outcome.REFUSED:
                        untried -= first  # a tenant may have many to refuse
                    # Less may be free now, and its tenant's next is untried.
                    last, left, every = head, True, self._rooms()
                    rooms = [room for room in every if room[0] is not self.reserved_from(request)]
                    break
            if class_queue.untried:
                return

    def _rooms(self) -> list[Room]:
        return [
            (runner, runner.capacity, runner.ledger.free, runner.only_adapters)
            for runner in self.freed
            if runner.has_capacity
        ]

    def remove(self, request: Request) -> None:
        """Remove a request that was not placed."""
        self.class_queues[request.request_class].remove(request)
        self._leave_base(request)
        if request is self.reserved_for:
            self.reserve(None, None)

    def remove_placed(self, request: Request) -> None:
        """Remove a placed request, and count it for the waiting requests that it passed."""
        self._leave_base(request)
        for request_class, class_queue in self.class_queues.items():
            if request_class is request.request_class:
                class_queue.remove(request)
                class_queue.passed_by_younger(request.key)
                return
            class_queue.passed_by_less_urgent()

    def _leave_base(self, request: Request) -> None:
        self.bases[request.base] -= 1
        if not self.bases[request.base]:
            del self.bases[request.base]

    def passed_over(self, request: Request) -> int:
        return self.class_queues[request.request_class].passed_over(request)

    def overdue(self) -> Request | None:
        """The most urgent request that has been passed over too often."""
        for class_queue in self.class_queues.values():
            if (overdue := class_queue.overdue()) is not None:
                return overdue
        return None


def _fits(request: Request, rooms: list[Room], config: SchedulerConfig) -> list[Runner]:
    fits: list[Runner] = []
    need = request.need
    for runner, capacity, free, only in rooms:
        if need is None or need.capacity is not capacity:
            need = request.requirement_on(capacity, config, runner.adapter_pages(request.digest))
        if (
            need.promise.pages <= free
            and not need.never
            and (only is None or request.digest in only or request.digest == BASE)
            and runner.serves(request.base)
        ):
            fits.append(runner)
    return fits
