"""How many pages sequences will need at the most, at any later time, if they all go on.

Sequences end at different times, so they never need together what each of them needs at its own end. The sum of
promises counts exactly that: where promises are large it wastes memory, and where they are small it is exceeded.

Nobody knows how long an answer becomes, but its quantiles are estimated. A sequence that has generated g tokens still
runs s iterations later with the probability P(L > g + s) / P(L > g) (S3-23). So for each s the expected need is a sum
over the sequences, and so is its variance. The forecast is the largest need over all s, each with a margin of some
standard deviations. LightLLM's scheduler looks for the same maximum with one drawn length for each sequence. Pure
arithmetic.
"""

from collections.abc import Collection, Iterable, Sequence
from math import exp, log
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from motet.domain import PAGE_TOKENS

MAX_STEPS = 1 << 20
"""How far the forecast looks ahead."""
_GROWTH = 1.3
"""From one step that is looked at to the next."""
DEVIATIONS = 1.5
"""The margin, in standard deviations of the need."""
_NARROWEST = 0.01
"""The least distance of two quantiles, as a difference of logarithms: equal ones are allowed."""
_STEEPEST = 4.0
"""How fast, at the most, the probability of even longer answers falls beyond the last quantile: as a power of the
length. An answer that is longer than it could be by its quantiles may then still go on."""

_Numbers = npt.NDArray[np.float64]


class LengthLaw(NamedTuple):
    """How likely an answer is longer than a length, as a curve through its quantiles. The logarithms of the lengths
    count: around the median the curve is symmetric, and beyond the last quantile it is a straight line."""

    median: float
    to_q80: float
    to_q90: float
    to_q95: float
    slope: float

    @classmethod
    def of(cls, quantiles: Collection[int]) -> "LengthLaw":
        """The law with these four: q50, q80, q90 and q95."""
        q50, q80, q90, q95 = (log(max(0, quantile) + 1) for quantile in quantiles)
        to_q80 = max(q80 - q50, _NARROWEST)
        to_q90 = max(q90 - q50, to_q80 + _NARROWEST)
        to_q95 = max(q95 - q50, to_q90 + _NARROWEST)
        return cls(q50, to_q80, to_q90, to_q95, min(_STEEPEST, log(4) / (to_q95 - to_q80)))

    @classmethod
    def at(cls, tokens: int) -> "LengthLaw":
        """The law of an answer that probably has this length."""
        return cls.of((tokens,) * 4)

    @classmethod
    def endless(cls) -> "LengthLaw":
        """The law of an answer that surely becomes as long as it can."""
        return cls.at(1 << 60)


class Prospect(NamedTuple):
    """One sequence, as its future depends on it."""

    tokens: int
    """How many tokens it has now that need pages, with its whole prompt."""
    generated: int
    """Of the tokens, those of the answer."""
    most: int
    """How many tokens its answer can have."""
    law: LengthLaw
    shared: int = 0
    """How many of its pages another sequence pays for, which most likely ends later."""

    @property
    def likely_left(self) -> float:
        """How many tokens its answer most likely still gets; negative if it should have ended."""
        return min(self.most, exp(self.law.median) - 1) - self.generated

    @property
    def surely_longest(self) -> bool:
        """True if its answer most likely becomes as long as it can."""
        return self.law.median >= log(self.most + 1)


class Need(NamedTuple):
    pages: int
    of_each: tuple[int, ...]
    """How much of it is of each sequence, at least one page. The sum is `pages`."""


def largest_need(prospects: Collection[Prospect], *, at_least: int = 0, deviations: float = DEVIATIONS) -> Need:
    """The largest need at any later iteration. `at_least`: what they surely need."""
    if not prospects:
        return Need(0, ())
    columns = np.array([(one.tokens, one.generated, one.most, one.shared, *one.law) for one in prospects])
    tokens, generated, most, shared, *law = columns.T[:, :, np.newaxis]
    last = (most - generated).max() - 1
    steps = np.append(_STEPS[: int(np.searchsorted(_STEPS, last))], max(0.0, last))
    lengths = generated + steps
    survival = log_survival(lengths, law)
    runs = np.exp(survival - survival[:, :1])
    runs[lengths >= most] = 0
    runs[:, 0] = 1
    pages = np.ceil((tokens + steps) / PAGE_TOKENS) - shared
    expected = runs * pages
    mean = expected.sum(axis=0)
    deviation = np.sqrt((expected * (pages - expected)).sum(axis=0))
    if_all_run = (pages * (runs > 0)).sum(axis=0)
    needs = np.minimum(mean + deviations * deviation, if_all_run)
    at = int(needs.argmax())
    need = max(int(np.ceil(needs[at])), at_least)
    return Need(need, _divided(need, expected[:, at]))


def _divided(pages: int, weights: _Numbers) -> tuple[int, ...]:
    """One page for each, and the others by weight. Those with the largest remainders get what rounding leaves: without
    it, the sum over hundreds would miss many pages."""
    beyond = np.maximum(0, weights * (pages / weights.sum()) - 1)
    left = pages - len(weights)
    exact = beyond * (left / beyond.sum()) if left else beyond * 0
    shares = np.floor(exact)
    shares[np.argsort(shares - exact, kind="stable")[: left - int(shares.sum())]] += 1
    return tuple((shares + 1).astype(int).tolist())


def sum_of_ends(prospects: Iterable[Prospect]) -> int:
    """The pages of all of them, each at its own end. No need exceeds this sum, and it costs little."""
    return sum(-(-(tokens + max(0, most - generated - 1)) // PAGE_TOKENS) for tokens, generated, most, *_ in prospects)


def pages_of_longest_lives(prospects: Collection[Prospect]) -> int:
    """The largest need if each answer becomes as long as it can. It is at the last step of one of them, just before the
    need falls; the steps of a forecast may miss that."""
    tokens, generated, most, shared = np.array([(*one[:3], one.shared) for one in prospects]).T[:, :, np.newaxis]
    ends = np.maximum(0, most - generated - 1)
    pages = (-(-(tokens + ends.T) // PAGE_TOKENS) - shared) * (ends >= ends.T)
    return int(pages.sum(axis=0).max())


def log_survival(lengths: _Numbers, law: Sequence[_Numbers]) -> _Numbers:
    """The logarithm of the probability that an answer is longer. `law`: the fields of laws."""
    median, to_q80, to_q90, to_q95, slope = law
    beyond = np.log(lengths + 1) - median
    far = np.abs(beyond)
    fall = (
        log(2)
        + log(2.5) * np.minimum(far / to_q80, 1)
        + log(2) * np.clip((far - to_q80) / (to_q90 - to_q80), 0, 1)
        + log(2) * np.clip((far - to_q90) / (to_q95 - to_q90), 0, 1)
        + slope * np.maximum(far - to_q95, 0)
    )
    return np.where(beyond >= 0, -fall, np.log1p(-np.exp(-fall)))


def _steps() -> _Numbers:
    steps = [0.0, 8.0]
    while steps[-1] < MAX_STEPS:
        steps.append(float(int(steps[-1] * _GROWTH)))
    return np.array(steps)


_STEPS = _steps()
