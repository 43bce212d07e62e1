"""Shares of tenants: where several want more than there is, each gets its part by its weight."""

MAX_WEIGHT = 1000
DEFAULT_WEIGHT = 1


def weight_said(weight: int) -> int:
    """The weight that a peer says. A peer of an older version says none."""
    return min(weight, MAX_WEIGHT) or DEFAULT_WEIGHT
