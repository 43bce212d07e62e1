"""Quantiles of a few values. `plan/gaps.py` has those of very many."""

from collections.abc import Sequence


def quantile(values: Sequence[float], level: float) -> float:
    """The smallest of them that is at least as large as `level` of them all; 0 if there are none."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -int(-level * len(ordered) // 1) - 1))]
