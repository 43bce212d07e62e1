"""How long the iterations of a simulated runner take.

A profile's law says what is usual. What strays from it is drawn from the profile, in runs of neighbours, because slow
iterations come together. Each is drawn from iterations of about the same size: what makes a short one take half as long
again does not do that to a long one.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import cycle, islice

from motet_simulator.profiles.profile import Profile, Work

RUN_OF_RESIDUALS = 32
"""How many neighbouring residuals a simulation draws at once."""

MAX_SIZES, MIN_OF_A_SIZE = 8, 64
"""In how many parts residuals are divided by the size of their iterations, and how many a part has at least."""


class StepTimes:
    """The seconds of a simulated runner's iterations: the same for the same seed and number, whoever asks and when."""

    def __init__(self, profile: Profile, seed: int) -> None:
        self._law = profile.law
        self._seed = seed
        residuals = profile.residuals
        decoding = (residuals.decoding, residuals.decoding_seconds)
        prompts = (residuals.prompts, residuals.prompts_seconds)
        alike = ((1.0,), ())
        self._decoding = _neighbours(*next(one for one in (decoding, prompts, alike) if one[0]))
        self._prompts = _neighbours(*next(one for one in (prompts, decoding, alike) if one[0]))
        self._run = -1
        self._chance = 0

    def seconds(self, step: int, work: Work) -> float:
        residuals = self._prompts if work.prefill else self._decoding
        seconds = self._law.seconds(work)
        return seconds * residuals.at(seconds, self._place(step), 1)[0]

    def decoding(self, first_step: int, count: int, work: Work) -> list[float]:
        """The seconds of `count` iterations in which the same sequences decode. `work` is that of the first."""
        law = self._law
        constant, of_adapters = law.fixed + law.seconds_of_decodes(work.decodes), law.adapters * work.adapters
        of_context, context, decodes = law.context, work.context, work.decodes
        usual = [constant + of_context * (context + decodes * number) + of_adapters for number in range(count)]
        factors: list[float] = []
        while len(factors) < count:
            done = len(factors)
            step = first_step + done
            alike = self._decoding.alike(usual, done)
            of_run = RUN_OF_RESIDUALS - step % RUN_OF_RESIDUALS
            factors += self._decoding.at(usual[done], self._place(step), min(of_run, alike))
        return [seconds * factor for seconds, factor in zip(usual, factors, strict=True)]

    def _place(self, step: int) -> int:
        run, place = divmod(step, RUN_OF_RESIDUALS)
        if run != self._run:
            self._run, self._chance = run, _mixed(self._seed * 0x9E3779B97F4A7C15 + run)
        return self._chance + place


class _Neighbours:
    """Residuals in the order in which they were seen, in parts by the size of their iterations. After the last one of a
    part comes its first."""

    def __init__(self, residuals: tuple[float, ...], sizes: tuple[float, ...]) -> None:
        self._borders = _borders(sizes)
        parts: list[list[float]] = [[] for _ in range(len(self._borders) + 1)]
        for factor, seconds in zip(residuals, sizes or (0.0,) * len(residuals), strict=True):
            parts[bisect_right(self._borders, seconds)].append(factor)
        self._parts = [(len(part), (*part, *islice(cycle(part), RUN_OF_RESIDUALS))) for part in parts]

    def at(self, seconds: float, place: int, count: int) -> tuple[float, ...]:
        """`count` neighbours of iterations of about this size, at most those of a run."""
        there, again = self._parts[bisect_right(self._borders, seconds)]
        first = place % there
        return again[first : first + count]

    def alike(self, ascending: Sequence[float], first: int) -> int:
        """How many of these sizes, from the first one on, are in the same part."""
        border = bisect_right(self._borders, ascending[first])
        if border == len(self._borders) or ascending[-1] < self._borders[border]:
            return len(ascending) - first
        return bisect_left(ascending, self._borders[border]) - first


_neighbours = lru_cache(maxsize=4)(_Neighbours)
"""All runners of a simulation have the same."""


def _borders(sizes: Sequence[float]) -> list[float]:
    """Where a part ends and the next one begins. All parts have about the same number of these sizes."""
    ascending = sorted(sizes)
    parts = min(MAX_SIZES, len(sizes) // MIN_OF_A_SIZE)
    borders = {ascending[len(sizes) * part // parts] for part in range(1, parts)}
    return sorted(border for border in borders if border > ascending[0])


def _mixed(number: int) -> int:
    """The finalizer of SplitMix64: neighbours get numbers that have nothing to do with each other."""
    number = (number + 0x9E3779B97F4A7C15) & _MASK
    number = ((number ^ number >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    number = ((number ^ number >> 27) * 0x94D049BB133111EB) & _MASK
    return number ^ number >> 31


_MASK = (1 << 64) - 1
