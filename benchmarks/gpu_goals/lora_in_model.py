"""LoRA of a whole model as others compute it, in the place of our back end in the same forward pass."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from benchmarks.gpu_goals.models import Adapters, Model
from benchmarks.gpu_goals.vllm_kernels import VllmKernels


class Lora(Protocol):
    def add_lora_together(self, y: torch.Tensor, x: torch.Tensor, linears: Sequence[str], batch: Any) -> None:
        """As GpuBackend's"""


def spans(owners: Sequence[int]) -> list[tuple[int, int]]:
    """The rows of each owner, which lie together"""
    return [(owners.index(owner), owners.index(owner) + owners.count(owner)) for owner in sorted(set(owners))]


class _InPlace:
    """What reads adapters where our own back end reads them"""

    def __init__(self, model: Model, adapters: Adapters, owners: Sequence[int]) -> None:
        self._sizes = {linear: size for group in model.groups for linear, size in group.outputs.items()}
        self._matrices = {linear: adapters.stacked(linear) for linear in self._sizes}
        self._owners = list(owners)

    def add_lora_together(self, y: torch.Tensor, x: torch.Tensor, linears: Sequence[str], batch: Any) -> None:  # noqa: ARG002
        first = 0
        for linear in linears:
            last = first + self._sizes[linear]
            self._add(y[:, first:last], x, *self._matrices[linear])
            first = last

    def _add(self, y: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
        raise NotImplementedError


class Loop(_InPlace):
    """One adapter after the other"""

    def _add(self, y: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
        for owner, (first, last) in enumerate(spans(self._owners)):
            y[first:last].addmm_(x[first:last] @ a[owner].t(), b[owner])


class Gather(_InPlace):
    """The matrices of each row's adapter are collected, and all rows multiplied at once."""

    def __init__(self, model: Model, adapters: Adapters, owners: Sequence[int]) -> None:
        super().__init__(model, adapters, owners)
        self._of_row = torch.tensor(self._owners, device=adapters.memory.device)

    def _add(self, y: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
        v = torch.bmm(x[:, None], a.index_select(0, self._of_row).transpose(1, 2))
        y += torch.bmm(v, b.index_select(0, self._of_row))[:, 0]


class Grouped(_InPlace):
    """torch's grouped product"""

    def __init__(self, model: Model, adapters: Adapters, owners: Sequence[int]) -> None:
        super().__init__(model, adapters, owners)
        ends = [last for _, last in spans(self._owners)]
        self._ends = torch.tensor(ends, dtype=torch.int32, device=adapters.memory.device)

    def _add(self, y: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
        multiply = torch.nn.functional.grouped_mm
        v = multiply(x, a.transpose(1, 2), offs=self._ends)
        y += multiply(v, b, offs=self._ends)


class Vllm:
    """vLLM's kernels, with q, k and v in one launch, and gate and up"""

    def __init__(self, model: Model, adapters: Adapters, owners: Sequence[int]) -> None:
        if model.bench.vllm is None:
            raise LookupError("--vllm-kernels names no folder")
        self._kernels = VllmKernels(model.bench.vllm)
        self._batch = self._kernels.batch(owners, len(set(owners)), adapters.memory.device)
        self._v = torch.empty(3, len(owners), adapters.rank, dtype=torch.float32, device=adapters.memory.device)
        self._matrices = {}
        for linear in model.linears:
            a, b = adapters.stacked(linear)
            self._matrices[linear] = a[:, None].contiguous(), b.transpose(1, 2)[:, None].contiguous()

    def add_lora_together(self, y: torch.Tensor, x: torch.Tensor, linears: Sequence[str], batch: Any) -> None:  # noqa: ARG002
        of_each = [self._matrices[linear] for linear in linears]
        matrices = [a for a, _ in of_each], [b for _, b in of_each]
        self._kernels.add(y, x, self._v[: len(linears)], matrices, self._batch)


OTHERS: dict[str, type[Loop | Gather | Grouped | Vllm]] = {
    "vllm": Vllm,
    "loop": Loop,
    "gather": Gather,
    "grouped": Grouped,
}
