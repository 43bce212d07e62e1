"""Heads of flows in the order of their turns, where only the first are looked at."""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush, heapreplace
from itertools import islice
from math import inf
from operator import itemgetter

from motet_scheduler.policy.order import Head, head_of
from motet_scheduler.policy.requests import Request
from motet_scheduler.policy.shares import Share

FEW = 8
"""Up to this number of new ones, each is put where it belongs; for more it is faster to sort all."""

SLACK = 16
"""Entries of heads that are no longer the first of their tenant, which may be kept beside as many as count."""

Turned = tuple[float, int, Request]
"""A request behind its age."""

ITS_REQUEST = itemgetter(2)


class OfTenant:
    """The heads of one tenant: their order never changes, whatever it is given."""

    __slots__ = ("first", "heads", "overdue")

    def __init__(self, head: Turned) -> None:
        self.heads = [head]
        """In order."""
        self.overdue = 0
        """How many of the first have been passed as often as allowed: that stays so."""
        self.first: Head | None = None
        """The entry of the first of them."""


class OrderedHeads:
    """Each placement moves the turns of all heads of a tenant, and of those that wait nearly all stay where they are.
    So only the first of each tenant has an entry, and is put where it belongs when it is among the first that are
    looked at. Counters of tenants only grow, so none is then found too late."""

    __slots__ = ("_entries", "_new", "of", "of_tenants")

    def __init__(self) -> None:
        self._entries: list[Head] = []
        """In order, by the turns that they have or had. The new ones are last, in no order."""
        self._new = 0
        self.of_tenants: dict[Share | None, OfTenant] = {}
        """None: those that had a place before, of all tenants."""
        self.of: dict[Request, OfTenant] = {}

    def __len__(self) -> int:
        return len(self.of)

    def __iter__(self) -> Iterator[Head]:
        """In order. None may come or go meanwhile."""
        return self.behind(None)

    def behind(self, last: Head | None) -> Iterator[Head]:
        """The same, from the one on that is behind `last`."""
        if self._new:
            self._sort()
        later: list[tuple[float, float, int, Request, int, OfTenant]] = []
        """The next of each tenant of which some were looked at."""
        for first, of_tenant in self._firsts(last):
            while later and later[0] < first:
                yield later[0][:4]
                _go_on(later)
            if last is None or last < first:
                yield first
                number = 1
            elif last[0] == first[0]:
                number = bisect_left(of_tenant.heads, (last[1], last[2] + 1))
            else:
                continue
            if number < len(of_tenant.heads):
                heappush(later, (first[0], *of_tenant.heads[number], number, of_tenant))
        while later:
            yield later[0][:4]
            _go_on(later)

    def _firsts(self, last: Head | None) -> Iterator[tuple[Head, OfTenant]]:
        """The first of each tenant that has heads behind `last`."""
        entries, of = self._entries, self.of
        at = bisect_left(entries, last[:1]) if last is not None else 0
        while at < len(entries):
            head = entries[at]
            of_tenant = of.get(head[3])
            if of_tenant is None or of_tenant.first is not head:
                del entries[at]
            elif _has_moved(head):
                del entries[at]
                of_tenant.first = head_of(head[3])
                insort(entries, of_tenant.first, at)
            else:
                yield head, of_tenant
                at += 1

    def given_at_most(self, counter: float, most: int) -> list[Head] | None:
        """Those of tenants with at most this counter, in order. None: they are more than `most`."""
        if self._new:
            self._sort()
        found: list[Head] = []
        for first, of_tenant in self._firsts(None):
            given = first[0]
            if given > counter:
                break
            if len(found) + len(of_tenant.heads) > most:
                return None
            found += [(given, *turned) for turned in of_tenant.heads]
        return sorted(found)

    def up_to(self, number: int) -> list[Head]:
        """The first."""
        if len(self.of) == 1 and number:  # mostly
            return [*map(head_of, self.of)]
        return list(islice(self, number))

    def first(self) -> Head:
        if not self._new:  # mostly nothing has moved: the common case of `__iter__`, as this is asked very often
            head = self._entries[0]
            of_tenant = self.of.get(head[3])
            if of_tenant is not None and of_tenant.first is head and not _has_moved(head):
                return head
        return next(iter(self))

    def of_tenant(self, share: Share, most: int, allowed: int) -> Sequence[Turned]:
        """The first `most` of those of this tenant that had no place before, from the first one on that was passed less
        often than `allowed`: mostly all before are overdue, and nobody looks at them again."""
        of_tenant = self.of_tenants.get(share)
        if of_tenant is None:
            return ()
        heads, overdue = of_tenant.heads, of_tenant.overdue
        while overdue < min(most, len(heads)) and heads[overdue][2].passes >= allowed:
            overdue += 1
        of_tenant.overdue = overdue
        return heads[overdue:most]

    def add(self, request: Request) -> None:
        whose = request.share if request.charge is None else None
        head = (request.turn_at, request.sequence, request)
        of_tenant = self.of_tenants.get(whose)
        if of_tenant is None:
            of_tenant = self.of_tenants[whose] = OfTenant(head)
        elif of_tenant.heads[-1] < head:
            of_tenant.heads.append(head)
        else:
            at = bisect_left(of_tenant.heads, head)
            of_tenant.heads.insert(at, head)
            of_tenant.overdue = min(of_tenant.overdue, at)
        self.of[request] = of_tenant
        if of_tenant.heads[0] is head:
            self._enter(of_tenant)

    def take(self, others: "OrderedHeads") -> None:
        """All of these others, which are not used any more: thousands in one step."""
        for whose, some in others.of_tenants.items():
            of_tenant = self.of_tenants.setdefault(whose, some)
            if of_tenant is not some:
                of_tenant.heads += some.heads
                of_tenant.heads.sort()
                of_tenant.overdue = 0
            self.of.update(dict.fromkeys(map(ITS_REQUEST, some.heads), of_tenant))
            self._enter(of_tenant)

    def discard(self, request: Request) -> None:
        of_tenant = self.of.pop(request)
        heads = of_tenant.heads
        at = 0 if heads[0][2] is request else bisect_left(heads, (request.turn_at, request.sequence))
        del heads[at]
        if at < of_tenant.overdue:
            of_tenant.overdue -= 1
        if not heads:
            del self.of_tenants[request.share if request.charge is None else None]
        elif not at:
            self._enter(of_tenant)
        if len(self._entries) > 2 * len(self.of_tenants) + SLACK:
            self._sort()
            self._entries = [head for head, _ in self._firsts(None)]

    def _enter(self, of_tenant: OfTenant) -> None:
        """It has another first one."""
        of_tenant.first = head_of(of_tenant.heads[0][2])
        self._entries.append(of_tenant.first)
        self._new += 1

    def _sort(self) -> None:
        entries, new = self._entries, self._new
        if new > FEW:
            entries.sort()
        else:
            last = entries[len(entries) - new :]
            del entries[len(entries) - new :]
            for head in last:
                insort(entries, head)
        self._new = 0


def _has_moved(head: Head) -> bool:
    """Whether its tenant was given more since."""
    given, _, _, request = head
    return given != -inf and request.share is not None and given != request.share.counter


def _go_on(later: list[tuple[float, float, int, Request, int, OfTenant]]) -> None:
    given, _, _, _, number, of_tenant = later[0]
    if number + 1 < len(of_tenant.heads):
        heapreplace(later, (given, *of_tenant.heads[number + 1], number + 1, of_tenant))
    else:
        heappop(later)
