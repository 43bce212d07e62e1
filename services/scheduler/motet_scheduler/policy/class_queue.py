"""The waiting requests of one class: in the flows of their tenants, the heads of these, and which was passed over."""

from bisect import bisect_left, bisect_right, insort
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from heapq import merge
from itertools import chain, islice, takewhile
from math import inf
from operator import attrgetter

from motet.domain import Digest, Tenant
from motet_scheduler.policy.expected_order import expected_order
from motet_scheduler.policy.order import Head, Order, head_of, order_of
from motet_scheduler.policy.ordered_heads import OrderedHeads, Turned
from motet_scheduler.policy.passes import LESS_URGENT, Passes
from motet_scheduler.policy.requests import CapacityId, PageNeed, Request, SomeOf, WaitsFor
from motet_scheduler.policy.rooms import Room
from motet_scheduler.policy.runners import Runner
from motet_scheduler.policy.shares import Aged, Flow, Share, Shares
from motet_scheduler.policy.token_costs import TokenCosts
from motet_scheduler.policy.waiting_heads import MAX_FEW, Lowest, Waiting

MAX_COUNTED = 32
"""Heads of one tenant that wait for the same, of which it is counted who passes them when the tenant is given more: the
oldest, which become overdue before the others. Of a tenant with few flows, all are counted (`_passed_of`)."""

MAX_LOOKED = 100
"""Heads that are looked at in one step, when limits have changed."""

HEADS_OF_A_LOOK = 32
"""Of those given least: to look at these takes as long as one look for those that fit on a runner."""

COST_OF_TRY = 9
"""Of one that is tried again, if to look at one costs 1."""


def flow_of(request: Request) -> Flow:
    own = request.digest if request.replaced else request.adapter or request.digest
    return request.base, own, request.size


