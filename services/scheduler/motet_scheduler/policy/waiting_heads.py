"""The heads of flows that were tried and wait for room, by how much they need: those that fit are found without a look
at the others."""

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial
from heapq import merge
from itertools import chain, compress, islice, takewhile
from math import inf
from operator import itemgetter

from motet.domain import BASE, Digest
from motet_scheduler.policy.order import Head, head_of
from motet_scheduler.policy.ordered_heads import OrderedHeads
from motet_scheduler.policy.requests import CapacityId, PageNeed, Request
from motet_scheduler.policy.rooms import Room
from motet_scheduler.policy.runners import Runner

Sized = tuple[int, int, float, int, Digest, Request]
"""A request and its adapter, behind its need and its age."""

ITS_ADAPTER = itemgetter(4)

MAX_FEW = 256
"""Each of these is compared with what runs. Of more, the first of each need are found in their order."""

LOOKED_FIRST, MANY = 8, 32
"""Where more than `MANY` fit, this number in the order of their turns is looked at before those that fit are sorted.
Those of one adapter are then found by each need, in its order."""


Lowest = dict["Waiting", list[Head] | None]
"""Of those that wait for the same, the ones of tenants that were given least: found once for all runners. None: there
are more than `MAX_FEW`."""


def sized(request: Request, need: PageNeed) -> Sized:
    return (*need, request.turn_at, request.sequence, request.digest, request)


def between(above: int, free: int, by_size: list[Sized], most: int) -> list[Sized] | None:
    """Those that need more than `above` pages and at most `free`. None: they are more than `most`."""
    begin = bisect_left(by_size, (above + 1,)) if above else 0
    end = bisect_left(by_size, (free + 1,))
    return by_size[begin:end] if end - begin <= most else None


def may_run(heads: Iterable[Head], runner: Runner) -> Iterator[Head]:
    """Those that may run there if there is room."""
    instance, resident, refuses = runner.instance, runner.adapters.tiers, bool(runner.refused.failures)
    for head in heads:
        request = head[3]
        if instance in request.avoid or (request.replaced and request.digest not in resident):
            continue
        if refuses and not runner.may_serve(request.digest, request.adapter):
            continue
        yield head


def that_fit_of(
    heads: Iterable[Head], runner: Runner, above: int, free: int, only: Collection[Digest] | None
) -> Iterator[Head]:
    """Those of these, in their order, that need more than `above` pages of a runner and at most `free`. `only`: the
    adapters that alone may be used there. None: any may."""
    capacity, there = id(runner.capacity), runner.adapters_running if only is None else only
    for head in heads:
        request = head[3]
        is_there = request.digest in there or request.digest == BASE
        if only is not None and not is_there:
            continue
        need = request.page_needs.get(capacity)
        if need is None or not above < need[0] <= free:
            continue
        if is_there or not need[1] or need[0] + runner.ledger.free - free <= runner.free_beside(need[1]):
            yield head


class ByNeed:
    """Heads by what they need on runners of one capacity."""

    __slots__ = ("_heads", "_needs")

    def __init__(self) -> None:
        self._needs: list[PageNeed] = []
        """In order."""
        self._heads: dict[PageNeed, OrderedHeads] = {}

    def add(self, need: PageNeed, request: Request) -> None:
        heads = self._heads.get(need)
        if heads is None:
            heads = self._heads[need] = OrderedHeads()
            insort(self._needs, need)
        heads.add(request)

    def discard(self, need: PageNeed, request: Request) -> None:
        heads = self._heads[need]
        heads.discard(request)
        if not heads:
            del self._heads[need]
            del self._needs[bisect_left(self._needs, need)]

    def in_order(self, runner: Runner, free: int, *, above: int, adapters_there: bool) -> Iterator[Head]:
        """Those of `Waiting.that_fit`. However many have their turn before them and need more, or as much, nobody looks
        at them."""
        needs, kept = self._needs, runner.ledger.free - free
        alike = (
            may_run(self._heads[need], runner)
            for need in needs[bisect_left(needs, (above + 1,)) : bisect_left(needs, (free + 1,))]
            if adapters_there or not need[1] or need[0] + kept <= runner.free_beside(need[1])
        )
        return merge(*alike)


