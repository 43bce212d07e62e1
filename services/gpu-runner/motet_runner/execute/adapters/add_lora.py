"""What the engine must know of a back end of add_lora, whichever it is."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from motet_kernels import LinearGroup, LoraBackend, RunLayout

MakeLayout = Callable[[int, Sequence[LinearGroup], torch.dtype], RunLayout]
"""Gets a rank, a multiple of the tile, and what the model computes in."""

MakeBackend = Callable[[Sequence[LinearGroup], torch.Tensor, torch.dtype, int], LoraBackend[Any]]
"""Gets the memory [bytes] from which it reads adapters, and how many bytes it may take beside it."""


@dataclass(frozen=True)
class AddLora:
    """Tile and layout are the same for all that may follow each other in one engine: adapters stay where they are."""

    make: MakeBackend
    tile: int
    copies: bool
    """Whether it takes bytes beside the memory"""
    make_layout: MakeLayout = RunLayout
