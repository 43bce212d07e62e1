"""What a model's modules compute for each row of an iteration, recorded while they run: steps of a program for the
compiled kernels. It needs no knowledge of the family.

Only attention mixes rows, and the probe of `execute.model` shows that. So everything else is a list of operations on
the numbers of a row. The rows are found by the size of their dimension: no other dimension has that size. What does not
depend on the rows is a constant. An operation that is not known here, or that mixes rows, leaves its result unknown;
the recording is of no use if the logits depend on that, or if the modules look at numbers to decide what to do.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import PreTrainedModel, masking_utils

from motet_kernels.cpp.steps import NUMBER_TYPES, Attend, Compute, Place, Step, Value
from motet_runner.execute.flat_batch import FlatBatch, PagedRows
from motet_runner.execute.packed_linears import HEAD, Packed, weight_of
from motet_runner.execute.row_views import (
    KEPT,
    ROWS,
    CannotRecord,
    View,
    as_constant,
    is_in,
    laid_out,
    row_dimension,
    tensors_in,
    walk,
)
from motet_runner.execute.unpacked_steps import LinearOf, LookUpOf


class Recording(TorchDispatchMode):
    def __init__(
        self, linears: dict[int, str], head: int, dtype: torch.dtype, *, vocabulary: int, positions: int
    ) -> None:
        """`linears`: the paths of linears by the addresses of their weights; `head`: the address of the head's.
        `vocabulary`, `positions`: how many tokens and positions there may ever be"""
        super().__init__()  # type: ignore[no-untyped-call] # torch's
        self.tokens, self.positions = Value(1, torch.int64), Value(1, torch.int64)
        self._steps: list[Step | LinearOf | LookUpOf] = []
        self._linears = linears
        self._head = head
        self._dtype = dtype
        self._vocabulary, self._positions = vocabulary, positions
        # By the tensors that are still there: all that a large model computes would take much memory.
        self._views = WeakTensorKeyDictionary()
        self._unknown = WeakTensorKeyDictionary()
        """Tensors that depend on rows in a way that a program cannot compute, and why"""
        self._keep = torch.empty(0, dtype=torch.int64)
        self._refused = ""

    # -- what the model is given, and what comes of it -----------------------------------------------------------------

    def run(self, batch: FlatBatch, forward: Callable[[FlatBatch], torch.Tensor]) -> Value:
        """The logits of an iteration of ROWS rows, of which KEPT are kept."""
        self._keep = batch.keep
        self._know(batch.input_ids, View(self.tokens, laid_out((1, ROWS), kept=False)))
        self._know(batch.positions, View(self.positions, laid_out((1, ROWS), kept=False)))
        batch.paged = PagedRows(self, None)  # type: ignore[arg-type] # it takes the place of attention over pages
        with _without_masks(), self:
            logits = forward(batch)
        if self._refused:
            raise CannotRecord(self._refused)
        view = self._view(logits)
        if tuple(logits.shape) != (KEPT, view.value.size):
            raise CannotRecord(f"the logits are {tuple(logits.shape)}")
        return self._together(view).value

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: int,
        _batch: object,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """[rows, heads, width] of any numbers"""
        heads, _, width = query.shape
        out = torch.zeros((ROWS, heads, width), dtype=query.dtype)
        try:
            places = [self._of_heads(tensor) for tensor in (query, key, value)]
            self._steps.append(Compute("write", (1, key.shape[0], width), None, (places[1], places[2]), layer))
            view = self._new(out.shape, out.dtype)
            self._steps.append(Attend(layer, places[0], view.value, heads, scale, window, softcap))
            self._know(out, view)
        except CannotRecord as error:
            self._forget(out, str(error))
        return out

    def program(self, packed: dict[str, Packed], biases: dict[str, torch.Tensor | None]) -> list[Step]:
        """The steps, with the weights where they are packed."""
        return [step.with_weights(packed, biases) if isinstance(step, LinearOf | LookUpOf) else step
                for step in self._steps]  # fmt: skip

    # -- what the modules do -------------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        given = [tensor for tensor in tensors_in((args, kwargs)) if tensor in self._views or tensor in self._unknown]
        if given:
            name = function.overloadpacket.__name__
            outputs = list(tensors_in(result))
            if not outputs:
                self._refuse(f"it looks at numbers of rows ({name})")
            elif function._schema.is_mutable:
                self._refuse(f"it changes numbers in place ({name})")
            try:
                unknown = next((self._unknown[tensor] for tensor in given if tensor in self._unknown), None)
                if unknown is not None:
                    raise CannotRecord(unknown)
                self._record(name, args, kwargs, result)
            except Exception as error:  # the modules serve, whatever they do
                why = str(error) if isinstance(error, CannotRecord) else f"{name}: {error}"
                for output in outputs:
                    self._forget(output, why)
        return result

    def _refuse(self, why: str) -> None:
        self._refused = self._refused or why

    def _record(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if name in _SAME and result.dtype == args[0].dtype:
            self._know(result, self._view(args[0]))
        elif name in _VIEWS:
            self._record_view(name, args, kwargs, result)
        elif name in _UNARY or name in _SAME:
            operation = _UNARY.get(name, "copy")
            if name == "gelu" and kwargs.get("approximate") == "tanh":
                operation = "gelu_tanh"
            self._compute(operation, result, args[0])
        elif name in _BINARY:
            if kwargs.get("alpha", 1) != 1 or kwargs.get("rounding_mode") is not None:
                raise CannotRecord(f"{name} with {kwargs}")
            first, second = args[:2]
            self._compute(_BINARY[name], result, *((second, first) if name == "rsub" else (first, second)))
        elif (known := getattr(self, f"_{name}", None)) is not None:
            known(result, *args, **kwargs)
        else:
            raise CannotRecord(f"it computes {name}")

    def _record_view(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        view = self._view(args[0])
        of = getattr(torch.ops.aten, name)
        if name in {"reshape", "flatten"}:
            try:
                shaped = view.shape.view(result.shape)
            except RuntimeError:
                view = self._together(view)
                shaped = view.shape.view(result.shape)
        else:
            shaped = of(view.shape, *args[1:], **kwargs)
        for tensor, shape in zip(tensors_in(result), tensors_in(shaped), strict=True):
            if tensor.shape != shape.shape:
                raise CannotRecord(f"{name} gives another shape")
            row_dimension(shape.shape, kept=view.value.kept)
            self._know(tensor, View(view.value, shape))

    def _pow(self, result: torch.Tensor, x: Any, exponent: Any) -> None:
        if exponent == 2:
            self._compute("multiply", result, x, x)
        elif exponent in _POWERS:
            self._compute(_POWERS[exponent], result, x)
        else:
            raise CannotRecord(f"it raises to {exponent}")

    def _matmul(self, result: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> None:
        """Of one column and one row, as some models multiply frequencies with positions"""
        if x.dim() != y.dim() or x.dim() < 2 or x.shape[-1] != 1:
            raise CannotRecord("it computes matmul")
        self._compute("multiply", result, x, y)

    def _square(self, result: torch.Tensor, x: Any) -> None:
        self._compute("multiply", result, x, x)

    def _mean(self, result: torch.Tensor, x: torch.Tensor, dims: Any = None, keepdim: bool = False, **_: Any) -> None:
        self._reduce("mean", result, x, dims, keepdim=keepdim)

    def _sum(self, result: torch.Tensor, x: torch.Tensor, dims: Any = None, keepdim: bool = False, **_: Any) -> None:
        self._reduce("sum", result, x, dims, keepdim=keepdim)

    def _reduce(self, name: str, result: torch.Tensor, x: torch.Tensor, dims: Any, *, keepdim: bool) -> None:
        if dims is None or [dim % x.dim() for dim in dims] != [x.dim() - 1]:
            raise CannotRecord(f"{name} over {dims}")
        kept = self._view(x).value.kept
        out = self._new((*x.shape[:-1], 1), result.dtype, kept=kept)
        self._step(name, x.shape, View(out.value, out.shape.expand(x.shape)), [x], last_apart=True)
        self._know(result, out if keepdim else View(out.value, out.shape.squeeze(-1)))

    def _layer_norm(  # noqa: PLR0917 torch's signature
        self, result: torch.Tensor, x: Any, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any
    ) -> None:
        self._norm(
            "layer_norm", result, x, shape, [1.0 if weight is None else weight, 0.0 if bias is None else bias], eps
        )

    def _rms_norm(self, result: torch.Tensor, x: Any, shape: Any, weight: Any = None, eps: float | None = None) -> None:
        epsilon = torch.finfo(x.dtype).eps if eps is None else eps
        self._norm("rms_norm", result, x, shape, [1.0 if weight is None else weight], epsilon)

    def _norm(  # noqa: PLR0917
        self, name: str, result: torch.Tensor, x: torch.Tensor, shape: Any, others: list[Any], epsilon: float
    ) -> None:
        if len(shape) != 1:
            raise CannotRecord(f"{name} over {len(shape)} dimensions")
        view = self._new(result.shape, result.dtype, kept=self._view(x).value.kept)
        self._step(name, result.shape, view, [x, *others], last_apart=True, real=epsilon)
        self._know(result, view)

    def _cat(self, result: torch.Tensor, tensors: Sequence[torch.Tensor], dim: int = 0) -> None:
        kept = next(self._views[tensor].value.kept for tensor in tensors if tensor in self._views)
        whole = self._new(result.shape, result.dtype, kept=kept)
        first = 0
        for tensor in tensors:
            size = tensor.shape[dim]
            part = View(whole.value, whole.shape.narrow(dim, first, size))
            self._step("copy", tensor.shape, part, [tensor])
            first += size
        self._know(result, whole)

    def _stack(self, result: torch.Tensor, tensors: Sequence[torch.Tensor], dim: int = 0) -> None:
        kept = next(self._views[tensor].value.kept for tensor in tensors if tensor in self._views)
        whole = self._new(result.shape, result.dtype, kept=kept)
        for number, tensor in enumerate(tensors):
            self._step("copy", tensor.shape, View(whole.value, whole.shape.select(dim, number)), [tensor])
        self._know(result, whole)

    def _repeat_interleave(
        self, result: torch.Tensor, x: torch.Tensor, repeats: int, dim: int | None = None, **_: Any
    ) -> None:
        dim = x.dim() if dim is None else dim % x.dim()
        if not isinstance(repeats, int) or dim >= x.dim():
            raise CannotRecord("it repeats other numbers than those of a dimension")
        whole = self._new(result.shape, result.dtype, kept=self._view(x).value.kept)
        for number in range(repeats):
            part = View(whole.value, whole.shape.unflatten(dim, (x.shape[dim], repeats)).select(dim + 1, number))
            self._step("copy", x.shape, part, [x])
        self._know(result, whole)

    def _repeat(self, result: torch.Tensor, x: torch.Tensor, _repeats: Sequence[int]) -> None:
        view = self._view(x)
        self._know(result, View(view.value, view.shape.expand(result.shape)))  # fails unless there is one of each

    def _gather(self, result: torch.Tensor, table: torch.Tensor, dim: int, index: torch.Tensor, **_: Any) -> None:
        if table in self._views or dim % table.dim() != table.dim() - 2 or table.shape[-2:].numel() != table.numel():
            raise CannotRecord("it gathers something else than rows of a matrix")
        if self._view(index).shape.shape[-1] != table.shape[-1] or self._view(index).shape.stride(-1):
            raise CannotRecord("it gathers parts of rows")
        self._look_up(result, table.view(table.shape[-2:]), index)

    def _linear(
        self, result: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> None:
        self._multiply(result, x, weight, bias)

    def _addmm(self, result: torch.Tensor, bias: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> None:
        self._multiply(result, x, weight, bias)

    def _multiply(self, result: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        path = HEAD if weight.data_ptr() == self._head else self._linears.get(weight.data_ptr())
        if path is None or x.dtype is not self._dtype:
            raise CannotRecord("it multiplies with weights that are not packed")
        view = self._view(x)
        sizes = [size for dim, size in enumerate(x.shape) if dim != view.row_dimension and size != 1]
        if sizes != [x.shape[-1]]:
            raise CannotRecord("a linear sees more than rows")
        if view.shape.stride(-1) != 1:
            view = self._together(view)
        out = self._new(result.shape, result.dtype, kept=view.value.kept)
        self._steps.append(
            LinearOf(view.value, int(view.shape.storage_offset()), out.value, path, has_bias=bias is not None)
        )
        self._know(result, out)

    def _embedding(self, result: torch.Tensor, weight: torch.Tensor, index: torch.Tensor, *_: Any) -> None:
        self._look_up(result, weight, index)

    def _index_select(self, result: torch.Tensor, table: torch.Tensor, dim: int, index: torch.Tensor) -> None:
        if dim != 0:
            raise CannotRecord("it selects columns by row")
        self._look_up(result, table, index)

    def _index(self, result: torch.Tensor, x: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> None:
        by = [(dim, index) for dim, index in enumerate(indices) if index is not None]
        if len(by) != 1:
            raise CannotRecord("it looks up by several numbers")
        (dim, index), = by  # fmt: skip
        if x not in self._views and dim == 0:
            self._look_up(result, x, index)
            return
        view = self._view(x)
        if index is not self._keep or dim != view.row_dimension:
            raise CannotRecord("it selects rows")
        out = self._new(result.shape, result.dtype, kept=True)
        without_rows = view.shape.select(dim, 0)
        self._steps.append(Compute("keep", *walk([out.shape.select(dim, 0), without_rows], [out.value, view.value])))
        self._know(result, out)

    def _look_up(self, result: torch.Tensor, table: torch.Tensor, index: torch.Tensor) -> None:
        by = self._view(index)
        if table in self._views:
            raise CannotRecord("it looks up in numbers of rows")
        width = table.shape[-1]
        if by.value.size != 1 or by.value.dtype is not torch.int64 or table.dim() != 2 or not table.is_contiguous():
            raise CannotRecord("it looks up something else than rows of a matrix")
        most = self._vocabulary if by.value is self.tokens else self._positions
        if len(table) < most:  # it was made for this iteration, say, and is longer in a later one
            raise CannotRecord(f"it looks up in a table of {len(table)} rows, where there may be {most}")
        if table.dtype not in NUMBER_TYPES:
            raise CannotRecord(f"it looks up numbers that are {table.dtype}")
        out = self._new(result.shape, result.dtype, kept=by.value.kept)
        is_head = table.data_ptr() == self._head
        self._steps.append(LookUpOf(out.value, None if is_head else table, by.value, len(table), width))
        self._know(result, out)

    # -- steps ---------------------------------------------------------------------------------------------------------

    def _compute(self, operation: str, result: torch.Tensor, *operands: Any) -> None:
        kept = next(self._views[one].value.kept for one in operands if is_in(one, self._views))
        view = self._new(result.shape, result.dtype, kept=kept)
        self._step(operation, result.shape, view, list(operands))
        self._know(result, view)

    def _step(
        self,
        operation: str,
        shape: Sequence[int],
        out: View,
        operands: list[Any],
        *,
        last_apart: bool = False,
        real: float = 0.0,
    ) -> None:
        row = row_dimension(shape, kept=out.value.kept)
        shapes = [out.shape.select(row, 0)]
        places: list[Value | torch.Tensor] = [out.value]
        for operand in operands:
            if is_in(operand, self._views):
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
        self._steps.append(Compute(operation, *walk(shapes, places, last_apart=last_apart), real=real))

    def _of_heads(self, tensor: torch.Tensor) -> Place:
        """[heads, rows, width] as the numbers of a row, of which those of a head lie together"""
        view = self._view(tensor)
        if tensor.dtype is not self._dtype:
            raise CannotRecord(f"its attention is in {tensor.dtype}")
        if view.shape.stride(2) != 1:
            view = self._together(view)
        return Place(view.value, (0, view.shape.stride(0), 1), int(view.shape.storage_offset()))

    def _together(self, view: View) -> View:
        """The same numbers, those of a row one after the other and alone"""
        whole = self._new(view.shape.shape, view.value.dtype, kept=view.value.kept)
        if view.shape.stride() == whole.shape.stride() and view.value.size == whole.value.size:
            return view
        row = view.row_dimension
        shapes = [whole.shape.select(row, 0), view.shape.select(row, 0)]
        self._steps.append(Compute("copy", *walk(shapes, [whole.value, view.value])))
        return whole

    def _new(self, shape: Sequence[int], dtype: torch.dtype, *, kept: bool = False) -> View:
        if dtype not in NUMBER_TYPES:
            raise CannotRecord(f"it computes numbers that are {dtype}")
        numbers = laid_out(shape, kept=kept)
        return View(Value(numbers.numel() // (KEPT if kept else ROWS), dtype, kept), numbers)

    def _view(self, tensor: torch.Tensor) -> View:
        view: View | None = self._views.get(tensor)
        if view is None:
            raise CannotRecord(self._unknown.get(tensor, "a constant takes the place of rows"))
        return view

    def _know(self, tensor: torch.Tensor, view: View) -> None:
        self._views[tensor] = view

    def _forget(self, tensor: torch.Tensor, why: str) -> None:
        self._views.pop(tensor, None)
        self._unknown[tensor] = why


_SAME = {"to", "type_as", "contiguous", "clone", "alias", "detach", "dropout", "_to_copy", "float", "lift_fresh"}
"""What changes nothing but the type of numbers"""
_VIEWS = {
    "view", "reshape", "_unsafe_view", "flatten", "transpose", "permute", "unsqueeze", "squeeze", "slice", "select",
    "narrow", "expand", "expand_as", "split", "split_with_sizes", "chunk", "unbind", "unflatten", "t", "movedim",
}  # fmt: skip
_UNARY = {
    name: name for name in ("rsqrt", "sqrt", "exp", "tanh", "sigmoid", "silu", "gelu", "relu", "cos", "sin")
} | {"neg": "negative"}  # fmt: skip
_BINARY = {
    "add": "add", "sub": "subtract", "rsub": "subtract", "mul": "multiply", "multiply": "multiply", "div": "divide",
}  # fmt: skip
_POWERS = {3: "cube", 0.5: "sqrt", -0.5: "rsqrt"}


def linears_by_address(model: Any, linears: dict[str, nn.Module]) -> tuple[dict[int, str], int]:
    """What a Recording must know of the weights."""
    head = model.get_output_embeddings()
    addresses = {weight_of(module).data_ptr(): path for path, module in linears.items()}
    return addresses, 0 if head is None else head.weight.data_ptr()


@contextmanager
def _without_masks() -> Iterator[None]:
    """Our attention has no masks, and there is no padding. Without this, transformers looks at positions to find out
    which mask it needs, and at tokens to warn of padding."""
    nothing = (
        (masking_utils, "find_packed_sequence_indices"),
        (PreTrainedModel, "warn_if_padding_and_no_attention_mask"),
    )
    found = [getattr(owner, name) for owner, name in nothing]
    for owner, name in nothing:
        setattr(owner, name, lambda *_: None)
    try:
        yield
    finally:
        for (owner, name), function in zip(nothing, found, strict=True):
            setattr(owner, name, function)
