"""One iteration as the model sees it: the new tokens of all sequences in one line, and where their KV lies.

There is no padding between sequences of different lengths (OR-03, S3-06).

Everything that does not depend on the layer is worked out here, once an iteration. Rows are ordered by adapter (PU-10),
rows of the base last, so that an adapter's rows lie together and the base's cost LoRA nothing.
"""

from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from motet.domain import BASE, PAGE_TOKENS, Digest, pages_for
from motet_kernels import LoraBackend, PlacedAdapter, Segment
from motet_runner.execute.prompt_logprobs import ScoredRow, scored_row
from motet_runner.execute.row_table import RowTable, TableRow
from motet_runner.memory.paged import PagedStore
from motet_runner.memory.upload import uploaded
from motet_runner.plan import RowStep, StepPlan

Watcher = Callable[[torch.nn.Module, torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]], None]
"""Is called with module, query, key, value and options of an attention call."""


WherePlaced = Callable[[Digest, int], PlacedAdapter]
"""Gets an adapter and the first page of its run."""


@dataclass(slots=True)
class DecodeGroup:
    """Sequences with one new row each and similar lengths, attended together."""

    rows: torch.Tensor
    """[sequences] rows of the iteration"""
    scattered: bool
    """Whether `rows` are other than 0, 1, 2, …"""
    blocks: torch.Tensor
    """[layers, ...] see PagedStore.blocks_of"""
    lengths: torch.Tensor
    """[sequences, 1] tokens of those that are read that each may see"""
    count: int
    tokens: int
    """Keys read per sequence; the longest one's, rounded up to a page"""
    masks: dict[tuple[int | None, torch.dtype], torch.Tensor] = field(default_factory=dict)

    def mask(self, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """[sequences, 1, 1, tokens] added to scores"""
        if (window, dtype) not in self.masks:
            keys = torch.arange(self.tokens, device=self.lengths.device)
            seen = keys < self.lengths
            if window is not None:
                seen &= keys >= self.lengths - window
            self.masks[window, dtype] = _additive(seen, dtype)[:, None, None, :]
        return self.masks[window, dtype]


@dataclass(slots=True)
class PromptChunk:
    """One sequence's part of a prompt: its rows [first, last), which attend to `before` computed tokens, too."""

    first: int
    last: int
    before: int
    blocks: torch.Tensor | None
    """[layers, ...]; None when nothing came before"""
    tokens: int
    masks: dict[int | None, torch.Tensor] = field(default_factory=dict)

    def mask(self, window: int | None, dtype: torch.dtype, device: torch.device) -> torch.Tensor | None:
        """[rows, tokens] added to scores; None where plain causality among the chunk's own rows says the same"""
        if self.before == 0 and (window is None or window >= self.last - self.first):
            return None
        if window not in self.masks:
            tokens = self.tokens if self.before else self.last - self.first
            keys = torch.arange(tokens, device=device)
            queries = torch.arange(self.before, self.before + self.last - self.first, device=device)[:, None]
            seen = keys <= queries
            if window is not None:
                seen &= keys > queries - window
            self.masks[window] = _additive(seen, dtype)
        return self.masks[window]


def _additive(seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))


class AttentionOverPages(Protocol):
    """Attention that reads pages where they are"""

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: int,
        batch: Any,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor: ...


class SequenceAttention(AttentionOverPages, Protocol):
    """The same for whole sequences, such as motet_kernels.cpp.PagedAttention. Its batches are its own."""

    def make_batch(self, table: npt.NDArray[np.int32], sequences: npt.NDArray[np.int64]) -> Any:
        """`table` [any, pages] holds page numbers. `sequences` [sequences, 4]: first row, number of rows, tokens before
        them, and the sequence's row of the table."""

    def follow(self, batch: Any, before: npt.NDArray[np.int64], longest: int) -> None:
        """The same sequences again, after so many tokens of each. `longest`: the tokens of the longest one, with the
        new ones."""