class Sizes:
    """Heads by what they need on runners of one capacity."""

    __slots__ = ("_by_need", "by_size")

    def __init__(self) -> None:
        self.by_size: list[Sized] = []
        self._by_need: ByNeed | None = None
        """None, as long as they are few: then each that fits is looked at."""

    def add(self, one: Sized) -> None:
        insort(self.by_size, one)
        if self._by_need is not None:
            self._by_need.add(one[:2], one[5])
        elif len(self.by_size) > MAX_FEW:
            self.by_need()

    def discard(self, one: Sized) -> None:
        del self.by_size[bisect_left(self.by_size, one)]
        if self._by_need is not None:
            self._by_need.discard(one[:2], one[5])
            if len(self.by_size) <= MAX_FEW // 2:
                self._by_need = None

    def by_need(self) -> ByNeed:
        if (filed := self._by_need) is None:
            filed = self._by_need = ByNeed()
            for one in self.by_size:
                filed.add(one[:2], one[5])
        return filed

    def first(
        self, runner: Runner, free: int, examined: int, *, above: int, highest: float, adapters_there: bool
    ) -> Iterator[Head]:
        """The first `examined` of those of `Waiting.that_fit`. `adapters_there`: their adapters take no more pages."""
        few = between(above, free, self.by_size, MANY) if adapters_there else None
        if few is None:
            heads = self.by_need().in_order(runner, free, above=above, adapters_there=adapters_there)
        else:
            heads = may_run(sorted([head_of(one[5]) for one in few]), runner)
        if highest < inf:
            heads = takewhile(lambda head: head[0] <= highest, heads)
        return islice(heads, examined)


class Line(Sizes):
    """Heads that wait for the same."""

    __slots__ = ("_by_adapter",)

    def __init__(self) -> None:
        super().__init__()
        self._by_adapter: defaultdict[Digest, Sizes] | None = None
        """The same, of each adapter alone: where all slots are in use, only those that have one can go. None, as long
        as they are few."""

    def add(self, one: Sized) -> None:
        super().add(one)
        if self._by_adapter is not None:
            self._by_adapter[one[4]].add(one)
        elif len(self.by_size) > MAX_FEW:
            self.by_adapter()

    def discard(self, one: Sized) -> None:
        super().discard(one)
        if self._by_adapter is None:
            return
        if len(self.by_size) <= MAX_FEW // 2:
            self._by_adapter = None
            return
        of_adapter = self._by_adapter[one[4]]
        of_adapter.discard(one)
        if not of_adapter.by_size:
            del self._by_adapter[one[4]]

    def with_adapter(self, digest: Digest) -> list[Request]:
        if self._by_adapter is None:
            return [one[5] for one in self.by_size if one[4] == digest]
        return [one[5] for one in self._by_adapter[digest].by_size] if digest in self._by_adapter else []

    def few_of(self, digests: Iterable[Digest], above: int, free: int) -> list[Sized] | None:
        """Those for these adapters that need more than `above` pages and at most `free`. None: there are many."""
        few: list[Sized] = []
        of_each = self.by_adapter()
        for digest in digests:
            if (of_adapter := of_each.get(digest)) is not None and of_adapter.by_size[0][0] <= free:
                some = between(above, free, of_adapter.by_size, MAX_FEW - len(few))
                if some is None:
                    return None
                few += some
        return few

    def by_adapter(self) -> Mapping[Digest, Sizes]:
        if (filed := self._by_adapter) is None:
            filed = self._by_adapter = defaultdict(Sizes)
            for one in self.by_size:
                filed[one[4]].add(one)
        return filed


