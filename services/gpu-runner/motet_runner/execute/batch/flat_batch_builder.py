"""Makes a FlatBatch of each plan.

Everything that does not depend on the layer is computed here, once per iteration. Rows are sorted by adapter (PU-10),
base rows last, so that an adapter's rows are contiguous and LoRA computes nothing for base rows.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from motet.domain import BASE, PAGE_TOKENS, Digest
from motet_kernels import LoraBackend, PlacedAdapter, Segment
from motet_runner.execute.batch.flat_batch import FlatBatch, Line, PagedRows, SequenceAttention
from motet_runner.execute.batch.iteration_layout import DecodeBuffers, IterationLayout
from motet_runner.execute.batch.page_groups import PageGroups
from motet_runner.execute.batch.row_table import RowTable
from motet_runner.execute.batch.scored_rows import ScoredRow, scored_row
from motet_runner.memory.paged import PagedStore
from motet_runner.memory.upload import uploaded
from motet_runner.plan import StepPlan

WherePlaced = Callable[[Digest, int], PlacedAdapter]
"""Gets an adapter's digest and the first page of its run."""


class FlatBatchBuilder:
    """Makes a FlatBatch of each plan. Keeps the layout while the same rows decode with the same adapters."""

    def __init__(
        self,
        table: RowTable,
        store: PagedStore,
        device: torch.device,
        *,
        placed: WherePlaced | None = None,
        window: int | None = None,
    ) -> None:
        """`placed`: None if no row ever has an adapter. `window`: see PageGroups"""
        self._table = table
        self._store = store
        self._device = device
        self._placed = placed
        self._page_groups = PageGroups(table, store, device, window)
        self._backend: LoraBackend[Any] | None = None
        self._attention: SequenceAttention | None = None
        self._known: IterationLayout | None = None
        """The layout of the last decode-only iteration"""

    def use(self, backend: LoraBackend[Any] | None, attention: SequenceAttention | None) -> None:
        """Make batches for this back end and attention from now on. `backend`: None if no row ever has an adapter.
        `attention`: None for torch's."""
        self._backend = backend
        self._attention = attention
        self._known = None

    def build(self, plan: StepPlan) -> FlatBatch:
        layout = self._layout_of(plan)
        if self._attention is not None and not plan.prefills:
            return self._build_paged_decodes(plan, layout, self._attention)
        steps = plan.rows
        starts = np.array([step.start for step in steps], dtype=np.int64)[layout.order]
        ends = starts + layout.counts
        tokens: list[int] = []
        begun: list[int] = []
        for row, start, end in zip(layout.rows, starts.tolist(), ends.tolist(), strict=True):
            tokens += row.tokens[start:end]
            if 0 < end % PAGE_TOKENS <= end - start:
                begun.append(int(self._table.pages[row.number, end // PAGE_TOKENS]))
        positions = starts[layout.sequence_of] + layout.within
        longest = int(ends.max())
        paged = None if self._attention is None else self._attended(self._attention, layout, starts, longest)
        batch = FlatBatch(
            store=self._store,
            input_ids=self._tensor([tokens]),
            positions=self._on_device(positions[None]),
            keep=layout.keep,
            sampled=layout.sampled,
            scored=layout.scored,
            begun=begun,
            lora=layout.lora,
            tokens=len(tokens),
            longest=longest,
            line=Line(layout.rows, layout.sequence_of, positions),
            choices=torch.empty(len(layout.sampled), dtype=torch.int64) if layout.greedy else None,
            paged=paged,
        )
        if paged is None:
            in_line = zip(layout.firsts.tolist(), layout.order.tolist(), strict=True)
            batch.decodes, batch.chunks = self._page_groups.of([(first, steps[place]) for first, place in in_line])
            pages = self._table.pages[layout.table_rows[layout.sequence_of], positions // PAGE_TOKENS]
            batch.writes = self._store.rows_of(pages.astype(np.int64), positions % PAGE_TOKENS)
        return batch

    def _build_paged_decodes(self, plan: StepPlan, layout: IterationLayout, attention: SequenceAttention) -> FlatBatch:
        """Like `build`, for the usual iteration: each row has one new token, and attention reads pages in place."""
        buffers = layout.buffers
        if buffers is None:
            buffers = layout.buffers = DecodeBuffers(layout)
        starts: Sequence[int] = plan.decodes.starts
        if buffers.places is not None:
            starts = [starts[place] for place in buffers.places]
        begun = [
            int(self._table.pages[row.number, start // PAGE_TOKENS])
            for row, start in zip(layout.rows, starts, strict=True)
            if not start % PAGE_TOKENS
        ]
        buffers.tokens[:] = [row.tokens[start] for row, start in zip(layout.rows, starts, strict=True)]
        buffers.positions[:] = starts
        longest = max(starts) + 1
        return FlatBatch(
            store=self._store,
            input_ids=self._moved(buffers.input_ids),
            positions=self._moved(buffers.position_ids),
            keep=layout.keep,
            sampled=layout.sampled,
            scored=layout.scored,
            begun=begun,
            lora=layout.lora,
            tokens=len(starts),
            longest=longest,
            line=Line(layout.rows, layout.sequence_of, buffers.positions),
            choices=buffers.choices,
            paged=self._attended(attention, layout, buffers.positions, longest),
        )

    def _layout_of(self, plan: StepPlan) -> IterationLayout:
        known = self._known
        if (
            known is not None
            and not plan.prefills
            and known.changes == self._table.changes
            and known.numbers == plan.decodes.rows
            and known.adapters == plan.adapters
        ):
            return known
        self._known = None  # making a new batch of adapters makes the old one invalid, even if memory then runs out
        layout = self._lay_out(plan)
        self._known = None if plan.prefills else layout
        return layout

    def _lay_out(self, plan: StepPlan) -> IterationLayout:
        table, steps = self._table, plan.rows
        numbers = tuple(step.row for step in steps)
        adapters = self._adapters(plan)
        # The sort is stable: among an adapter's rows, decodes stay before prompts.
        best = {digest: number for number, digest in enumerate((*adapters, BASE))}
        in_plan = [table[number] for number in numbers]
        order = sorted(range(len(steps)), key=lambda place: best[in_plan[place].adapter])
        rows = [in_plan[place] for place in order]
        counts = np.array([steps[place].count for place in order], dtype=np.int64)
        lasts = counts.cumsum()
        firsts = lasts - counts
        total = int(lasts[-1])
        sequence_of = np.repeat(np.arange(len(order)), counts)
        segments = [
            Segment(first, last, adapters[row.adapter])
            for row, first, last in zip(rows, firsts.tolist(), lasts.tolist(), strict=True)
            if row.adapter != BASE
        ]
        last_of = dict(zip(order, (lasts - 1).tolist(), strict=True))
        sampling = [place for place, step in enumerate(steps) if step.samples]
        scored: list[ScoredRow] = []
        before_scored: list[int] = []
        for place, step in enumerate(plan.prefills, start=len(plan.decodes)):
            one = scored_row(in_plan[place], step)
            if one is not None:
                scored.append(one)
                before_first = last_of[place] - (step.start + step.count)
                before_scored += [before_first + at for at in one.places]
        return IterationLayout(
            changes=table.changes,
            adapters=plan.adapters,
            numbers=numbers,
            order=np.array(order),
            rows=rows,
            table_rows=np.array([row.number for row in rows]),
            counts=counts,
            firsts=firsts,
            sequence_of=sequence_of,
            within=np.arange(total) - firsts[sequence_of],
            keep=self._tensor([last_of[place] for place in sampling] + before_scored),
            sampled=[in_plan[place] for place in sampling],
            greedy=not scored and any(in_plan[place].sampling.temperature == 0 for place in sampling),
            scored=scored,
            lora=self._backend.make_batch(segments) if segments and self._backend is not None else None,
        )

    def _attended(
        self, attention: SequenceAttention, layout: IterationLayout, starts: np.ndarray, longest: int
    ) -> PagedRows:
        if layout.attended is None:
            described = np.stack((layout.firsts, layout.counts, starts, layout.table_rows), axis=1)
            layout.attended = attention.make_batch(self._table.pages, described)
        else:
            attention.follow(layout.attended, starts, longest)
        return PagedRows(attention, layout.attended)

    def _adapters(self, plan: StepPlan) -> dict[Digest, PlacedAdapter]:
        """The plan's adapters, in the order in which the back end wants their rows."""
        if not plan.adapters:
            return {}
        backend, placed = self._backend, self._placed
        assert backend is not None, "this model has no adapters"
        assert placed is not None, "this model has no adapters"
        by_digest = {digest: placed(digest, page) for digest, page in plan.adapters.items()}
        return dict(sorted(by_digest.items(), key=lambda each: backend.order(each[1])))

    def _tensor(self, values: list[int] | list[list[int]]) -> torch.Tensor:
        return self._on_device(np.array(values, dtype=np.int64))

    def _moved(self, buffer: torch.Tensor) -> torch.Tensor:
        return buffer if self._device.type == "cpu" else uploaded(buffer.numpy(), self._device)

    def _on_device(self, values: np.ndarray) -> torch.Tensor:
        return uploaded(values, self._device)
