"""What a recording knows of tensors while a model's modules run: which of a row's numbers each tensor holds, and the
steps that computed these numbers."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from motet_kernels.cpp.steps import NUMBER_TYPES, Compute, Place, Step, Value
from motet_runner.execute.forward.record.row_views import CannotRecord, Rows, View, as_constant, walk
from motet_runner.execute.forward.record.unpacked_steps import LinearOf, LookUpOf


class OwnWeight(NamedTuple):
    """The weight of a linear or the head, [outputs, inputs]. Views of parts of it are not packed."""

    path: str
    shape: torch.Size
    strides: tuple[int, ...]

    def is_all_of(self, weight: torch.Tensor) -> bool:
        return (weight.shape, weight.stride()) == (self.shape, self.strides)


class RowTrace:
    def __init__(
        self, weights: dict[int, OwnWeight], dtype: torch.dtype, rows: Rows, *, vocabulary: int, positions: int
    ) -> None:
        """`weights`: by address. `vocabulary`, `positions`: the largest numbers of tokens and positions"""
        self.weights, self.dtype, self.rows = weights, dtype, rows
        self.most_tokens, self.most_positions = vocabulary, positions
        self.tokens, self.positions = Value(1, torch.int64), Value(1, torch.int64)
        self.keep = torch.empty(0, dtype=torch.int64)
        """The tensor that selects the rows whose logits are wanted"""
        self.steps: list[Step | LinearOf | LookUpOf] = []
        # Weak references, because all results of a large model would take much memory.
        self._views = WeakTensorKeyDictionary()
        self._unknown = WeakTensorKeyDictionary()
        """Tensor that depends on rows in a way that a program cannot compute → why"""

    # -- tensors -------------------------------------------------------------------------------------------------------

    def depends_on_rows(self, tensor: torch.Tensor) -> bool:
        return tensor in self._views or tensor in self._unknown

    def is_known(self, operand: Any) -> bool:
        """True for a tensor that depends on rows and that a program can compute"""
        return isinstance(operand, torch.Tensor) and operand in self._views

    def check_known(self, tensors: Sequence[torch.Tensor]) -> None:
        why = next((self._unknown[tensor] for tensor in tensors if tensor in self._unknown), None)
        if why is not None:
            raise CannotRecord(why)

    def new(self, shape: Sequence[int], dtype: torch.dtype, *, kept: bool = False) -> View:
        if dtype not in NUMBER_TYPES:
            raise CannotRecord(f"it computes numbers that are {dtype}")
        numbers = self.rows.laid_out(shape, kept=kept)
        return View(Value(numbers.numel() // self.rows.number(kept=kept), dtype, kept), numbers)

    def view(self, tensor: torch.Tensor) -> View:
        view: View | None = self._views.get(tensor)
        if view is None:
            raise CannotRecord(self._unknown.get(tensor, "a constant takes the place of rows"))
        return view

    def row_dimension(self, view: View) -> int:
        return self.rows.dimension(view.shape.shape, kept=view.value.kept)

    def path_of(self, weight: torch.Tensor) -> str | None:
        """The path of the linear with this weight [outputs, inputs]; None if no linear has it as a whole"""
        own = self.weights.get(weight.data_ptr())
        return own.path if own is not None and own.is_all_of(weight) else None

    def know(self, tensor: torch.Tensor, view: View) -> None:
        self._views[tensor] = view

    def forget(self, tensor: torch.Tensor, why: str) -> None:
        self._views.pop(tensor, None)
        self._unknown[tensor] = why

    # -- steps ---------------------------------------------------------------------------------------------------------

    def compute(self, operation: str, result: torch.Tensor, *operands: Any) -> None:
        kept = next(self._views[one].value.kept for one in operands if self.is_known(one))
        view = self.new(result.shape, result.dtype, kept=kept)
        self.step(operation, result.shape, view, list(operands))
        self.know(result, view)

    def step(
        self,
        operation: str,
        shape: Sequence[int],
        out: View,
        operands: list[Any],
        *,
        last_apart: bool = False,
        real: float = 0.0,
    ) -> None:
        row = self.rows.dimension(shape, kept=out.value.kept)
        shapes = [out.shape.select(row, 0)]
        places: list[Value | torch.Tensor] = [out.value]
        for operand in operands:
            if self.is_known(operand):
                view = self._views[operand]
                if view.value.kept is not out.value.kept:
                    raise CannotRecord("it brings kept rows and others together")
                expanded = view.shape.expand(shape)
                if expanded.stride(row) != view.value.size:
                    raise CannotRecord("it brings different rows together")
                places.append(view.value)
            else:
                constant = as_constant(operand)
                if constant.dim() >= len(shape) - row and constant.shape[row - len(shape)] != 1:
                    raise CannotRecord("it has numbers for each place in an iteration")
                expanded = constant.expand(shape)
                places.append(constant)
            shapes.append(expanded.select(row, 0))
        self.steps.append(Compute(operation, *walk(shapes, places, last_apart=last_apart), real=real))

    def of_heads(self, tensor: torch.Tensor) -> Place:
        """[heads, rows, width] as the numbers of a row, with each head contiguous"""
        view = self.view(tensor)
        if tensor.dtype is not self.dtype:
            raise CannotRecord(f"its attention is in {tensor.dtype}")
        if view.shape.stride(2) != 1:
            view = self.together(view)
        return Place(view.value, (0, view.shape.stride(0), 1), int(view.shape.storage_offset()))

    def together(self, view: View) -> View:
        """The same numbers with each row contiguous: copied to a new value, if necessary."""
        whole = self.new(view.shape.shape, view.value.dtype, kept=view.value.kept)
        if view.shape.stride() == whole.shape.stride() and view.value.size == whole.value.size:
            return view
        row = self.row_dimension(view)
        shapes = [whole.shape.select(row, 0), view.shape.select(row, 0)]
        self.steps.append(Compute("copy", *walk(shapes, [whole.value, view.value])))
        return whole
