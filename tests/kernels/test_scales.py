"""Adapters that scale and shift the linears' own results (DoRA, biases), against the fp64 oracle, in each back end."""

import pytest
import torch

from motet_kernels import LinearGroup, PlacedAdapter, Segment, TorchBackend, reference
from motet_kernels.cpp import CppBackend
from motet_kernels.exact_backend import ExactBackend
from motet_kernels.run_layout import SCALE_ROWS
from testbed.compiled_kernels import compiled_library

INPUTS, OUTPUTS, OTHERS = 48, 300, 40
RANKS = (4, 16, 8, 6, 64)
"""Every other one scales."""
OWNERS = [0, 1, 1, None, 2, 3, *[1] * 40, 4, 3, 0, None, 3]
"""Decodes, and a prompt of more rows than a block has"""
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-2}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["torch", "cpp", "exact"])
def test_rows_are_scaled_and_shifted_as_their_adapters_say(name: str, dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(0)

    def of(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random, dtype=torch.float32).to(dtype).float()

    make = {
        "torch": lambda groups, memory: TorchBackend(groups, memory, dtype, copy_bytes=1 << 20),
        "cpp": lambda groups, memory: CppBackend(groups, memory, dtype, library=compiled_library()),
        "exact": lambda groups, memory: ExactBackend(groups, memory, dtype),
    }[name]
    groups = [LinearGroup(INPUTS, {"linear": OUTPUTS, "other": OTHERS})]
    memory = torch.zeros(1 << 20, dtype=torch.uint8)
    backend = make(groups, memory)
    placed, matrices, scales, begin = [], {}, {}, 64
    for number, rank in enumerate(RANKS):
        scaled = number % 2 == 1
        layout = backend.layout(rank + SCALE_ROWS if scaled else rank)
        run = memory[begin : begin + layout.bytes]
        a, b, d, e = of(rank, INPUTS) / INPUTS**0.5, of(OUTPUTS, rank) / rank**0.5, of(OUTPUTS), of(OUTPUTS)
        layout.write(run, "linear", a.to(dtype), b.to(dtype), 1.0)
        matrices[str(number)] = a.to(dtype), b.to(dtype), 1.0
        if scaled:
            layout.write_scaling(run, "linear", 1 + d, e)
            scales[str(number)] = 1 + d, e
        products = backend.layout(rank).rank if scaled else 0
        placed.append(PlacedAdapter(str(number), begin, layout.rank, frozenset({"linear"}), products))
        begin += layout.bytes
    assert begin < len(memory)
    segments = [Segment(row, row + 1, placed[owner]) for row, owner in enumerate(OWNERS) if owner is not None]
    x, y, z = of(len(OWNERS), INPUTS).to(dtype), of(len(OWNERS), OUTPUTS).to(dtype), of(len(OWNERS), OTHERS).to(dtype)
    expected, before = reference.add_lora(y, x, segments, matrices, scales), z.clone()
    plain = reference.add_lora(y, x, segments, matrices)
    batch = backend.make_batch(segments)
    backend.add_lora(y, x, "linear", batch)
    backend.add_lora(z, x, "other", batch)
    torch.testing.assert_close(y.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert float((y.double() - plain).abs().max()) > 1
    assert torch.equal(z, before), "no adapter changes this linear"
