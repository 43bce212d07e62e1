"""The time of an iteration, as a law that is learned from iterations (S3-18). Pure.

The law is a sum of four parts: a fixed one, one for each decode, one for each token that decodes attend to, and one for
each prompt token. Iterations are kept by kind, which is about as many decodes of about the same length with about as
many prompt tokens; of each kind, the newest. The law is fitted to the kinds by least squares of the relative errors,
with no negative part. So a rare kind counts like a frequent one, and kinds that are alike do not hide the others.

Iterations vary, and a few are very slow (a swap, a page fault): a time counts as at most twice the median of its kind.
"""

from collections import deque
from dataclasses import dataclass
from itertools import combinations
from math import inf, log2, sqrt
from statistics import fmean, median
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

MAX_KINDS = 128
MAX_OF_KIND = 64
"""How many iterations of a kind are kept."""
MIN_OF_KIND = 4
"""Of fewer iterations, the median says little."""
MIN_STEPS = 32
"""How many iterations must be seen before there is a law."""
MAX_SLOW = 2.0
"""A slower iteration counts as this multiple of the median."""
STEPS_PER_FIT = 16

_KINDS_PER_DOUBLING = 6
"""How finely decodes are told apart; context and prompts by doublings."""
_HALF_LIFE = 512
"""After how many iterations a kind that is no longer seen counts half, and begins anew if it is seen again: a machine
may become faster or slower."""
_TRAFFIC_STEPS = 512
"""Over about how many iterations the traffic is averaged."""
_RIDGE = 1e-7
"""Share of the squares by which parts are kept small, if the iterations do not tell them apart: each in inverse
proportion to its presumed share."""
_LEAST_SHARE = 0.01
_FIXED, _BY_WORK = (1.0, 0.0, 0.0, 0.0), (0.0, 1.0, 1.0, 1.0)
"""Shares: all of the time is fixed, or none of it."""
_ALONE = 1.5
"""With fewer decodes on average, mostly one sequence runs."""


class TimedStep(NamedTuple):
    seconds: float
    """Since the iteration before it ended"""
    decodes: int
    context: int
    """Tokens to which the decodes attend, themselves included"""
    prompt_tokens: int
    prompts: int = 0
    """Sequences that have these prompt tokens, and do not decode yet"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimeLaw:
    """Seconds."""

    fixed: float = 0.0
    decode: float = 0.0
    context: float = 0.0
    """For each token that decodes attend to"""
    prompt: float = 0.0
    """For each prompt token"""

    def seconds(self, decodes: float, context: float, prompt_tokens: float) -> float:
        return self.fixed + self.decode * decodes + self.context * context + self.prompt * prompt_tokens


class StepTimes:
    """Learns from iterations."""

    def __init__(self, target: float = inf) -> None:
        """`target`: how many seconds an iteration should take."""
        self._target = target
        self.law: StepTimeLaw | None = None
        """None: too few iterations were seen."""
        self.most_decodes = 0
        """The most decodes of an iteration of a kind that is known."""
        self.steps = 0
        self._kinds: dict[tuple[int, int, int], _Kind] = {}
        """The one that was seen last is the last."""
        self._sequences = self._decodes = self._context = self._prompt_tokens = 0.0
        """Sums of which older iterations are a smaller part"""

    def learn(self, iteration: TimedStep) -> bool:
        """→ True if the law is another one now. Iterations without decodes delay nobody's next token."""
        if iteration.decodes < 1 or iteration.seconds <= 0:
            return False
        self.steps += 1
        keep = 1 - 1 / _TRAFFIC_STEPS
        self._sequences = keep * self._sequences + iteration.decodes + iteration.prompts
        self._decodes = keep * self._decodes + iteration.decodes
        self._context = keep * self._context + iteration.context
        self._prompt_tokens = keep * self._prompt_tokens + iteration.prompt_tokens
        kind = self._kinds.pop(name := _kind_of(iteration), None) or _Kind()
        self._kinds[name] = kind
        kind.add(iteration, self.steps)
        if len(self._kinds) > MAX_KINDS:
            del self._kinds[next(iter(self._kinds))]
        if self.steps < MIN_STEPS or self.steps % STEPS_PER_FIT:
            return False
        return self._fit(iteration.decodes)

    def token_seconds(self, sequences: float) -> float:
        """The mean time of a token while that many sequences run, with the context and the prompts of the traffic: a
        part of them computes a prompt. Only with a law."""
        assert self.law is not None
        share = sequences / self._sequences
        return self.law.seconds(share * self._decodes, share * self._context, share * self._prompt_tokens)

    def forget(self) -> None:
        """Other kernels compute from now on. The law stays until there is a new one."""
        self._kinds.clear()
        self.steps = 0

    def _fit(self, decodes_now: int) -> bool:
        known = [kind for kind in self._kinds.values() if len(kind.iterations) >= MIN_OF_KIND]
        if not known:
            return False
        means = [kind.mean() for kind in known]
        seconds = np.array([mean[0] for mean in means])
        work = np.array([(1.0, *mean[1:]) for mean in means])
        weights = np.array([kind.weight(self.steps, decodes_now) for kind in known])
        presumed = self._presumed(*np.average(np.column_stack((seconds, work)), axis=0, weights=weights))
        parts = work * (np.sqrt(weights) / seconds)[:, None]
        fixed, decode, context, prompt = _fitted(parts, np.sqrt(weights), np.maximum(presumed, _LEAST_SHARE))
        self.law = StepTimeLaw(fixed=fixed, decode=decode, context=context, prompt=prompt)
        self.most_decodes = max(int(mean[1]) for mean in means)
        return True

    def _presumed(
        self, seconds: float, _: float, decodes: float, context: float, prompt_tokens: float
    ) -> tuple[float, float, float, float]:
        """The presumed share of each part in the time of such iterations, which decides where they do not tell.

        If they are too slow, fewer decodes take less: else one sequence would seem as slow as many that began together.
        If only one sequence runs, and keeps the target, others take nothing: else no second one would ever start, and
        show what it takes. Otherwise the shares are as before.
        """
        law = self.law
        if seconds > self._target:
            return _BY_WORK
        if law is None or decodes < _ALONE:
            return _FIXED
        whole = law.seconds(decodes, context, prompt_tokens) or 1.0
        by_context, by_prompts = law.context * context / whole, law.prompt * prompt_tokens / whole
        return law.fixed / whole, law.decode * decodes / whole, by_context, by_prompts


