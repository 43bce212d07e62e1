"""What needs no card: launches of a layer, counted where they are made, in Triton's interpreter."""

from collections.abc import Iterator

import torch

from benchmarks.harness import Result
from motet_kernels import LinearGroup, PlacedAdapter, Segment
from motet_kernels.gpu.launches import traced_launches
from motet_kernels.gpu.lora_backend import GpuBackend

MOST_LAUNCHES = 8
"""Shrink and expand for each of the four inputs of a layer's linears"""

INPUTS, KV_OUTPUTS, FEED_FORWARD, RANK = 32, 16, 48, 16

GROUPS = (
    LinearGroup(INPUTS, {"q": INPUTS, "k": KV_OUTPUTS, "v": KV_OUTPUTS}),
    LinearGroup(INPUTS, {"o": INPUTS}),
    LinearGroup(INPUTS, {"gate": FEED_FORWARD, "up": FEED_FORWARD}),
    LinearGroup(FEED_FORWARD, {"down": INPUTS}),
)


def counted() -> list[Result]:
    return list(_counted())


def _counted() -> Iterator[Result]:
    launches = lora_launches_of_a_layer()
    yield Result("lora_launches_per_layer", launches, "launches", f"<= {MOST_LAUNCHES}", launches <= MOST_LAUNCHES)


def lora_launches_of_a_layer() -> int:
    """Of a decode of three rows, two of which have an adapter each, on all seven linears of a layer"""
    dtype = torch.float32
    memory = torch.zeros(2 * GpuBackend(GROUPS, torch.zeros(64, dtype=torch.uint8), dtype).layout(RANK).bytes).byte()
    backend = GpuBackend(GROUPS, memory, dtype)
    linears = frozenset(linear for group in GROUPS for linear in group.outputs)
    adapters = [PlacedAdapter(str(place), place * len(memory) // 2, RANK, linears) for place in range(2)]
    batch = backend.fixed_batch(3)
    backend.fill(batch, [Segment(0, 1, adapters[0]), Segment(2, 3, adapters[1])])
    with traced_launches() as trace:
        for group in GROUPS:
            x = torch.zeros(3, group.inputs, dtype=dtype)
            y = torch.zeros(3, sum(group.outputs.values()), dtype=dtype)
            backend.add_lora_together(y, x, list(group.outputs), batch)
    return len(trace)
