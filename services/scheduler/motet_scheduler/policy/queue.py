"""The order in which the waiting requests of one group are tried, and when each is tried again.

Class first, then age, whoever asked: a tenant with many old requests is served before one with a single younger one. A
flow is the requests of one tenant and class for one base model; those for an adapter with `maxReplicas`, which may wait
for other runners, are a flow of their own. A request never passes an older one of its own flow, so only the oldest of
each flow, its head, is tried. Younger requests of the same class and less urgent
requests may pass a request that does not fit, at most `max_passed_over` times. Then it is overdue, and one runner is
reserved for it: there, nothing of its class and nothing less urgent is placed before it. More urgent requests always go
first, which is not counted. Of the overdue requests that wait for the same runners, one at a time has a reservation.

A request that was tried and fits nowhere knows whose runners it waits for: those of its base model, or, as long as
`maxReplicas` allows no more, those that have its adapter. When one of these has room again, the oldest that need no
more pages than are free there are looked at, of each base model and each adapter `tenants_examined` at most; where all
adapter slots are in use, only those for an adapter in one of them, or for none. So whoever waits for something else, or
for more, is in nobody's way. When other runners than before may take a request, it counts as untried (`try_again`). Of
untried ones that get no place, too, each scan tries `tenants_examined` at most, and nothing younger or less urgent
before the others; `TryMore` goes on.
"""

from bisect import bisect_left, bisect_right, insort
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from enum import Enum, auto
from itertools import chain
from typing import TypeVar

from motet.domain import BASE, Digest, Tenant
from motet.runner_info import RequestClass
from motet_scheduler.policy.requests import CapacityId, PageNeed, QueueKey, Request
from motet_scheduler.policy.runners import Runner
from motet_scheduler.policy.values import SchedulerConfig

Head = tuple[float, int, Request]
"""A request behind its key: flat, as they are compared very often. Keys are unique, so requests never are."""

Sized = tuple[int, int, float, int, Request]
"""A head behind its `PageNeed`."""

ByNeed = defaultdict[CapacityId, list[Sized]]

Flow = tuple[Tenant, str, str]
"""Tenant, base model, and adapter if that has `maxReplicas`."""


class Outcome(Enum):
    """How a request has left the queue."""

    PLACED = auto()
    REFUSED = auto()
    """Or it ended otherwise, without a place."""
    OVERDUE = auto()
    """It has not left: it was tried for the first time, is overdue, and may need a reservation before others go on."""


Behind = TypeVar("Behind", Head, Sized)

Place = Callable[[Request, list[Runner]], Outcome | None]
"""Places a request on one of these runners, or of none: on any. None: it still waits."""

FEW_OF = 100
"""To remove fewer than one in a hundred from lists, each is searched for. For more it is faster to go through the lists
once: all that wait for an adapter may count as untried at once."""


