"""The linears of a model as kernels read them: their weights packed, in place of the originals.

The modules stay and compute with the packed weights, so memory holds one copy, for them and for the fused forward.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from motet_kernels.cpp import Library
from motet_kernels.cpp.linear import PackedWeights
from motet_kernels.decoder_weights import PACKED_TYPES, PackedLinears
from motet_kernels.huge_pages import Chunks
from motet_kernels.torch_linear import TorchWeights, reorders
from motet_runner.memory.gpu_memory import GpuMemory
from motet_runner.memory.host_limit import available_host_bytes

MIB = 1024 * 1024


class Packing(ABC):
    """How some kernels want weights"""

    dtypes: Sequence[torch.dtype] = PACKED_TYPES
    """Those of weights that are packed"""
    takes_groups_apart = True
    """Whether one of several linears that were packed together takes no longer than if it were packed alone"""
    only_fused = False
    """Whether nothing but a fused forward gains from it"""

    def available_bytes(self) -> int:
        """What memory has left where the weights are"""
        return available_host_bytes()

    @abstractmethod
    def bytes_beside(self, weights: Sequence[torch.Tensor]) -> int:
        """What packing them takes beside them"""

    @abstractmethod
    def begin(self, weights: Sequence[torch.Tensor], *, looked_up: bool) -> PackedLinears:
        """To be packed together, by its `parts`. `looked_up`: an embedding uses them, too."""


class TorchPacking(Packing):
    takes_groups_apart = False

    def bytes_beside(self, weights: Sequence[torch.Tensor]) -> int:
        size = sum(weight.nbytes for weight in weights)
        return size if len(weights) == 1 else 2 * size  # several are brought together first

    def begin(self, weights: Sequence[torch.Tensor], *, looked_up: bool) -> TorchWeights:
        return TorchWeights(weights, reordered=not looked_up and reorders(weights[0].dtype))


class LibraryPacking(Packing):
    def __init__(self, library: Library) -> None:
        self._library = library
        self._chunks = Chunks()

    def bytes_beside(self, weights: Sequence[torch.Tensor]) -> int:
        return sum(weight.nbytes for weight in weights)

    def begin(self, weights: Sequence[torch.Tensor], *, looked_up: bool) -> PackedWeights:  # noqa: ARG002
        return PackedWeights(self._library, weights, later=True, allocate=self._chunks.empty)


class SideBySide(Packing):
    """For a GPU: matrices as they were, one below the other."""

    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    only_fused = True

    def __init__(self, device: torch.device, utilization_percent: int) -> None:
        """`utilization_percent`: how much of the GPU's memory this process may take in all"""
        self._device = device
        self._percent = utilization_percent

    def available_bytes(self) -> int:
        if self._device.type != "cuda":
            return super().available_bytes()
        torch.cuda.empty_cache()  # what was replaced until now has other sizes than what comes
        return GpuMemory.of(self._device).left(self._percent)

    def bytes_beside(self, weights: Sequence[torch.Tensor]) -> int:
        return 0 if len(weights) == 1 else sum(weight.nbytes for weight in weights)

    def begin(self, weights: Sequence[torch.Tensor], *, looked_up: bool) -> TorchWeights:  # noqa: ARG002
        return TorchWeights(weights, reordered=False)


@dataclass(frozen=True)
class Packed:
    """Where the weights of a linear are: one of those that were packed together."""

    weights: PackedLinears
    index: int


FaultOf = Callable[[Sequence[torch.Tensor], PackedLinears], str]
"""Gets weights, and the same ones packed: why these cannot replace them; empty if they can."""

HEAD = ""
"""The path of the model's head, whatever the model calls it"""


