"""The waiting requests of one class: in the flows of their tenants, the heads of these, and which was passed over."""

from bisect import bisect_left, bisect_right, insort
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter

from motet.domain import Digest, Tenant
from motet_scheduler.policy.expected_order import expected_order
from motet_scheduler.policy.order import Head, Order, head_of
from motet_scheduler.policy.passes import LESS_URGENT, Passes
from motet_scheduler.policy.requests import CapacityId, PageNeed, Request
from motet_scheduler.policy.runners import Runner
from motet_scheduler.policy.shares import Aged, Flow, Share, Shares
from motet_scheduler.policy.waiting_heads import Waiting, discard

FEW_OF = 100
"""To remove fewer than one in a hundred from lists, each is searched for. For more it is faster to go through the lists
once: all that wait for an adapter may count as untried at once."""

MAX_FLOWS = 32
"""Of one tenant. Its other requests share one more: each placement moves the heads of all its flows."""

OTHERS: Flow = ("", "", -1)


def flow_of(request: Request, share: Share) -> Flow:
    apart = request.digest if request.replaced else request.adapter if request.limited else ""
    flow = (request.base, apart, request.size)
    return flow if flow in share.flows or len(share.flows) < MAX_FLOWS else OTHERS


class ClassQueue:
    """The requests of one class. Additions and removals cost O(log n), and a short memmove."""

    def __init__(self, max_passed_over: int, answer_cost: float) -> None:
        self.shares = Shares(answer_cost)
        self.untried_heads: list[Head] = []
        self.waiting: defaultdict[str, Waiting] = defaultdict(Waiting)
        """Those that were tried, by what they wait for."""
        self._size = 0
        self._max_passed_over = max_passed_over
        self._placements = 0
        """That passed somebody."""
        self._passes: dict[str, Passes] = {}
        """By what those wait for that were passed."""

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Request]:
        return expected_order(self.shares)

    def unordered(self) -> Iterator[Aged]:
        flows_of_each = map(dict.values, map(attrgetter("flows"), self.shares))
        return chain.from_iterable(chain.from_iterable(flows_of_each))

    def add(self, request: Request, weight: float) -> None:
        share = request.share
        if share is None:
            share = request.share = self.shares.begin(request.tenant, weight)
        self._join_flow(request, share)
        self._size += 1
        request.passes_from, request.passes = self._placements, 0

    def remove(self, request: Request) -> None:
        self._leave_flow(request)
        request.deadline_at = None
        self._size -= 1
        if not self._size:
            self._passes.clear()

    def charge(self, request: Request, cached: int) -> float:
        """It was placed, on a runner that has `cached` tokens of its prompt: the others of its tenant have their turns
        later. Returns what its tenant was charged, over its weight."""
        share = request.share
        assert share is not None
        if request.charge is not None:
            return 0.0  # it is placed again
        given = self.shares.charge(request, share, cached)
        self._file_all_again(share)
        return given

    def charged_elsewhere(self, tenant: Tenant, given: float) -> None:
        """A request of another class was placed."""
        if (share := self.shares.charged_elsewhere(tenant, given)) is not None:
            self._file_all_again(share)

    def _file_all_again(self, share: Share) -> None:
        for flow in share.flows.values():
            self._file_again(flow[0][-1])

    def note_replaced(self, request: Request) -> None:
        """Its revision was replaced: those behind it need not wait for the runners that hold it."""
        share = self._leave_flow(request)
        request.replaced = True
        self._join_flow(request, share)

    def heads(self) -> list[Request]:
        """The oldest request of each flow, in the order of their turns."""
        return [head[3] for head in sorted(self._heads())]

    def _heads(self) -> Iterator[Head]:
        return chain(self.untried_heads, *(one.heads for one in self.waiting.values()))

    def wait_for(self, request: Request, runners_of: str, page_needs: Mapping[CapacityId, PageNeed]) -> None:
        """It was tried, and none of these runners has room for it."""
        head = self._unfile(request)
        request.waits_for, request.page_needs, request.filed = runners_of, page_needs, head
        self.waiting[runners_of].add(head)

    def try_again(self, requests: Iterable[Request]) -> None:
        again = [request for request in dict.fromkeys(requests) if request.waits_for is not None]
        if len(again) * FEW_OF < sum(1 for _ in self._heads()):
            for request in again:
                self._file(self._unfile(request))
            return
        left: defaultdict[str, set[Digest]] = defaultdict(set)
        for request in again:
            assert request.waits_for is not None
            assert request.filed is not None
            left[request.waits_for].add(request.digest)
            request.waits_for = None
            self.untried_heads.append(request.filed)
        for runners_of, digests in left.items():
            self.waiting[runners_of].discard_untried(digests)
            if not self.waiting[runners_of].heads:
                del self.waiting[runners_of]
        self.untried_heads.sort()

    def limits_changed(self, adapters: Collection[str], has_limit: Callable[[str], bool]) -> None:
        """Puts all into their flows at once: ten thousand may wait, and to move each alone takes ten times as long."""
        self.untried_heads.clear()
        self.waiting.clear()
        for share in self.shares:
            waiting = sorted(chain.from_iterable(share.flows.values()))
            share.flows.clear()
            for aged in waiting:
                request = aged[-1]
                if request.adapter in adapters:
                    request.limited = has_limit(request.adapter)
                request.waits_for = request.filed = None
                request.flow = flow_of(request, share)
                share.flows.setdefault(request.flow, []).append(aged)
            for flow in share.flows.values():
                head = flow[0][-1].filed = head_of(flow[0][-1])
                self.untried_heads.append(head)
        self.untried_heads.sort()

    def try_all_again(self) -> None:
        self.untried_heads = sorted(self._heads())
        self.waiting.clear()
        for head in self.untried_heads:
            head[3].waits_for = None

    def with_adapter(self, digest: Digest, bases: Iterable[str]) -> list[Request]:
        """Of those that were tried and some runner could hold. Their base model is one of these, if they have one."""
        return [
            request
            for runners_of in (*bases, digest)
            if runners_of in self.waiting
            for request in self.waiting[runners_of].with_adapter(digest)
        ]

    def that_fit(self, runner: Runner, free: int, examined: int) -> list[Head]:
        """Those that wait for room on this runner and need at most `free` pages: at most `examined` of those that wait
        for the same."""
        found: list[Head] = []
        for runners_of in self._names_for(runner):
            found += self.waiting[runners_of].that_fit(runner, free, examined)
        return found

    def first_for(self, runner: Runner, counter: float, examined: int) -> list[Head]:
        """Those of tenants with at most this counter."""
        found: list[Head] = []
        for runners_of in self._names_for(runner):
            found += self.waiting[runners_of].first_for(runner, counter, examined)
        return found

    def to_try(self, fit: Iterable[Head], after: Head | None, untried: int) -> list[Head]:
        """In order: untried requests, and those that may fit. `after`: only later ones.

        The work is bounded: at most `untried` untried ones. None is later than an untried one that is left.
        """
        found = [*self.untried_heads[:untried], *fit]
        if len(found) > 1:
            found = sorted(set(found))
        if len(self.untried_heads) > untried:
            del found[bisect_left(found, self.untried_heads[untried]) :]
        return found[bisect_right(found, after) :] if after is not None else found

    def _names_for(self, runner: Runner) -> Collection[str]:
        """Of `waiting`: what those wait for that wait for this runner."""
        waiting, base = self.waiting, runner.base.digest
        own = {one for one in ("", base) if one in waiting}
        return own if len(own) == len(waiting) else own | (waiting.keys() & runner.adapters)

    def passed(self, runner: Runner, order: Order = LESS_URGENT) -> None:
        """A later request was placed on this runner, where those that wait for it have too little room."""
        for runners_of in self._names_for(runner) if self.waiting else ():
            if self.waiting[runners_of].heads[0] < order:
                self._placements += 1
                if runners_of not in self._passes:
                    self._passes[runners_of] = Passes(self._max_passed_over)
                self._passes[runners_of].add(self._placements, order)

    def is_overdue(self, request: Request) -> bool:
        """Whether it waits for room, and was passed over as often as allowed."""
        passes = self._passes.get(request.waits_for) if request.waits_for is not None else None
        return passes is not None and request.filed is not None and passes.overdue(request.filed)

    def overdue(self) -> Sequence[Head]:
        """In order: of those that were tried and wait for the same, the one that is overdue."""
        if not self._passes:
            return ()
        found: list[Head] = []
        for runners_of, passes in self._passes.items():
            first = passes.first
            if first is None or first.filed is None or first.waits_for != runners_of:
                waiting = self.waiting.get(runners_of)
                head = waiting.heads[0] if waiting is not None else None
                first = passes.first = head[3] if head is not None and passes.overdue(head) else None
            if first is not None and first.filed is not None:
                found.append(first.filed)
        return sorted(found)

    def overdue_alike(self, runners_of: str, most: int) -> Iterator[Request]:
        """The first `most` overdue ones that wait for the same."""
        waiting, passes = self.waiting.get(runners_of), self._passes.get(runners_of)
        if waiting is None or passes is None or passes.first is None:
            return
        yield passes.first
        for head in waiting.heads[:most]:
            if head[3] is not passes.first and passes.overdue(head):
                yield head[3]

    def _join_flow(self, request: Request, share: Share) -> None:
        request.flow = flow_of(request, share)
        flow = share.flows.setdefault(request.flow, [])
        before = flow[0][-1] if flow else None
        insort(flow, (*request.turn, request))
        if flow[0][-1] is request:
            if before is not None:
                self._unfile(before)
            self._file(head_of(request))

    def _leave_flow(self, request: Request) -> Share:
        share = request.share
        assert share is not None
        flow = share.flows[request.flow]
        at = bisect_left(flow, (*request.turn, request))
        assert flow[at][-1] is request, f"{request.id} is not where its turn says"
        del flow[at]
        if request.filed is not None:
            self._unfile(request)
            if flow:
                self._file(head_of(flow[0][-1]))
        if not flow:
            del share.flows[request.flow]
        return share

    def _file(self, head: Head) -> None:
        head[3].filed = head
        insort(self.untried_heads, head)

    def _file_again(self, request: Request) -> None:
        """Its tenant's counter has grown. It waits for what it waited for."""
        head = head_of(request)
        if head == request.filed:
            return
        if request.waits_for is None:
            self._unfile(request)
            self._file(head)
            return
        before, request.filed = request.filed, head
        assert before is not None
        if (passes := self._passes.get(request.waits_for)) is not None:
            passes.count(before, self._placements)
        self.waiting[request.waits_for].discard(before)
        self.waiting[request.waits_for].add(head)

    def _unfile(self, request: Request) -> Head:
        head = request.filed
        assert head is not None, f"{request.id} is not the head of a flow"
        if request.waits_for is None:
            discard(self.untried_heads, head)
        else:
            waiting = self.waiting[request.waits_for]
            waiting.discard(head)
            if not waiting.heads:
                del self.waiting[request.waits_for]
                if request.waits_for != request.base:
                    self._passes.pop(request.waits_for, None)
        request.filed = request.waits_for = None
        return head