class PagedRows(NamedTuple):
    """All rows, for attention that reads pages where they are."""

    attention: AttentionOverPages
    batch: Any


class Line(NamedTuple):
    """Whose the tokens of the iteration are, for what depends on their sequences."""

    rows: list[TableRow]
    """In the order of the line"""
    sequence_of: np.ndarray
    """[tokens] the place of each one's row in `rows`"""
    positions: np.ndarray
    """[tokens]"""


@dataclass(slots=True)
class FlatBatch:
    store: PagedStore
    input_ids: torch.Tensor
    positions: torch.Tensor
    keep: torch.Tensor
    """Rows whose logits are wanted"""
    sampled: list[TableRow]
    """In the order of `keep`, which is the plan's"""
    scored: list[ScoredRow]
    """In the order of `keep`, after those that are sampled"""
    writes: torch.Tensor
    """[layers, ...] see PagedStore.rows_of; empty, as `decodes` and `chunks`, where there are `paged` rows"""
    begun: list[int]
    """Pages that get their first rows in this iteration and are not filled by it: cleared before the model runs"""
    decodes: list[DecodeGroup]
    chunks: list[PromptChunk]
    lora: Any
    """The batch of the LoRA back end; None if no row has an adapter"""
    tokens: int
    longest: int
    """Tokens of the longest sequence, with the new ones"""
    line: Line
    paged: PagedRows | None = None
    head_rows: torch.Tensor | None = None
    """Rows for which the head computes, if they are others than those of `keep`: then all"""
    choices: torch.Tensor | None = None
    """[sampled] memory for the token of each one's largest logit; None if no row wants it"""
    chosen: torch.Tensor | None = None
    """The same, once the model call has chosen: -1 where the logits are not finite"""
    calls: int = 0
    """Attention calls so far"""
    watcher: Watcher | None = None
    """Sees each attention call; only the probe has one"""

    @property
    def all_decode_together(self) -> bool:
        return len(self.decodes) == 1 and self.decodes[0].count == self.tokens and not self.decodes[0].scattered


_NOWHERE = torch.empty(0, dtype=torch.int64)

CURRENT: ContextVar[FlatBatch] = ContextVar("motet_flat_batch")
"""The batch of the model call that is under way."""


@dataclass(slots=True)
class _Layout:
    """Where the rows of an iteration lie. It stays while the same sequences decode."""

    changes: int
    """Of the row table"""
    adapters: dict[Digest, int]
    """The first page of each one's run"""
    numbers: tuple[int, ...]
    """Of the table's rows, in the order of the plan"""
    order: np.ndarray
    """[sequences] their places in the plan"""
    rows: list[TableRow]
    """In that order, as all that follows"""
    table_rows: np.ndarray
    """Their numbers"""
    counts: np.ndarray
    """New tokens of each"""
    firsts: np.ndarray
    """Where the new tokens of each begin"""
    sequence_of: np.ndarray
    """[tokens] the place of each one's sequence"""
    within: np.ndarray
    """[tokens] each one's place among the new ones of its sequence"""
    keep: torch.Tensor
    sampled: list[TableRow]
    """In the order of the plan, as `keep`"""
    greedy: bool
    """Whether some of them want the largest logit, and nobody other logits"""
    scored: list[ScoredRow]
    """After those, as `keep`"""
    lora: Any
    attended: Any = None
    buffers: "_DecodeBuffers | None" = None


class _DecodeBuffers:
    """What each iteration of a layout that only decodes writes anew, at the same addresses: to make arrays and tensors
    of a few numbers takes longer than to fill them."""

    def __init__(self, layout: _Layout) -> None:
        count = len(layout.rows)
        self.tokens = np.empty(count, dtype=np.int64)
        self.positions = np.empty(count, dtype=np.int64)
        self.input_ids = torch.from_numpy(self.tokens)[None]
        self.position_ids = torch.from_numpy(self.positions)[None]
        self.choices = torch.empty(count, dtype=torch.int64) if layout.greedy else None
        places = layout.order.tolist()
        self.places = None if places == list(range(count)) else places
        """The places of the rows in the plan; None: they are in its order"""


