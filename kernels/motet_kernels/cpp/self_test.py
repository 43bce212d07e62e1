"""Compares a library with its references, on small sizes that reach every part of the kernels."""

import torch

from motet_kernels import reference
from motet_kernels.cpp.library import TYPES, Library
from motet_kernels.cpp.linear import PACKED_TYPES, PackedWeights
from motet_kernels.cpp.lora_backend import CppBackend
from motet_kernels.lora_batch import PlacedAdapter, Segment
from motet_kernels.run_layout import LinearGroup

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.01}
"""How far a result may be off: less than a number that is left out or counted twice"""

INPUTS, OUTPUTS = 203, 149
SEGMENTS = ((8, 1), (16, 1), (24, 2), (8, 5), (40, 37), (16, 4))
"""Rank and rows of each"""


class SelfTestFailed(Exception):
    """The library computes something else, or not at all."""


def check(library: Library) -> None:
    for dtype in TYPES:
        _check_add_lora(library, dtype)
    for dtype in PACKED_TYPES:
        _check_linear(library, dtype)


def _check_add_lora(library: Library, dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(0)
    group = LinearGroup(INPUTS, {"linear": OUTPUTS})
    sizes = CppBackend([group], torch.empty(0, dtype=torch.uint8), dtype, library=library)
    memory = torch.zeros(sum(sizes.layout(rank).bytes for rank, _ in SEGMENTS), dtype=torch.uint8)
    backend = CppBackend([group], memory, dtype, library=library)
    segments, matrices, offset, row = [], {}, 0, 0
    for number, (rank, rows) in enumerate(SEGMENTS):
        layout = backend.layout(rank)
        a = torch.randn(rank, INPUTS, generator=random) / INPUTS**0.5
        b = torch.randn(OUTPUTS, rank, generator=random) / rank**0.5
        a, b = a.to(dtype), b.to(dtype)
        layout.write(memory[offset : offset + layout.bytes], "linear", a, b, 1.0)
        adapter = PlacedAdapter(str(number), offset, rank, frozenset({"linear"}))
        segments.append(Segment(row, row + rows, adapter))
        matrices[adapter.name] = a, b, 1.0
        offset += layout.bytes
        row += rows + 1  # and one without an adapter
    x, y = (torch.randn(row, width, generator=random).to(dtype) for width in (INPUTS, OUTPUTS))
    expected = reference.add_lora(y, x, segments, matrices)
    backend.add_lora(y, x, "linear", backend.make_batch(segments))
    compare("add_lora", y, expected, TOLERANCE[dtype])


def _check_linear(library: Library, dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(0)
    weight = torch.randn(OUTPUTS, INPUTS, generator=random).to(dtype)
    bias = torch.randn(OUTPUTS, generator=random).to(dtype)
    packed = PackedWeights(library, [weight])
    for rows in (*range(1, 14), 37):
        x = torch.randn(rows, INPUTS, generator=random).to(dtype)
        compare("linear", packed.linear(x, bias), x.double() @ weight.double().t() + bias.double(), TOLERANCE[dtype])
    if not torch.equal(packed.rows(torch.arange(OUTPUTS)), weight):
        raise SelfTestFailed(f"unpack in {dtype} gives other numbers")


def compare(what: str, ours: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    difference = float((ours.double() - expected).abs().max())
    if not difference <= tolerance * max(1.0, float(expected.abs().max())):
        raise SelfTestFailed(f"{what} in {ours.dtype} is off by {difference:.2g}")
