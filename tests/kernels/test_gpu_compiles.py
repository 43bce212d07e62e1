"""The kernels in Triton compile for a GPU of compute capability 9.0, also in bf16, which the interpreter cannot check.

None of them spills registers into memory: that costs more than most of them read.
"""

import pytest
import torch

from motet_kernels import LinearGroup, PlacedAdapter, Segment
from motet_kernels.gpu.lora_backend import EXPAND_WARPS, SHRINK_WARPS, GpuBackend
from tests.support.gpu_compiler import launches_are_compiled

REGISTERS = 65536
"""Of a multiprocessor"""

SHARED_BYTES = 227 * 1024


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "group",
    [LinearGroup(4096, {"q": 4096, "k": 1024, "v": 1024}), LinearGroup(11008, {"down": 4096})],
    ids=["qkv", "down"],
)
def test_add_lora_compiles_and_all_its_programs_fit_at_once(group: LinearGroup, dtype: torch.dtype) -> None:
    memory = torch.empty(2**20, dtype=torch.uint8)
    backend = GpuBackend([group], memory, dtype)
    batch = backend.make_batch([Segment(0, 1, PlacedAdapter("one", 0, 16, frozenset(group.outputs)))])
    x, y = torch.empty(1, group.inputs, dtype=dtype), torch.empty(1, sum(group.outputs.values()), dtype=dtype)
    with launches_are_compiled() as found:
        backend.add_lora_together(y, x, tuple(group.outputs), batch)
    assert [kernel.name for kernel in found] == ["lora_shrink", "lora_expand"]
    for kernel, warps in zip(found, (SHRINK_WARPS, EXPAND_WARPS), strict=True):
        assert kernel.spilled_bytes == 0
        if dtype.itemsize == 2:  # fp32 has no products of matrices in hardware that are exact
            assert warps * 32 * kernel.registers <= REGISTERS
            assert warps // kernel.warps * (kernel.shared_bytes + 1024) <= SHARED_BYTES
            assert "HMMA" in kernel.instructions
            assert "LDG.E.128" in kernel.instructions
