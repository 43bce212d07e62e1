"""Adapters of 8-bit integers (G5) have half the bytes of bf16. A batch of many adapters spends nearly all its time on
reading their bytes.

A[r] and B[r] are used only in (x · A[r]) · B[r]. So the two rows share one scale, in fp32: shrink multiplies its sums
by the scale, and expand needs none. Each linear takes four more bytes per rank, so the size of a run is still
proportional to the rank. What scales and shifts a linear's own result is in integers, too: each of the two rows has a
scale of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from motet_kernels.run_layout import LinearGroup, RunLayout

LARGEST = 127
SCALE_BYTES = 4


@dataclass(frozen=True, eq=False)
class Int8Layout(RunLayout):
    """The matrices are laid out as in any run. After all matrices follow the scales [rank] of each linear."""

    @cached_property
    def scale_offsets(self) -> dict[str, int]:
        """Linear → where its scales begin, in bytes"""
        begin = self._laid_out[1]
        return {linear: begin + number * self._scale_bytes for number, linear in enumerate(self.offsets)}

    @cached_property
    def bytes(self) -> int:
        return self._laid_out[1] + len(self.offsets) * self._scale_bytes

    @property
    def _scale_bytes(self) -> int:
        """The bytes of a linear's scales. The rank is a multiple of 16, so these scales begin at a cache line."""
        return self.rank * SCALE_BYTES

    def scales(self, run: torch.Tensor, linear: str) -> torch.Tensor:
        """[rank] fp32, as a view of a run [bytes]"""
        begin = self.scale_offsets[linear]
        return run[begin : begin + self._scale_bytes].view(torch.float32)

    def write(self, run: torch.Tensor, linear: str, a: torch.Tensor, b: torch.Tensor, scale: float) -> None:
        into_a, into_b = self.matrices(run, linear)
        rank = a.shape[0]
        into_a[:rank], of_a = _rounded(a.float())
        into_b[:rank], of_b = _rounded(b.t().float() * scale)
        self.scales(run, linear)[:rank] = of_a * of_b

    def write_alike(
        self, run: torch.Tensor, linears: Sequence[str], a: torch.Tensor, b: torch.Tensor, scales: Sequence[float]
    ) -> None:
        for linear, *of_one in zip(linears, a, b, scales, strict=True):
            self.write(run, linear, *of_one)

    def scaling(self, run: torch.Tensor, linear: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies in fp32"""
        d, e = self.matrices(run, linear)[1][-2:].float() * self.scales(run, linear)[-2:, None]
        return d, e

    def write_scaling(self, run: torch.Tensor, linear: str, scale: torch.Tensor, shift: torch.Tensor) -> None:
        rows = self.matrices(run, linear)[1][-2:]
        integers, self.scales(run, linear)[-2:] = _rounded(torch.stack((scale - 1, shift)))
        rows.copy_(integers)

    def is_finite(self, run: torch.Tensor, linear: str) -> bool:
        return bool(self.scales(run, linear).isfinite().all())

    def stored(self, run: torch.Tensor, linear: str) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = self.matrices(run, linear)
        return a.float() * self.scales(run, linear)[:, None], b.float()


def int8_layout(rank: int, groups: Sequence[LinearGroup], dtype: torch.dtype) -> RunLayout:  # noqa: ARG001
    """`dtype`, the model's data type, is ignored."""
    return Int8Layout(rank, groups, torch.int8)


def _rounded(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row as integers, and the row's scale; 0 for a row of zeros"""
    of_one = rows.abs().amax(dim=1) / LARGEST
    integers = rows / torch.where(of_one > 0, of_one, 1.0)[:, None]
    return integers.round().to(torch.int8), of_one
