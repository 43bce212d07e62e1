"""The reference of tests and proofs: one segment at a time, in fp64, in the order of the formula."""

from collections.abc import Mapping, Sequence

import torch

from motet_kernels.lora_batch import Segment


def add_lora(
    y: torch.Tensor,
    x: torch.Tensor,
    segments: Sequence[Segment],
    matrices: Mapping[str, tuple[torch.Tensor, torch.Tensor, float | torch.Tensor]],
    scales: Mapping[str, tuple[torch.Tensor, torch.Tensor]] | None = None,
) -> torch.Tensor:
    """c · y[i] + e + scale · (x[i] · Aᵀ) · Bᵀ for every row i of a segment; other rows stay as they are.

    `matrices`: adapter's name → (lora_A [rank, in], lora_B [out, rank], scale), as PEFT saves them. `scales`: adapter's
    name → (c, e) [out]; without them, c is 1 and e is 0. For several linears with one input, y, matrices and scales
    have one dimension more before these.
    """
    result = y.to(torch.float64, copy=True)
    for segment in segments:
        a, b, scale = matrices[segment.adapter.name]
        scale_and_shift = (scales or {}).get(segment.adapter.name)
        rows = slice(segment.start, segment.stop)
        own = result[..., rows, :]
        if scale_and_shift is not None:
            c, e = scale_and_shift
            own.mul_(c.double().unsqueeze(-2)).add_(e.double().unsqueeze(-2))
        own += scale * (x[rows].double() @ a.double().mT) @ b.double().mT
    return result
