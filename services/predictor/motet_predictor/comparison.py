"""Whether one version's estimates are better than another's, by the answers that both have estimated. Pure.

Both estimate each answer before they learn it, and the pinball loss of their quantiles is compared. The loss is that of
the logarithm of the length: a quantile of a length is that of its logarithm, too, and so an answer of 4,000 tokens
does not decide against a hundred of 40.

The test is a one-sided z test of the paired differences' mean, at fixed numbers of prompts. The chance to be wrong is
divided among them (Bonferroni), so that looking several times does not make a worse version the better one by luck.

Answers to one prompt of a tenant are alike (the choices of a request, a question that is asked again and again), so
they are one difference: their mean. A tenant has the say of some hundred prompts at most, and no more than all others
together. Differences of one tenant's prompts are taken as independent."""

from dataclasses import dataclass
from enum import Enum
from math import inf, isfinite
from statistics import NormalDist
from typing import Self

import numpy as np

from motet_predictor.length_model import QUANTILES

LOOKS = (500, 1000, 2000, 4000)
"""After how many prompts it is decided. After the last there is no more than chance between the two."""
CONFIDENCE = 0.95
"""Of all looks together"""
MAX_ANSWERS = 100 * LOOKS[-1]
"""Where the same few prompts come for ever, it ends: a comparison delays the next refit."""
MIN_PROMPTS = 100
"""Of fewer prompts the error is not known well enough."""
EQUAL_SAY_ABOVE = 200
"""A tenant with more prompts than this has no more say than one with this number."""
MIN_OTHERS = 20
"""If all tenants but one have fewer prompts than this together, that one decides."""

_CRITICAL = NormalDist().inv_cdf(1 - (1 - CONFIDENCE) / len(LOOKS))
_QUANTILES = np.asarray(QUANTILES)
_ROUNDING = 1e-9
_ROW = np.dtype([("tenant", "<u4"), ("prompt", "<i8"), ("count", "<u4"), ("total", "<f8")])


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
        self._of: dict[tuple[str, int], tuple[int, float]] = {}
        """Of each prompt of a tenant: how many answers, and the sum of their differences. At the last look a comparison
        ends, so there are no more."""

    @property
    def prompts(self) -> int:
        return len(self._of)

    def observe(self, tenant: str, prompt: int, loss: float, other: float) -> Verdict | None:
        """Count an answer by the losses of both versions. Returns what is decided now.

        `prompt` is a number for its text; 0: not known."""
        self.answers += 1
        key = tenant, prompt or -self.answers
        count, total = self._of.get(key, (0, 0.0))
        self._of[key] = count + 1, total + other - loss
        if not count and self.prompts in LOOKS:  # a prompt that is repeated brings no look nearer
            return self._verdict()
        return Verdict.ALIKE if self.answers >= MAX_ANSWERS else None

    def gain(self) -> Gain:
        """Of the version over the other one. Its error is infinite before the second prompt."""
        if self.prompts < 2:
            return Gain(0.0, inf)
        differences = np.array([total / count for count, total in self._of.values()])
        _, tenants, counts = np.unique([tenant for tenant, _ in self._of], return_inverse=True, return_counts=True)
        say = np.minimum(counts, EQUAL_SAY_ABOVE)
        most = counts.argmax()
        others = say.sum() - say[most]
        if others >= MIN_OTHERS:
            say[most] = min(say[most], others)
        weights = (say / counts)[tenants]
        mean = float(weights @ differences) / float(weights.sum())
        return Gain(mean, float(np.linalg.norm(weights * (differences - mean))) / float(weights.sum()))

    def to_bytes(self, against: str) -> bytes:
        """`against`: the name of the other version."""
        tenants = {tenant: number for number, tenant in enumerate(dict.fromkeys(tenant for tenant, _ in self._of))}
        rows = [(tenants[tenant], prompt, *of) for (tenant, prompt), of in self._of.items()]
        names = "\0".join((against, *tenants)).encode()
        return len(names).to_bytes(4, "little") + names + np.array(rows, _ROW).tobytes()

    @classmethod
    def from_bytes(cls, data: bytes, against: str) -> Self:
        """What `to_bytes` has written; empty if it was against another version. Raises ValueError if it is damaged."""
        made, end = cls(), 4 + int.from_bytes(data[:4], "little")
        other, *tenants = data[4:end].decode().split("\0")
        if other != against:
            return made
        rows = np.frombuffer(data, _ROW, offset=min(end, len(data))).tolist()
        for tenant, prompt, count, total in rows:
            if not (tenant < len(tenants) and count > 0 and isfinite(total)):
                raise ValueError("a damaged comparison: its numbers are no differences")
            made._of[tenants[tenant], prompt] = count, total
            made.answers += count
        if len(rows) >= LOOKS[-1] or made.answers >= MAX_ANSWERS:
            raise ValueError("a damaged comparison: it should have ended")
        return made

    def _verdict(self) -> Verdict | None:
        gain = self.gain()
        if self.prompts >= MIN_PROMPTS:
            if gain.least > _ROUNDING:
                return Verdict.BETTER
            if Gain(-gain.mean, gain.error).least > _ROUNDING:
                return Verdict.WORSE
        return Verdict.ALIKE if self.prompts >= LOOKS[-1] else None
