"""How a recording sees a model's tensors: where their numbers lie in the numbers of each row."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from motet_kernels.cpp.steps import DIMENSIONS, NUMBER_TYPES, Place, Value

ROWS, KEPT = 23, 17
"""Of the iteration that is recorded. No other dimension may have these sizes."""


class CannotRecord(Exception):
    """The message says what the model does that a program cannot do."""


class View:
    """A tensor of the model: where its numbers lie in a value.

    `shape` is that tensor on no device, with the strides that it has when the numbers of a row of the value lie
    together. So torch says what views of it are.
    """

    def __init__(self, value: Value, shape: torch.Tensor) -> None:
        self.value = value
        self.shape = shape

    @property
    def row_dimension(self) -> int:
        return row_dimension(self.shape.shape, kept=self.value.kept)


def laid_out(shape: Sequence[int], *, kept: bool) -> torch.Tensor:
    """On no device, with the numbers of each row together, in the order of the dimensions."""
    row = row_dimension(shape, kept=kept)
    strides, size = [0] * len(shape), 1
    for dim in reversed(range(len(shape))):
        if dim != row:
            strides[dim] = size
            size *= shape[dim]
    strides[row] = size
    return torch.empty_strided(tuple(shape), strides, device="meta")


def row_dimension(shape: Sequence[int], *, kept: bool) -> int:
    sizes = list(shape)
    if sizes.count(ROWS) + sizes.count(KEPT) != 1 or (KEPT if kept else ROWS) not in sizes:
        raise CannotRecord(f"the rows are not one dimension of {tuple(sizes)}")
    return sizes.index(KEPT if kept else ROWS)


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
    """Sizes, and the places of the result and of what it is computed from, in as few dimensions as can be.
    `last_apart`: the last one is no part of another."""
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
