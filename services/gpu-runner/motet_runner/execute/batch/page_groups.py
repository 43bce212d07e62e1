"""The input of attention that cannot read page tables: decodes of similar lengths in groups, and prompts one by one.
The pages of each group or prompt are gathered."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from motet.domain import PAGE_TOKENS, pages_for
from motet_runner.execute.batch.row_table import RowTable
from motet_runner.memory.paged import PagedStore
from motet_runner.memory.upload import uploaded
from motet_runner.plan import RowStep


@dataclass(slots=True)
class DecodeGroup:
    """Sequences with one new row each and similar lengths, attended together."""

    rows: torch.Tensor
    """[sequences] rows of the iteration"""
    scattered: bool
    """True if `rows` are not 0, 1, 2, …"""
    blocks: torch.Tensor
    """[layers, ...] see PagedStore.blocks_of"""
    lengths: torch.Tensor
    """[sequences, 1] each sequence attends to this number of the keys that are read"""
    count: int
    tokens: int
    """The keys that are read per sequence: those of the longest sequence, rounded up to a page"""
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
    """One sequence's part of a prompt: rows [first, last), which also attend to `before` earlier tokens."""

    first: int
    last: int
    before: int
    blocks: torch.Tensor | None
    """[layers, ...]; None if no token came before"""
    tokens: int
    masks: dict[int | None, torch.Tensor] = field(default_factory=dict)

    def mask(self, window: int | None, dtype: torch.dtype, device: torch.device) -> torch.Tensor | None:
        """[rows, tokens] added to scores; None if the chunk's own rows with a plain causal mask suffice"""
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


@dataclass(frozen=True, slots=True)
class PageGroups:
    _table: RowTable
    _store: PagedStore
    _device: torch.device
    _window: int | None
    """The widest window, if all layers have one. Pages before the window are not read: other sequences may own them by
    now."""

    def of(self, steps: list[tuple[int, RowStep]]) -> tuple[list[DecodeGroup], list[PromptChunk]]:
        """The groups and chunks of steps. `steps`: with the place in the batch where the step's tokens begin"""
        decoding: list[tuple[int, RowStep]] = []
        chunks: list[PromptChunk] = []
        for first, step in steps:
            if step.count == 1 and step.start > 0:
                decoding.append((first, step))
            else:
                chunks.append(self._chunk(first, step))
        return self._decodes(decoding), chunks

    def _decodes(self, decoding: list[tuple[int, RowStep]]) -> list[DecodeGroup]:
        """Groups of decodes, as large as one read should be. A group's longest sequence has at most about twice the
        pages of its shortest."""
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
        # Beyond a sequence's end, its own first page that is read is repeated, and masked: never a neighbour's page.
        beside = np.arange(pages[0])
        read = firsts[:, None] + np.where(beside < pages[:, None], beside, 0)
        table = self._table.pages[rows[:, None], read].astype(np.int64)
        in_order = bool((places == np.arange(len(places))).all())
        all_places = uploaded(places, self._device)
        all_lengths = uploaded(lengths, self._device).view(-1, 1)
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
        """Each group's start, stop, and most pages of a sequence. `pages`: how many pages each sequence reads, in
        descending order."""
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
            read = slice(self._first_page(step), pages_for(step.start + step.count, PAGE_TOKENS))
            table = self._table.pages[step.row, read].astype(np.int64)[None, :]
            blocks, tokens = self._store.blocks_of(table), table.shape[1] * PAGE_TOKENS
        return PromptChunk(first, first + step.count, before, blocks, tokens)

    def _first_page(self, step: RowStep) -> int:
        """The first page that these rows attend to."""
        return 0 if self._window is None else max(0, step.start - self._window + 1) // PAGE_TOKENS
