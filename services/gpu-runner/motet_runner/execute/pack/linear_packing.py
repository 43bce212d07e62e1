"""A model's linears with packed weights in the kernels' layout, which replace the originals.

The modules and the fused forward share the packed weights, so memory holds one copy.
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
from motet_kernels.decoder_weights import PACKED_TYPES, PackedLinears, squares_of_rows
from motet_kernels.huge_pages import Chunks
from motet_kernels.torch_linear import TorchWeights, reorders
from motet_runner.memory.gpu_memory import GpuMemory
from motet_runner.memory.host_limit import available_host_bytes

MIB = 1024 * 1024


class Packing(ABC):
    """How some kernels pack weights"""

    dtypes: Sequence[torch.dtype] = PACKED_TYPES
    """The types of weights that are packed"""
    takes_groups_apart = True
    """True if a linear that was packed with others takes no longer than one that was packed alone"""
    only_fused = False
    """True if only a fused forward gains from packing"""

    def available_bytes(self) -> int:
        """The free bytes of the memory where the weights are"""
        return available_host_bytes()

    @abstractmethod
    def bytes_beside(self, weights: Sequence[torch.Tensor]) -> int:
        """The bytes that packing takes beside the weights"""

    @abstractmethod
    def begin(self, weights: Sequence[torch.Tensor], *, looked_up: bool) -> PackedLinears:
        """The packed form of these weights; its `parts` packs them together. `looked_up`: an embedding uses the
        weights, too."""


class TorchPacking(Packing):
    takes_groups_apart = False

    def bytes_beside(self, weights: Sequence[torch.Tensor]) -> int:
        size = sum(weight.nbytes for weight in weights)
        return size if len(weights) == 1 else 2 * size  # several are concatenated first

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
    """For a GPU: the matrices in their own layout, concatenated."""

    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    only_fused = True

    def __init__(self, device: torch.device, utilization_percent: int) -> None:
        """`utilization_percent`: the share of the GPU's memory that this process may take"""
        self._device = device
        self._percent = utilization_percent

    def available_bytes(self) -> int:
        if self._device.type != "cuda":
            return super().available_bytes()
        torch.cuda.empty_cache()  # the next blocks have other sizes than the freed blocks
        return GpuMemory.of(self._device).left(self._percent)

    def bytes_beside(self, weights: Sequence[torch.Tensor]) -> int:
        return 0 if len(weights) == 1 else sum(weight.nbytes for weight in weights)

    def begin(self, weights: Sequence[torch.Tensor], *, looked_up: bool) -> TorchWeights:  # noqa: ARG002
        return TorchWeights(weights, reordered=False)


@dataclass(frozen=True)
class Packed:
    """A linear's packed weights: its index among the linears that were packed together."""

    weights: PackedLinears
    index: int


FaultOf = Callable[[Sequence[torch.Tensor], PackedLinears], str]
"""Gets weights and their packed form → why the packed form cannot replace the weights; empty if it can."""

HEAD = ""
"""The path of the model's head, whatever the model calls it"""


class LinearPacking:
    """Replaces the weights of a model's linears, group by group, and of its head.

    After each part, every linear computes with its own weights or with its packed ones. Packing takes memory for one
    group at a time.
    """

    def __init__(
        self,
        model: Any,
        linears: dict[str, nn.Module],
        groups: Sequence[Sequence[str]],
        packing: Packing,
        fault_of: FaultOf,
    ) -> None:
        """`fault_of`: linears with a fault keep their own weights."""
        self.packed: dict[str, Packed] = {}
        """Path → its packed weights"""
        self.total = len(linears)
        """How many linears there are, without the head"""
        self.fault = ""
        """Why some linears are not packed"""
        self._model = model
        self._linears = linears
        self._groups = groups
        self._packing = packing
        self._fault_of = fault_of

    @property
    def unpacked(self) -> int:
        """How many linears keep their own weights"""
        return self.total - len(self.packed.keys() - {HEAD})

    def parts(self) -> Iterator[None]:
        """Raises MemoryError or RuntimeError if memory does not suffice for the next weights. Weights that are packed
        stay packed."""
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
                _replace(self._linears[path], self.packed[path])
            del weights, together
            yield
        yield from self._pack_head()

    def _pack(
        self, weights: Sequence[torch.Tensor], *, looked_up: bool = False
    ) -> Generator[None, None, PackedLinears | None]:
        """None if the packed weights' products are wrong"""
        needed, available = self._packing.bytes_beside(weights), self._packing.available_bytes()
        if needed > available:  # an allocation would succeed, and its use would kill the process
            raise MemoryError(f"{needed / MIB:.0f} MiB are needed for a moment, and {available / MIB:.0f} MiB are left")
        packed = self._packing.begin(weights, looked_up=looked_up)
        yield from packed.parts(weights)
        fault = self._fault_of(weights, packed)
        yield
        self.fault = self.fault or fault
        return None if fault else packed

    def _pack_head(self) -> Iterator[None]:
        """If the embedding shares its matrix with the head, it reads the packed weights."""
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
            if not torch.equal(looks_up(some), embedding(some)):  # not a plain look-up, so both keep their weights
                return
            embedding.forward = looks_up
        self.packed[HEAD] = Packed(weights, 0)
        _replace(head, self.packed[HEAD])
        if tied:
            embedding.weight = head.weight
        yield


class _Embedding:
    """An embedding that does more than look up, such as Gemma's. During a call, only the rows that the call needs are
    its weight."""

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


def squares_of(linear: nn.Module) -> torch.Tensor:
    """As `squares_of_rows` of the linear's weight, which may be packed; in any thread, also while it is being packed"""
    weight = weight_of(linear)
    if weight.numel():
        return squares_of_rows(weight)
    packed: Packed = linear.packed  # type: ignore[assignment] # `_replace` has set it
    return packed.weights.squares(packed.index)


def _replace(linear: nn.Module, packed: Packed) -> None:
    bias: torch.Tensor | None = linear.bias  # type: ignore[assignment] # nn.Module's attributes are tensors or modules
    linear.forward = partial(packed.weights.linear, bias=bias, index=packed.index)
    linear.packed = packed  # type: ignore[assignment] # a module keeps any attribute
    own: torch.Tensor = linear.weight  # type: ignore[assignment] # as above
    linear.weight = nn.Parameter(own.new_empty(0, dtype=packed.weights.dtype), requires_grad=False)
