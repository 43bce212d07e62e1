"""The back end of exact mode, in plain torch: a row's result does not depend on the other rows.

The bits of a product depend on its shape, because libraries choose their code by the shape. So each product here has
exactly TILE_ROWS rows, and each adapter has its own products. A tile may hold rows of other adapters: their products
are computed, but not added.
"""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from motet_kernels.lora_batch import PlacedAdapter, Segment
from motet_kernels.run_layout import LinearGroup, RunLayout, scale

TILE_ROWS = 16


class AdapterRows(NamedTuple):
    """Rows [start, stop) of one tile, all of one adapter."""

    tile: int
    """The tile's first row"""
    start: int
    stop: int
    adapter: PlacedAdapter


class ExactBackend:
    tile = 16
    """The rank is the width of a product; in exact mode, widths are multiples of 16."""
    copies = False

    def __init__(self, groups: Sequence[LinearGroup], memory: torch.Tensor, dtype: torch.dtype) -> None:
        self._memory = memory
        groups = tuple(groups)
        self._layout = cache(lambda rank: RunLayout(rank, groups, dtype))

    def layout(self, rank: int) -> RunLayout:
        return self._layout(-(-rank // self.tile) * self.tile)

    @staticmethod
    def order(adapter: PlacedAdapter) -> tuple[int, int]:
        return adapter.rank, adapter.offset

    @staticmethod
    def make_batch(segments: Sequence[Segment]) -> list[AdapterRows]:
        return [
            AdapterRows(tile, max(start, tile), min(stop, tile + TILE_ROWS), adapter)
            for start, stop, adapter in segments
            for tile in range(start - start % TILE_ROWS, stop, TILE_ROWS)
        ]

    def add_lora(self, y: torch.Tensor, x: torch.Tensor, linear: str, batch: Sequence[AdapterRows]) -> None:
        added: dict[tuple[int, PlacedAdapter], torch.Tensor] = {}
        for rows in batch:
            tile, adapter = rows.tile, rows.adapter
            if linear not in adapter.linears:
                continue
            layout, begin = self._layout(adapter.rank), adapter.offset
            run = self._memory[begin : begin + layout.bytes]
            if (tile, adapter) not in added:
                a, b = layout.matrices(run, linear)
                added[tile, adapter] = _tile(x, tile) @ a.t() @ b
            if adapter.scales:
                scale(y[rows.start : rows.stop], *layout.scaling(run, linear))
            y[rows.start : rows.stop] += added[tile, adapter][rows.start - tile : rows.stop - tile]


def _tile(x: torch.Tensor, first: int) -> torch.Tensor:
    rows = x[first : first + TILE_ROWS]
    return rows if len(rows) == TILE_ROWS else pad(rows, (0, 0, 0, TILE_ROWS - len(rows)))
