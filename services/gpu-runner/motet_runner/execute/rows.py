"""One iteration as the model sees it: every sequence's new tokens in one row of tokens, and where their KV lies.

Everything that does not depend on the layer is worked out here, once an iteration. Rows are ordered by adapter (PU-10),
rows of the base last, so that an adapter's rows lie together and the base's cost LoRA nothing.
"""

from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from motet.domain import BASE, PAGE_TOKENS, Digest, pages_for
from motet_kernels import LoraBatch, Segment, make_batch
from motet_runner.memory.paged import PagedStore
from motet_runner.plan import Iteration, Work

Slots = Callable[[Digest], tuple[int, int]]
"""Where an adapter lies on the device: (rank class, slot)."""

Watcher = Callable[[torch.nn.Module, torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]], None]
"""Is called with module, query, key, value and options of an attention call."""


@dataclass(slots=True)
class Decodes:
    """Sequences with one new row each and similar lengths, attended together."""

    rows: torch.Tensor
    """[sequences] rows of the iteration"""
    scattered: bool
    """Whether `rows` are other than 0, 1, 2, …"""
    blocks: torch.Tensor
    """[layers, ...] see PagedStore.blocks_of"""
    lengths: torch.Tensor
    """[sequences, 1] tokens each may see"""
    count: int
    tokens: int
    """Keys read per sequence; the longest one's, rounded up to a page"""
    masks: dict[int | None, torch.Tensor] = field(default_factory=dict)

    def mask(self, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """[sequences, 1, 1, tokens] added to scores"""
        if window not in self.masks:
            keys = torch.arange(self.tokens, device=self.lengths.device)
            seen = keys < self.lengths
            if window is not None:
                seen &= keys >= self.lengths - window
            self.masks[window] = _additive(seen, dtype)[:, None, None, :]
        return self.masks[window]


@dataclass(slots=True)
class Chunk:
    """One sequence's part of a prompt: its rows [first, last), which come after `before` computed tokens."""

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


@dataclass(slots=True)
class Rows:
    store: PagedStore
    input_ids: torch.Tensor
    positions: torch.Tensor
    keep: torch.Tensor
    """Rows whose logits are wanted"""
    sampled: list[Work]
    """In the order of `keep`"""
    writes: torch.Tensor
    """[layers, ...] see PagedStore.rows_of"""
    begun: list[int]
    """Pages that get their first rows in this iteration and are not filled by it: cleared before the model runs"""
    decodes: list[Decodes]
    chunks: list[Chunk]
    lora: LoraBatch | None
    adapters: frozenset[Digest]
    tokens: int
    calls: int = 0
    """Attention calls so far"""
    watcher: Watcher | None = None
    """Sees each attention call; only the probe has one"""

    @property
    def all_decode_together(self) -> bool:
        return len(self.decodes) == 1 and self.decodes[0].count == self.tokens and not self.decodes[0].scattered


CURRENT: ContextVar[Rows] = ContextVar("motet_rows")


class Assembler:
    """Makes Rows of Iterations. Remembers the LoRA layout: it changes only when rows change hands."""

    def __init__(self, store: PagedStore, device: torch.device) -> None:
        self._store = store
        self._device = device
        self._laid_out: tuple[tuple[Segment, ...], LoraBatch] | None = None

    def assemble(self, iteration: Iteration, slots: Slots) -> Rows:
        placed = [(_place(work, slots), work) for work in iteration.work]
        placed.sort(key=lambda pair: pair[0])  # stable: decodes stay before prompts within an adapter
        tokens: list[int] = []
        segments: list[Segment] = []
        decoding: list[tuple[int, Work]] = []
        chunks: list[tuple[int, Work]] = []
        keep: list[int] = []
        sampled: list[Work] = []
        for (_, group, slot), work in placed:
            first = len(tokens)
            if work.count == 1 and work.start > 0:
                tokens.append(work.sequence.tokens[work.start])
                decoding.append((first, work))
            else:
                tokens += work.sequence.tokens[work.start : work.start + work.count]
                chunks.append((first, work))
            if group >= 0:
                segments.append(Segment(group, slot, first, len(tokens)))
            if work.samples:
                keep.append(len(tokens) - 1)
                sampled.append(work)
        positions, pages, offsets = _addresses(decoding, chunks, len(tokens))
        return Rows(
            store=self._store,
            input_ids=self._tensor(tokens).view(1, -1),
            positions=torch.from_numpy(positions).to(self._device).view(1, -1),
            keep=self._tensor(keep),
            sampled=sampled,
            writes=self._store.rows_of(pages, offsets),
            begun=[page for work in iteration.work for page in _begun(work)],
            decodes=[self._decodes(group) for group in self._groups(decoding)],
            chunks=[self._chunk(first, work) for first, work in chunks],
            lora=self._layout(tuple(segments)),
            adapters=frozenset(work.sequence.adapter for work in iteration.work) - {BASE},
            tokens=len(tokens),
        )

    def _layout(self, segments: tuple[Segment, ...]) -> LoraBatch | None:
        if not segments:
            return None
        if self._laid_out is None or self._laid_out[0] != segments:
            self._laid_out = segments, make_batch(segments, self._device)
        return self._laid_out[1]

    def _groups(self, decoding: list[tuple[int, Work]]) -> Iterator[list[tuple[int, Work]]]:
        """Decodes that are attended together: as many as are well read at once, none twice as long as another."""
        pages = {row: pages_for(work.start + 1) for row, work in decoding}
        left = decoding
        if len(set(pages.values())) > 1:
            left = sorted(decoding, key=lambda member: -pages[member[0]])
        while left:
            longest = pages[left[0][0]]
            most = self._store.sequences_a_read(longest)
            count = next((i for i, (row, _) in enumerate(left) if i >= most or 2 * pages[row] + 2 < longest), len(left))
            yield left[:count]
            left = left[count:]

    def _decodes(self, members: list[tuple[int, Work]]) -> Decodes:
        tables = [work.sequence.pages[: pages_for(work.start + 1)] for _, work in members]
        longest = max(map(len, tables))
        # Pages beyond a sequence's end repeat its own first page, never a neighbour's, and are masked.
        table = np.array([pages + pages[:1] * (longest - len(pages)) for pages in tables], dtype=np.int64)
        rows = [row for row, _ in members]
        return Decodes(
            rows=self._tensor(rows),
            scattered=rows != list(range(len(rows))),
            blocks=self._store.blocks_of(table),
            lengths=self._tensor([work.start + 1 for _, work in members]).view(-1, 1),
            count=len(members),
            tokens=longest * PAGE_TOKENS,
        )

    def _chunk(self, first: int, work: Work) -> Chunk:
        blocks, tokens = None, work.count
        if work.start:
            table = np.array([work.sequence.pages[: pages_for(work.start + work.count)]], dtype=np.int64)
            blocks, tokens = self._store.blocks_of(table), table.shape[1] * PAGE_TOKENS
        return Chunk(first, first + work.count, work.start, blocks, tokens)

    def _tensor(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)


def _place(work: Work, slots: Slots) -> tuple[bool, int, int]:
    if work.sequence.adapter == BASE:
        return True, -1, -1
    return False, *slots(work.sequence.adapter)


def _begun(work: Work) -> list[int]:
    end = work.start + work.count
    in_last_page = end % PAGE_TOKENS
    return [work.sequence.pages[end // PAGE_TOKENS]] if 0 < in_last_page <= work.count else []


def _addresses(
    decoding: list[tuple[int, Work]], chunks: list[tuple[int, Work]], total: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Position, page and place in the page of every row."""
    positions = np.empty(total, dtype=np.int64)
    pages = np.empty(total, dtype=np.int64)
    for row, work in decoding:
        positions[row] = work.start
        pages[row] = work.sequence.pages[work.start // PAGE_TOKENS]
    for first, work in chunks:
        there = slice(first, first + work.count)
        positions[there] = np.arange(work.start, work.start + work.count)
        pages[there] = np.asarray(work.sequence.pages, dtype=np.int64)[positions[there] // PAGE_TOKENS]
    return positions, pages, positions % PAGE_TOKENS
