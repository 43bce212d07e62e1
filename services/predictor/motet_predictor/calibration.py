"""How far an adapter's estimates have been from its answers, and the correction that follows (split conformal). Pure.

Where an answer fell in the distribution that was estimated for it is its position, between 0 and 1. If estimates are
right, positions are even: 90 % lie below 0.9. If only 80 % do, the 90 % quantile must be read further up: at the
position that 90 % of the earlier answers did not exceed. The first positions count little beside an even prior, and old
ones fade, so the correction follows each answer. An answer whose length takes an interval of positions (several have
the same length, or it was cut and could have become any longer one) counts for all of the interval evenly."""

import numpy as np

BINS = 64
PRIOR_ANSWERS = 20.0
"""How many answers the even prior counts for. With 5, q95 varies too much in a new adapter."""
UNSEEN_ANSWERS = 1.0
"""The next answer counts as if it were beyond all others: so few answers do not promise more than they can."""
HALF_LIFE = 2048
"""Longer than that of the statistics: a quantile of the tail needs many answers."""
_EDGES = np.linspace(0.0, 1.0, BINS + 1)
_DECAY = 2.0 ** (-1 / HALF_LIFE)


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

    def observe(self, low: float, high: float) -> None:
        prior = _EDGES * PRIOR_ANSWERS
        self.below = prior + (self.below - prior) * _DECAY + spread(low, high)

    def positions(self, quantiles: np.ndarray) -> np.ndarray:
        """Where in an estimated distribution to read these quantiles. Rises with the quantile."""
        positions: np.ndarray = np.interp(quantiles * (self.below[-1] + UNSEEN_ANSWERS), self.below, _EDGES)
        return positions
