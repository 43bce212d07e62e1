"""The linears of a model in the compiled kernels: their weights packed, in place of the originals.

The modules stay and compute with the packed weights, so memory holds one copy, for them and for the fused forward.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from motet_kernels.cpp import Library
from motet_kernels.cpp.linear import PACKED_TYPES, PackedWeights


@dataclass(frozen=True)
class Packed:
    """Where the weights of a linear are: one of those that were packed together."""

    weights: PackedWeights
    index: int


HEAD = ""
"""The path of the model's head, whatever the model calls it"""


def pack_linears(
    model: Any, linears: dict[str, nn.Module], groups: Sequence[Sequence[str]], library: Library
) -> dict[str, Packed]:
    """Replace the weights of these linears, those of a group together, and of the model's head.

    → the packed ones by path. The embedding looks up in the head's when both are one matrix.
    """
    packed: dict[str, Packed] = {}
    for group in groups:
        weights = [_weight(linears[path]) for path in group]
        dtype = weights[0].dtype
        if dtype not in PACKED_TYPES or any(weight.dtype is not dtype for weight in weights):
            continue
        together = PackedWeights(library, weights)
        for index, path in enumerate(group):
            packed[path] = Packed(together, index)
            _replace(linears[path], together, index)
        del weights
    head = _pack_head(model, library)
    return packed if head is None else packed | {HEAD: head}


def _pack_head(model: Any, library: Library) -> Packed | None:
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if type(head) is not nn.Linear or head.weight.dtype not in PACKED_TYPES:
        return None
    tied = head.weight.data_ptr() == embedding.weight.data_ptr()
    if tied and type(embedding) is not nn.Embedding:  # it does more than look up, so it keeps its weights
        return None
    weights = PackedWeights(library, [head.weight])
    _replace(head, weights, 0)
    if tied:
        embedding.weight = head.weight
        embedding.forward = weights.rows
    return Packed(weights, 0)


def _weight(linear: nn.Module) -> torch.Tensor:
    """[outputs, inputs]"""
    weight: torch.Tensor = linear.weight  # type: ignore[assignment] # nn.Module's attributes are tensors or modules
    return weight.t() if isinstance(linear, Conv1D) else weight


def _replace(linear: nn.Module, weights: PackedWeights, index: int) -> None:
    bias: torch.Tensor | None = linear.bias  # type: ignore[assignment] # nn.Module's attributes are tensors or modules
    linear.forward = partial(weights.linear, bias=bias, index=index)
    linear.weight = nn.Parameter(torch.empty(0, dtype=weights.dtype), requires_grad=False)
