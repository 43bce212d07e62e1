"""Adapters beside the base (PU-05): every linear that sees exactly the iteration's rows may get LoRA added.

The module stays what it is; its `forward` is followed by `add_lora` on the same rows. The base is never changed, and an
iteration without adapters goes through untouched.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from motet.errors import SetupError
from motet_kernels import AdapterSlot, LinearGroup, LoraBackend, RunLayout, TorchBackend
from motet_runner.execute.flat_batch import CURRENT


def features(module: nn.Module) -> tuple[int, int] | None:
    """(in, out) of a linear, GPT-2's transposed one included; None for anything else."""
    if type(module) is nn.Linear:
        return module.in_features, module.out_features
    if isinstance(module, Conv1D):
        return module.nx, module.nf
    return None


NOT_YET = ("cpp", "triton")


def backend_named(kernels: str) -> type[TorchBackend]:
    """The back end of add_lora that `engine.kernels` names. `auto` is the fastest one that runs on this device."""
    known = {"auto": TorchBackend, "torch": TorchBackend}
    if kernels in known:
        return known[kernels]
    if kernels in NOT_YET:
        raise SetupError(f"not yet: engine.kernels {kernels!r}. Choose one of {', '.join(known)}.")
    raise SetupError(f"engine.kernels {kernels!r} is unknown. Choose one of {', '.join(known)}.")


class LoraLinears:
    """The linears that an adapter may change, by the linear's path in the base model, and the back end that adds to
    their results.

    All adapters share `rows` rows of rank in each linear: an adapter has the same ones everywhere.
    """

    def __init__(  # noqa: PLR0917
        self,
        linears: dict[str, nn.Module],
        rows: int,
        dtype: torch.dtype,
        device: torch.device,
        groups: Sequence[Sequence[str]] = (),
        kernels: str = "auto",
    ) -> None:
        """`groups`: the linears that are fed the same tensor. One that is in none is a group of its own."""
        self.rows = rows
        self.pinned = device.type == "cuda"
        """Whether what is copied to the device must be in pinned memory."""
        self.shapes = {path: _shape(path, module) for path, module in linears.items()}
        backend = backend_named(kernels)(_groups(self.shapes, groups), rows, dtype, device)
        self.backend: LoraBackend[Any] = backend
        for path, module in linears.items():
            module.forward = _followed(module.forward, backend, path, *self.shapes[path])

    def layout(self, rank: int) -> RunLayout:
        return self.backend.layout(rank)

    def write(self, path: str, place: AdapterSlot, a: torch.Tensor | None, b: torch.Tensor | None) -> None:
        self.backend.write(path, place, a, b)

    def move(self, place: AdapterSlot, to: AdapterSlot) -> None:
        """Carry an adapter to other rows of all linears."""
        self.backend.move(place, to)


def bytes_of(linears: dict[str, nn.Module], rows: int, dtype: torch.dtype) -> int:
    """What `rows` rows take in all linears together."""
    shapes = {path: _shape(path, module) for path, module in linears.items()}
    return TorchBackend.bytes_of(_groups(shapes, ()), rows, dtype)


def _groups(shapes: dict[str, tuple[int, int]], shared: Sequence[Sequence[str]]) -> list[LinearGroup]:
    """All linears in the order of the model; those that share their input come with the first of them."""
    group_of = {path: tuple(group) for group in shared for path in group}
    in_order = dict.fromkeys(group_of.get(path, (path,)) for path in shapes)
    return [LinearGroup(shapes[group[0]][0], {path: shapes[path][1] for path in group}) for group in in_order]


def _shape(path: str, module: nn.Module) -> tuple[int, int]:
    shape = features(module)
    assert shape is not None, path
    return shape


def _followed(
    forward: Callable[[torch.Tensor], torch.Tensor], backend: LoraBackend[Any], path: str, inputs: int, outputs: int
) -> Callable[[torch.Tensor], torch.Tensor]:
    def followed(x: torch.Tensor) -> torch.Tensor:
        y = forward(x)
        batch = CURRENT.get().lora
        if batch is not None:
            backend.add_lora(y.view(-1, outputs), x.reshape(-1, inputs), path, batch)
        return y

    return followed
