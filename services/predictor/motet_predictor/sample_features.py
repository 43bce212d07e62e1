"""The features of a prompt as the predictor takes them from a message and keeps them in a sample. Pure.

They arrive from another process, so all of it is checked: how many there are, and which version and key made them."""

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice

import numpy as np

Features = np.ndarray[tuple[int], np.dtype[np.uint32]]

MAX_FEATURES = 280
"""The most that are used of a prompt."""
MAX_SAMPLE_BYTES = 1024
"""Of a sample with its names. Where names are long, some features are left out."""
FEATURE_BYTES = 3
"""More bits of a feature than these would tell no two rows of the table of weights apart."""
_SPACE_BYTES = 4
_NUMBERS_BYTES = 72
"""What a sample has beside names and features"""

NEWEST = 200
"""By this number of answers it is known which space is in use. Tenants that do not come back must not keep an old one,
and one gateway that still has another key must not decide."""

_FEATURE_BITS = np.uint32((1 << 8 * FEATURE_BYTES) - 1)

NO_FEATURES: Features = np.zeros(0, np.uint32)


def features_of(message: Sequence[int]) -> Features:
    """Each feature of a message once; more than MAX_FEATURES are ignored."""
    if not message:
        return NO_FEATURES
    # An `array` is made of a list faster than numpy makes one.
    features: Features = np.frombuffer(array("I", message[:MAX_FEATURES]), np.uint32) & _FEATURE_BITS
    if (features[1:] > features[:-1]).all():
        return features  # as gateways send them; this is faster than to sort them again
    return np.unique(features)


def to_bytes(space: int, features: Features, *, beside: int = 0) -> bytes:
    """Features for a sample whose names have `beside` bytes."""
    if not space or not len(features):
        return b""
    room = (MAX_SAMPLE_BYTES - _NUMBERS_BYTES - _SPACE_BYTES - beside) // FEATURE_BYTES
    bytes_of = features[: max(room, 0)].astype("<u4").view(np.uint8).reshape(-1, 4)
    return space.to_bytes(_SPACE_BYTES, "little") + bytes_of[:, :FEATURE_BYTES].tobytes()


def from_bytes(data: bytes) -> tuple[int, Features]:
    """What `to_bytes` has written, or space 0 and nothing if it is something else."""
    count, rest = divmod(len(data) - _SPACE_BYTES, FEATURE_BYTES)
    if not 0 < count <= MAX_FEATURES or rest:
        return 0, NO_FEATURES
    features = np.zeros((count, 4), np.uint8)
    features[:, :FEATURE_BYTES] = np.frombuffer(data, np.uint8, offset=_SPACE_BYTES).reshape(count, FEATURE_BYTES)
    return int.from_bytes(data[:_SPACE_BYTES], "little"), features.reshape(-1).view("<u4").astype(np.uint32)


def space_in_use(newest: Iterable[int]) -> int:
    """The space that most of the newest features belong to; 0: not known. `newest`: the newest first, 0 where an answer
    has no features."""
    counts = Counter(islice((space for space in newest if space), NEWEST))
    # Of equally many always the same: where two gateways have two keys, it must not change with each answer.
    return max(counts, key=lambda space: (counts[space], space), default=0)
