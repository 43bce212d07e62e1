"""Running quantiles of answer lengths, in small fixed memory. Pure: no clock, no I/O.

A histogram of the logarithm of lengths, in which older answers count less and less. Of a censored answer (cut by
max_tokens or by the client) we only know that it is at least this long; its weight goes to longer answers, by the
method of Kaplan and Meier. A prior counts like a number of answers with its distribution (the estimator of Susarla and
Van Ryzin): a tenant with few answers is estimated mostly by the lengths of other tenants.
"""

import math
import struct
from bisect import bisect_left
from collections.abc import Sequence
from typing import Self

import numpy as np

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

BucketShares = np.ndarray
"""One share for each bucket of EDGES. The shares add up to 1."""


def bucket_of(tokens: int) -> int:
    return bisect_left(EDGES, min(max(tokens, 1), MAX_TOKENS))


def quantiles_of(masses: BucketShares, quantiles: Sequence[float]) -> list[int]:
    """For each quantile q, the shortest length that at least the share q of all answers does not exceed."""
    # The tolerance is for a share that is q except for rounding: its bucket still counts.
    at = np.searchsorted(np.cumsum(masses), np.asarray(quantiles) - 1e-9)
    return [EDGES[one] for one in np.minimum(at, len(EDGES) - 1).tolist()]


class LengthStatistics:
    """What is known about the lengths of one kind of answers."""

    _HEADER = struct.Struct("<BQdH")
    _ENTRY = np.dtype([("bucket", "<u2"), ("ended", "<f8"), ("censored", "<f8")])
    _VERSION = 1
    _RENORMALISE_ABOVE = 1e9

    def __init__(self) -> None:
        self._ended = np.zeros(len(EDGES))
        self._censored = np.zeros(len(EDGES))
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

    def weights(self) -> tuple[np.ndarray, np.ndarray]:
        """Of each bucket: how many complete answers still count, and how many censored ones."""
        return self._ended / self._unit, self._censored / self._unit

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
        ended, total = self._ended, self._total
        if prior is not None and strength > 0:
            weight = strength * self._unit
            ended = ended + weight * prior
            total += weight
        if total <= 0:
            return None
        if not self._censored.any():  # the usual case
            return ended / total
        left = ended + self._censored
        at_risk = np.cumsum(left[::-1])[::-1]
        hazards = ended / np.where(at_risk > 0, at_risk, 1.0)
        surviving = np.cumprod(1.0 - hazards)
        masses: BucketShares = np.concatenate(([1.0], surviving[:-1])) * hazards
        masses[bucket_of(EDGES[int(left.nonzero()[0][-1])] * 2)] += surviving[-1]
        return masses

    def quantile(self, q: float) -> int | None:
        """The shortest length that at least the share `q` of answers does not exceed; None before the first answer."""
        found = self.quantiles((q,))
        return None if found is None else found[0]

    def quantiles(self, shares: Sequence[float]) -> list[int] | None:
        """The same of several shares, in the time of one."""
        if not all(0 <= q <= 1 for q in shares):
            raise ValueError(f"a quantile lies between 0 and 1, not at {shares}")
        masses = self.bucket_shares()
        return None if masses is None else quantiles_of(masses, [max(q, 1e-6) for q in shares])

    def merge(self, other: "LengthStatistics") -> None:
        """Add the answers of `other`, as if they were as recent as our own."""
        self._renormalise()
        ended, censored = other.weights()
        self._ended += ended
        self._censored += censored
        self._total = float(self._ended.sum() + self._censored.sum())
        self._count += other.count

    def to_bytes(self) -> bytes:
        """Everything as bytes, a few kilobytes at most. Empty buckets are left out."""
        buckets = (self._ended + self._censored).nonzero()[0]
        entries = np.empty(len(buckets), self._ENTRY)
        entries["bucket"], entries["ended"], entries["censored"] = (
            buckets,
            self._ended[buckets],
            self._censored[buckets],
        )
        return self._HEADER.pack(self._VERSION, self._count, self._unit, len(entries)) + entries.tobytes()

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Read what `to_bytes` has written. Raises ValueError if it is something else."""
        statistics = cls()
        try:
            version, statistics._count, statistics._unit, entries = cls._HEADER.unpack_from(data)
            if version != cls._VERSION or len(data) != cls._HEADER.size + entries * cls._ENTRY.itemsize:
                raise ValueError(f"length statistics of another version ({version}) or of a wrong size")
            kept = np.frombuffer(data[cls._HEADER.size :], cls._ENTRY)
            weights = np.stack((kept["ended"], kept["censored"]))
            if not ((weights >= 0) & (weights < math.inf)).all():
                raise ValueError("damaged length statistics: some weights are no numbers, or below 0")
            statistics._ended[kept["bucket"]], statistics._censored[kept["bucket"]] = weights
        except (struct.error, IndexError) as error:
            raise ValueError(f"damaged length statistics: {error}") from error
        with np.errstate(over="ignore"):
            statistics._total = float(statistics._ended.sum() + statistics._censored.sum())
        # A single row that is not a number would spoil the mean over all tenants.
        if not (0 < statistics._unit < math.inf and statistics._total < math.inf):
            raise ValueError(
                f"damaged length statistics: weights of {statistics._total} in units of {statistics._unit}"
            )
        return statistics

    def _renormalise(self) -> None:
        self._ended /= self._unit
        self._censored /= self._unit
        self._unit = 1.0
        self._total = float(self._ended.sum() + self._censored.sum())
