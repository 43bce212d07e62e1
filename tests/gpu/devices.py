"""Where the tests of this folder compute, and in what."""

from typing import Any

import pytest
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE.type == "cuda" else [])]
"""In the interpreter a product of bfloats is wrong, without an error."""

IN_A_SOAK = [] if DEVICE.type == "cuda" else [pytest.mark.soak]
"""Marks of what takes the interpreter long, and fails for a cause for which another test fails, too."""

LAYERS = 2
"""Of models whose layers are alike: with a second one, what belongs to a layer is seen to be its own."""


def in_types(first: Any, *others: Any, both: bool = True) -> list[Any]:
    """Parameters: each of these with each type. The interpreter computes the first of them in 16 bits, and the others
    only in a soak: sizes and types are parts of a kernel that have nothing to do with each other. `both`: the first
    also in 32 bits"""

    def is_short(one: Any, dtype: torch.dtype) -> bool:
        wide = dtype is torch.float32
        return both or not wide if one is first else wide

    return [
        pytest.param(one, dtype, marks=() if is_short(one, dtype) else IN_A_SOAK)
        for one in (first, *others)
        for dtype in DTYPES
    ]