class _Kind:
    """Iterations that are alike."""

    __slots__ = ("_mean", "iterations", "seen_at")

    def __init__(self) -> None:
        self.iterations: deque[TimedStep] = deque(maxlen=MAX_OF_KIND)
        self.seen_at = 0
        self._mean: tuple[float, float, float, float] | None = None

    def add(self, iteration: TimedStep, step: int) -> None:
        if step - self.seen_at > _HALF_LIFE:
            self.iterations.clear()
        self.iterations.append(iteration)
        self.seen_at = step
        self._mean = None

    def mean(self) -> tuple[float, float, float, float]:
        """Of the same four numbers, without what makes an iteration very slow."""
        if self._mean is None:
            most = MAX_SLOW * median(one.seconds for one in self.iterations)
            rest = zip(*(one[1:4] for one in self.iterations), strict=True)
            seconds = fmean(min(one.seconds, most) for one in self.iterations)
            decodes, context, prompt_tokens = (fmean(numbers) for numbers in rest)
            self._mean = seconds, decodes, context, prompt_tokens
        return self._mean

    def weight(self, step: int, decodes_now: int) -> float:
        """Newer kinds count more, and those with about as many decodes as now: the law is straight only near by."""
        age = 2.0 ** ((self.seen_at - step) / _HALF_LIFE)
        distance = log2(self.iterations[-1].decodes / decodes_now)
        return float(age * sqrt(len(self.iterations)) / (1 + 4 * distance**2))


def _kind_of(iteration: TimedStep) -> tuple[int, int, int]:
    decodes = int(_KINDS_PER_DOUBLING * log2(iteration.decodes))
    return decodes, (iteration.context // iteration.decodes).bit_length(), iteration.prompt_tokens.bit_length()


def _fitted(
    parts: npt.NDArray[np.float64], wanted: npt.NDArray[np.float64], shares: npt.NDArray[np.float64]
) -> list[float]:
    """The factors of the columns whose sum is nearest to `wanted`, none of them negative. There are few columns, so
    each set of them is tried."""
    columns = parts.shape[1]
    sizes = np.sqrt((parts**2).sum(axis=0))
    parts = parts / np.where(sizes > 0, sizes, 1.0)
    ridges = np.diag(np.sqrt(_RIDGE * float((wanted**2).sum()) / shares))
    best, least = [0.0] * columns, float("inf")
    for count in range(1, columns + 1):
        for chosen in combinations(range(columns), count):
            if any(sizes[column] == 0 for column in chosen):
                continue
            padded = np.vstack([parts[:, chosen], ridges[np.ix_(chosen, chosen)]])
            goal = np.concatenate([wanted, np.zeros(count)])
            found = np.linalg.lstsq(padded, goal, rcond=None)[0]
            error = float(((padded @ found - goal) ** 2).sum())
            if error < least and (found >= 0).all():
                best, least = [0.0] * columns, error
                for column, factor in zip(chosen, found, strict=True):
                    best[column] = float(factor / sizes[column])
    return best
