"""What the features of a prompt say about the length of its answer: a sparse softmax over classes of lengths. Pure.

Each feature has one weight for each class, twice: once for everybody, and once for the tenant's adapter. Their sum
tilts the running statistics: each class gains the factor exp(sum). Without features, or for features that were never
seen, nothing changes. Weights lie in one table of fixed size; what shares a row by chance is learned together."""

import hashlib
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
    both = np.concatenate((wide, wide ^ _salt(tenant, adapter)))
    both *= _ODD  # wraps around: that mixes the bits
    return both >> _BITS


@dataclass(frozen=True, slots=True)
class PromptWeights:
    space: int
    """Which features they were fitted to: the gateway's way of making them, and its key."""
    table: np.ndarray

    @classmethod
    def zero(cls, space: int) -> Self:
        return cls(space, np.zeros((ROWS, CLASSES), np.float32))

    def tilted(self, shares: np.ndarray, tenant: str, adapter: str, features: np.ndarray) -> np.ndarray:
        """The shares of all buckets, given the features of the prompt."""
        rows = rows_of(tenant, adapter, features)
        # Several times faster than to index and to sum: all of a row is read at once, and no row is checked.
        of_rows = self.table.take(rows.view(np.int64), axis=0, mode="clip")
        return self.tilted_by(shares, np.ones(len(rows), np.float32) @ of_rows * scale_of(len(features)))

    def tilted_by(self, shares: np.ndarray, sums: np.ndarray) -> np.ndarray:
        """The shares of all buckets, where each class gains the factor exp(sum)."""
        tilted: np.ndarray = shares * np.exp(sums - sums.max())[CLASS_OF_BUCKET]
        total = tilted.sum()
        return tilted / total if total > 0 else shares


def scale_of(features: int) -> float:
    """Long prompts have many features; their sum must not grow as fast as their number."""
    return float(features**-0.5)
