"""The kernels of a GPU (PU-01, PU-22), and whether they run on a device. Imported only on demand, because this module
needs Triton."""

import torch

from motet_kernels import RunLayout
from motet_kernels.gpu.attention import GpuAttention
from motet_kernels.gpu.launches import interpreted
from motet_kernels.gpu.lora_backend import GpuBackend
from motet_kernels.gpu.lora_tiles import MAX_RANK
from motet_kernels.int8_layout import int8_layout
from motet_runner.execute.adapters.add_lora import AddLora
from motet_runner.execute.forward.gpu import GpuForward
from motet_runner.execute.kernels.roles import BackEnd, LargestWork
from motet_runner.execute.pack.linear_packing import SideBySide


def triton_back_end(device: torch.device, *, int8: bool = False, utilization_percent: int = 100) -> BackEnd:
    """`int8`: adapters are 8-bit integers. `utilization_percent`: the share of the GPU's memory that this process may
    take"""
    return BackEnd(
        "triton",
        AddLora(
            lambda groups, memory, dtype, _: GpuBackend(groups, memory, dtype, int8=int8),
            GpuBackend.tile,
            GpuBackend.copies,
            int8_layout if int8 else RunLayout,
        ),
        GpuAttention,
        SideBySide(device, utilization_percent),
        GpuForward,
        room_bytes=_room_bytes,
    )


def _room_bytes(work: LargestWork) -> int:
    groups = work.groups
    # The first batch is an iteration's. All captured graphs share the second batch, and add adapters of any rank.
    batches = [(work.rows, work.max_rank), (work.decodes, MAX_RANK)]
    return GpuAttention.room_bytes(work.heads, work.head_dim) + sum(
        GpuBackend.room_bytes(groups, rows, rank) for rows, rank in batches if groups
    )


def computes_here(device: torch.device) -> bool:
    """True if Triton runs on this device. On a CPU, only Triton's interpreter runs, for tests."""
    return device.type == "cuda" or interpreted()
