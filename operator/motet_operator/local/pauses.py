"""The pauses of the local operator, which looks at manifests and folders again and again, and makes rounds: with
thousands of adapters each of the three takes a small part of a core, as far as its longest pause allows. Pure."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Pause:
    times: float
    """Times the length of what it follows"""
    max_seconds: float

    def after(self, cpu_seconds: float) -> float:
        return min(self.times * cpu_seconds, self.max_seconds)


AT_MANIFESTS = Pause(99, 1.0)
AT_FOLDERS = Pause(99, 5.0)
OF_ROUNDS = Pause(74, 2.0)
"""A round looks at all adapters, and each of thousands reports on its own."""

AT_ONCE_SECONDS = 0.05
"""Rounds that take this long together may follow each other at once."""


class RoundPauses:
    def __init__(self) -> None:
        self._paid_at = -math.inf
        """When the rounds so far have taken no more than their part of the core."""

    def after(self, round_seconds: float, now: float) -> float:
        """How long the next round waits at least."""
        ahead = OF_ROUNDS.times * AT_ONCE_SECONDS
        paid_at = max(self._paid_at, now) + OF_ROUNDS.times * round_seconds
        self._paid_at = min(paid_at, now + ahead + OF_ROUNDS.max_seconds)
        return max(0.0, self._paid_at - ahead - now)