class LinearPacking:
    """Replaces the weights of a model's linears, those of a group together, and of its head.

    After each part, every linear computes with its own weights or with its packed ones. Beside all weights, memory
    holds those of one group, while they are packed.
    """

    def __init__(
        self,
        model: Any,
        linears: dict[str, nn.Module],
        groups: Sequence[Sequence[str]],
        packing: Packing,
        fault_of: FaultOf,
    ) -> None:
        """`fault_of`: what fails keeps its own weights."""
        self.packed: dict[str, Packed] = {}
        """By path"""
        self.total = len(linears)
        """Linears, without the head"""
        self.fault = ""
        """Why some are not packed, if their products are wrong then"""
        self._model = model
        self._linears = linears
        self._groups = groups
        self._packing = packing
        self._fault_of = fault_of

    @property
    def unpacked(self) -> int:
        """Linears that have their own weights"""
        return self.total - len(self.packed.keys() - {HEAD})

    def parts(self) -> Iterator[None]:
        """Raises MemoryError or RuntimeError if memory does not suffice for the next ones. What is packed by then
        stays."""
        for group in self._groups:
            weights = [weight_of(self._linears[path]) for path in group]
            dtype = weights[0].dtype
            if dtype not in self._packing.dtypes or any(weight.dtype is not dtype for weight in weights):
                continue
            together = yield from self._pack(weights)
            if together is None:
                continue
            for index, path in enumerate(group):
                self.packed[path] = Packed(together, index)
                _replace(self._linears[path], together, index)
            del weights, together
            yield
        yield from self._pack_head()

    def _pack(
        self, weights: Sequence[torch.Tensor], *, looked_up: bool = False
    ) -> Generator[None, None, PackedLinears | None]:
        """None if their products are wrong"""
        needed, available = self._packing.bytes_beside(weights), self._packing.available_bytes()
        if needed > available:  # an allocation would succeed, and its use would end the process
            raise MemoryError(f"{needed / MIB:.0f} MiB are needed for a moment, and {available / MIB:.0f} MiB are left")
        packed = self._packing.begin(weights, looked_up=looked_up)
        yield from packed.parts(weights)
        fault = self._fault_of(weights, packed)
        yield
        self.fault = self.fault or fault
        return None if fault else packed

    def _pack_head(self) -> Iterator[None]:
        """The embedding looks up in the packed weights when both are one matrix."""
        head, embedding = self._model.get_output_embeddings(), self._model.get_input_embeddings()
        if type(head) is not nn.Linear or head.weight.dtype not in self._packing.dtypes:
            return
        tied = head.weight.data_ptr() == embedding.weight.data_ptr()
        weights = yield from self._pack([head.weight], looked_up=tied)
        if weights is None:
            return
        if tied:
            looks_up = weights.rows if type(embedding) is nn.Embedding else _Embedding(embedding, weights)
            some = torch.tensor([[1, 0, len(head.weight) - 1]], device=head.weight.device)
            if not torch.equal(looks_up(some), embedding(some)):  # it does something else, so both keep their weights
                return
            embedding.forward = looks_up
        _replace(head, weights, 0)
        if tied:
            embedding.weight = head.weight
        self.packed[HEAD] = Packed(weights, 0)
        yield


class _Embedding:
    """An embedding that does more than look up, such as Gemma's: it gets the rows of these tokens as all its rows."""

    def __init__(self, embedding: nn.Module, weights: PackedLinears) -> None:
        self._embedding = embedding
        self._forward = embedding.forward
        self._weights = weights

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        own = self._embedding.weight
        self._embedding.weight = nn.Parameter(self._weights.rows(tokens.reshape(-1)), requires_grad=False)
        try:
            rows: torch.Tensor = self._forward(torch.arange(tokens.numel(), device=tokens.device).view(tokens.shape))
        finally:
            self._embedding.weight = own
        return rows


def weight_of(linear: nn.Module) -> torch.Tensor:
    """[outputs, inputs]"""
    weight: torch.Tensor = linear.weight  # type: ignore[assignment] # nn.Module's attributes are tensors or modules
    return weight.t() if isinstance(linear, Conv1D) else weight


def _replace(linear: nn.Module, weights: PackedLinears, index: int) -> None:
    bias: torch.Tensor | None = linear.bias  # type: ignore[assignment] # nn.Module's attributes are tensors or modules
    linear.forward = partial(weights.linear, bias=bias, index=index)
    own: torch.Tensor = linear.weight  # type: ignore[assignment] # as above
    linear.weight = nn.Parameter(own.new_empty(0, dtype=weights.dtype), requires_grad=False)
