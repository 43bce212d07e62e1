"""How often others took room that was too small for a request that had its turn before them."""

from collections import deque
from itertools import islice

from motet_scheduler.policy.order import Head, Order
from motet_scheduler.policy.requests import Request

LESS_URGENT = (float("inf"), 0.0, 0)
"""The order of what is less urgent: it has its turn after all."""


class Passes:
    """The last placements, on runners for which the same requests wait, that passed the first of these."""

    def __init__(self, max_passed_over: int) -> None:
        self._max_passed_over = max_passed_over
        self._last: deque[tuple[int, Order]] = deque(maxlen=max_passed_over)
        """The number of the placement, and the order of what was placed."""
        self.first: Request | None = None
        """The overdue one that gets a runner first: so as long as it waits here, also if its tenant was given more."""
        self._not_yet: Head | None = None
        """Found not to be overdue, since the last placement."""

    def add(self, number: int, order: Order) -> None:
        self._last.append((number, order))
        self._not_yet = None

    def overdue(self, head: Head) -> bool:
        """Whether all of the last placements, as many as are allowed, came after this one and passed it."""
        if head is self._not_yet:
            return False
        request = head[3]
        last, more = self._last, self._max_passed_over - request.passes
        if more > 0 and (
            len(last) < more
            or last[-more][0] <= request.passes_from
            or any(order < head for _, order in islice(reversed(last), more))
        ):
            self._not_yet = head
            return False
        request.passes = self._max_passed_over  # it stays so
        return True

    def count(self, head: Head, number: int) -> None:
        """Those that passed this one, before it gets a later turn. `number`: of the last placement."""
        request = head[3]
        for at, order in reversed(self._last):
            if at <= request.passes_from:
                break
            request.passes += order > head
        request.passes_from = number
