"""Says when the share of free pages asks for a report at once. Pages come and go in each step, so few levels count."""

from collections.abc import Callable, Iterable

CHECK_SECONDS = 0.05
"""Seconds between two checks of the free pages while the engine works"""

LEVELS = (0.5, 0.25, 0.1, 0.05)
"""When the share of free pages crosses one of these, a report is due."""


class FreeLevels:
    def __init__(self, now: float) -> None:
        self._level = 0
        self._checked = now

    def ask_for_a_report(self, now: float, free_share: Callable[[], float]) -> bool:
        """True if the level has changed since the last check."""
        if now - self._checked < CHECK_SECONDS:
            return False
        self._checked = now
        before, self._level = self._level, _level_of(free_share())
        return self._level != before

    def quiet_at(self, free_share: float) -> bool:
        """True if a check would ask for no report at this share."""
        return _level_of(free_share) == self._level

    def leapt(self, ends: Iterable[float]) -> None:
        """Iterations ended at these times, and after each the free pages were `quiet_at`."""
        for now in ends:
            if now - self._checked >= CHECK_SECONDS:
                self._checked = now


def _level_of(free_share: float) -> int:
    return sum(free_share < share for share in LEVELS)
