"""Exact mode: iterations cut into tiles of 16 tokens, so that a token's numbers do not depend on its neighbours.

The last bits of a linear's or an element-wise function's result for a row depend on the number of rows: libraries
choose their code by the shape. So each call of the model has exactly 16 tokens. A shorter tile is padded with copies of
its first token; the copies' results are dropped. Tiles come in the order of the plan: a token finds the keys of earlier
tokens in the pages, or in its own tile.
"""

from collections.abc import Iterator

import numpy as np
import torch

from motet.domain import BASE, PAGE_TOKENS
from motet_kernels import TILE_ROWS, Segment
from motet_runner.execute.batch.flat_batch import FlatBatch, Line, PagedRows
from motet_runner.execute.batch.flat_batch_builder import FlatBatchBuilder, WherePlaced
from motet_runner.execute.batch.row_table import RowTable, TableRow
from motet_runner.execute.batch.scored_rows import ScoredRow, scored_row
from motet_runner.execute.exact.tile_attention import TileAttention
from motet_runner.execute.forward.one_thread import one_thread
from motet_runner.memory.paged import PagedStore
from motet_runner.plan import RowStep, StepPlan


def tiles(plan: StepPlan) -> Iterator[StepPlan]:
    """Cuts a plan into plans of at most 16 tokens. Only the last part of a row samples."""
    steps: list[RowStep] = []
    room = TILE_ROWS
    for step in plan.rows:
        start, end = step.start, step.start + step.count
        while start < end:
            count = min(room, end - start)
            steps.append(RowStep(step.row, start, count, samples=step.samples and start + count == end))
            start += count
            room -= count
            if room == 0:
                yield plan.with_rows(steps)
                steps, room = [], TILE_ROWS
    if steps:
        yield plan.with_rows(steps)


class Tiles:
    """Cuts iterations for exact mode, see `worker.local_worker.Cut`"""

    parts = staticmethod(tiles)
    computing = staticmethod(one_thread)

    @staticmethod
    def builder(table: RowTable, store: PagedStore, device: torch.device, placed: WherePlaced | None) -> "TileBuilder":
        return TileBuilder(table, store, device, placed=placed)


class TileBuilder(FlatBatchBuilder):
    """Makes a FlatBatch of each plan of at most 16 tokens. Tiles have their own attention."""

    def __init__(
        self, table: RowTable, store: PagedStore, device: torch.device, *, placed: WherePlaced | None = None
    ) -> None:
        super().__init__(table, store, device, placed=placed)
        self._of_tiles = TileAttention(store)
        self._all_rows = torch.arange(TILE_ROWS, device=device)

    def build(self, plan: StepPlan) -> FlatBatch:
        table, adapters = self._table, self._adapters(plan)
        tokens: list[int] = []
        positions: list[int] = []
        rows: list[int] = []
        keep: list[int] = []
        begun: list[int] = []
        sampled: list[TableRow] = []
        before_scored: list[int] = []
        scored: list[ScoredRow] = []
        segments: list[Segment] = []
        for step in plan.rows:
            row, end = table[step.row], step.start + step.count
            if row.adapter != BASE:
                segments.append(Segment(len(tokens), len(tokens) + step.count, adapters[row.adapter]))
            tokens += row.tokens[step.start : end]
            positions += range(step.start, end)
            rows += [step.row] * step.count
            if 0 < end % PAGE_TOKENS <= step.count:
                begun.append(int(table.pages[step.row, end // PAGE_TOKENS]))
            if step.samples:
                keep.append(len(tokens) - 1)
                sampled.append(row)
            if (one := scored_row(row, step)) is not None:
                before_scored += [len(tokens) - end + place - 1 for place in one.places]
                scored.append(one)
        keep += before_scored
        count = len(tokens)
        assert 0 < count <= TILE_ROWS, count
        fill = TILE_ROWS - count
        tokens += tokens[:1] * fill
        positions += positions[:1] * fill
        rows += rows[:1] * fill
        of_rows = self._of_tiles.make_batch(table.pages, np.array(rows), np.array(positions), count)
        return FlatBatch(
            store=self._store,
            input_ids=self._tensor([tokens]),
            positions=self._tensor([positions]),
            keep=self._all_rows[keep],
            head_rows=self._all_rows if keep else None,
            sampled=sampled,
            scored=scored,
            begun=begun,
            lora=self._backend.make_batch(segments) if segments and self._backend is not None else None,
            tokens=count,
            longest=max(positions) + 1,
            line=Line([table[row] for row in rows], np.arange(TILE_ROWS), np.array(positions)),
            paged=PagedRows(self._of_tiles, of_rows),
        )
