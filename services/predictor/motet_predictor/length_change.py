"""Notices that an adapter's answers have become longer or shorter than what was expected of them. Pure.

It compares the positions (see `calibration`) of the newest answers with an even distribution (Kolmogorov and Smirnov).
When they differ so much that chance is no explanation, older answers are of no use any more: they are dropped, and only
the newest are learned again. Of several answers to one prompt only the newest is compared: the choices of one request,
or a question that is asked again and again, are alike without being a change."""

from dataclasses import dataclass

import numpy as np

from motet_predictor.calibration import spread

WINDOWS = (8, 16, 32)
"""Among how many of the newest answers it looks for a change. Eight find one of an octave or two."""
THRESHOLD = 2.4
"""Of the distance times the root of the number of answers. By chance, 2 in 100,000 windows exceed it."""

_EVEN = spread(0.0, 1.0)
_WINDOW = np.array(WINDOWS)
_PROMPT, _TOKENS, _CENSORED, _LOW, _HIGH, _NUMBER = range(6)


@dataclass(frozen=True, slots=True)
class Since:
    """What has come since a change."""

    answers: list[tuple[int, bool]]
    """The newest of each prompt (length, censored)"""
    all: int
    """How many there were, with those to the same prompts"""


class LengthChange:
    def __init__(self) -> None:
        self._answers = np.zeros((0, 6))
        self._observed = 0

    def knows(self, prompt: int) -> bool:
        """Whether one of the answers that it compares is to this prompt."""
        return prompt != 0 and bool((self._answers[:, _PROMPT] == prompt).any())

    def observe(self, prompt: int, tokens: int, censored: bool, low: float, high: float) -> Since | None:
        """Returns the answers since the change if there was one.

        `prompt` is a number for its text; 0: not known."""
        others = self._answers[(self._answers[:, _PROMPT] != prompt) | (prompt == 0)]
        self._observed += 1
        newest = prompt, tokens, censored, low, high, self._observed
        answers = self._answers = np.vstack((others[1 - WINDOWS[-1] :], newest))
        windows = _WINDOW[len(answers) >= _WINDOW]
        if not len(windows):
            return None
        low_of, high_of = answers[::-1, [_LOW]], answers[::-1, [_HIGH]]
        below = np.cumsum(spread(low_of, high_of), axis=0)[windows - 1]
        distances = np.abs(below / windows[:, None] - _EVEN).max(axis=1)
        found = windows[distances * windows**0.5 > THRESHOLD]
        if not len(found):
            return None
        self._answers, since = answers[:0].copy(), answers[-found[0] :]
        return Since(
            [(int(row[_TOKENS]), bool(row[_CENSORED])) for row in since], self._observed + 1 - int(since[0, _NUMBER])
        )
