"""A worker's table of rows: the state of the sequences that it computes.

The plan names rows by number and sends only changes. Page tables keep their address, which kernels use, until the table
has to grow.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from motet.domain import Digest, RequestId
from motet_runner.interface import Sampling
from motet_runner.plan import RowJoin
from motet_runner.row_mask import RowMask

UNKNOWN_TOKEN = 0
"""Stands for a token that the host does not have yet, or that a row did not get. In the second case, the plan ends the
row."""

_FIRST_ROWS = 16
_FIRST_PAGES = 16


@dataclass(slots=True)
class TableRow:
    number: int
    request: RequestId
    tokens: list[int]
    """Prompt and output, including the tokens that this worker has sampled."""
    prompt_tokens: int
    adapter: Digest
    sampling: Sampling
    seed: int
    choice: int
    adjustment: object = None
    """The sampler's state of this row. A row that joins again starts with None."""
    to_score: int | None = None
    """The place in the prompt of the first token whose log probability is wanted; None: no token"""
    mask: RowMask | None = None
    """What its next token may be; None: any token"""

    @property
    def output_tokens(self) -> int:
        return len(self.tokens) - self.prompt_tokens


class MaskedRow(NamedTuple):
    at: int
    """Its place in the batch"""
    row: TableRow
    mask: RowMask
    next: int
    """The place of its next token in its output"""


def masked_rows(rows: Sequence[TableRow]) -> list[MaskedRow]:
    return [MaskedRow(at, row, row.mask, row.output_tokens) for at, row in enumerate(rows) if row.mask is not None]


class RowTable:
    def __init__(self) -> None:
        self.changes = 0
        """Counts changes: a row has got or lost its sequence, or the buffers are new."""
        self._rows: dict[int, TableRow] = {}
        self.pages: npt.NDArray[np.int32] = np.zeros((_FIRST_ROWS, _FIRST_PAGES), dtype=np.int32)
        """[rows, pages] The page table of each row; entries beyond its count are stale."""
        self.counts: npt.NDArray[np.int32] = np.zeros(_FIRST_ROWS, dtype=np.int32)
        """[rows] Each row's number of pages, including pages before its window. Entries of such pages are stale,
        too."""

    def __getitem__(self, row: int) -> TableRow:
        return self._rows[row]

    def __len__(self) -> int:
        return len(self._rows)

    def leave(self, row: int) -> None:
        del self._rows[row]
        self.changes += 1

    def join(self, join: RowJoin) -> None:
        if join.row >= len(self.counts):
            self._grow(join.row + 1, self.pages.shape[1])
        self._rows[join.row] = TableRow(
            join.row,
            join.request,
            list(join.tokens),
            join.prompt_tokens,
            join.adapter,
            join.sampling,
            join.seed,
            join.choice,
            to_score=join.to_score,
            mask=join.mask,
        )
        self.counts[join.row] = join.left_pages
        self.changes += 1

    def extend(self, row: int, new_pages: Sequence[int]) -> None:
        """Append pages to a row's page table."""
        first = int(self.counts[row])
        last = first + len(new_pages)
        if last > self.pages.shape[1]:
            self._grow(len(self.counts), last)
        self.pages[row, first:last] = new_pages
        self.counts[row] = last

    def move_pages(self, moves: Mapping[int, int]) -> None:
        """`moves`: old page → new page"""
        new_page = np.arange(max(*moves, int(self.pages.max())) + 1, dtype=np.int32)
        new_page[list(moves)] = list(moves.values())
        self.pages[:] = new_page[self.pages]

    def pages_of(self, row: int) -> npt.NDArray[np.int32]:
        return self.pages[row, : self.counts[row]]

    def _grow(self, rows: int, pages: int) -> None:
        """Doubles a size that is too small, so that growth is rare."""
        old_rows, old_pages = self.pages.shape
        rows = old_rows if rows <= old_rows else max(rows, 2 * old_rows)
        pages = old_pages if pages <= old_pages else max(pages, 2 * old_pages)
        table, counts = np.zeros((rows, pages), dtype=np.int32), np.zeros(rows, dtype=np.int32)
        table[:old_rows, :old_pages] = self.pages
        counts[:old_rows] = self.counts
        self.changes += 1
        self.pages, self.counts = table, counts