class FlatBatchBuilder:
    """Makes a FlatBatch of each plan. Remembers the layout: it changes only when rows change hands."""

    def __init__(
        self,
        table: RowTable,
        store: PagedStore,
        device: torch.device,
        *,
        placed: WherePlaced | None = None,
        window: int | None = None,
    ) -> None:
        """`placed`: None if no row ever has an adapter. `window`: how many tokens a token attends to, if
        all layers have a window. Pages before it are not read: they may be others' by now."""
        self._window = window
        self._table = table
        self._store = store
        self._device = device
        self._placed = placed
        self._backend: LoraBackend[Any] | None = None
        self._attention: SequenceAttention | None = None
        self._known: _Layout | None = None
        """The layout of the newest iteration that only decoded"""

    def use(self, backend: LoraBackend[Any] | None, attention: SequenceAttention | None) -> None:
        """Make batches for these from now on. `backend`: None if no row ever has an adapter. `attention`: None for
        torch's."""
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
        decoding: list[tuple[int, RowStep]] = []
        chunks: list[tuple[int, RowStep]] = []
        writes = _NOWHERE
        if paged is None:
            for first, place in zip(layout.firsts.tolist(), layout.order.tolist(), strict=True):
                step = steps[place]
                (decoding if step.count == 1 and step.start > 0 else chunks).append((first, step))
            pages = self._table.pages[layout.table_rows[layout.sequence_of], positions // PAGE_TOKENS]
            writes = self._store.rows_of(pages.astype(np.int64), positions % PAGE_TOKENS)
        return FlatBatch(
            store=self._store,
            input_ids=self._tensor([tokens]),
            positions=self._on_device(positions[None]),
            keep=layout.keep,
            sampled=layout.sampled,
            scored=layout.scored,
            writes=writes,
            begun=begun,
            decodes=self._decode_groups(decoding),
            chunks=[self._chunk(first, step) for first, step in chunks],
            lora=layout.lora,
            tokens=len(tokens),
            longest=longest,
            line=Line(layout.rows, layout.sequence_of, positions),
            choices=torch.empty(len(layout.sampled), dtype=torch.int64) if layout.greedy else None,
            paged=paged,
        )

    def _build_paged_decodes(self, plan: StepPlan, layout: _Layout, attention: SequenceAttention) -> FlatBatch:
        """The same for the usual iteration, in which each row has one new token and nothing depends on the page
        tables but attention itself."""
        buffers = layout.buffers
        if buffers is None:
            buffers = layout.buffers = _DecodeBuffers(layout)
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
            writes=_NOWHERE,
            begun=begun,
            decodes=[],
            chunks=[],
            lora=layout.lora,
            tokens=len(starts),
            longest=longest,
            line=Line(layout.rows, layout.sequence_of, buffers.positions),
            choices=buffers.choices,
            paged=self._attended(attention, layout, buffers.positions, longest),
        )

    def _layout_of(self, plan: StepPlan) -> _Layout:
        known = self._known
        if (
            known is not None
            and not plan.prefills
            and known.changes == self._table.changes
            and known.numbers == plan.decodes.rows
            and known.adapters == plan.adapters
        ):
            return known
        self._known = None  # should memory end now: its batch of adapters is good until another one is made
        layout = self._lay_out(plan)
        self._known = None if plan.prefills else layout
        return layout

    def _lay_out(self, plan: StepPlan) -> _Layout:
        table, steps = self._table, plan.rows
        numbers = tuple(step.row for step in steps)
        adapters = self._adapters(plan)
        # Stable: decodes stay before prompts within an adapter.
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
        return _Layout(
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

    def _attended(self, attention: SequenceAttention, layout: _Layout, starts: np.ndarray, longest: int) -> PagedRows:
        if layout.attended is None:
            described = np.stack((layout.firsts, layout.counts, starts, layout.table_rows), axis=1)
            layout.attended = attention.make_batch(self._table.pages, described)
        else:
            attention.follow(layout.attended, starts, longest)
        return PagedRows(attention, layout.attended)

    def _adapters(self, plan: StepPlan) -> dict[Digest, PlacedAdapter]:
        """Those of the plan's rows, in the order in which their rows lie best."""
        if not plan.adapters:
            return {}
        backend, placed = self._backend, self._placed
        assert backend is not None, "this model has no adapters"
        assert placed is not None, "this model has no adapters"
        by_digest = {digest: placed(digest, page) for digest, page in plan.adapters.items()}
        return dict(sorted(by_digest.items(), key=lambda each: backend.order(each[1])))

    def _decode_groups(self, decoding: list[tuple[int, RowStep]]) -> list[DecodeGroup]:
        """Decodes that are attended together: as many as are well read at once, none twice as long as another."""
        if not decoding:
            return []
        places = np.array([first for first, _ in decoding], dtype=np.int64)
        rows = np.array([step.row for _, step in decoding], dtype=np.int64)
        firsts = np.array([self._first_page(step) for _, step in decoding], dtype=np.int64)
        lengths = np.array([step.start + 1 for _, step in decoding], dtype=np.int64) - firsts * PAGE_TOKENS
        pages = -(-lengths // PAGE_TOKENS)
        if (pages != pages[0]).any():
            order = np.argsort(-pages, kind="stable")
            places, rows, firsts, lengths, pages = (a[order] for a in (places, rows, firsts, lengths, pages))
        # Pages beyond a sequence's end repeat the first one that is read, never a neighbour's, and are masked.
        beside = np.arange(pages[0])
        read = firsts[:, None] + np.where(beside < pages[:, None], beside, 0)
        table = self._table.pages[rows[:, None], read].astype(np.int64)
        in_order = bool((places == np.arange(len(places))).all())
        all_places = self._on_device(places)
        all_lengths = self._on_device(lengths).view(-1, 1)
        return [
            DecodeGroup(
                rows=all_places[start:stop],
                scattered=not in_order or start > 0,
                blocks=self._store.blocks_of(table[start:stop, :longest]),
                lengths=all_lengths[start:stop],
                count=stop - start,
                tokens=longest * PAGE_TOKENS,
            )
            for start, stop, longest in self._groups(pages.tolist())
        ]

    def _groups(self, pages: list[int]) -> Iterator[tuple[int, int, int]]:
        """Start, stop and longest of each group. `pages` are those that each sequence reads, the longest first."""
        start = 0
        while start < len(pages):
            longest = pages[start]
            most = min(len(pages), start + self._store.sequences_a_read(longest))
            stop = start + 1
            while stop < most and 2 * pages[stop] + 2 >= longest:
                stop += 1
            yield start, stop, longest
            start = stop

    def _chunk(self, first: int, step: RowStep) -> PromptChunk:
        blocks, tokens = None, step.count
        before = step.start - self._first_page(step) * PAGE_TOKENS
        if before:
            read = slice(self._first_page(step), pages_for(step.start + step.count))
            table = self._table.pages[step.row, read].astype(np.int64)[None, :]
            blocks, tokens = self._store.blocks_of(table), table.shape[1] * PAGE_TOKENS
        return PromptChunk(first, first + step.count, before, blocks, tokens)

    def _first_page(self, step: RowStep) -> int:
        """The first page that these rows attend to."""
        return 0 if self._window is None else max(0, step.start - self._window + 1) // PAGE_TOKENS

    def _tensor(self, values: list[int] | list[list[int]]) -> torch.Tensor:
        return self._on_device(np.array(values, dtype=np.int64))

    def _moved(self, buffer: torch.Tensor) -> torch.Tensor:
        return buffer if self._device.type == "cpu" else uploaded(buffer.numpy(), self._device)

    def _on_device(self, values: np.ndarray) -> torch.Tensor:
        return uploaded(values, self._device)
