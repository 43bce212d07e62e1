"""Queries about a list of steps: which step writes or reads some numbers, and whether two views are the same."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from motet_kernels.cpp.steps import Compute, Place, Step, Value, read_by, written_by

TYPES = (torch.float32, torch.bfloat16)
"""The types in which the steps of peepholes compute"""


@dataclass(frozen=True)
class Found:
    """The indices of the matched steps, and the step that replaces them, at the place of the last matched step."""

    steps: frozenset[int]
    by: Compute


class Numbers(NamedTuple):
    """The numbers that a step reads or writes"""

    place: Place
    sizes: tuple[int, ...]
    """The sizes of the step's view of these numbers"""

    @property
    def of(self) -> object:
        return self.place.of

    @property
    def dtype(self) -> torch.dtype:
        return self.place.of.dtype

    def are(self, other: "Numbers") -> bool:
        """True if these are the same numbers, in the same order"""
        same = self.of is other.of and self.place.offset == other.place.offset
        return same and _dimensions(self) == _dimensions(other)

    def in_sizes(self, wanted: Sequence[int]) -> Place | None:
        """The same numbers in the same order, viewed with other sizes; None if no strides give that view."""
        dims = _dimensions(self)
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
        return None if dims else replace(self.place, strides=tuple(reversed(strides)))


def _dimensions(numbers: Numbers) -> list[tuple[int, int]]:
    """The fewest sizes and strides that describe the same view"""
    dims: list[tuple[int, int]] = []
    for size, stride in zip(numbers.sizes, numbers.place.strides, strict=True):
        if size == 1:
            continue
        if dims and dims[-1][1] == stride * size:
            dims[-1] = dims[-1][0] * size, stride
        else:
            dims.append((size, stride))
    return dims


def read_in(step: Compute) -> list[Numbers]:
    return [Numbers(place, step.sizes) for place in step.inputs]


def pairs_in(step: Compute) -> Iterator[tuple[Numbers, Numbers]]:
    """The two inputs of a sum or a product, in both orders"""
    one, other = read_in(step)
    yield one, other
    yield other, one


def written_in(step: Compute) -> Numbers:
    return Numbers(step.result, step.sizes)


def together(sizes: Sequence[int], *numbers: Numbers) -> list[Place] | None:
    """The places of these numbers, viewed with these sizes. None if their types differ, or if the last dimension of one
    is not contiguous."""
    dtype = numbers[0].dtype
    places = [
        place
        for one in numbers
        if (place := one.in_sizes(sizes)) is not None and one.dtype is dtype and place.strides[-1] == 1
    ]
    return places if dtype in TYPES and len(places) == len(numbers) else None


class User(NamedTuple):
    """A step that reads some numbers"""

    number: int
    step: Compute
    others: list[Numbers]
    """The step's other inputs"""


class Uses:
    def __init__(self, steps: Sequence[Step], positions: Value) -> None:
        """`positions`: the value that holds the rows' positions"""
        self.steps = steps
        self.positions = positions
        self._writers: dict[object, list[int]] = {}
        self._readers: dict[object, list[int]] = {}
        for number, step in enumerate(steps):
            for value in written_by(step):
                self._writers.setdefault(value, []).append(number)
            for value in dict.fromkeys(read_by(step)):
                self._readers.setdefault(value, []).append(number)

    def writers(self, of: object) -> list[int]:
        return self._writers.get(of, [])

    def readers(self, of: object) -> list[int]:
        return self._readers.get(of, [])

    def compute(self, number: int, *operations: str) -> Compute | None:
        """The step, if it computes one of these operations."""
        step = self.steps[number]
        return step if isinstance(step, Compute) and step.operation in operations else None

    def source(self, of: Numbers, *operations: str) -> tuple[int, Compute] | None:
        """The step that writes exactly these numbers by one of these operations. Other steps may write other parts of
        the same value."""
        for number in self.writers(of.of):
            step = self.compute(number, *operations)
            if step is not None and written_in(step).are(of):
                return number, step
        return None

    def user(self, of: Numbers, operation: str) -> User | None:
        """The first step that reads the value of these numbers, if it computes this operation from exactly these
        numbers. Later steps may read them, too."""
        number = self.readers(of.of)[0]
        step = self.compute(number, operation)
        if step is None:
            return None
        read = read_in(step)
        place = next((place for place, one in enumerate(read) if one.are(of)), None)
        return None if place is None else User(number, step, read[:place] + read[place + 1 :])
