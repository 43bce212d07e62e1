"""Queries of peepholes about a list of steps: who writes a value, who reads it, and whether two places are the same."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from motet_kernels.cpp.steps import Compute, Place, Step, Value, read_by, written_by

TYPES = (torch.float32, torch.bfloat16)
"""The types in which the steps of peepholes compute"""


@dataclass(frozen=True)
class Found:
    """The numbers of the matched steps, and the step that replaces them, at the place of the last one."""

    steps: frozenset[int]
    by: Compute


class Uses:
    def __init__(self, steps: Sequence[Step], positions: Value) -> None:
        """`positions`: the rows' value"""
        self.steps = steps
        self.positions = positions
        self._writers: dict[Value, list[int]] = {}
        self._readers: dict[Value, list[int]] = {}
        for number, step in enumerate(steps):
            for value in written_by(step):
                self._writers.setdefault(value, []).append(number)
            for value in dict.fromkeys(read_by(step)):
                self._readers.setdefault(value, []).append(number)

    def writers(self, of: object) -> list[int]:
        return self._writers.get(of, []) if isinstance(of, Value) else []

    def readers(self, of: object) -> list[int]:
        return self._readers.get(of, []) if isinstance(of, Value) else []

    def compute(self, number: int, *operations: str) -> Compute | None:
        """The step, if it computes one of these operations."""
        step = self.steps[number]
        return step if isinstance(step, Compute) and step.operation in operations else None

    def step(self, number: int) -> Compute:
        """A step that only_writer or only_reader has found"""
        step = self.steps[number]
        assert isinstance(step, Compute)
        return step

    def only_writer(self, of: object, operation: str) -> int | None:
        return self._only(self.writers(of), operation)

    def only_reader(self, of: object, operation: str) -> int | None:
        return self._only(self.readers(of), operation)

    def _only(self, numbers: Sequence[int], operation: str) -> int | None:
        return numbers[0] if len(numbers) == 1 and self.compute(numbers[0], operation) is not None else None


def same(one: Place | None, other: Place | None) -> bool:
    if one is None or other is None:
        return False
    return one.of is other.of and (one.strides, one.offset) == (other.strides, other.offset)


def in_sizes(place: Place | None, sizes: Sequence[int], wanted: Sequence[int]) -> Place | None:
    """The same numbers in the same order, viewed with other sizes; None if no strides give that view."""
    if place is None:
        return None
    dims = _dimensions(sizes, place.strides)
    strides: list[int] = []
    for size in reversed(wanted):
        if size == 1:
            strides.append(0)
            continue
        if not dims or dims[-1][0] % size:
            return None
        count, stride = dims.pop()
        strides.append(stride)
        if count > size:
            dims.append((count // size, stride * size))
    return None if dims else replace(place, strides=tuple(reversed(strides)))


def _dimensions(sizes: Sequence[int], strides: Sequence[int]) -> list[tuple[int, int]]:
    """The fewest sizes and strides that describe the same view"""
    dims: list[tuple[int, int]] = []
    for size, stride in zip(sizes, strides, strict=True):
        if size == 1:
            continue
        if dims and dims[-1][1] == stride * size:
            dims[-1] = dims[-1][0] * size, stride
        else:
            dims.append((size, stride))
    return dims


def is_whole(place: Place | None, sizes: Sequence[int]) -> bool:
    """True if these are all numbers of a value, in order."""
    if place is None or not isinstance(place.of, Value) or place.offset:
        return False
    count = place.of.size
    return _dimensions(sizes, place.strides) == ([(count, 1)] if count > 1 else [])


def lie_together(places: Sequence[Place], dtype: torch.dtype) -> bool:
    """True if all have this type, and the last dimension is contiguous."""
    return dtype in TYPES and all(place.of.dtype is dtype and place.strides[-1] == 1 for place in places)
