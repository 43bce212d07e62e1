"""The steps of a forward pass; each step computes numbers of rows (PU-21, OR-05, OR-17).

`peepholes` fuses some steps. Then `program.py` runs all steps in one call of the compiled kernels.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from motet_kernels.cpp.linear import PackedWeights

OPERATIONS = (
    *("copy", "add", "subtract", "multiply", "divide", "negative", "cube", "rsqrt", "sqrt", "exp", "tanh", "sigmoid"),
    *("silu", "gelu", "gelu_tanh", "relu", "cos", "sin", "mean", "sum", "layer_norm", "rms_norm", "look_up", "unpack"),
    *("keep", "write"),
    *(
        "modules_norm",
        "sum_and_norm",
        "rotate",
        "norm_and_rotate",
        "write_rotated",
        "write_normed_rotated",
        "silu_times",
    ),
)
"""The operations that stand one per line are fused: see `peepholes`."""

DIMENSIONS = 3
"""A step reads and writes the numbers of one row as arrays of this number of dimensions."""
MAX_INPUTS = 5

NUMBER_TYPES = (torch.float32, torch.bfloat16, torch.int64)
"""The types of values; a program names a type by its index here"""


@dataclass(frozen=True, eq=False)
class Value:
    """Numbers of each row. Each number is written once; several steps may write parts of a value."""

    size: int
    dtype: torch.dtype
    kept: bool = False
    """True if only the kept rows have these numbers: the rows whose logits are wanted"""

    @property
    def row_bytes(self) -> int:
        return self.size * self.dtype.itemsize


@dataclass(frozen=True)
class Place:
    """Where a step reads or writes numbers: in a value, or in data that all rows share. Strides are in elements."""

    of: "Value | torch.Tensor | PackedWeights | ByPosition"
    strides: tuple[int, ...] = (0,) * DIMENSIONS
    offset: int = 0


@dataclass(frozen=True)
class Compute:
    operation: str
    sizes: tuple[int, ...]
    out: Place | None
    """None for a write of keys and values into their pages"""
    inputs: tuple[Place, ...]
    number: int = 0
    """The layer of keys and values, or how many rows a lookup table has"""
    real: float = 0.0
    """The epsilon of a norm"""
    also: Place | None = None
    """Where a fused norm writes the sum"""

    @property
    def result(self) -> Place:
        """`out`, for all operations but a write of keys and values"""
        assert self.out is not None
        return self.out


@dataclass(frozen=True)
class Multiply:
    """A linear"""

    x: Value
    offset: int
    y: Value
    weights: PackedWeights
    index: int
    bias: torch.Tensor | None
    path: str


@dataclass(frozen=True)
class Attend:
    layer: int
    query: Place
    out: Value
    heads: int
    scale: float
    window: int | None
    softcap: float | None


Step = Compute | Multiply | Attend


@dataclass(frozen=True, eq=False)
class ByPosition:
    """A table: these steps compute the row for each position."""

    positions: Value
    steps: Sequence[Step]
    result: Value

    address = 0
    """The library reads 0 here until the program has computed the table."""

    @property
    def dtype(self) -> torch.dtype:
        return self.result.dtype


def values_of(steps: Iterable[Step]) -> Iterator[Value]:
    """The values that the steps read or write"""
    for step in steps:
        yield from read_by(step)
        yield from written_by(step)


def read_by(step: Step) -> list[Value]:
    if isinstance(step, Multiply):
        return [step.x]
    places = step.inputs if isinstance(step, Compute) else (step.query,)
    return [place.of for place in places if isinstance(place.of, Value)]


def written_by(step: Step) -> list[Value]:
    if isinstance(step, Multiply):
        return [step.y]
    if isinstance(step, Attend):
        return [step.out]
    places = (step.out, step.also)
    return [place.of for place in places if place is not None and isinstance(place.of, Value)]


def needed(steps: Sequence[Step], logits: Value) -> list[Step]:
    """The steps on which the logits depend, all writes into pages, and all attention"""
    values = {logits}
    found: list[Step] = []
    for step in reversed(steps):
        results = written_by(step)
        if not results or isinstance(step, Attend) or not values.isdisjoint(results):
            found.append(step)
            values.update(read_by(step))
    return found[::-1]
