"""When a process takes the levels that it shows as metrics, such as how many requests wait."""

from collections.abc import Callable
from math import inf

LEVELS_SECONDS = 1.0
"""The least time between two: of a thousand runners, taking them costs tens of milliseconds."""


class Levels:
    """Takes them in ticks, and not more often than `LEVELS_SECONDS` says. A change since the last time makes a tick
    due; a tick that comes for another reason takes them, too."""

    def __init__(self, take: Callable[[], None]) -> None:
        self._take = take
        self._taken_at = -inf
        self._stale = True

    def changed(self) -> None:
        self._stale = True

    def next_due(self) -> float:
        return self._taken_at + LEVELS_SECONDS if self._stale else inf

    def tick(self, now: float) -> None:
        if now >= self._taken_at + LEVELS_SECONDS:
            self._taken_at, self._stale = now, False
            self._take()
