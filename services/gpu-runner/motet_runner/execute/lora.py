"""Adapters beside the base (PU-05): every linear that sees exactly the iteration's rows may get LoRA added.

The module stays what it is; its `forward` is followed by `add_lora` on the same rows. The base is never changed, and an
iteration without adapters goes through untouched.
"""

from collections.abc import Callable
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from motet_kernels import Weights, add_lora
from motet_runner.execute.rows import CURRENT


def features(module: Any) -> tuple[int, int] | None:
    """(in, out) of a linear, GPT-2's transposed one included; None for anything else."""
    if type(module) is nn.Linear:
        return module.in_features, module.out_features
    if isinstance(module, Conv1D):
        return module.nx, module.nf
    return None


class LoraLinears:
    """The weights of every linear that an adapter may change, by the linear's path in the base model."""

    def __init__(self, linears: dict[str, Any], dtype: Any, device: Any) -> None:
        self.weights: dict[str, Weights] = {}
        for path, module in linears.items():
            shape = features(module)
            assert shape is not None, path
            self.weights[path] = Weights(*shape, dtype, device)
            module.forward = _followed(module.forward, self.weights[path])

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        return {path: (weights.inputs, weights.outputs) for path, weights in self.weights.items()}


def _followed(forward: Callable[[Any], Any], weights: Weights) -> Callable[[Any], Any]:
    def followed(x: Any) -> Any:
        y = forward(x)
        batch = CURRENT.get().lora
        if batch is not None:
            add_lora(y.view(-1, weights.outputs), x.reshape(-1, weights.inputs), weights, batch)
        return y

    return followed
