"""On how many runners the demand for an adapter wants it: at once more when it grows, later fewer when it falls."""

from math import ceil


def wanted_replicas(requests: int, fits: int, *, maximum: int) -> int:
    """`requests` run or wait, of which one runner takes `fits` if it takes nothing else."""
    return min(ceil(requests / fits), maximum)


class ReplicaDemand:
    """Of one adapter."""

    __slots__ = ("_falls_at", "_hold", "_since", "turn", "wanted")

    def __init__(self, hold: float) -> None:
        """`hold`: seconds for which fewer must have been enough."""
        self.wanted = 0
        self.turn = -1
        """Of the adapters with these bytes, whose source was tried last."""
        self._hold = hold
        self._falls_at = 0.0
        self._since = 0
        """The most that was needed since `wanted` was: as many as that are wanted next."""

    def note(self, needed: int, now: float) -> int:
        """`needed` now. → how many are wanted"""
        if needed >= self.wanted:
            self.wanted, self._falls_at, self._since = needed, now + self._hold, 0
            return needed
        self._since = max(self._since, needed)
        if now >= self._falls_at:
            self.wanted, self._falls_at, self._since = self._since, now + self._hold, needed
        return self.wanted