class Waiting:
    """Heads that were tried and wait for the same."""

    __slots__ = ("_by_need", "adapters", "heads")

    def __init__(self) -> None:
        self.heads: list[Head] = []
        """In order of age."""
        self._by_need: ByNeed = defaultdict(list)
        self.adapters: defaultdict[Digest, ByNeed] = defaultdict(lambda: defaultdict(list))
        """The same, of each adapter alone: where all slots are in use, only those that have one can go."""

    def add(self, head: Head) -> None:
        insort(self.heads, head)
        request = head[2]
        of_adapter = self.adapters[request.digest]
        for capacity, need in request.page_needs.items():
            sized = need + head
            insort(self._by_need[capacity], sized)
            insort(of_adapter[capacity], sized)

    def discard(self, head: Head) -> None:
        _discard(self.heads, head)
        request = head[2]
        of_adapter = self.adapters[request.digest]
        for capacity, need in request.page_needs.items():
            sized = need + head
            _discard(self._by_need[capacity], sized)
            _discard(of_adapter[capacity], sized)
            if not of_adapter[capacity]:
                del of_adapter[capacity]
        if not of_adapter:
            del self.adapters[request.digest]

    def discard_untried(self, digests: Collection[Digest]) -> None:
        """All that count as untried now: they are for these adapters."""
        self.heads = _tried(self.heads)
        for by_need in (self._by_need, *map(self.adapters.__getitem__, digests)):
            for capacity in list(by_need):
                by_need[capacity] = _tried(by_need[capacity])
                if not by_need[capacity]:
                    del by_need[capacity]
        for digest in digests:
            if not self.adapters[digest]:
                del self.adapters[digest]

    def with_adapter(self, digest: Digest) -> Iterator[Request]:
        """Those that some runner could hold: once for each capacity."""
        return (sized[-1] for by_need in self.adapters.get(digest, {}).values() for sized in by_need)

    def that_fit(self, runner: Runner, examined: int) -> list[Head]:
        """For each adapter that may be used there, and for the base model, the oldest `examined` of those that need no
        more than the free pages of a runner; if any adapter may, of all."""
        capacity, free, only = id(runner.capacity), runner.ledger.free, runner.only_adapters
        by_need = self._by_need.get(capacity)
        if not by_need or by_need[0][0] > free:  # mostly
            return []
        found = _that_fit(by_need, runner, free, examined) if only is None else []
        # An adapter that is there takes no more pages.
        for digest in (
            (BASE, *runner.adapters_running) if only is not None or runner.capacity.adapter_rank_bytes else ()
        ):
            if (of_adapter := self.adapters.get(digest)) is not None:
                found += _that_fit(of_adapter.get(capacity, []), runner, free, examined, adapters_there=True)
        return found


def _that_fit(
    by_need: list[Sized], runner: Runner, free: int, examined: int, *, adapters_there: bool = False
) -> list[Head]:
    end = bisect_left(by_need, (free + 1,))
    if end <= examined:
        return [
            one[2:] for one in by_need[:end] if not one[1] or adapters_there or one[0] <= runner.free_beside(one[1])
        ]
    found: list[Head] = []
    at = 0
    while at < len(by_need) and by_need[at][0] <= free:
        pages, adapter_pages = by_need[at][:2]
        end = bisect_left(by_need, (pages, adapter_pages + 1), at)
        if not adapter_pages or adapters_there or pages <= runner.free_beside(adapter_pages):
            found += [one[2:] for one in by_need[at : min(end, at + examined)]]
        at = end
    if len(found) > examined:
        found.sort()
        del found[examined:]
    return found


def _head(request: Request) -> Head:
    return (request.asked_at, request.sequence, request)


def _flow(request: Request) -> Flow:
    return (request.tenant, request.base, request.adapter if request.limited else "")


