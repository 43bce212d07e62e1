"""A model's own modules in a wider type than its weights: the reference for rounded results.

Only results are wide. Each weight keeps its type and is widened when it is used, a large weight in parts, so that
memory holds no second model.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from motet_runner.execute.forward.modules import LoadedModel

WIDENED_BYTES = 8 * 1024 * 1024
"""The bytes of a linear's weight that are widened at a time: few, so that they are still in a CPU's cache for the
product."""

_LOOKS_UP = frozenset({"embedding", "index_select", "index", "gather"})
"""Operators that select a few numbers of a large tensor: the result is widened, not the input."""


@contextmanager
def wide(loaded: LoadedModel, dtype: torch.dtype) -> Iterator[LoadedModel]:
    """The model with all results in this type. Afterwards the modules get their former attributes and buffers back,
    because some ropes keep results, or a position as a tensor instead of a number."""
    model = loaded.model
    kept = [(module, {**vars(module), "_buffers": {**vars(module)["_buffers"]}}) for module in model.modules()]
    experts = getattr(model, "get_experts_implementation", lambda: None)()
    if experts is not None:  # other implementations gather all experts' weights
        model.set_experts_implementation("eager")
    try:
        with Wide(dtype):
            yield replace(loaded, dtype=dtype, fused=None)
    finally:
        for module, former in kept:
            vars(module).clear()
            vars(module).update(former)
        if experts is not None:
            model.set_experts_implementation(experts)


class Wide(TorchDispatchMode):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch's
        self._dtype = dtype
        self._widened = torch.empty(0, dtype=dtype)
        """Memory that all parts reuse: to allocate memory for each part takes longer than the product"""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if func.is_view:  # `to` is a view, too
            return func(*map(self._type, args), **{key: self._type(value) for key, value in kwargs.items()})
        if name in _LOOKS_UP:
            return self._wide(func(*args, **kwargs))
        if func._schema.is_mutable:  # noqa: SLF001 - torch has no public name for it
            return func(args[0], *(self._as(args[0], one) for one in args[1:]), **kwargs)
        if name == "linear":
            return self._linear(*args, **kwargs)
        return func(*map(self._wide, args), **{key: self._wide(value) for key, value in kwargs.items()})

    def _linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        x = self._wide(x)
        rows = max(1, WIDENED_BYTES // (weight.shape[1] * self._dtype.itemsize))
        if self._widened.numel() < rows * weight.shape[1] or self._widened.device != weight.device:
            self._widened = torch.empty(rows * weight.shape[1], dtype=self._dtype, device=weight.device)
        y = x.new_empty((*x.shape[:-1], len(weight)))
        for first in range(0, len(weight), rows):
            part = weight[first : first + rows]
            widened = self._widened[: part.numel()].view(part.shape).copy_(part)
            y[..., first : first + rows] = torch.nn.functional.linear(x, widened)
        return y if bias is None else y + self._wide(bias)

    def _wide(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to(self._dtype) if value.is_floating_point() else value
        if isinstance(value, list | tuple):
            return type(value)(map(self._wide, value))
        return self._type(value)

    def _type(self, value: Any) -> Any:
        return self._dtype if isinstance(value, torch.dtype) and value.is_floating_point else value

    @staticmethod
    def _as(changed: torch.Tensor, value: Any) -> Any:
        """Converted to the type of the tensor that is changed in place"""
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return value.to(changed.dtype)
        return value