class ClassQueue:
    """The requests of one class."""

    def __init__(self, max_passed_over: int, costs: TokenCosts) -> None:
        self.shares = Shares(costs)
        self.untried_heads = OrderedHeads()
        self.waiting: defaultdict[WaitsFor, Waiting] = defaultdict(Waiting)
        """Those that were tried, by what they wait for."""
        self._narrow = OrderedHeads()
        """Of these, those for which not every runner of their base model will do. With `maxReplicas` they may wait for
        thousands of things, and nobody looks at each."""
        self._some_of: dict[SomeOf, None] = {}
        """Of these, what those wait for that only some runners could take: mostly nobody."""
        self.size = 0
        self._max_passed_over = max_passed_over
        self._placements = 0
        """That passed somebody."""
        self._passes: dict[WaitsFor, Passes] = {}
        """By what those wait for that were passed."""
        self.known_overdue: Sequence[Request] | None = None
        """None: not known since a head came, left or was passed."""
        self.looked = 0
        """On how many runners those that fit were looked for, since somebody asked. `HEADS_OF_A_LOOK` heads count as
        one."""
        self._left_over = False
        """Whether `_passes` has some that nobody waited for when it was last looked."""

    def __len__(self) -> int:
        return self.size

    def in_order(self) -> Iterator[Request | None]:
        return expected_order(self.shares)

    def unordered(self) -> Iterator[Aged]:
        return chain.from_iterable(self.flows())

    def flows(self) -> Iterator[Sequence[Aged]]:
        return chain.from_iterable(map(dict.values, map(attrgetter("flows"), self.shares)))

    def add(self, request: Request, weight: float) -> None:
        share = request.share
        if share is None:
            share = request.share = self.shares.begin(request.tenant, weight)
        self._join_flow(request, share)
        self.size += 1
        share.waiting += 1
        request.passes_from = self._placements
        if request.delivered:
            request.passes = 0  # else a decline would cost it its turn

    def remove(self, request: Request) -> None:
        self._keep_passes(request)
        self._leave_flow(request).waiting -= 1
        request.deadline_at = None
        self.size -= 1
        if not self.size:
            self._passes.clear()
            self.known_overdue = None

    def charge(self, request: Request, cached: int) -> float:
        """It was placed, on a runner that has `cached` tokens of its prompt: the others of its tenant have their turns
        later. Returns what its tenant was charged, over its weight."""
        share = request.share
        assert share is not None
        if request.charge is not None:
            return 0.0  # it is placed again
        before = share.counter
        given = self.shares.charge(request, share, cached)
        self._count_passes(share, before)
        return given

    def charged_elsewhere(self, tenant: Tenant, given: float) -> None:
        """A request of another class was placed."""
        if (share := self.shares.of(tenant)) is not None:
            before = share.counter
            self.shares.charged_elsewhere(share, given)
            self._count_passes(share, before)

    def _count_passes(self, share: Share, before: float) -> None:
        """Those that passed its heads, if these have their turns later now."""
        if share.counter == before or not self._passes:
            return
        if self._left_over:
            self.known_overdue = None
        for passes, heads in self._passed_of(share):
            if passes.count([(before, *turned) for turned in heads], self._placements):
                self.known_overdue = None

    def _passed_of(self, share: Share) -> Iterator[tuple[Passes, Sequence[Turned]]]:
        """The heads of a tenant that had no place before, each with those that passed it: found by its flows, or by
        what they wait for, whichever are fewer. Adapters with `maxReplicas` may wait for thousands of things."""
        if len(share.flows) <= len(self._passes):
            for flow in share.flows.values():
                unpaid, *_, request = flow[0]
                passes = self._passes.get(request.waits_for) if request.waits_for is not None else None
                if unpaid and passes is not None:
                    yield passes, [(request.turn_at, request.sequence, request)]
            return
        for runners_of, passes in self._passes.items():
            if (waiting := self.waiting.get(runners_of)) is not None:
                yield passes, waiting.heads.of_tenant(share, MAX_COUNTED, self._max_passed_over)

    def _keep_passes(self, request: Request) -> None:
        """Those that passed it where it waited: it leaves, and may come back."""
        passes = self._passes.get(request.waits_for) if request.waits_for is not None else None
        if passes is not None:
            passes.count([head_of(request)], self._placements)

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

    def wait_for(self, request: Request, runners_of: WaitsFor, page_needs: Mapping[CapacityId, PageNeed]) -> None:
        """It was tried, and none of these runners has room for it."""
        self._unfile(request)
        request.waits_for, request.page_needs = runners_of, page_needs
        if isinstance(runners_of, SomeOf):
            self._some_of[runners_of] = None
        self.waiting[runners_of].add(request)
        if runners_of != request.base:
            self._narrow.add(request)
        self._note_head(runners_of, request)

    def try_again(self, requests: Iterable[Request]) -> None:
        for request in requests:
            if request.waits_for is not None:
                if request.declines:  # it may be declined again, at once
                    self._keep_passes(request)
                self._unfile(request)
                self.untried_heads.add(request)

    def limits_changed(self, adapters: Collection[str]) -> Iterator[int]:
        """`maxReplicas` of these has changed: other runners may take their requests. Yields after every few what that
        has cost."""
        heads = [*chain.from_iterable(waiting.heads.of for waiting in self.waiting.values())]
        for begin in range(0, len(heads), MAX_LOOKED):
            some = heads[begin : begin + MAX_LOOKED]
            again = [request for request in some if request.adapter in adapters]
            self.try_again(again)
            yield len(some) + COST_OF_TRY * len(again)

    def try_all_again(self) -> None:
        for waiting in self.waiting.values():
            for request in waiting.heads.of:
                request.waits_for = None
            self.untried_heads.take(waiting.heads)
        self.waiting.clear()
        self._narrow = OrderedHeads()
        self._some_of.clear()
        self.known_overdue = None

    def with_adapter(self, digest: Digest, bases: Iterable[str]) -> list[Request]:
        """Of those that were tried and some runner could take. Their base model is one of these, if they have one."""
        of: list[WaitsFor] = [*bases, digest]
        of += [one for one in self._some_of if one.runners_of in of]
        return [
            request
            for runners_of in of
            if runners_of in self.waiting
            for request in self.waiting[runners_of].with_adapter(digest)
        ]

    def not_taken_by(self, runner: Runner) -> Iterator[Request]:
        """Those that it has refused for good, of those that were tried."""
        return chain.from_iterable(
            self.waiting[one].heads.of for one in self._some_of if runner.instance in one.without
        )

    def that_fit(
        self, rooms: Mapping[Runner, Room], examined: int, highest: float | None, *, lacking: bool
    ) -> Collection[Head]:
        """Those that wait for one of these rooms, and fit there (`Waiting.that_fit`): few of those that wait for the
        same. The last places are for tenants with at most the counter `highest`, and if they are `lacking`, all room
        is. None: they are for no tenant."""
        found: list[Head] = []
        sources = 0
        lowest: Lowest = {}
        for runner, room in rooms.items():
            whole, small, above, _ = room
            if highest == inf:
                small = whole
            elif lacking:
                small = 0
            if not small and highest is None and above >= whole:
                continue
            capacity = id(runner.capacity)
            for one in self._names_for(runner):
                waiting = self.waiting[one]
                line = waiting.lines.get(capacity)
                if line is None or not line.by_size:
                    continue
                least = line.by_size[0][0]
                if least > small and (least > whole or (above >= whole and not waiting.has_up_to(highest))):
                    continue  # mostly
                self.looked += 1
                if fit := waiting.that_fit_in(runner, room, small, examined, highest, lowest=lowest):
                    found += fit
                    sources += 1
        return set(found) if sources > 1 else found

    def up_to(self, counter: float, bases: Iterable[str]) -> list[OrderedHeads]:
        """Those that were tried, in lines: of these the ones whose first is of a tenant with at most this counter.
        `bases`: the base models of all that wait."""
        lines = [self.waiting[one].heads for one in bases if one in self.waiting]
        if self._narrow.of:
            lines.append(self._narrow)
        return [line for line in lines if line.first()[0] <= counter]

    def first_for(
        self,
        bases: Iterable[str],
        counter: float,
        after: Head | None,
        *,
        fits: Callable[[Request], bool],
        examined: int,
    ) -> tuple[list[Head], Head | None]:
        """Of those that were tried and may fit, the first of tenants with at most this counter, behind `after`. Few are
        looked at: if there may be more, the last of these is returned, too."""
        if not (lines := self.up_to(counter, bases)):  # mostly
            return [], None
        found: list[Head] = []
        looked, last = 0, None
        few = lines[0].given_at_most(counter, MAX_FEW) if len(lines) == 1 else None
        if few is not None:  # mostly
            of_these: Iterable[Head] = few[bisect_right(few, after) :] if after is not None else few
        else:
            of_these = takewhile(lambda head: head[0] <= counter, merge(*(line.behind(after) for line in lines)))
        for looked, head in enumerate(of_these, 1):
            if fits(head[3]):
                found.append(head)
            if looked == MAX_FEW or len(found) == examined:
                last = head
                break
        self.looked += looked // HEADS_OF_A_LOOK
        return found, last

    def to_try(self, fit: Collection[Head], after: Head | None, untried: int) -> list[Head]:
        """In order: untried requests, and those that may fit, each once. `after`: only later ones.

        The work is bounded: at most `untried` untried ones. None is later than an untried one that is left.
        """
        found = [*fit]
        if self.untried_heads.of:
            heads = self.untried_heads.up_to(untried + 1)
            found += heads[:untried]
            found.sort()
            if len(heads) > untried:
                del found[bisect_left(found, heads[untried]) :]
        else:
            found.sort()
        return found[bisect_right(found, after) :] if after is not None else found

    def _names_for(self, runner: Runner) -> Collection[WaitsFor]:
        """Of `waiting`: what those wait for that wait for this runner."""
        waiting = self.waiting
        if len(waiting) == 1 and ("" in waiting or runner.base.digest in waiting):  # mostly
            return waiting
        own = waiting.keys() & ("", runner.base.digest)
        if len(own) == len(waiting):
            return own
        of_it = {one for one in self._some_of if one.has(runner) and self._is_of(one.runners_of, runner)}
        return own | (waiting.keys() & runner.adapters.having) | of_it

    @staticmethod
    def _is_of(runners_of: str, runner: Runner) -> bool:
        return runners_of in ("", runner.base.digest) or runners_of in runner.adapters.having

    def passed(self, runner: Runner, order: Order = LESS_URGENT) -> None:
        """A later request was placed on this runner, where those that wait for it have too little room."""
        for runners_of in self._names_for(runner) if self.waiting else ():
            if order is LESS_URGENT or self.waiting[runners_of].heads.first() < order:
                self._placements += 1
                if runners_of not in self._passes:
                    self._passes[runners_of] = Passes(self._max_passed_over)
                if self._passes[runners_of].add(self._placements, order):
                    self.known_overdue = None

    def is_overdue(self, request: Request) -> bool:
        """Whether it waits for room, and was passed over as often as allowed."""
        passes = self._passes.get(request.waits_for) if request.waits_for is not None else None
        return passes is not None and passes.overdue(head_of(request))

    def overdue(self) -> Sequence[Request]:
        """In order: of those that were tried and wait for the same, the one that is overdue."""
        if self.known_overdue is None:
            self.known_overdue = self._find_overdue()
        return self.known_overdue

    def _find_overdue(self) -> Sequence[Request]:
        found: list[Request] = []
        self._left_over = False
        for runners_of, passes in list(self._passes.items()):
            if runners_of not in self.waiting:
                if not self.untried_heads.of:
                    del self._passes[runners_of]  # nobody waits for these, nor may soon: there may be many adapters
                    continue
                self._left_over = True
            first = passes.first
            if first is None or first.waits_for != runners_of:
                waiting = self.waiting.get(runners_of)
                passes.watch(waiting.heads.first() if waiting is not None else None)
                first = passes.first
            if first is not None:
                found.append(first)
        return sorted(found, key=order_of) if len(found) > 1 else found

    def _note_head(self, runners_of: WaitsFor, request: Request) -> None:
        """It has come to those that wait for these, or leaves."""
        if (passes := self._passes.get(runners_of)) is not None and passes.may_change(request):
            self.known_overdue = None

    def overdue_alike(self, runners_of: WaitsFor, most: int) -> Iterator[Request]:
        """The first `most` overdue ones that wait for the same."""
        waiting, passes = self.waiting.get(runners_of), self._passes.get(runners_of)
        if waiting is None or passes is None or passes.first is None:
            return
        yield passes.first
        for head in list(islice(waiting.heads, most)):
            if head[3] is not passes.first and passes.overdue(head):
                yield head[3]

    def _join_flow(self, request: Request, share: Share) -> None:
        request.flow = flow_of(request)
        flow = share.flows.setdefault(request.flow, [])
        before = flow[0][-1] if flow else None
        aged = (*request.turn, request)
        if before is None or aged > flow[-1]:
            flow.append(aged)  # mostly, and nobody looks at those between
        else:
            insort(flow, aged)
        if flow[0][-1] is request:
            if before is not None:
                self._unfile(before)
            self.untried_heads.add(request)

    def _leave_flow(self, request: Request) -> Share:
        share = request.share
        assert share is not None
        flow = share.flows[request.flow]
        at = 0 if flow[0][-1] is request else bisect_left(flow, (*request.turn, request))
        assert flow[at][-1] is request, f"{request.id} is not where its turn says"
        del flow[at]
        if not at:
            self._unfile(request)
            if flow:
                self.untried_heads.add(flow[0][-1])
        if not flow:
            del share.flows[request.flow]
        return share

    def _unfile(self, request: Request) -> None:
        """It is untried, or its flow has another head."""
        if (runners_of := request.waits_for) is None:
            self.untried_heads.discard(request)
            return
        self._note_head(runners_of, request)
        request.waits_for = None
        waiting = self.waiting[runners_of]
        waiting.discard(request)
        if runners_of != request.base:
            self._narrow.discard(request)
        if not waiting.heads:
            del self.waiting[runners_of]
            if isinstance(runners_of, SomeOf):
                del self._some_of[runners_of]
