"""Whether one version's estimates are better than another's, by the answers that both have estimated. Pure.

Both estimate each answer before they learn it, and the pinball loss of their quantiles is compared. The loss is that of
the logarithm of the length: a quantile of a length is that of its logarithm, too, and so an answer of 4,000 tokens
does not decide against a hundred of 40.

The test is a one-sided z test of the paired differences' mean, at fixed numbers of answers. The chance to be wrong is
divided among them (Bonferroni), so that looking several times does not make a worse version the better one by luck. A
tenant with many answers has the say of some hundreds at most: its answers count for less, in the mean and in its
error."""

from dataclasses import dataclass
from enum import Enum
from math import inf
from statistics import NormalDist

import numpy as np

from motet_predictor.length_model import QUANTILES

LOOKS = (500, 1000, 2000, 4000)
"""After how many answers it is decided. After the last there is no more than chance between the two."""
CONFIDENCE = 0.95
"""Of all looks together"""
EQUAL_SAY_ABOVE = 200
"""A tenant with more answers than this has no more say than one with this number."""
MAX_TENANTS = 4096
"""Of which the answers are kept apart. Those of later ones are added to one more."""

_CRITICAL = NormalDist().inv_cdf(1 - (1 - CONFIDENCE) / len(LOOKS))
_QUANTILES = np.asarray(QUANTILES)
_ROUNDING = 1e-9


class Verdict(Enum):
    BETTER = "better"
    WORSE = "worse"
    ALIKE = "alike"
    """After the last look it is neither better nor worse."""


@dataclass(frozen=True, slots=True)
class Gain:
    """How much smaller the loss of one version is than that of the other, and the standard error of that."""

    mean: float
    error: float

    @property
    def least(self) -> float:
        """What it is at least, with the confidence of one look."""
        return self.mean - _CRITICAL * self.error


def pinball_loss(estimated: np.ndarray, tokens: int) -> float:
    """The mean over the quantiles, in doublings of the length. An answer that was cut is compared with what estimates
    say below the cut: pass them with that bound."""
    over = np.log2(np.maximum(estimated, 1)) - np.log2(max(tokens, 1))
    return float(np.maximum((1 - _QUANTILES) * over, -_QUANTILES * over).mean())


class Comparison:
    def __init__(self) -> None:
        self.answers = 0
        self._of: dict[str, tuple[int, float, float]] = {}
        """Of each tenant: how many answers, the sum of the differences, and that of their squares"""

    def observe(self, tenant: str, loss: float, other: float) -> Verdict | None:
        """Count an answer by the losses of both versions. Returns what is decided now."""
        self.answers += 1
        name = tenant if tenant in self._of or len(self._of) < MAX_TENANTS else ""
        count, total, squares = self._of.get(name, (0, 0.0, 0.0))
        difference = other - loss
        self._of[name] = count + 1, total + difference, squares + difference**2
        return self._verdict() if self.answers in LOOKS else None

    @property
    def tenants(self) -> int:
        return len(self._of)

    def gain(self) -> Gain:
        """Of the version over the other one. Its error is infinite before the second answer."""
        if self.answers < 2:
            return Gain(0.0, inf)
        rows = np.array(list(self._of.values()))
        counts, totals, squares = rows.T
        say = np.minimum(1.0, EQUAL_SAY_ABOVE / counts)
        weight = float((say * counts).sum())
        mean = float((say * totals).sum()) / weight
        spread = squares - 2 * mean * totals + mean**2 * counts
        return Gain(mean, float(np.maximum((say**2 * spread).sum(), 0.0)) ** 0.5 / weight)

    def _verdict(self) -> Verdict | None:
        gain = self.gain()
        if gain.least > _ROUNDING:
            return Verdict.BETTER
        if Gain(-gain.mean, gain.error).least > _ROUNDING:
            return Verdict.WORSE
        return Verdict.ALIKE if self.answers >= LOOKS[-1] else None
