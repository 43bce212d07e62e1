"""The error that rounding explains: how far right results may be from the truth."""

from collections.abc import Sequence

import torch
from torch.nn.functional import linear

from motet_kernels.decoder_weights import PackedLinears
from motet_runner.execute.forward.wide_modules import Wide

ALLOWED = {torch.float32: 2.0, torch.bfloat16: 1.5, torch.float16: 1.5}
"""The allowed error, as a multiple of the root mean square error of right results. The largest error would say less: it
is noise. In float32 the noise comes from another order of sums; in 16 bits, from the rounding of results in any order.
"""
OF_ONE = 6.0
"""A single token may be off by this multiple of ALLOWED. The mean alone would hide one wrong token among many right
ones."""
LEAST = {torch.float32: 2e-6, torch.bfloat16: 1e-3, torch.float16: 1e-4}
"""An error that is always allowed, relative to the results. The right results' error may be small by luck; float32 sums
in another order are then off by more than ALLOWED."""

LINEAR_ROWS = 65


def linear_fault(weights: Sequence[torch.Tensor], packed: PackedLinears) -> str:
    """Why these packed weights cannot replace the originals; empty if they can."""
    like = weights[0]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(LINEAR_ROWS, packed.inputs, generator=generator, dtype=torch.float32).to(like.device, like.dtype)
    for index, weight in enumerate(weights):
        with Wide(wider(weight.dtype)):
            truth = linear(x, weight)
        for rows in (1, LINEAR_ROWS):
            right = truth[:rows]
            own = rms(linear(x[:rows], weight) - right)
            error = rms(packed.linear(x[:rows], index=index) - right)
            if not error <= allowed(own, right, weight.dtype):
                return f"a product is off by {error:.2g}, and that of torch by {own:.2g}"
    return ""


def allowed(own: float, truth: torch.Tensor, dtype: torch.dtype) -> float:
    """`own`: the error of results that are known to be right"""
    return max(ALLOWED[dtype] * own, LEAST[dtype] * rms(truth))


def rms(numbers: torch.Tensor) -> float:
    return float(numbers.double().square().mean().sqrt())


def wider(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float32 else torch.float32
