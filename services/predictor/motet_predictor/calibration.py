"""How far an adapter's estimates have been from its answers, and the correction that follows (split conformal). Pure.

Where an answer fell in the distribution that was estimated for it is its position, between 0 and 1. If estimates are
right, positions are even: 90 % lie below 0.9. If only 80 % do, the 90 % quantile must be read further up: at the
position that 90 % of the earlier answers did not exceed. The first positions count little beside an even prior, and old
ones fade, so the correction follows each answer. An answer whose length takes an interval of positions (several have
the same length, or it was cut and could have become any longer one) counts for all of the interval evenly.

Where the newest answers exceed the 90 % quantile far too often, they count more, until they do not any more: answers
that become longer little by little, or only the long ones among them, are no change that `length_change` could find.
Of several answers to one prompt only the first is among the newest, as the choices of one request are alike."""

import numpy as np

BINS = 64
PRIOR_ANSWERS = 20.0
"""How many answers the even prior counts for. With 5, q95 varies too much in a new adapter."""
UNSEEN_ANSWERS = 1.0
"""The next answer counts as if it were beyond all others: so few answers do not promise more than they can."""
HALF_LIFE = 2048
"""Longer than that of the statistics: a quantile of the tail needs many answers."""
NEWEST_HALF_LIFE = 24
NEWEST_STRENGTH = 20.0
"""How many answers the earlier ones count for beside the newest."""
WATCHED = 0.9
"""The quantile that answers should not exceed too often."""
MAX_TOO_LONG = 1.5
"""By how many more than expected the newest answers may exceed it."""
_EDGES = np.linspace(0.0, 1.0, BINS + 1)
_DECAY = 2.0 ** (-1 / HALF_LIFE)
_NEWEST_DECAY = 2.0 ** (-1 / NEWEST_HALF_LIFE)


def spread(low: float | np.ndarray, high: float | np.ndarray) -> np.ndarray:
    """Of an answer at the positions from low to high: the share at or below each edge."""
    low = np.minimum(low, high - 1e-9)
    share: np.ndarray = np.clip((_EDGES - low) / (high - low), 0.0, 1.0)
    return share


class Calibration:
    """The positions of an adapter's answers."""

    def __init__(self) -> None:
        self.below = _EDGES * PRIOR_ANSWERS
        """The weight of the answers at or below each edge"""
        self.newest = np.zeros(BINS + 1)
        """The same of the newest answers alone"""
        self._too_short = False
        """Whether too many of these exceed their estimates"""

    def observe(self, low: float, high: float, *, repeats: bool = False) -> None:
        """`repeats`: one of the newest answers is to the same prompt."""
        share = spread(low, high)
        prior = _EDGES * PRIOR_ANSWERS
        self.below = prior + (self.below - prior) * _DECAY + share
        if not repeats:
            self.newest = self.newest * _NEWEST_DECAY + share
        self.watch()

    def watch(self) -> None:
        """Look whether too many of the newest answers exceed their estimates."""
        newest = self.newest
        too_long = newest[-1] - np.interp(_read(self.below, WATCHED), _EDGES, newest)
        self._too_short = bool(too_long > (1 - WATCHED) * newest[-1] + MAX_TOO_LONG)

    def positions(self, quantiles: np.ndarray) -> np.ndarray:
        """Where in an estimated distribution to read these quantiles. Rises with the quantile."""
        positions = _read(self.below, quantiles)
        if self._too_short:
            newest = _read(self.newest + self.below * (NEWEST_STRENGTH / self.below[-1]), quantiles)
            positions = np.maximum(positions, newest)
        return positions


def _read(below: np.ndarray, quantiles: float | np.ndarray) -> np.ndarray:
    positions: np.ndarray = np.interp(quantiles * (below[-1] + UNSEEN_ANSWERS), below, _EDGES)
    return positions
