"""How many checks of one namespace go on at a time: fewer than there are threads for them, because a check may take a
minute. So another namespace's begins soon. What requests wait for is checked first, then the oldest.
"""

from collections import Counter
from collections.abc import Callable

from motet_runner.adapters.policy.effects import Check

MAX_CHECKS = 3
"""Of a namespace, at a time"""


class Turns:
    def __init__(self, most: int = MAX_CHECKS) -> None:
        self._most = most
        self._under_way: dict[int, str] = {}
        """By the number of the check"""
        self._waiting: dict[str, dict[int, Check]] = {}

    def begin(self, check: Check, namespace: str) -> bool:
        """True if it may be carried out now. Else `ended` returns it, once others have ended."""
        if Counter(self._under_way.values())[namespace] < self._most:
            self._under_way[check.number] = namespace
            return True
        self._waiting.setdefault(namespace, {})[check.number] = check
        return False

    def ended(self, number: int, rank: Callable[[int], int | None]) -> Check | None:
        """An effect was answered → the check that begins now. `rank`, by the number of one that waits: the lowest is
        next; None: nobody expects its answer any more."""
        namespace = self._under_way.pop(number, None)
        if namespace is None or namespace not in self._waiting:
            return None
        waiting = self._waiting.pop(namespace)
        ranks = {one: place for one in waiting if (place := rank(one)) is not None}
        if not ranks:
            return None
        following = min(ranks, key=lambda one: ranks[one])
        if len(ranks) > 1:
            self._waiting[namespace] = {one: waiting[one] for one in ranks if one != following}
        self._under_way[following] = namespace
        return waiting[following]
