"""The features of a prompt as the predictor takes them from a message and keeps them in a sample. Pure.

They arrive from another process, so all of it is checked: how many there are, and which version and key made them."""

from collections.abc import Sequence

import numpy as np

Features = np.ndarray[tuple[int], np.dtype[np.uint32]]

MAX_FEATURES = 224
"""The most that are used of a prompt. A sample with them has less than a KiB, if its names are short."""

NO_FEATURES: Features = np.zeros(0, np.uint32)


def features_of(message: Sequence[int]) -> Features:
    """Each feature of a message once; more than MAX_FEATURES are ignored."""
    return np.unique(np.array(message[:MAX_FEATURES], dtype=np.uint32)) if message else NO_FEATURES


def to_bytes(space: int, features: Features) -> bytes:
    return space.to_bytes(4, "little") + features.astype("<u4").tobytes() if space and len(features) else b""


def from_bytes(data: bytes) -> tuple[int, Features]:
    """What `to_bytes` has written, or space 0 and nothing if it is something else."""
    if len(data) < 8 or len(data) % 4 or len(data) > 4 * (MAX_FEATURES + 1):
        return 0, NO_FEATURES
    space, *_ = numbers = np.frombuffer(data, "<u4").astype(np.uint32)
    return int(space), numbers[1:]
