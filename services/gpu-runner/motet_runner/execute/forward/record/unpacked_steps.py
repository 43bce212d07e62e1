"""Steps whose weights a recording knows only by path: they are packed later."""

import torch

from motet_kernels.cpp.linear import PackedWeights
from motet_kernels.cpp.steps import Compute, Multiply, Place, Value
from motet_runner.execute.forward.record.row_views import CannotRecord
from motet_runner.execute.pack.linear_packing import HEAD, Packed


def _of_library(packed: Packed) -> PackedWeights:
    assert isinstance(packed.weights, PackedWeights), "the compiled kernels are chosen together"
    return packed.weights


class LinearOf:
    """A linear, known by its path only"""

    def __init__(self, x: Value, offset: int, y: Value, path: str, *, has_bias: bool) -> None:
        self._x, self._offset, self._y, self._path, self._has_bias = x, offset, y, path, has_bias

    def with_weights(self, packed: dict[str, Packed], biases: dict[str, torch.Tensor | None]) -> Multiply:
        if self._path not in packed:
            raise CannotRecord("some weights are not packed")
        weights, index = _of_library(packed[self._path]), packed[self._path].index
        if self._y.size != weights.outputs[index]:
            raise CannotRecord("a linear gives other numbers than those of its weights")
        bias = biases[self._path] if self._has_bias else None
        return Multiply(self._x, self._offset, self._y, weights, index, bias, self._path)


class LookUpOf:
    """A row of `table`; if `table` is None, a row of the head's packed weights."""

    def __init__(self, out: Value, table: torch.Tensor | None, index: Value, rows: int, width: int) -> None:
        self._out, self._table, self._index, self._rows, self._width = out, table, index, rows, width

    def with_weights(self, packed: dict[str, Packed], _biases: dict[str, torch.Tensor | None]) -> Compute:
        table: torch.Tensor | PackedWeights | None = self._table
        if table is None:
            if HEAD not in packed:
                raise CannotRecord("the head is not packed")
            table = _of_library(packed[HEAD])
        operation = "unpack" if isinstance(table, PackedWeights) else "look_up"
        places = (Place(table), Place(self._index))
        return Compute(operation, (1, 1, self._width), Place(self._out, (0, 0, 1)), places, self._rows)
