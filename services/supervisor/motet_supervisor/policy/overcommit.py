"""How far a pool's promises may exceed its pages: less while requests are parked often, more while hardly any is.

Overcommit pays as long as predictions are too long more often than too short. When many are too short, requests are
parked, and the excess is halved at once. It grows again in small steps. Between the two shares nothing changes. Pure.
"""

from dataclasses import dataclass

MANY_PARKS, FEW_PARKS = 0.05, 0.01
"""Parks, as a share of the sequences of a window: with more than the first the factor falls, with fewer than the
second it rises."""

MIN_SEQUENCES = 20
"""A window goes on until it has seen as many: the share of fewer says nothing."""

RISE = 0.1
"""Of the distance from 1 to the most, with each window of few parks."""

QUIET_WINDOWS = 3
"""How many windows without many parks must follow each other before the factor rises."""

_LEAST_EXCESS = 0.01
"""An excess below this is none."""


@dataclass(slots=True)
class OvercommitControl:
    """Of one pool. `most` is what the platform allows. The factor is always between 1 and that, and begins there."""

    most: float
    window: float
    """In seconds"""
    began: float
    """When the window began"""
    factor: float = 0.0
    _parks: int = 0
    _ends: int = 0
    _quiet: int = 0
    """How many windows without many parks have followed each other"""

    def __post_init__(self) -> None:
        self.factor = self.most

    def note_park(self) -> None:
        self._parks += 1

    def note_end(self) -> None:
        self._ends += 1

    def look(self, live: int, now: float) -> bool:
        """`live`: how many sequences the pool has now → whether the factor has changed."""
        sequences = live + self._ends
        if self.most <= 1.0 or now - self.began < self.window or sequences < MIN_SEQUENCES:
            return False
        share = self._parks / sequences
        self.began, self._parks, self._ends = now, 0, 0
        before = self.factor
        if share > MANY_PARKS:
            self._quiet = 0
            excess = (self.factor - 1.0) / 2
            self.factor = 1.0 + (excess if excess >= _LEAST_EXCESS else 0.0)
            return self.factor < before
        self._quiet += 1
        if share < FEW_PARKS and self._quiet >= QUIET_WINDOWS:
            self.factor = min(self.most, self.factor + RISE * (self.most - 1.0))
        return self.factor > before
