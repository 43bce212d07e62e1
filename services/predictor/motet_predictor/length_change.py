"""Notices that an adapter's answers have become longer or shorter than its statistics say. Pure.

It compares the positions (see `calibration`) of the newest answers with an even distribution (Kolmogorov and Smirnov).
When they differ so much that chance is no explanation, older answers are of no use any more: they are dropped, and only
the newest are learned again."""

from collections import deque

import numpy as np

from motet_predictor.calibration import spread

WINDOWS = (8, 16, 32)
"""Among how many of the newest answers it looks for a change. Eight find one of an octave or two."""
THRESHOLD = 2.4
"""Of the distance times the root of the number of answers. By chance, 2 in 100,000 windows exceed it."""

_EVEN = spread(0.0, 1.0)
_WINDOW = np.array(WINDOWS)


class LengthChange:
    def __init__(self) -> None:
        self._answers: deque[tuple[int, bool]] = deque(maxlen=WINDOWS[-1])
        self._below: deque[np.ndarray] = deque(maxlen=WINDOWS[-1])

    def observe(self, tokens: int, censored: bool, low: float, high: float) -> list[tuple[int, bool]]:
        """Returns the answers since the change (length, censored) if there was one, else nothing."""
        self._answers.append((tokens, censored))
        self._below.append(spread(low, high).astype(np.float32))
        windows = _WINDOW[len(self._answers) >= _WINDOW]
        if not len(windows):
            return []
        below = np.cumsum(np.array(self._below)[::-1], axis=0)[windows - 1]
        distances = np.abs(below / windows[:, None] - _EVEN).max(axis=1)
        found = windows[distances * windows**0.5 > THRESHOLD]
        if not len(found):
            return []
        since = list(self._answers)[-int(found[0]) :]
        self._answers.clear()
        self._below.clear()
        return since
