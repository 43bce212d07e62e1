"""What the features of a prompt say about the length of its answer: a sparse softmax over classes of lengths. Pure.

Each feature has one weight for each class, twice: once for everybody, and once for the tenant's adapter. Their sum
tilts the running statistics: each class gains the factor exp(sum). Without features, or for features that were never
seen, nothing changes. Weights lie in one table of fixed size; what shares a row by chance is learned together."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Self

import numpy as np

from motet_predictor.length_classes import CLASS_OF_BUCKET, CLASSES

ROWS = 1 << 17
"""A power of two. With 24 classes in four bytes each, the table has 12.6 MB."""

MAX_WEIGHT = 30.0
"""A weight beyond this decides alone, so a larger one means damaged bytes."""

_ODD, _BITS = np.uint64(0x9E3779B97F4A7C15), np.uint64(47)


@lru_cache(maxsize=4096)
def _salt(tenant: str, adapter: str) -> np.uint64:
    name = f"{tenant}\0{adapter}".encode("utf-8", "surrogatepass")
    return np.uint64(int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little"))


def rows_of(tenant: str, adapter: str, features: np.ndarray) -> np.ndarray:
    """The rows of the features: those for everybody, then those of the tenant's adapter."""
    wide = features.astype(np.uint64)
    return _rows_of(np.concatenate((wide, wide ^ _salt(tenant, adapter))))


def _rows_of(wide: np.ndarray) -> np.ndarray:
    rows: np.ndarray = (wide * _ODD) >> _BITS  # the product wraps around: that mixes the bits
    return rows


@dataclass(frozen=True, slots=True)
class PromptWeights:
    space: int
    """Which features they were fitted to: the gateway's way of making them, and its key."""
    table: np.ndarray

    @classmethod
    def zero(cls, space: int) -> Self:
        return cls(space, np.zeros((ROWS, CLASSES), np.float32))

    def sums(self, prompts: Sequence[tuple[str, str, np.ndarray]]) -> np.ndarray:
        """The logarithm of the factor that each class gains by the features of each prompt (tenant, adapter, features):
        a row for each. All rows of the table are read at once, which is faster than prompt by prompt."""
        wide = np.concatenate([features for _, _, features in prompts]).astype(np.uint64)
        counts = [len(features) for _, _, features in prompts]
        salts = np.repeat(np.array([_salt(tenant, adapter) for tenant, adapter, _ in prompts]), counts)
        for_all, own = self._read(wide), self._read(wide ^ salts)
        sums, end = [], 0
        for count in counts:
            start, end = end, end + count
            ones = np.ones(count, np.float32)  # several times faster than `sum`
            sums.append((ones @ for_all[start:end] + ones @ own[start:end]) * scale_of(count))
        return np.array(sums)

    def _read(self, wide: np.ndarray) -> np.ndarray:
        # Faster than to index: all of a row is read at once, and no row is checked.
        return self.table.take(_rows_of(wide).view(np.int64), axis=0, mode="clip")


def tilted_by(shares: np.ndarray, sums: np.ndarray) -> np.ndarray:
    """The shares of all buckets, where each class gains the factor exp(sum). Of one prompt, or of one in each row."""
    factors = np.exp(sums - sums.max(axis=-1, keepdims=True))
    tilted: np.ndarray = shares * factors.take(CLASS_OF_BUCKET, axis=-1, mode="clip")
    total = tilted.sum(axis=-1, keepdims=True)
    np.divide(tilted, total, out=tilted, where=total > 0)
    return np.where(total > 0, tilted, shares)


def scale_of(features: int) -> float:
    """Long prompts have many features; their sum must not grow as fast as their number."""
    return float(features**-0.5)
