"""The waiting requests of one class: in their flows, the heads of these, and how often each was passed over."""

from bisect import bisect_left, bisect_right, insort
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain

from motet.domain import Digest, Tenant
from motet_scheduler.policy.requests import CapacityId, PageNeed, QueueKey, Request
from motet_scheduler.policy.runners import Runner
from motet_scheduler.policy.waiting_heads import Head, Waiting, discard

Flow = tuple[Tenant, str, str, int]
"""Tenant, base model, what may wait for other runners (an adapter with `maxReplicas`, or a replaced revision), and the
size: where the largest go first, smaller ones take the room that is left (S3-05)."""

FEW_OF = 100
"""To remove fewer than one in a hundred from lists, each is searched for. For more it is faster to go through the lists
once: all that wait for an adapter may count as untried at once."""


def _head(request: Request) -> Head:
    return (request.turn_at, request.sequence, request)


def flow_of(request: Request) -> Flow:
    apart = request.digest if request.replaced else request.adapter if request.limited else ""
    return (request.tenant, request.base, apart, request.size)


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
        self._join_flow(request)
        self._size += 1
        self._youngest = max(self._youngest, request.key)

    def remove(self, request: Request) -> None:
        oldest = self._heads[0]
        self._leave_flow(request)
        request.deadline_at = None
        self._size -= 1
        if self._passes and (not self._heads or self._heads[0] is not oldest):
            del self._passes[: bisect_right(self._passes, self._heads[0]) if self._heads else None]

    def note_replaced(self, request: Request) -> None:
        """Its revision was replaced: those behind it need not wait for the runners that hold it."""
        self._leave_flow(request)
        request.replaced = True
        self._join_flow(request)

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
                flows.setdefault(flow_of(head[2]), []).append(head)
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
        for runner in rooms if self.waiting else ():
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
            turn_at, sequence = self._youngest
            self._add_pass((turn_at, sequence + 1))

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

    def _join_flow(self, request: Request) -> None:
        flow = self._flows.setdefault(flow_of(request), [])
        before = flow[0] if flow else None
        insort(flow, _head(request))
        self._move_head(before, flow[0])

    def _leave_flow(self, request: Request) -> None:
        flow = self._flows[flow_of(request)]
        before = flow[0]
        at = bisect_left(flow, _head(request))
        assert flow[at][2] is request, f"{request.id} is not where its age says"
        del flow[at]
        self._move_head(before, flow[0] if flow else None)
        if not flow:
            del self._flows[flow_of(request)]

    def _move_head(self, before: Head | None, after: Head | None) -> None:
        if before is after:
            return
        if before is not None:
            discard(self._heads, before)
            self._leave(before)
        if after is not None:
            insort(self._heads, after)
            insort(self.untried_heads, after)

    def _leave(self, head: Head) -> None:
        request = head[2]
        if request.waits_for is None:
            discard(self.untried_heads, head)
            return
        waiting = self.waiting[request.waits_for]
        waiting.discard(head)
        if not waiting.heads:
            del self.waiting[request.waits_for]
        request.waits_for = None
