"""The handlers that record torch's operations as steps of a program."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from motet_kernels.cpp.steps import NUMBER_TYPES, Compute
from motet_runner.execute.forward.record.row_trace import RowTrace
from motet_runner.execute.forward.record.row_views import CannotRecord, View, tensors_in, walk
from motet_runner.execute.forward.record.unpacked_steps import LinearOf, LookUpOf
from motet_runner.execute.pack.linear_packing import HEAD

_SAME = {"to", "type_as", "contiguous", "clone", "alias", "detach", "dropout", "_to_copy", "float", "lift_fresh"}
"""Operations that change at most the type of numbers"""
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


def record(trace: RowTrace, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
    """Raises CannotRecord, or any other error if a call has arguments that its handler does not know."""
    if name in _SAME and result.dtype == args[0].dtype:
        trace.know(result, trace.view(args[0]))
    elif name in _VIEWS:
        _view(trace, name, args, kwargs, result)
    elif name in _UNARY or name in _SAME:
        operation = _UNARY.get(name, "copy")
        if name == "gelu" and kwargs.get("approximate") == "tanh":
            operation = "gelu_tanh"
        trace.compute(operation, result, args[0])
    elif name in _BINARY:
        if kwargs.get("alpha", 1) != 1 or kwargs.get("rounding_mode") is not None:
            raise CannotRecord(f"{name} with {kwargs}")
        first, second = args[:2]
        trace.compute(_BINARY[name], result, *((second, first) if name == "rsub" else (first, second)))
    elif name in HANDLERS:
        HANDLERS[name](trace, result, *args, **kwargs)
    else:
        raise CannotRecord(f"it computes {name}")


def _view(trace: RowTrace, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
    view = trace.view(args[0])
    of = getattr(torch.ops.aten, name)
    if name in {"reshape", "flatten"}:
        try:
            shaped = view.shape.view(result.shape)
        except RuntimeError:
            view = trace.together(view)
            shaped = view.shape.view(result.shape)
    else:
        shaped = of(view.shape, *args[1:], **kwargs)
    for tensor, shape in zip(tensors_in(result), tensors_in(shaped), strict=True):
        if tensor.shape != shape.shape:
            raise CannotRecord(f"{name} gives another shape")
        part = View(view.value, shape)
        trace.row_dimension(part)  # raises unless there is one
        trace.know(tensor, part)


def _pow(trace: RowTrace, result: torch.Tensor, x: Any, exponent: Any) -> None:
    if exponent == 2:
        trace.compute("multiply", result, x, x)
    elif exponent in _POWERS:
        trace.compute(_POWERS[exponent], result, x)
    else:
        raise CannotRecord(f"it raises to {exponent}")


def _matmul(trace: RowTrace, result: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> None:
    """An outer product (one column · one row), such as frequencies times positions in some models."""
    if x.dim() != y.dim() or x.dim() < 2 or x.shape[-1] != 1:
        raise CannotRecord("it computes matmul")
    trace.compute("multiply", result, x, y)


def _reduce(  # noqa: PLR0917 torch's signature
    name: str, trace: RowTrace, result: torch.Tensor, x: torch.Tensor, dims: Any = None, keepdim: bool = False, **_: Any
) -> None:
    if dims is None or [dim % x.dim() for dim in dims] != [x.dim() - 1]:
        raise CannotRecord(f"{name} over {dims}")
    kept = trace.view(x).value.kept
    out = trace.new((*x.shape[:-1], 1), result.dtype, kept=kept)
    trace.step(name, x.shape, View(out.value, out.shape.expand(x.shape)), [x], last_apart=True)
    trace.know(result, out if keepdim else View(out.value, out.shape.squeeze(-1)))


def _layer_norm(  # noqa: PLR0917 torch's signature
    trace: RowTrace,
    result: torch.Tensor,
    x: Any,
    shape: Any,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    *_: Any,
) -> None:
    others = [1.0 if weight is None else weight, 0.0 if bias is None else bias]
    _norm(trace, "layer_norm", result, x, shape, others, eps)


def _rms_norm(  # noqa: PLR0917 torch's signature
    trace: RowTrace, result: torch.Tensor, x: Any, shape: Any, weight: Any = None, eps: float | None = None
) -> None:
    epsilon = torch.finfo(x.dtype).eps if eps is None else eps
    _norm(trace, "rms_norm", result, x, shape, [1.0 if weight is None else weight], epsilon)


def _norm(  # noqa: PLR0917
    trace: RowTrace, name: str, result: torch.Tensor, x: torch.Tensor, shape: Any, others: list[Any], epsilon: float
) -> None:
    if len(shape) != 1:
        raise CannotRecord(f"{name} over {len(shape)} dimensions")
    view = trace.new(result.shape, result.dtype, kept=trace.view(x).value.kept)
    trace.step(name, result.shape, view, [x, *others], last_apart=True, real=epsilon)
    trace.know(result, view)


def _put_together(
    trace: RowTrace,
    result: torch.Tensor,
    tensors: Sequence[torch.Tensor],
    parts: Callable[[torch.Tensor], Sequence[torch.Tensor]],
) -> None:
    """`parts`: views of the result, one for each of the tensors"""
    kept = next(trace.view(tensor).value.kept for tensor in tensors if trace.is_known(tensor))
    whole = trace.new(result.shape, result.dtype, kept=kept)
    for tensor, part in zip(tensors, parts(whole.shape), strict=True):
        trace.step("copy", tensor.shape, View(whole.value, part), [tensor])
    trace.know(result, whole)


def _cat(trace: RowTrace, result: torch.Tensor, tensors: Sequence[torch.Tensor], dim: int = 0) -> None:
    sizes = [tensor.shape[dim] for tensor in tensors]
    _put_together(trace, result, tensors, lambda whole: whole.split(sizes, dim))


def _stack(trace: RowTrace, result: torch.Tensor, tensors: Sequence[torch.Tensor], dim: int = 0) -> None:
    _put_together(trace, result, tensors, lambda whole: whole.unbind(dim))


def _repeat_interleave(
    trace: RowTrace, result: torch.Tensor, x: torch.Tensor, repeats: int, dim: int | None = None, **_: Any
) -> None:
    dim = x.dim() if dim is None else dim % x.dim()
    if not isinstance(repeats, int) or dim >= x.dim():
        raise CannotRecord("it repeats other numbers than those of a dimension")
    sizes = (x.shape[dim], repeats)
    _put_together(trace, result, [x] * repeats, lambda whole: whole.unflatten(dim, sizes).unbind(dim + 1))


def _repeat(trace: RowTrace, result: torch.Tensor, x: torch.Tensor, _repeats: Sequence[int]) -> None:
    view = trace.view(x)
    trace.know(result, View(view.value, view.shape.expand(result.shape)))  # fails if a repeated dimension is above 1


def _gather(
    trace: RowTrace, result: torch.Tensor, table: torch.Tensor, dim: int, index: torch.Tensor, **_: Any
) -> None:
    if trace.is_known(table) or dim % table.dim() != table.dim() - 2 or table.shape[-2:].numel() != table.numel():
        raise CannotRecord("it gathers something else than rows of a matrix")
    if trace.view(index).shape.shape[-1] != table.shape[-1] or trace.view(index).shape.stride(-1):
        raise CannotRecord("it gathers parts of rows")
    _look_up(trace, result, table.view(table.shape[-2:]), index)


def _addmm(trace: RowTrace, result: torch.Tensor, bias: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> None:
    _linear(trace, result, x, weight.t(), bias)


def _linear(
    trace: RowTrace, result: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> None:
    path = trace.path_of(weight)
    if path is None or x.dtype is not trace.dtype:
        raise CannotRecord("it multiplies with weights that are not packed")
    view = trace.view(x)
    sizes = [size for dim, size in enumerate(x.shape) if dim != trace.row_dimension(view) and size != 1]
    if sizes != [x.shape[-1]]:
        raise CannotRecord("a linear sees more than rows")
    if view.shape.stride(-1) != 1:
        view = trace.together(view)
    out = trace.new(result.shape, result.dtype, kept=view.value.kept)
    trace.steps.append(
        LinearOf(view.value, int(view.shape.storage_offset()), out.value, path, has_bias=bias is not None)
    )
    trace.know(result, out)


def _index_select(trace: RowTrace, result: torch.Tensor, table: torch.Tensor, dim: int, index: torch.Tensor) -> None:
    if dim != 0:
        raise CannotRecord("it selects columns by row")
    _look_up(trace, result, table, index)


def _index(trace: RowTrace, result: torch.Tensor, x: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> None:
    by = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    if len(by) != 1:
        raise CannotRecord("it looks up by several numbers")
    (dim, index), = by  # fmt: skip
    if not trace.is_known(x) and dim == 0:
        _look_up(trace, result, x, index)
        return
    view = trace.view(x)
    if index is not trace.keep or dim != trace.row_dimension(view):
        raise CannotRecord("it selects rows")
    out = trace.new(result.shape, result.dtype, kept=True)
    without_rows = view.shape.select(dim, 0)
    trace.steps.append(Compute("keep", *walk([out.shape.select(dim, 0), without_rows], [out.value, view.value])))
    trace.know(result, out)


def _look_up(trace: RowTrace, result: torch.Tensor, table: torch.Tensor, index: torch.Tensor, *_: Any) -> None:
    by = trace.view(index)
    if trace.is_known(table):
        raise CannotRecord("it looks up in numbers of rows")
    width = table.shape[-1]
    if by.value.size != 1 or by.value.dtype is not torch.int64 or table.dim() != 2 or not table.is_contiguous():
        raise CannotRecord("it looks up something else than rows of a matrix")
    most = trace.most_tokens if by.value is trace.tokens else trace.most_positions
    if len(table) < most:  # the model may make a longer table in a later iteration
        raise CannotRecord(f"it looks up in a table of {len(table)} rows, where there may be {most}")
    if table.dtype not in NUMBER_TYPES:
        raise CannotRecord(f"it looks up numbers that are {table.dtype}")
    out = trace.new(result.shape, result.dtype, kept=by.value.kept)
    is_head = trace.path_of(table) == HEAD
    trace.steps.append(LookUpOf(out.value, None if is_head else table, by.value, len(table), width))
    trace.know(result, out)


HANDLERS: dict[str, Callable[..., None]] = {
    "pow": _pow, "square": partial(_pow, exponent=2), "matmul": _matmul, "mean": partial(_reduce, "mean"),
    "sum": partial(_reduce, "sum"), "layer_norm": _layer_norm, "rms_norm": _rms_norm, "cat": _cat, "stack": _stack,
    "repeat": _repeat, "repeat_interleave": _repeat_interleave, "linear": _linear, "addmm": _addmm,
    "embedding": _look_up, "gather": _gather, "index": _index, "index_select": _index_select,
}  # fmt: skip
"""The handlers of the other operations. Each gets the trace, the operation's result and its arguments."""
