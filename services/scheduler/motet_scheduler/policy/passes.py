"""How often others took room that was too small for a request that had its turn before them."""

from bisect import bisect_right

from motet_scheduler.policy.order import Head, Order
from motet_scheduler.policy.requests import Request

LESS_URGENT = (float("inf"), 0.0, 0)
"""The order of what is less urgent: it has its turn after all."""


class Passes:
    """The last placements, on runners for which the same requests wait, that passed the first of these."""

    def __init__(self, max_passed_over: int) -> None:
        self._max_passed_over = max_passed_over
        self._numbers: list[int] = []
        """Of the placements."""
        self._orders: list[Order] = []
        """Of what was placed."""
        self.first: Request | None = None
        """The overdue one that gets a runner first: so as long as it waits here, also if its tenant was given more."""
        self._not_yet: Head | None = None
        """Found not to be overdue."""
        self._missing = 0
        """How many more placements have to pass that one, at least, before it may be."""

    def add(self, number: int, order: Order) -> bool:
        """Whether the first may be overdue now that was not before."""
        self._numbers.append(number)
        self._orders.append(order)
        if len(self._numbers) > 2 * self._max_passed_over:
            del self._numbers[: self._max_passed_over], self._orders[: self._max_passed_over]
        self._missing -= 1
        return self.first is None and self._missing <= 0

    def overdue(self, head: Head) -> bool:
        """Whether all of the last placements, as many as are allowed, came after this one and passed it."""
        if head is self._not_yet and self._missing > 0:
            return False
        request = head[3]
        missing = self._max_passed_over - request.passes
        for number, order in zip(reversed(self._numbers), reversed(self._orders), strict=True) if missing > 0 else ():
            if number <= request.passes_from or order < head:
                break
            missing -= 1
            if not missing:
                break
        if missing > 0:
            self._not_yet, self._missing = head, missing
            return False
        request.passes = self._max_passed_over  # it stays so
        return True

    def count(self, head: Head, number: int) -> None:
        """Those that passed this one, before it gets a later turn. `number`: of the last placement."""
        request = head[3]
        if request.passes >= self._max_passed_over:
            return  # it stays overdue
        first = max(bisect_right(self._numbers, request.passes_from), len(self._numbers) - self._max_passed_over)
        request.passes += sum(map(head.__lt__, self._orders[first:]))
        request.passes_from = number