class Waiting:
    """Heads that were tried and wait for the same."""

    __slots__ = ("heads", "lines")

    def __init__(self) -> None:
        self.heads = OrderedHeads()
        self.lines: defaultdict[CapacityId, Line] = defaultdict(Line)

    def add(self, request: Request) -> None:
        self.heads.add(request)
        for capacity, need in request.page_needs.items():
            self.lines[capacity].add(sized(request, need))

    def discard(self, request: Request) -> None:
        self.heads.discard(request)
        for capacity, need in request.page_needs.items():
            self.lines[capacity].discard(sized(request, need))

    def with_adapter(self, digest: Digest) -> Iterator[Request]:
        """Those that some runner could hold: once for each capacity."""
        return chain.from_iterable(line.with_adapter(digest) for line in self.lines.values())

    def has_up_to(self, highest: float | None) -> bool:
        """Whether one of them has at most this counter. None: none may have it."""
        return highest is not None and self.heads.first()[0] <= highest

    def that_fit_in(
        self, runner: Runner, room: Room, small: int, examined: int, highest: float | None, *, lowest: Lowest
    ) -> Iterable[Head]:
        """Those that fit in this room (`that_fit`): of those that need more than `small` pages, the ones that leave the
        last places, and those of tenants with at most the counter `highest`. None: no tenant may have these."""
        whole, _, above, leaving = room
        found = self.that_fit(runner, small, examined, leaving=leaving) if small else []
        if small < whole:
            if above < whole:
                found += self.that_fit(runner, whole, examined, above=above, leaving=leaving)
            if self.has_up_to(highest):
                assert highest is not None
                # Also smaller ones: for an adapter that is not there, they need pages that only the whole room has.
                found += self.that_fit(runner, whole, examined, highest=highest, leaving=leaving, lowest=lowest)
                return set(found)
        return found

    def that_fit(
        self,
        runner: Runner,
        free: int,
        examined: int,
        *,
        above: int = 0,
        highest: float = inf,
        leaving: Digest | None = None,
        lowest: Lowest | None = None,
    ) -> list[Head]:
        """The first `examined` of those that need more than `above` pages of a runner and at most `free`, whose adapter
        may be used there (not `leaving`), and whose tenants have at most the counter `highest`; of more than `MAX_FEW`,
        as many for each such adapter. All of these fit there, or all that do are among them: nobody who does not fit
        hides one."""
        capacity = id(runner.capacity)
        line = self.lines.get(capacity)
        if line is None:
            return []
        few = between(above, free, line.by_size, max(examined, MAX_FEW)) if highest == inf else None
        if few is not None and not few:
            return []  # mostly
        only = runner.only_adapters
        if only is not None and leaving is not None:
            only = {one: None for one in only if one != leaving}
        if highest < inf:
            if lowest is None or self not in lowest:
                lowest = {} if lowest is None else lowest
                lowest[self] = self.heads.given_at_most(highest, MAX_FEW)
            if (heads := lowest[self]) is not None:  # mostly
                fit = that_fit_of(heads, runner, above, free, only)
                return [*islice(may_run(fit, runner), examined)]
        elif few is None and only is not None:
            few = line.few_of((BASE, *only), above, free)
        if few is None or (only is None and len(few) > MANY):
            in_order = takewhile(lambda head: head[0] <= highest, self.heads)
            of_first = islice(in_order, LOOKED_FIRST if only is None else MAX_FEW)
            fit = that_fit_of(of_first, runner, above, free, only)
            firsts = [*islice(may_run(fit, runner), examined)]
            if len(firsts) == examined:  # mostly
                return firsts
        if few is not None:  # mostly
            if only is not None:
                few = [*compress(few, map({BASE, *only}.__contains__, map(ITS_ADAPTER, few)))]  # as fast as it can be
            elif runner.capacity.adapter_rank_bytes:
                kept, running = runner.ledger.free - free, runner.adapters_running
                few = [
                    one for one in few if not one[1] or one[4] in running or one[0] + kept <= runner.free_beside(one[1])
                ]
            found = [head_of(one[5]) for one in few]
            return found if len(found) <= examined else list(islice(may_run(sorted(found), runner), examined))
        first = partial(Sizes.first, runner=runner, free=free, examined=examined, above=above, highest=highest)
        found = list(first(line, adapters_there=False)) if only is None else []
        if only is not None or runner.capacity.adapter_rank_bytes:
            # An adapter that is there takes no more pages.
            of_each = line.by_adapter()
            for digest in (BASE, *(runner.adapters_running if only is None else only)):
                if (of_adapter := of_each.get(digest)) is not None and of_adapter.by_size[0][0] <= free:
                    found += first(of_adapter, adapters_there=True)
        return found
