"""`maxReplicas` of adapters has changed: other runners may take their requests. A hundred thousand heads of flows may
wait, and to look at all of them would delay everything else: each scan looks at some."""

from collections.abc import Collection, Iterator
from itertools import chain

from motet_scheduler.policy.class_queue import ClassQueue

MAX_COST = 1000
"""Of one scan: if none is to be tried again, it looks at as many."""


class LimitChanges:
    """Of one group."""

    def __init__(self, class_queues: Collection[ClassQueue]) -> None:
        self._class_queues = class_queues
        self._adapters: set[str] = set()
        """Those whose requests come next. What is under way ends first: limits may change more often than that."""
        self._steps: Iterator[int] | None = None
        """What each step of what is under way has cost. None: nothing is."""
        self.under_way = False

    def note(self, adapters: Collection[str]) -> None:
        self._adapters.update(adapters)
        self.under_way = bool(self._adapters) or self._steps is not None

    def go_on(self) -> None:
        left = MAX_COST
        while left > 0 and self.under_way:
            if self._steps is None:
                adapters, self._adapters = self._adapters, set()
                of_each = [one.limits_changed(adapters) for one in self._class_queues]
                self._steps = chain.from_iterable(of_each)
            if (cost := next(self._steps, 0)) == 0:
                self._steps = None
                self.under_way = bool(self._adapters)
            left -= cost