class ClassQueue:
    """The requests of one class. Additions and removals cost O(log n), and a short memmove."""

    def __init__(self, max_passed_over: int) -> None:
        self._max_passed_over = max_passed_over
        self._flows: dict[Flow, list[Head]] = {}
        self._heads: list[Head] = []
        """The oldest request of each flow."""
        self.untried_heads: list[Head] = []
        self.waiting: defaultdict[str, Waiting] = defaultdict(Waiting)
        """Those that were tried, by what they wait for."""
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
        return (request for _, _, request in sorted(self.unordered()))

    def unordered(self) -> Iterator[Head]:
        return chain.from_iterable(self._flows.values())

    def add(self, request: Request) -> None:
        flow = self._flows.setdefault(_flow(request), [])
        before = flow[0] if flow else None
        insort(flow, _head(request))
        self._size += 1
        self._youngest = max(self._youngest, request.key)
        self._move_head(before, flow[0])

    def remove(self, request: Request) -> None:
        flow, oldest = self._flows[_flow(request)], self._heads[0]
        before = flow[0]
        at = bisect_left(flow, _head(request))
        assert flow[at][2] is request, f"{request.id} is not where its age says"
        del flow[at]
        request.deadline_at = None
        self._size -= 1
        self._move_head(before, flow[0] if flow else None)
        if not flow:
            del self._flows[_flow(request)]
        if self._passes and (not self._heads or self._heads[0] is not oldest):
            del self._passes[: bisect_right(self._passes, self._heads[0]) if self._heads else None]

    def head(self) -> Request | None:
        """The oldest request."""
        return self._heads[0][2] if self._heads else None

    def heads(self) -> list[Request]:
        """The oldest request of each flow, in order of age."""
        return [request for _, _, request in self._heads]

    def wait_for(self, request: Request, runners_of: str, page_needs: Mapping[CapacityId, PageNeed]) -> None:
        """It was tried, and none of these runners has room for it."""
        head = _head(request)
        self._leave(head)
        request.waits_for, request.page_needs = runners_of, page_needs
        self.waiting[runners_of].add(head)

    def try_again(self, requests: Iterable[Request]) -> None:
        again = [request for request in dict.fromkeys(requests) if request.waits_for is not None]
        if len(again) * FEW_OF < len(self._heads):
            for request in again:
                self._leave(head := _head(request))
                insort(self.untried_heads, head)
            return
        left: defaultdict[str, set[Digest]] = defaultdict(set)
        for request in again:
            assert request.waits_for is not None
            left[request.waits_for].add(request.digest)
            request.waits_for = None
        for runners_of, digests in left.items():
            self.waiting[runners_of].discard_untried(digests)
            if not self.waiting[runners_of].heads:
                del self.waiting[runners_of]
        self.untried_heads += map(_head, again)
        self.untried_heads.sort()

    def limits_changed(self, adapters: Collection[str], has_limit: Callable[[str], bool]) -> None:
        """Puts all into their flows at once: ten thousand may wait, and to move each alone takes ten times as long."""
        for _, _, request in self._heads:
            request.waits_for = None
        flows: dict[Flow, list[Head]] = {}
        for flow in self._flows.values():
            for head in flow:
                if head[2].adapter in adapters:
                    head[2].limited = has_limit(head[2].adapter)
                flows.setdefault(_flow(head[2]), []).append(head)
        for flow in flows.values():
            flow.sort()
        self._flows, self._heads = flows, sorted(flow[0] for flow in flows.values())
        self.try_all_again()

    def try_all_again(self) -> None:
        self.untried_heads = self._heads.copy()
        self.waiting.clear()
        for _, _, request in self._heads:
            request.waits_for = None

    def with_adapter(self, digest: Digest, bases: Iterable[str]) -> list[Request]:
        """Of those that were tried and some runner could hold. Their base model is one of these, if they have one."""
        return [
            request
            for runners_of in (*bases, digest)
            if runners_of in self.waiting
            for request in self.waiting[runners_of].with_adapter(digest)
        ]

    def to_try(self, rooms: Sequence[Runner], after: Head | None, examined: int, untried: int) -> list[Head]:
        """In order of age: untried requests, and those that wait for room on one of these runners. `after`: only
        younger ones.

        The work is bounded: at most `untried` untried ones, and of those that wait for the same base model or adapter,
        at most `examined` for each runner. None is younger than an untried one that is left.
        """
        found = self.untried_heads[:untried]
        for runner in rooms:
            for runners_of in {"", runner.base.digest, *(self.waiting.keys() & runner.adapters)}:
                if (waiting := self.waiting.get(runners_of)) is not None:
                    found += waiting.that_fit(runner, examined)
        if len(found) > 1:
            found = sorted(set(found))
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

    def is_overdue(self, request: Request) -> bool:
        return len(self._passes) >= self._max_passed_over and request.key < self._passes[0]

    def overdue(self) -> Sequence[Head]:
        """In order of age: the oldest of those that were tried and wait for the same, if it is overdue."""
        if len(self._passes) < self._max_passed_over or self._heads[0] >= self._passes[0]:
            return ()
        return sorted([one.heads[0] for one in self.waiting.values() if one.heads[0] < self._passes[0]])

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
        waiting = self.waiting[request.waits_for]
        waiting.discard(head)
        if not waiting.heads:
            del self.waiting[request.waits_for]
        request.waits_for = None


