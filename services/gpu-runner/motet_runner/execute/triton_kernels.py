"""The kernels of a GPU (PU-01, PU-22), and whether they serve here. Imported only when they are asked for: it needs
Triton."""

from collections.abc import Sequence
from typing import Any

import torch

from motet_kernels import LinearGroup, LoraBackend, RunLayout
from motet_kernels.gpu.attention import GpuAttention
from motet_kernels.gpu.launches import interpreted
from motet_kernels.gpu.lora_backend import GpuBackend
from motet_kernels.gpu.lora_tiles import MAX_RANK
from motet_kernels.int8_layout import int8_layout
from motet_runner.execute.flat_batch import SequenceAttention
from motet_runner.execute.gpu_forward import GpuForward
from motet_runner.execute.kernels import LargestWork
from motet_runner.execute.packed_linears import SideBySide


class TritonKernels:
    name = "triton"
    library = None
    tile = GpuBackend.tile
    copies = GpuBackend.copies
    makes_forward = GpuForward
    has_threads = False

    def __init__(self, device: torch.device, *, int8: bool = False, utilization_percent: int = 100) -> None:
        """`int8`: adapters are of integers. `utilization_percent`: how much of the GPU's memory this process may take
        in all"""
        self.packing = SideBySide(device, utilization_percent)
        self._int8 = int8
        self.make_layout = int8_layout if int8 else RunLayout

    def lora(
        self,
        groups: Sequence[LinearGroup],
        memory: torch.Tensor,
        dtype: torch.dtype,
        copy_bytes: int,  # noqa: ARG002
    ) -> LoraBackend[Any]:
        return GpuBackend(groups, memory, dtype, int8=self._int8)

    @staticmethod
    def room_bytes(work: LargestWork) -> int:
        groups = work.groups
        batches = [(work.rows, work.max_rank), (work.decodes, MAX_RANK)]  # of an iteration, and of all recordings
        return GpuAttention.room_bytes(work.heads, work.head_dim) + sum(
            GpuBackend.room_bytes(groups, rows, rank) for rows, rank in batches if groups
        )

    @staticmethod
    def attention(pages: torch.Tensor) -> SequenceAttention | None:
        return GpuAttention(pages)


def computes_here(device: torch.device) -> bool:
    """Whether Triton runs on this device: on a CPU only its interpreter does, for tests."""
    return device.type == "cuda" or interpreted()
