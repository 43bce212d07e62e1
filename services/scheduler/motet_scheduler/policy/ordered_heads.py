"""Heads of flows in the order of their turns, where only the first are looked at."""

from bisect import bisect_right, insort
from collections.abc import Iterator
from itertools import islice
from math import inf

from motet_scheduler.policy.order import Head, head_of
from motet_scheduler.policy.requests import Request

FEW = 8
"""Up to this number of new ones, each is put where it belongs; for more it is faster to sort all."""

SLACK = 16
"""Entries of heads that have left, which may be kept beside as many as there are heads."""


class OrderedHeads:
    """Each placement moves the turns of all heads of a tenant, and of those that wait nearly all stay where they are.
    So a head that comes, goes or moves costs no search: it is put where it belongs when it is among the first that are
    looked at. Counters of tenants only grow, so none is then found too late."""

    __slots__ = ("_heads", "_new", "of")

    def __init__(self) -> None:
        self._heads: list[Head] = []
        """In order, by the turns that they have or had. The new ones are last, in no order."""
        self._new = 0
        self.of: dict[Request, Head] = {}
        """The entry that counts of each."""

    def __len__(self) -> int:
        return len(self.of)

    def __iter__(self) -> Iterator[Head]:
        """In order. None may come or go meanwhile."""
        return self.behind(None)

    def behind(self, last: Head | None) -> Iterator[Head]:
        """The same, from the one on that is behind `last`."""
        if self._new:
            self._sort()
        heads, of = self._heads, self.of
        at = bisect_right(heads, last) if last is not None else 0
        while at < len(heads):
            head = heads[at]
            given, _, _, request = head
            if of.get(request) is not head:
                del heads[at]  # it has left
            elif given != -inf and request.share is not None and given != request.share.counter:
                del heads[at]
                head = of[request] = head_of(request)
                insort(heads, head, at)
            else:
                yield head
                at += 1

    def up_to(self, number: int) -> list[Head]:
        """The first."""
        if len(self.of) == 1 and number:  # mostly
            return [*map(head_of, self.of)]
        return list(islice(self, number))

    def first(self) -> Head:
        if not self._new:  # mostly nothing has moved: the common case of `__iter__`, as this is asked very often
            head = self._heads[0]
            share = head[3].share
            if self.of.get(head[3]) is head and share is not None and head[0] == share.counter:
                return head
        return next(iter(self))

    def add(self, request: Request) -> None:
        head = self.of[request] = head_of(request)
        self._heads.append(head)
        self._new += 1

    def discard(self, request: Request) -> None:
        del self.of[request]
        if len(self._heads) > 2 * len(self.of) + SLACK:
            self._sort()
            self._heads = [head for head in self._heads if self.of.get(head[3]) is head]

    def _sort(self) -> None:
        heads, new = self._heads, self._new
        if new > FEW:
            heads.sort()
        else:
            last = heads[len(heads) - new :]
            del heads[len(heads) - new :]
            for head in last:
                insort(heads, head)
        self._new = 0
