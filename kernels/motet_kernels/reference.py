"""The reference of tests: one row at a time, in fp64, in the order of the formula. Clear rather than fast."""

from collections.abc import Mapping, Sequence

import torch

from motet_kernels.lora_batch import Segment


def add_lora(
    y: torch.Tensor,
    x: torch.Tensor,
    segments: Sequence[Segment],
    matrices: Mapping[str, tuple[torch.Tensor, torch.Tensor, float]],
) -> torch.Tensor:
    """y[i] + scale · (x[i] · Aᵀ) · Bᵀ for every row i of a segment; other rows stay as they are.

    `matrices`: adapter's name → (lora_A [rank, in], lora_B [out, rank], scale), as PEFT saves them.
    """
    result = y.double().clone()
    for segment in segments:
        a, b, scale = matrices[segment.adapter.name]
        for row in range(segment.start, segment.stop):
            result[row] += scale * (b.double() @ (a.double() @ x[row].double()))
    return result
