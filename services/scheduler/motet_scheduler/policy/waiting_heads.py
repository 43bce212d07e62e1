"""The heads of flows that were tried and wait for room, by how much they need: those that fit are found without a look
at the others."""

from bisect import bisect_left, bisect_right, insort
from collections import defaultdict
from collections.abc import Collection, Iterator
from math import inf
from typing import TypeVar

from motet.domain import BASE, Digest
from motet_scheduler.policy.order import Head
from motet_scheduler.policy.requests import CapacityId, Request
from motet_scheduler.policy.runners import Runner

Sized = tuple[int, int, float, float, int, Request]
"""A head behind its `PageNeed`."""

TOO_MANY = (inf, 0)
"""The need of what no runner of a capacity could hold."""

ByNeed = defaultdict[CapacityId, list[Sized]]

Behind = TypeVar("Behind", Head, Sized)


class Waiting:
    """Heads that were tried and wait for the same."""

    __slots__ = ("_by_need", "adapters", "heads")

    def __init__(self) -> None:
        self.heads: list[Head] = []
        """In order."""
        self._by_need: ByNeed = defaultdict(list)
        self.adapters: defaultdict[Digest, ByNeed] = defaultdict(lambda: defaultdict(list))
        """The same, of each adapter alone: where all slots are in use, only those that have one can go."""

    def add(self, head: Head) -> None:
        insort(self.heads, head)
        request = head[-1]
        of_adapter = self.adapters[request.digest]
        for capacity, need in request.page_needs.items():
            sized = need + head
            insort(self._by_need[capacity], sized)
            insort(of_adapter[capacity], sized)

    def discard(self, head: Head) -> None:
        discard(self.heads, head)
        request = head[-1]
        of_adapter = self.adapters[request.digest]
        for capacity, need in request.page_needs.items():
            sized = need + head
            discard(self._by_need[capacity], sized)
            discard(of_adapter[capacity], sized)
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

    def first_for(self, runner: Runner, counter: float, examined: int) -> list[Head]:
        """The first `examined` of tenants with at most this counter, of those that fit by their pages."""
        if self.heads[0][0] > counter:  # mostly
            return []
        first = self.heads[: min(examined, bisect_right(self.heads, (counter, inf)))]
        capacity, free = id(runner.capacity), runner.ledger.free
        return [head for head in first if head[-1].page_needs.get(capacity, TOO_MANY)[0] <= free]

    def that_fit(self, runner: Runner, free: int, examined: int) -> list[Head]:
        """For each adapter that may be used there, and for the base model, the first `examined` of those that need no
        more than `free` pages of a runner; if any adapter may, of all. Those that avoid it do not hide the others."""
        capacity, only = id(runner.capacity), runner.only_adapters
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
    instance, at = runner.instance, 0
    while at < len(by_need) and by_need[at][0] <= free:
        pages, adapter_pages = by_need[at][:2]
        end = bisect_left(by_need, (pages, adapter_pages + 1), at)
        if not adapter_pages or adapters_there or pages <= runner.free_beside(adapter_pages):
            first, more = at, examined
            while first < end and more:
                alike = by_need[first : min(end, first + more)]
                some = [one[2:] for one in alike if instance not in one[-1].avoid]
                first, more = first + more, more - len(some)
                found += some
        at = end
    if len(found) > examined:
        found.sort()
        del found[examined:]
    return found


def _tried(heads: list[Behind]) -> list[Behind]:
    return [head for head in heads if head[-1].waits_for is not None]


def discard(heads: list[Behind], head: Behind) -> None:
    del heads[bisect_left(heads, head)]
