"""Adapters beside the base (PU-05): every linear that sees exactly the iteration's rows may get LoRA added.

The module stays what it is; its `forward` is followed by `add_lora` on the same rows. The base is never changed, and an
iteration without adapters goes through untouched.
"""

from collections.abc import Callable

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from motet_kernels import AdapterSlot, LoraWeights, add_lora
from motet_runner.execute.rows import CURRENT


def features(module: nn.Module) -> tuple[int, int] | None:
    """(in, out) of a linear, GPT-2's transposed one included; None for anything else."""
    if type(module) is nn.Linear:
        return module.in_features, module.out_features
    if isinstance(module, Conv1D):
        return module.nx, module.nf
    return None


class LoraLinears:
    """The weights of every linear that an adapter may change, by the linear's path in the base model.

    All adapters share `rows` rows of rank in each linear: an adapter has the same ones everywhere.
    """

    def __init__(self, linears: dict[str, nn.Module], rows: int, dtype: torch.dtype, device: torch.device) -> None:
        self.rows = rows
        self.weights: dict[str, LoraWeights] = {}
        for path, module in linears.items():
            self.weights[path] = LoraWeights(*_shape(path, module), rows, dtype, device)
            module.forward = _followed(module.forward, self.weights[path])

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        return {path: (weights.inputs, weights.outputs) for path, weights in self.weights.items()}

    def write(
        self, path: str, place: AdapterSlot, a: torch.Tensor | None, b: torch.Tensor | None, scale: float = 1.0
    ) -> None:
        self.weights[path].write(*place, a, b, scale)

    def move(self, place: AdapterSlot, to: AdapterSlot) -> None:
        """Carry an adapter to other rows of all linears."""
        for weights in self.weights.values():
            weights.move(place[0], place[1], to[1])


def bytes_of(linears: dict[str, nn.Module], rows: int, dtype: torch.dtype) -> int:
    """What `rows` rows take in all linears together, with the copies that a batch may need (see `LoraWeights`)."""
    of_a_row: int = sum(sum(_shape(path, module)) for path, module in linears.items()) * dtype.itemsize
    return 2 * rows * of_a_row


def _shape(path: str, module: nn.Module) -> tuple[int, int]:
    shape = features(module)
    assert shape is not None, path
    return shape


def _followed(
    forward: Callable[[torch.Tensor], torch.Tensor], weights: LoraWeights
) -> Callable[[torch.Tensor], torch.Tensor]:
    def followed(x: torch.Tensor) -> torch.Tensor:
        y = forward(x)
        batch = CURRENT.get().lora
        if batch is not None:
            add_lora(y.view(-1, weights.outputs), x.reshape(-1, weights.inputs), weights, batch)
        return y

    return followed
