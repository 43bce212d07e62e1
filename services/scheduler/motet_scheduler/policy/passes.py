"""How often others took room that was too small for a request that had its turn before them."""

from collections import deque

from motet_scheduler.policy.order import Head, Order

LESS_URGENT = (float("inf"), 0.0, 0)
"""The order of what is less urgent: it has its turn after all."""


class Passes:
    """The last placements, on runners for which the same requests wait, that passed the first of these."""

    def __init__(self, max_passed_over: int) -> None:
        self._last: deque[tuple[int, Order]] = deque(maxlen=max_passed_over)
        """The number of the placement, and the order of what was placed."""
        self._known: Head | None = None
        """Found to be overdue: it stays so until it leaves or has its turn later."""
        self._not_yet: Head | None = None
        """Found not to be overdue, since the last placement."""

    def add(self, number: int, order: Order) -> None:
        self._last.append((number, order))
        self._not_yet = None

    def overdue(self, head: Head) -> bool:
        """Whether all of the last placements, as many as are allowed, came after this one and passed it."""
        if head is self._known:
            return True
        if head is self._not_yet:
            return False
        self._not_yet, last = head, self._last
        if len(last) < (last.maxlen or 0) or last[0][0] <= head[3].passes_from:
            return False
        if any(order < head for _, order in last):
            return False
        self._known = head
        return True
