"""How far a pool's promises may exceed its pages: less while requests are parked often, more while hardly any is.

Overcommit pays as long as predictions are too long more often than too short. When many are too short, requests are
parked, and the excess is halved at once. It grows again in small steps. Between the two shares nothing changes. Pure.

Sequences are judged when they end: a long one lives through many windows, but is one sequence. So a change of the
factor shows only in those that end later.
"""

from dataclasses import dataclass

MANY_PARKED, FEW_PARKED = 0.05, 0.01
"""Sequences that were parked, as a share of those that ended in a window: with more than the first the factor falls,
with fewer than the second it rises."""

MIN_SEQUENCES = 100
"""A window goes on until as many have ended, or until it is certain that many of them were parked. Fewer cannot show
whether it was one in a hundred."""

RISE = 0.1
"""Of the distance from 1 to the most, with each window in which few were parked."""

QUIET_WINDOWS = 3
"""How many windows in which not many were parked must follow each other before the factor rises."""

_LEAST_EXCESS = 0.01
"""An excess below this is none."""


@dataclass(slots=True)
class OvercommitControl:
    """Of one pool. `most` is what the platform allows. The factor is always between 1 and that, and begins there, or
    where an earlier process has left it."""

    most: float
    window: float
    """In seconds, at the least"""
    began: float
    """When the window began"""
    factor: float = 0.0
    _ended: int = 0
    _parked: int = 0
    """How many of those were parked, however often"""
    _quiet: int = 0
    """How many windows in which not many were parked have followed each other"""
    _judged: bool = False
    """Whether a window has ended"""

    def __post_init__(self) -> None:
        self.factor = self.most

    def begin_at(self, kept: float) -> bool:
        """A runner keeps this factor; 0: none. The lowest counts until a window has ended. Whether the factor has
        changed."""
        if self._judged or not 0 < kept < self.factor:
            return False
        self.factor = max(1.0, kept)
        return True

    def note_end(self, *, parked: bool) -> None:
        """`parked`: at least once in its life."""
        self._ended += 1
        self._parked += parked

    def look(self, now: float) -> bool:
        """Whether the factor has changed."""
        enough = self._ended >= MIN_SEQUENCES or self._parked > MANY_PARKED * MIN_SEQUENCES
        if self.most <= 1.0 or now - self.began < self.window or not enough:
            return False
        share = self._parked / self._ended
        self.began, self._ended, self._parked, self._judged = now, 0, 0, True
        before = self.factor
        if share > MANY_PARKED:
            self._quiet = 0
            excess = (self.factor - 1.0) / 2
            self.factor = 1.0 + (excess if excess >= _LEAST_EXCESS else 0.0)
            return self.factor < before
        self._quiet += 1
        if share < FEW_PARKED and self._quiet >= QUIET_WINDOWS:
            self.factor = min(self.most, self.factor + RISE * (self.most - 1.0))
        return self.factor > before
