"""The classes of lengths that a prompt decides between: two for each doubling, so most have many buckets. Pure."""

import numpy as np

from motet.length_statistics import EDGES, bucket_of

LONGEST = 4096
"""Answers above this length are one class: so few are longer that nothing is learned about them."""


def _upper_edges() -> tuple[int, ...]:
    halves = range(2 * LONGEST.bit_length())
    return tuple(sorted({int(2 ** (half / 2)) for half in halves if 2 ** (half / 2) <= LONGEST}))


CLASS_EDGES = _upper_edges()
"""The longest length of each class but the last one."""

CLASSES = len(CLASS_EDGES) + 1
CLASS_OF_BUCKET = np.searchsorted(np.asarray(CLASS_EDGES), np.asarray(EDGES))
"""The class of each bucket of `motet.length_statistics`."""

_FIRST_BUCKETS = np.searchsorted(CLASS_OF_BUCKET, np.arange(CLASSES))


def class_of(tokens: int) -> int:
    return int(CLASS_OF_BUCKET[bucket_of(tokens)])


def class_shares(bucket_shares: np.ndarray) -> np.ndarray:
    """The share of each class, from the shares of all buckets. Of one distribution, or of one in each row."""
    return np.add.reduceat(bucket_shares, _FIRST_BUCKETS, axis=-1)