def _tried(heads: list[Behind]) -> list[Behind]:
    return [head for head in heads if head[-1].waits_for is not None]


def _discard(heads: list[Behind], head: Behind) -> None:
    del heads[bisect_left(heads, head)]


class Queue:
    def __init__(self, max_passed_over: int) -> None:
        self.class_queues = {one: ClassQueue(max_passed_over) for one in RequestClass}
        self.bases: Counter[str] = Counter()
        """How many requests wait for each base model."""
        self.freed: dict[Runner, None] = {}
        """Runners that may have room since the last scan. In order, as a set would differ from process to process."""
        self.reserved: dict[Runner, Request] = {}
        """Runners that are reserved, and for which overdue request."""
        self._considered: dict[str, Request] | None = None
        """The `overdue` ones when runners were reserved last. None: one that had a reservation has left."""

    def __len__(self) -> int:
        return sum(len(class_queue) for class_queue in self.class_queues.values())

    def __iter__(self) -> Iterator[Request]:
        for class_queue in self.class_queues.values():
            yield from class_queue

    def unordered(self) -> Iterator[Head]:
        """All requests behind their keys, for sums: fast, as ten thousand may wait."""
        return chain.from_iterable(map(ClassQueue.unordered, self.class_queues.values()))

    def heads(self) -> list[Request]:
        """The oldest request of each flow."""
        return [request for class_queue in self.class_queues.values() for request in class_queue.heads()]

    def size_of(self, request_class: RequestClass) -> int:
        return len(self.class_queues[request_class])

    def add(self, request: Request) -> None:
        self.class_queues[request.request_class].add(request)
        self.bases[request.base] += 1

    @property
    def changed(self) -> bool:
        """Whether a request may fit now that did not before, or a runner must be reserved for another one."""
        return bool(self.freed) or self.untried or not self.overdue_are_considered

    @property
    def overdue_are_considered(self) -> bool:
        return self.overdue() == self._considered

    @property
    def untried(self) -> bool:
        return any(class_queue.untried_heads for class_queue in self.class_queues.values())

    def retry_on(self, runner: Runner) -> None:
        """This runner may have room."""
        self.freed[runner] = None

    def try_again(self, requests: Collection[Request]) -> None:
        """Other runners may take these requests than before, if they wait."""
        for request_class, class_queue in self.class_queues.items() if requests else ():
            class_queue.try_again(request for request in requests if request.request_class is request_class)

    def with_adapters(self, digests: Iterable[Digest]) -> list[Request]:
        """Requests that wait and were tried, of the oldest of each flow."""
        return [
            request
            for class_queue in self.class_queues.values()
            for digest in digests
            for request in class_queue.with_adapter(digest, self.bases)
        ]

    def limits_changed(self, adapters: Collection[str], has_limit: Callable[[str], bool]) -> None:
        """`maxReplicas` of these adapters has changed: other runners may take their requests, in another order."""
        for class_queue in self.class_queues.values():
            if any(request.adapter in adapters for _, _, request in class_queue.unordered()):
                class_queue.limits_changed(adapters, has_limit)

    def try_all_again(self) -> None:
        for class_queue in self.class_queues.values():
            class_queue.try_all_again()

    def wait_for(self, request: Request, runners_of: str, page_needs: Mapping[CapacityId, PageNeed]) -> None:
        """It was tried, and waits for runners that have this base model, or this adapter."""
        self.class_queues[request.request_class].wait_for(request, runners_of, page_needs)

    def reserve(self, overdue: dict[str, Request], reserved: dict[Runner, Request]) -> None:
        """Reserve these runners for overdue requests, instead of those that were reserved."""
        before, self.reserved, self._considered = self.reserved, reserved, overdue
        for runner, request in before.items():
            if reserved.get(runner) is not request:
                self.retry_on(runner)

    def reserved_from(self, request: Request) -> Collection[Runner]:
        """The runners that this request has to leave to overdue ones."""
        return [
            runner
            for runner, overdue in self.reserved.items()
            if request is not overdue and request.request_class >= overdue.request_class
        ]

    def try_in_order(self, config: SchedulerConfig, place: Place) -> Iterator[Outcome]:
        """Have the requests placed that may fit now, the most urgent first, on the runners that have room; untried
        ones: on any. Yields the outcome of each that has left: the caller may stop after it.

        Skips those that wait for runners with too little room. These are nearly all, so this must be fast. Ends before
        anything that is younger or less urgent than an untried one that is left.
        """
        every = [runner for runner in self.freed if runner.has_capacity]
        for request_class, class_queue in self.class_queues.items():
            rooms = every
            for runner, overdue in self.reserved.items():
                if request_class < overdue.request_class or runner not in every:
                    continue
                rooms = [room for room in rooms if room is not runner]
                if request_class is overdue.request_class:
                    need = overdue.requirement_on(runner.capacity, config, runner.adapter_pages(overdue.digest))
                    if need.promise.pages <= runner.ledger.free and (outcome := place(overdue, [runner])) is not None:
                        yield outcome
            last: Head | None = None
            untried, left = config.tenants_examined, True
            while left and (rooms or class_queue.untried_heads):
                left = False
                for head in class_queue.to_try(rooms, last, config.tenants_examined, untried):
                    request = head[2]
                    first = request.waits_for is None
                    outcome = place(request, [] if first else rooms)
                    if outcome is None:
                        untried -= first
                        if first and class_queue.is_overdue(request):
                            yield Outcome.OVERDUE
                        continue
                    yield outcome
                    if outcome is Outcome.REFUSED:
                        untried -= first  # a tenant may have many to refuse
                    # Less may be free now, and the next of its flow is untried.
                    last, left, every = head, True, [room for room in every if room.has_capacity]
                    rooms = [room for room in rooms if room in every]
                    break
            if class_queue.untried_heads:
                return

    def remove(self, request: Request) -> None:
        """Remove a request that was not placed."""
        self.class_queues[request.request_class].remove(request)
        self._left(request)

    def remove_placed(self, request: Request) -> None:
        """Remove a placed request, and count it for the waiting requests that it passed."""
        self._left(request)
        for request_class, class_queue in self.class_queues.items():
            if request_class is request.request_class:
                class_queue.remove(request)
                class_queue.passed_by_younger(request.key)
                return
            class_queue.passed_by_less_urgent()

    def _left(self, request: Request) -> None:
        if request in self.reserved.values():
            self._considered = None
        self.bases[request.base] -= 1
        if not self.bases[request.base]:
            del self.bases[request.base]

    def passed_over(self, request: Request) -> int:
        return self.class_queues[request.request_class].passed_over(request)

    def overdue(self) -> dict[str, Request]:
        """The oldest overdue request of the most urgent class, of those that wait for the same: in the order in which
        runners are reserved."""
        found: dict[str, Request] = {}
        for class_queue in self.class_queues.values():
            for _, _, request in class_queue.overdue():
                assert request.waits_for is not None
                found.setdefault(request.waits_for, request)
        return found

    def overdue_alike(self, runners_of: str, most: int) -> Iterator[Request]:
        """The oldest `most` overdue ones of each class that wait for these runners, the most urgent class first."""
        for class_queue in self.class_queues.values():
            for _, _, request in (
                class_queue.waiting[runners_of].heads[:most] if runners_of in class_queue.waiting else ()
            ):
                if not class_queue.is_overdue(request):
                    break
                yield request
