"""How often others took room that was too small for a request that had its turn before them."""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable

from motet_scheduler.policy.order import Head, Order, head_of
from motet_scheduler.policy.requests import Request

LESS_URGENT = (float("inf"), 0.0, 0)
"""The order of what is less urgent: it has its turn after all."""


class Passes:
    """The last placements, on runners for which the same requests wait, that passed the first of these."""

    def __init__(self, max_passed_over: int) -> None:
        self._max_passed_over = max_passed_over
        self._added = 0
        """How many there were, also those that are not kept."""
        self._numbers: list[int] = []
        """Of the placements."""
        self._orders: list[Order] = []
        """Of what was placed."""
        self._sorted: list[Order] = []
        """The last of these, as many as are allowed, in order."""
        self._firsts: list[Order] = []
        """Those of what was placed that had its turn before all that was placed later: so in order, too."""
        self._firsts_at: list[int] = []
        """How many there were up to each of these."""
        self.first: Request | None = None
        """The overdue one that gets a runner first: so as long as it waits here, also if its tenant was given more."""
        self._watched: Head | None = None
        """The one that would be next, found not to be overdue."""
        self._missing = 0
        """How many more placements have to pass that one, at least, before it may be."""

    def add(self, number: int, order: Order) -> bool:
        """Whether the first may be overdue now that was not before."""
        most, firsts = self._max_passed_over, self._firsts
        if len(self._sorted) == most:
            del self._sorted[bisect_left(self._sorted, self._orders[-most])]
        insort(self._sorted, order)
        self._added += 1
        self._numbers.append(number)
        self._orders.append(order)
        if len(self._numbers) > 2 * most:
            del self._numbers[:most], self._orders[:most]
        while firsts and firsts[-1] >= order:
            firsts.pop()
            self._firsts_at.pop()
        firsts.append(order)
        self._firsts_at.append(self._added)
        if len(firsts) > most:
            del firsts[0], self._firsts_at[0]
        self._missing -= 1
        return self.first is None and self._missing <= 0

    def overdue(self, head: Head) -> bool:
        """Whether all of the last placements, as many as are allowed, came after this one and passed it."""
        return self._missing_for(head) <= 0

    def watch(self, head: Head | None) -> None:
        """Of those that wait for the same, this is the first: `first`, if it is overdue."""
        if head is not None and head is self._watched and self._missing > 0:
            return
        self.first, self._watched = None, head
        if head is not None:
            self._missing = self._missing_for(head)
            if self._missing <= 0:
                self.first, self._watched = head[3], None

    def may_change(self, request: Request) -> bool:
        """Whether another one may be the first, or overdue, now that this one has come, or leaves."""
        if self.first is not None:
            return self.first is request
        watched = self._watched
        return watched is None or watched[3] is request or head_of(request) < watched

    def _missing_for(self, head: Head) -> int:
        """How many more have to pass it, at least."""
        request = head[3]
        missing = self._max_passed_over - request.passes
        if missing > 0:
            since_it_came = len(self._numbers) - bisect_right(self._numbers, request.passes_from)
            before_it = bisect_left(self._firsts, head)
            since_it_was_first = self._added - self._firsts_at[before_it - 1] if before_it else self._added
            missing -= min(missing, since_it_came, since_it_was_first)
        if missing <= 0:
            request.passes = self._max_passed_over  # it stays so
        return missing

    def count(self, heads: Iterable[Head], number: int) -> bool:
        """Those that passed these, before they get a later turn. `number`: of the last placement. Returns whether
        another one may be the first then."""
        numbers, orders, watched = self._numbers, self._sorted, self._watched
        last_from = numbers[-len(orders)] if orders else -1
        changed = False
        for head in heads:
            request = head[3]
            if request.passes >= self._max_passed_over:
                continue  # it stays overdue
            if last_from > request.passes_from:  # mostly: all of these came after it
                request.passes += len(orders) - bisect_right(orders, head)
            else:
                first = bisect_right(numbers, request.passes_from)
                request.passes += sum(map(head.__lt__, self._orders[first:]))
            request.passes_from = number
            changed |= watched is not None and watched[3] is request
        return changed
