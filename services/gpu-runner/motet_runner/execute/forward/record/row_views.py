"""How a recording sees a model's tensors: as views of the numbers of each row.

The row dimension is found by its size, which no other dimension of the model has. `make_fx(tracing_mode="symbolic")`
and `torch.export` find the dimension without special sizes. But both give a graph of operators, in which
`row_handlers.py` would still have to find strides, constants and weights, and `make_fx` splits each linear into four
operators: no code would be saved.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from motet_kernels.cpp.steps import DIMENSIONS, NUMBER_TYPES, Place, Value

NUMBERS_OF_ROWS = (17, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67)
"""Primes: dimensions are seldom multiples of them."""


class CannotRecord(Exception):
    """The message says what the model does that a program cannot do."""


class Rows(NamedTuple):
    """The rows of the recorded iteration, and the kept rows among them. No other dimension may have these sizes."""

    all: int
    kept: int

    def dimension(self, shape: Sequence[int], *, kept: bool) -> int:
        sizes = list(shape)
        if sizes.count(self.all) + sizes.count(self.kept) != 1 or self.number(kept=kept) not in sizes:
            raise CannotRecord(f"the rows are not one dimension of {tuple(sizes)}")
        return sizes.index(self.number(kept=kept))

    def number(self, *, kept: bool) -> int:
        return self.kept if kept else self.all

    def laid_out(self, shape: Sequence[int], *, kept: bool) -> torch.Tensor:
        """A meta tensor in which the numbers of each row are contiguous, in the order of the dimensions."""
        row = self.dimension(shape, kept=kept)
        strides, size = [0] * len(shape), 1
        for dim in reversed(range(len(shape))):
            if dim != row:
                strides[dim] = size
                size *= shape[dim]
        strides[row] = size
        return torch.empty_strided(tuple(shape), strides, device="meta")


def rows_for(model: PreTrainedModel) -> Rows:
    """Numbers of rows that divide no dimension of the model's weights and no number of its configuration. So no part of
    a dimension, such as half a head, has the size of the rows."""
    sizes = {size for tensor in (*model.parameters(), *model.buffers()) for size in tensor.shape}
    sizes |= {number for number in _numbers_in(model.config.to_dict()) if number}
    fit = [rows for rows in NUMBERS_OF_ROWS if all(size % rows for size in sizes)]
    if len(fit) < 2:
        raise CannotRecord("it has dimensions of too many sizes")
    return Rows(fit[1], fit[0])


def _numbers_in(of: Any) -> Iterator[int]:
    if isinstance(of, int):
        yield of
    elif isinstance(of, dict | list | tuple):
        for one in of.values() if isinstance(of, dict) else of:
            yield from _numbers_in(one)


class View:
    """A tensor of the model as a view of a value.

    `shape`: the tensor on the meta device, with the strides that it has in a value with contiguous rows. So torch can
    compute its views.
    """

    def __init__(self, value: Value, shape: torch.Tensor) -> None:
        self.value = value
        self.shape = shape


def as_constant(operand: Any) -> torch.Tensor:
    if not isinstance(operand, torch.Tensor):
        return torch.tensor(float(operand), dtype=torch.float32)
    if operand.dtype in NUMBER_TYPES:
        return operand
    if operand.dtype not in {torch.float16, torch.float64, torch.int32}:
        raise CannotRecord(f"it computes with numbers that are {operand.dtype}")
    return operand.float()


def walk(
    shapes: Sequence[torch.Tensor], of: Sequence[Value | torch.Tensor], *, last_apart: bool = False
) -> tuple[tuple[int, ...], Place, tuple[Place, ...]]:
    """Sizes, and the places of the result and the operands, in the fewest dimensions. `last_apart`: the last dimension
    is not merged with others."""
    dims: list[tuple[int, tuple[int, ...]]] = []
    sizes = shapes[0].shape
    for dim, size in enumerate(sizes):
        strides = tuple(shape.stride(dim) for shape in shapes)
        last = dim + 1 == len(sizes)
        if size == 1 and not (last and last_apart):
            continue
        follows = dims and all(outer == inner * size for outer, inner in zip(dims[-1][1], strides, strict=True))
        if follows and not (last and last_apart):
            dims[-1] = dims[-1][0] * size, strides
        else:
            dims.append((size, strides))
    if len(dims) > DIMENSIONS:
        raise CannotRecord(f"it goes through {len(dims)} dimensions")
    dims = [(1, (0,) * len(shapes))] * (DIMENSIONS - len(dims)) + dims
    places = [
        Place(
            one,
            tuple(strides[number] for _, strides in dims),
            int(shape.storage_offset()) if isinstance(one, Value) else 0,
        )
        for number, (one, shape) in enumerate(zip(of, shapes, strict=True))
    ]
    return tuple(size for size, _ in dims), places[0], tuple(places[1:])


def tensors_in(of: Any) -> Iterator[torch.Tensor]:
    if isinstance(of, torch.Tensor):
        yield of
    elif isinstance(of, dict):
        yield from tensors_in(list(of.values()))
    elif isinstance(of, list | tuple):
        for one in of:
            yield from tensors_in(one)
