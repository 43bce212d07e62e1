"""Running quantiles of answer lengths, in small fixed memory. Pure: no clock, no I/O.

A histogram of the logarithm of lengths, in which older answers count less and less. Of a censored answer (cut by
max_tokens or by the client) we only know that it is at least this long; its weight goes to longer answers, by the
method of Kaplan and Meier. A prior counts like a number of answers with its distribution (the estimator of Susarla and
Van Ryzin): a tenant with few answers is estimated mostly by the lengths of other tenants.
"""

import math
import struct
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Self

MAX_TOKENS = 1 << 20
BUCKETS_PER_OCTAVE = 16
HALF_LIFE = 512
"""After this many newer answers, an answer counts half. That is enough answers for a stable q95, and few enough to
adapt within a day when a tenant's prompts change."""


def _upper_edges() -> tuple[int, ...]:
    edges = [1]
    step = 2.0 ** (1 / BUCKETS_PER_OCTAVE)
    while edges[-1] < MAX_TOKENS:
        edges.append(min(max(edges[-1] + 1, int(edges[-1] * step)), MAX_TOKENS))
    return tuple(edges)


EDGES = _upper_edges()
"""The longest length in each bucket. Short lengths have a bucket each; the others are at most 5 % apart."""

BucketShares = Sequence[float]
"""One share for each bucket of EDGES. The shares add up to 1."""


def bucket_of(tokens: int) -> int:
    return bisect_left(EDGES, min(max(tokens, 1), MAX_TOKENS))


def quantiles_of(masses: BucketShares, quantiles: Sequence[float]) -> list[int]:
    """For each quantile q, the shortest length that at least the share q of all answers does not exceed."""
    cumulated = list(accumulate(masses))
    last = len(EDGES) - 1
    # The tolerance is for a share that is q except for rounding: its bucket still counts.
    return [EDGES[min(bisect_left(cumulated, q - 1e-9), last)] for q in quantiles]


class LengthStatistics:
    """What is known about the lengths of one kind of answers."""

    _HEADER = struct.Struct("<BQdH")
    _ENTRY = struct.Struct("<Hdd")
    _VERSION = 1
    _RENORMALISE_ABOVE = 1e9

    def __init__(self) -> None:
        self._ended = [0.0] * len(EDGES)
        self._censored = [0.0] * len(EDGES)
        self._total = 0.0
        self._unit = 1.0  # the weight of the next answer; making it larger is cheaper than making all others smaller
        self._count = 0

    @property
    def count(self) -> int:
        """How many answers were ever added."""
        return self._count

    @property
    def weight(self) -> float:
        """How many answers still count. Older ones count less than 1."""
        return self._total / self._unit

    def weights(self) -> Iterator[tuple[float, float]]:
        """Of each bucket: how many complete answers still count, and how many censored ones."""
        scale = 1.0 / self._unit
        for ended, censored in zip(self._ended, self._censored, strict=True):
            yield ended * scale, censored * scale

    def observe(self, tokens: int, *, censored: bool = False) -> None:
        if tokens < 0:
            raise ValueError(f"a length cannot be negative: {tokens}")
        if censored and tokens == 0:
            return  # every answer has at least 0 tokens
        self._unit *= 2.0 ** (1 / HALF_LIFE)
        (self._censored if censored else self._ended)[bucket_of(tokens)] += self._unit
        self._total += self._unit
        self._count += 1
        if self._unit > self._RENORMALISE_ABOVE:
            self._renormalise()

    def bucket_shares(self, prior: BucketShares | None = None, strength: float = 0.0) -> BucketShares | None:
        """The share of each bucket, where `prior` counts as `strength` answers. None when nothing is known.

        The weight of censored answers that are longer than all complete ones goes to twice the longest known length,
        as a promise doubles (S3-13).
        """
        ended: Sequence[float] = self._ended
        total = self._total
        if prior is not None and strength > 0:
            weight = strength * self._unit
            ended = [own + weight * share for own, share in zip(ended, prior, strict=True)]
            total += weight
        if total <= 0:
            return None
        if not any(self._censored):  # the usual case, several times faster
            return [died / total for died in ended]
        masses = [0.0] * len(EDGES)
        surviving, at_risk, last = 1.0, total, 0
        for i, (died, left) in enumerate(zip(ended, self._censored, strict=True)):
            if died > 0:
                hazard = min(died / at_risk, 1.0) if at_risk > 0 else 1.0
                masses[i] = surviving * hazard
                surviving *= 1.0 - hazard
            if died > 0 or left > 0:
                last = i
                at_risk -= died + left
            if surviving <= 0:
                break
        if surviving > 0:
            masses[bucket_of(EDGES[last] * 2)] += surviving
        return masses

    def quantile(self, q: float) -> int | None:
        """The shortest length that at least the share `q` of answers does not exceed; None before the first answer."""
        if not 0 <= q <= 1:
            raise ValueError(f"a quantile lies between 0 and 1, not at {q}")
        masses = self.bucket_shares()
        return None if masses is None else quantiles_of(masses, (max(q, 1e-6),))[0]

    def merge(self, other: "LengthStatistics") -> None:
        """Add the answers of `other`, as if they were as recent as our own."""
        self._renormalise()
        for i, (ended, censored) in enumerate(other.weights()):
            self._ended[i] += ended
            self._censored[i] += censored
        self._total = sum(self._ended) + sum(self._censored)
        self._count += other.count

    def to_bytes(self) -> bytes:
        """Everything as bytes, a few kilobytes at most. Empty buckets are left out."""
        entries = [
            (i, ended, censored)
            for i, (ended, censored) in enumerate(zip(self._ended, self._censored, strict=True))
            if ended or censored
        ]
        header = self._HEADER.pack(self._VERSION, self._count, self._unit, len(entries))
        return header + b"".join(self._ENTRY.pack(*entry) for entry in entries)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Read what `to_bytes` has written. Raises ValueError if it is something else."""
        statistics = cls()
        try:
            version, statistics._count, statistics._unit, entries = cls._HEADER.unpack_from(data)
            if version != cls._VERSION or len(data) != cls._HEADER.size + entries * cls._ENTRY.size:
                raise ValueError(f"length statistics of another version ({version}) or of a wrong size")
            for i, ended, censored in cls._ENTRY.iter_unpack(data[cls._HEADER.size :]):
                if not (0 <= ended < math.inf and 0 <= censored < math.inf):
                    raise ValueError(f"damaged length statistics: {ended} and {censored} are no weights")
                statistics._ended[i], statistics._censored[i] = ended, censored
        except (struct.error, IndexError) as error:
            raise ValueError(f"damaged length statistics: {error}") from error
        statistics._total = sum(statistics._ended) + sum(statistics._censored)
        # A single row that is not a number would spoil the mean over all tenants.
        if not (0 < statistics._unit < math.inf and statistics._total < math.inf):
            raise ValueError(
                f"damaged length statistics: weights of {statistics._total} in units of {statistics._unit}"
            )
        return statistics

    def _renormalise(self) -> None:
        scale, self._unit = 1.0 / self._unit, 1.0
        self._ended = [mass * scale for mass in self._ended]
        self._censored = [mass * scale for mass in self._censored]
        self._total = sum(self._ended) + sum(self._censored)
