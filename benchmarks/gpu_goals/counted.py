"""What needs no card: launches of a layer, counted where they are made, in Triton's interpreter; and what they move,
counted from the list of work."""

from collections.abc import Iterator, Sequence

import torch

from benchmarks.gpu_goals.bench import cells
from benchmarks.harness import Result
from benchmarks.traffic import TRAFFIC
from motet_kernels import LinearGroup, PlacedAdapter, Segment
from motet_kernels.gpu.launches import traced_launches
from motet_kernels.gpu.lora_backend import GpuBackend
from testbed.lora_bytes import expand_bytes, floor_bytes, shrink_bytes

MOST_LAUNCHES = 8
"""Shrink and expand for each of the four inputs of a layer's linears"""

MOST_BYTES = 1.1
"""Times the floor"""

MIXED_RANKS = (8, 16, 32, 64, 128)
WIDTH, WIDE = 4096, 11008
LINEARS = 224
"""Of a model with 32 layers: the list of work is as long"""
ITEMSIZE = 2

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
    yield Result(
        "lora_launches_per_layer", launches, "launches", f"<= {MOST_LAUNCHES}", launches <= MOST_LAUNCHES, counted=True
    )
    worst = 0.0
    for ranks, traffic, rows, outputs in cells(((16,), (64,), MIXED_RANKS), list(TRAFFIC), (32, 64), (WIDTH, WIDE)):
        if len(ranks) == 1 or traffic != "identical":  # one adapter has one rank
            worst = max(worst, bytes_against_floor(TRAFFIC[traffic](rows), ranks, outputs))
    yield Result("bytes_vs_floor", worst, "x", f"<= {MOST_BYTES}", worst <= MOST_BYTES, counted=True)


def bytes_against_floor(owners: Sequence[int], ranks: Sequence[int], outputs: int) -> float:
    """What both launches of one linear move, against the least that any could. Adapters have these ranks in turn."""
    tile = GpuBackend.tile
    rank_of = {str(owner): ranks[owner % len(ranks)] for owner in sorted(set(owners))}
    placed = {
        name: PlacedAdapter(name, int(name) << 20, -(-rank // tile) * tile, frozenset({"it"}))
        for name, rank in rank_of.items()
    }
    segments = [Segment(row, row + 1, placed[str(owner)]) for row, owner in enumerate(owners)]
    widths = {"it": outputs}
    moved = [count(segments, WIDTH, widths, LINEARS, ITEMSIZE).moved for count in (shrink_bytes, expand_bytes)]
    return sum(moved) / floor_bytes(segments, rank_of, WIDTH, widths, ITEMSIZE)


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
