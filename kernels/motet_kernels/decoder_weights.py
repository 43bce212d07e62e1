"""The weights of a fused forward pass of a Llama-shaped decoder, for any implementation."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch

PACKED_TYPES = (torch.float32, torch.bfloat16)
"""The types of weights that kernels pack"""

ROWS_AT_ONCE = 256
"""How many rows of a weight are unpacked, or converted to fp32, at a time"""


class PackedLinears(Protocol):
    """Weights [outputs, inputs] of linears that are fed the same rows, packed in the layout that some kernels read.

    The results of all these linears are columns of one matrix.
    """

    dtype: torch.dtype
    inputs: int
    outputs: list[int]
    columns: list[int]
    """The first column of each linear; the last entry is the number of all columns."""

    def parts(self, weights: Sequence[torch.Tensor]) -> Iterator[None]:
        """Pack the weights, a few at a time. The packed weights may be used only after the last part."""

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None, index: int = 0) -> torch.Tensor:
        """x · Wᵀ (+ bias) with one of the linears, for x [..., inputs]"""

    def rows(self, of: torch.Tensor) -> torch.Tensor:
        """Unpacks rows of the first weight: for an embedding that shares its matrix with a linear."""

    def squares(self, index: int) -> torch.Tensor:
        """As `squares_of_rows` of one of the weights"""


Weights = TypeVar("Weights", bound=PackedLinears)


@dataclass(frozen=True)
class LayerWeights(Generic[Weights]):
    attention_norm: torch.Tensor
    qkv: Weights
    qkv_bias: Sequence[torch.Tensor | None]
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    """[head_dim] the weight of the norm of each head, before the rotation"""
    o: Weights
    o_bias: torch.Tensor | None
    mlp_norm: torch.Tensor
    gate_up: Weights
    gate_up_bias: Sequence[torch.Tensor | None]
    down: Weights
    down_bias: torch.Tensor | None
    scale: float
    """The factor of the attention scores"""
    window: int | None
    """How many tokens a token attends to, itself included; None: all"""
    linears: Sequence[Sequence[str]]
    """The names in add_lora: q, k and v; o; gate and up; down"""


@dataclass(frozen=True)
class DecoderWeights(Generic[Weights]):
    heads: int
    kv_heads: int
    head_dim: int
    epsilon: float
    """The epsilon of all norms"""
    embedding: torch.Tensor | Weights
    layers: Sequence[LayerWeights[Weights]]
    final_norm: torch.Tensor
    head: Weights
    head_bias: torch.Tensor | None


def squares_of_rows(weight: torch.Tensor) -> torch.Tensor:
    """[outputs] of each row, the sum of its squares in fp32"""
    return torch.cat([part.float().square().sum(1) for part in weight.split(ROWS_AT_ONCE)])


def bias_of_columns(weights: PackedLinears, biases: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """One bias for the columns of all linears; zeros for a linear without a bias, and for columns of padding. None if
    no linear has a bias."""
    given = [bias for bias in biases if bias is not None]
    if not given:
        return None
    together = torch.zeros(weights.columns[-1], dtype=weights.dtype, device=given[0].device)
    for first, bias in zip(weights.columns, biases, strict=False):
        if bias is not None:
            together[first : first + len(bias)] = bias
    return together
