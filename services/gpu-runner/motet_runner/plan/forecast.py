"""How many pages sequences will need at the most, at any later time, if they all go on.

Sequences end at different times, so they never need together what each of them needs at its own end. The sum of
promises counts exactly that: where promises are large it wastes memory, and where they are small it is exceeded.

Nobody knows how long an answer becomes, but its quantiles are estimated. A sequence that has generated g tokens still
runs s iterations later with the probability P(L > g + s) / P(L > g) (S3-23). So for each s the expected need is a sum
over the sequences, and so is its variance. The forecast is the largest need at some s, each with a margin of some
standard deviations. These s are the same whoever is in the batch: with one sequence more, no need is smaller.
LightLLM's scheduler looks for the same maximum with one drawn length for each sequence. Pure arithmetic.
"""

from collections.abc import Collection, Sequence
from math import exp, log
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

ANY_NUMBER = 1 << 40
"""More pages than there are; so few that their tokens can be counted in 64 bits."""
MAX_STEPS = 1 << 20
"""How far the forecast looks ahead."""
_GROWTH = 1.3
"""From one step that is looked at to the next, after the first ones."""
DEVIATIONS = 1.5
"""The margin, in standard deviations of the need."""
_NARROWEST = 0.01
"""The least distance of two quantiles, as a difference of logarithms: equal ones are allowed."""
_STEEPEST = 4.0
"""How fast, at the most, the probability of even longer answers falls beyond the last quantile: as a power of the
length. An answer that is longer than it could be by its quantiles may then still go on."""

_Numbers = npt.NDArray[np.float64]
_Integers = npt.NDArray[np.int64]


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
    most_pages: int = ANY_NUMBER
    """How many pages it has at the most, whatever its tokens: fewer than they need if all attention has a window."""

    @property
    def steps_to_end(self) -> int:
        """After how many iterations it computes its last token, if its answer becomes as long as it can."""
        return max(0, self.most - self.generated - 1)

    @property
    def but_tokens(self) -> tuple[float, ...]:
        """All of it that decides when it ends."""
        return (self.generated, self.most, *self.law, self.most_pages)

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
    most_pages: _Numbers
    steps: _Numbers
    """Those that are looked at."""
    runs: _Numbers
    """How likely each still runs at each of them."""

    def beside(self, prospects: Sequence[Prospect]) -> "_Chances":
        """With these as well. Those of the others are not computed again."""
        columns = np.array([(one.tokens, one.most_pages, one.generated, one.most, *one.law) for one in prospects])
        tokens, most_pages, generated, most, *law = columns.T[:, :, np.newaxis]
        until_end = int(np.searchsorted(_STEPS, (most - generated).max()))
        steps = _STEPS[: max(len(self.steps), until_end)]
        lengths = generated + steps
        survival = log_survival(lengths, law)
        runs = np.exp(survival - survival[:, :1])
        runs[lengths >= most] = 0
        runs[:, 0] = 1
        others = np.zeros((len(self.runs), len(steps)))  # at steps that were not looked at, they have ended
        others[:, : len(self.steps)] = self.runs
        return _Chances(
            np.concatenate((self.tokens, tokens)),
            np.concatenate((self.most_pages, most_pages)),
            steps,
            np.concatenate((others, runs)),
        )


class Outlook:
    """The future of a batch. What was found out about its sequences is kept for those that ask to join."""

    def __init__(self, page_tokens: int) -> None:
        self._page_tokens = page_tokens
        self.prospects: list[Prospect] = []
        self._chances = _OF_NONE
        """Of the first ones: as many as there were when somebody asked."""

    def add(self, prospects: Collection[Prospect]) -> None:
        self.prospects += prospects

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
        tokens, most_pages, steps, runs = self._chances.beside(also) if also else self._chances
        if not len(tokens):
            return Need(0, np.zeros(0))
        pages = np.minimum(np.ceil((tokens + steps) / self._page_tokens), most_pages)
        if shared is not None:
            pages -= np.array(shared)[:, np.newaxis]
        expected = runs * pages
        mean = expected.sum(axis=0)
        deviation = np.sqrt((expected * (pages - expected)).sum(axis=0))
        if_all_run = (pages * (runs > 0)).sum(axis=0)
        needs = np.minimum(mean + deviations * deviation, if_all_run)
        at = int(needs.argmax())
        return Need(max(int(np.ceil(needs[at])), at_least), expected[:, at])


def pages_of_longest_lives(prospects: Sequence[Prospect], page_tokens: int, shared: Sequence[int] | None = None) -> int:
    """The largest need if each answer becomes as long as it can. It is at the last step of one of them, just before the
    need falls; the steps of a forecast may miss that. `shared`: as in `Outlook.need`."""
    if not prospects:
        return 0
    tokens, ends, most_pages = np.array([(one.tokens, one.steps_to_end, one.most_pages) for one in prospects]).T
    grow_until = np.minimum(ends, most_pages * page_tokens - tokens)
    grown = np.where(grow_until < ends, most_pages, 0)
    growing, running = _Until(grow_until), _Until(ends)
    # Those that grow need pages for their tokens and the steps: what is whole in both, and one page more if what is
    # left of both is a page together.
    rounded = tokens + page_tokens - 1
    of_tokens = growing.sums(rounded // page_tokens - grown, ends)
    of_steps = growing.sums(np.ones_like(ends), ends) * (ends // page_tokens)
    left = growing.sums((rounded % page_tokens)[:, np.newaxis] >= np.arange(page_tokens + 1), ends)
    of_both = left[np.arange(len(ends)), page_tokens - ends % page_tokens]
    of_grown = running.sums(grown if shared is None else grown - np.array(shared), ends)
    return int((of_tokens + of_steps + of_both + of_grown).max())


class _Until:
    """Sums over those that last until a step."""

    def __init__(self, steps: _Integers) -> None:
        self._order = np.argsort(steps)
        self._steps = steps[self._order]

    def sums(self, values: npt.NDArray[np.generic], steps: _Integers) -> _Integers:
        """For each of the steps, the sum of the values of all that last until it or longer."""
        later = np.cumsum(values[self._order[::-1]], axis=0, dtype=np.int64)
        none_lasts = np.zeros((1, *later.shape[1:]), dtype=np.int64)
        lasting = len(self._steps) - np.searchsorted(self._steps, steps)
        sums: _Integers = np.concatenate((none_lasts, later))[lasting]
        return sums


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
    steps = [0.0, 2.0, 4.0, 6.0, 8.0]
    while steps[-1] < MAX_STEPS:
        steps.append(float(int(steps[-1] * _GROWTH)))
    return np.array(steps)


_STEPS = _steps()
_OF_NONE = _Chances(np.zeros((0, 1)), np.zeros((0, 1)), _STEPS[:1], np.zeros((0, 1)))
