"""Adapters beside the base (PU-05): LoRA can be added to each linear that gets exactly the iteration's rows.

After a module's own `forward`, `add_lora` adds to the result of the same rows. The base's weights never change, and an
iteration without adapters takes no extra work.
"""

from bisect import bisect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from hashlib import sha256
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from motet_kernels import LinearGroup, LoraBackend, RunLayout
from motet_runner.adapters.host_load import BaseLinear
from motet_runner.execute.adapters.add_lora import AddLora
from motet_runner.execute.batch.flat_batch import CURRENT


def features(module: nn.Module) -> tuple[int, int] | None:
    """(inputs, outputs) of a linear, or of GPT-2's transposed linear; None for other modules."""
    if type(module) is nn.Linear:
        return module.in_features, module.out_features
    if isinstance(module, Conv1D):
        return module.nx, module.nf
    return None


def biased_modules(linears: Mapping[str, nn.Module]) -> tuple[str, ...]:
    """Those of the linears that have a bias"""
    return tuple(path for path, module in linears.items() if module.bias is not None)


def linears_with_lora(model: Any, fed: Mapping[str, Sequence[int]], *, tokens: int) -> dict[str, nn.Module]:
    """The linears that an adapter may change: all but the head that got exactly the rows of an iteration with this many
    tokens. `fed`: by the path of a linear, the rows of each call."""
    head = model.get_output_embeddings()
    return {
        path: module
        for path, module in model.named_modules()
        if features(module) and module is not head and list(fed.get(path, ())) == [tokens]
    }


class LoraLinears:
    """The linears that an adapter may change, by path in the base model. A back end is bound to them when the adapters'
    memory exists."""

    def __init__(
        self,
        linears: dict[str, nn.Module],
        dtype: torch.dtype,
        add_lora: AddLora,
        groups: Sequence[Sequence[str]] = (),
        *,
        squares_of: Callable[[nn.Module], torch.Tensor] | None = None,
    ) -> None:
        """`add_lora`: the back end that is bound first. `groups`: linears with the same input tensor. A linear without
        a group becomes a group of its own. `squares_of`: gives the sums of the squares of the rows of a linear's
        weight, in any thread; None: no adapter has DoRA."""
        self.shapes = {path: _shape(path, module) for path, module in linears.items()}
        self._linears = linears
        self._squares_of = squares_of
        self._squares = cache(self._find_squares)
        every = (parameter for module in linears.values() for parameter in module.parameters())
        self._device = next((parameter.device for parameter in every), torch.device("cpu"))
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._dtype = dtype
        self._tile = add_lora.tile
        self.groups = _groups(self.shapes, groups)
        self._layout = cache(lambda rounded: add_lora.make_layout(rounded, self.groups, dtype))
        self._backend: LoraBackend[Any] | None = None
        self._forwards: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {}
        self._own: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {}
        """The forwards without LoRA"""

    def layout(self, rank: int) -> RunLayout:
        """The places of an adapter's matrices in its run, by rank. All back ends that are bound share this layout."""
        return self._layout(-(-rank // self._tile) * self._tile)

    @property
    def run_layout(self) -> str:
        """What the bytes of a run depend on, besides the adapter, the base and, for DoRA, what multiplies"""
        layout = self.layout(self._tile)
        groups = sha256(repr([(group.inputs, group.outputs) for group in self.groups]).encode()).hexdigest()
        return f"{type(layout).__name__} {layout.dtype}, of {self._dtype}, tile {self._tile}, groups {groups}"

    def run_bytes(self, rank: int) -> int:
        """The bytes of an adapter's run at this rank."""
        return self.layout(rank).bytes

    def largest_rank(self, room: int, wanted: int) -> int:
        """The largest rank whose run fits into `room` bytes, up to `wanted`; 0 if none does."""
        tile, most = self._tile, -(-wanted // self._tile)
        fitting = bisect(range(1, most + 1), room, key=lambda tiles: self.run_bytes(tiles * tile))
        return min(wanted, tile * fitting)

    def bind(self, add_lora: AddLora, memory: torch.Tensor, copy_bytes: int) -> LoraBackend[Any]:
        """Let a back end that reads adapters from `memory` [bytes] add LoRA to the linears' results. The back end takes
        at most `copy_bytes` beside `memory`. It may replace a back end that read the same memory."""
        assert add_lora.tile == self._tile, "the adapters in memory have the layout of another back end"
        self.follow()
        self._backend = add_lora.make(self.groups, memory, self._dtype, copy_bytes)
        return self._backend

    def follow(self) -> None:
        """Let LoRA follow each linear that is new or whose weights were packed since the last call."""
        for path, module in self._linears.items():
            if module.forward is not self._forwards.get(path):
                self._own[path] = module.forward
                self._forwards[path] = self._followed(module.forward, path, *self.shapes[path])
                module.forward = self._forwards[path]

    def base(self, path: str) -> BaseLinear:
        """May be called in any thread, also while weights are packed."""
        module = self._linears[path]
        bias: torch.Tensor | None = module.bias  # type: ignore[assignment] # a tensor

        def own(rows: torch.Tensor) -> torch.Tensor:
            forward = module.forward
            if forward is self._forwards[path]:
                forward = self._own[path]
            product: torch.Tensor = forward(rows)
            return product

        def multiply(rows: torch.Tensor) -> torch.Tensor:
            with self._beside():
                rows = rows.to(self._device, self._dtype)
                try:
                    product = own(rows)
                except RuntimeError:  # maybe the weights were packed since `forward` was read; there is another one now
                    product = own(rows)
                return (product if bias is None else product.float() - bias.float()).cpu()

        with self._beside():
            on_host = None if bias is None else bias.cpu()
        return BaseLinear(lambda: self._squares(path), on_host, multiply)

    def _find_squares(self, path: str) -> torch.Tensor:
        assert self._squares_of is not None, "nothing gives the squares of weights"
        with self._beside():
            return self._squares_of(self._linears[path]).cpu()

    def _beside(self) -> AbstractContextManager[Any]:
        """On a GPU, what a load computes does not wait for the iterations that are launched."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _followed(
        self, forward: Callable[[torch.Tensor], torch.Tensor], path: str, inputs: int, outputs: int
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        def followed(x: torch.Tensor) -> torch.Tensor:
            y = forward(x)
            batch = CURRENT.get().lora
            if batch is not None and self._backend is not None:
                self._backend.add_lora(y.view(-1, outputs), x.reshape(-1, inputs), path, batch)
            return y

        return followed


def _groups(shapes: dict[str, tuple[int, int]], shared: Sequence[Sequence[str]]) -> list[LinearGroup]:
    """All linears in the order of the model. A group has the place of its first linear."""
    group_of = {path: tuple(group) for group in shared for path in group}
    in_order = dict.fromkeys(group_of.get(path, (path,)) for path in shapes)
    return [LinearGroup(shapes[group[0]][0], {path: shapes[path][1] for path in group}) for group in in_order]


def _shape(path: str, module: nn.Module) -> tuple[int, int]:
    shape = features(module)
    assert shape is not None, path
    return shape
