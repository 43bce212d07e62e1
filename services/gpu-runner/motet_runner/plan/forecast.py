"""How many pages sequences will need at the most, at any later time, if they all go on.

Sequences end at different times, so they never need together what each of them needs at its own end. The sum of
promises counts exactly that: where promises are large it wastes memory, and where they are small it is exceeded.

Nobody knows how long an answer becomes, but its quantiles are estimated. A sequence that has generated g tokens still
runs s iterations later with the probability P(L > g + s) / P(L > g) (S3-23). So for each s the expected need is a sum
over the sequences, and so is its variance. The forecast is the largest need over all s, each with a margin of some
standard deviations. LightLLM's scheduler looks for the same maximum with one drawn length for each sequence. Pure
arithmetic.
"""

from collections.abc import Collection, Sequence
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

    @property
    def steps_to_end(self) -> int:
        """After how many iterations it computes its last token, if its answer becomes as long as it can."""
        return max(0, self.most - self.generated - 1)

    @property
    def end_pages(self) -> int:
        """How many pages it needs then."""
        return -(-(self.tokens + self.steps_to_end) // PAGE_TOKENS)

    @property
    def but_tokens(self) -> tuple[float, ...]:
        """All of it that decides when it ends."""
        return (self.generated, self.most, *self.law)

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
    weights: _Numbers
    """How much of it is expected of each sequence."""

    @property
    def of_each(self) -> tuple[int, ...]:
        """How much of it is of each sequence, at least one page. The sum is `pages`.

        Each has one page, and the others by weight. Those with the largest remainders get what rounding leaves: without
        it, the sum over hundreds would miss many pages.
        """
        weights = self.weights
        if not len(weights):
            return ()
        beyond = np.maximum(0, weights * (self.pages / weights.sum()) - 1)
        left = self.pages - len(weights)
        exact = beyond * (left / beyond.sum()) if left else beyond * 0
        shares = np.floor(exact)
        shares[np.argsort(shares - exact, kind="stable")[: left - int(shares.sum())]] += 1
        return tuple((shares + 1).astype(int).tolist())


class _Chances(NamedTuple):
    tokens: _Numbers
    """Of each sequence, as a column."""
    steps: _Numbers
    """Those that are looked at."""
    runs: _Numbers
    """How likely each still runs at each of them."""

    def beside(self, prospects: Sequence[Prospect]) -> "_Chances":
        """With these as well. Those of the others are not computed again."""
        columns = np.array([(one.tokens, one.generated, one.most, *one.law) for one in prospects])
        tokens, generated, most, *law = columns.T[:, :, np.newaxis]
        last = max(self.steps[-1], (most - generated).max() - 1)
        steps = np.append(_STEPS[: int(np.searchsorted(_STEPS, last))], last)
        lengths = generated + steps
        survival = log_survival(lengths, law)
        runs = np.exp(survival - survival[:, :1])
        runs[lengths >= most] = 0
        runs[:, 0] = 1
        others = np.zeros((len(self.runs), len(steps)))  # at steps that were not looked at, they have ended
        others[:, np.isin(steps, self.steps)] = self.runs[:, np.isin(self.steps, steps)]
        return _Chances(np.concatenate((self.tokens, tokens)), steps, np.concatenate((others, runs)))


_OF_NONE = _Chances(np.zeros((0, 1)), np.zeros(1), np.zeros((0, 1)))


class Outlook:
    """The future of a batch. What was found out about its sequences is kept for those that ask to join."""

    def __init__(self) -> None:
        self.prospects: list[Prospect] = []
        self.sum_of_ends = 0
        """The pages of all of them, each at its own end. No need exceeds this sum, and it costs little."""
        self._chances = _OF_NONE
        """Of the first ones: as many as there were when somebody asked."""

    def add(self, prospects: Collection[Prospect]) -> None:
        self.prospects += prospects
        self.sum_of_ends += sum(one.end_pages for one in prospects)

    def need(
        self,
        also: Sequence[Prospect] = (),
        *,
        shared: Sequence[int] | None = None,
        at_least: int = 0,
        deviations: float = DEVIATIONS,
    ) -> Need:
        """The largest need at any later iteration, with those of `also`.

        `shared`: how many of each one's pages another one pays for, which most likely ends later. `at_least`: what they
        surely need.
        """
        known = len(self._chances.tokens)
        if known < len(self.prospects):
            self._chances = self._chances.beside(self.prospects[known:])
        tokens, steps, runs = self._chances.beside(also) if also else self._chances
        if not len(tokens):
            return Need(0, np.zeros(0))
        pages = np.ceil((tokens + steps) / PAGE_TOKENS)
        if shared is not None:
            pages -= np.array(shared)[:, np.newaxis]
        expected = runs * pages
        mean = expected.sum(axis=0)
        deviation = np.sqrt((expected * (pages - expected)).sum(axis=0))
        if_all_run = (pages * (runs > 0)).sum(axis=0)
        needs = np.minimum(mean + deviations * deviation, if_all_run)
        at = int(needs.argmax())
        return Need(max(int(np.ceil(needs[at])), at_least), expected[:, at])


def pages_of_longest_lives(prospects: Sequence[Prospect], shared: Sequence[int] | None = None) -> int:
    """The largest need if each answer becomes as long as it can. It is at the last step of one of them, just before the
    need falls; the steps of a forecast may miss that. `shared`: as in `Outlook.need`."""
    if not prospects:
        return 0
    columns = np.array([(one.tokens + PAGE_TOKENS - 1, one.steps_to_end) for one in prospects])
    columns = np.column_stack((columns, shared if shared is not None else np.zeros(len(columns), dtype=int)))
    rounded, ends, paid = columns[np.argsort(-columns[:, 1])].T
    # Who still runs at the end of one are all that come up to it in this order, with those that end at the same step.
    running = np.searchsorted(-ends, -ends, side="right")
    whole = np.cumsum(rounded // PAGE_TOKENS - paid)[running - 1] + running * (ends // PAGE_TOKENS)
    # One more page each, if the tokens of its last page and those of the last steps are a page together.
    in_last_page = np.cumsum((rounded % PAGE_TOKENS)[:, np.newaxis] >= np.arange(PAGE_TOKENS + 1), axis=0)
    return int((whole + in_last_page[running - 1, PAGE_TOKENS - ends % PAGE_TOKENS]).max())


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
