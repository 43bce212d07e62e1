"""What the engine must know of any back end of add_lora."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from motet_kernels import LinearGroup, LoraBackend, RunLayout

MakeLayout = Callable[[int, Sequence[LinearGroup], torch.dtype], RunLayout]
"""Gets a rank (a multiple of the tile), the groups, and the model's dtype."""

MakeBackend = Callable[[Sequence[LinearGroup], torch.Tensor, torch.dtype, int], LoraBackend[Any]]
"""Gets the groups, the adapters' memory [bytes], the dtype, and the bytes that the back end may take beside this
memory."""


@dataclass(frozen=True)
class AddLora:
    """Back ends that follow each other in one engine share tile and layout: adapters stay where they are."""

    make: MakeBackend
    tile: int
    copies: bool
    """True if the back end takes bytes beside the adapters' memory"""
    make_layout: MakeLayout = RunLayout
