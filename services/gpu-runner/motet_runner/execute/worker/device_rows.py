"""What a device knows of its rows, at addresses that stay: newest tokens, lengths, page tables.

The host sends only what the device cannot know by itself: a row that has joined, new pages. Tokens that the device has
sampled, and lengths that grow by one, it has.
"""

from collections.abc import Sequence

import numpy as np
import torch

from motet_runner.execute.batch.row_table import RowTable, TableRow
from motet_runner.memory.link import Link
from motet_runner.memory.parcel import Parcel

NOBODY = 0
"""A row that no sequence has. Those of the table come after it."""

_AS_IT_IS = -1
_FEWEST = 4

_UPDATES = "updates"
_NEW_PAGES = "new_pages"


class DeviceRows:
    def __init__(self, link: Link, rows: int, pages: int) -> None:
        """`rows`: how many there are at first. `pages`: of the longest sequence"""
        device = link.device
        self.newest = torch.zeros(rows + 1, dtype=torch.int64, device=device)
        """[rows] The token of each that is computed next"""
        self.before = torch.zeros(rows + 1, dtype=torch.int64, device=device)
        """[rows] Tokens before that one"""
        self.pages = torch.zeros((rows + 1, pages), dtype=torch.int32, device=device)
        """[rows, pages] Page tables"""
        self._newest_at: dict[int, int] = {}
        """Row → the place of its newest token in its sequence, if the device has sampled it"""
        self._before: dict[int, int] = {}
        """Row → what the device has there"""
        self._pages: dict[int, int] = {}
        """Row → how many of its pages the device has"""

    @staticmethod
    def room_bytes(rows: int, pages: int) -> int:
        """Of the device's memory, for `rows` rows"""
        return (rows + 1) * (8 + 8 + 4 * pages)

    def leave(self, row: int) -> None:
        for known in (self._newest_at, self._before, self._pages):
            known.pop(row, None)

    def move_pages(self) -> None:
        """All page tables are to be sent anew."""
        self._pages.clear()

    def have(self, rows: Sequence[TableRow], places: Sequence[int]) -> list[bool]:
        """Which of these tokens, by their places in the sequences, the device has sampled itself"""
        return [self._newest_at.get(row.number) == place for row, place in zip(rows, places, strict=True)]

    def got(self, rows: Sequence[TableRow], numbers: torch.Tensor, tokens: torch.Tensor) -> None:
        """Each of these rows has got its next token. `numbers` [rows]: from `numbers_of`, on the device. The host may
        learn the tokens later, but it knows how many there are. This takes no memory."""
        self.newest.index_copy_(0, numbers, tokens)
        for row in rows:
            self._newest_at[row.number] = len(row.tokens)

    def went_on(self, rows: Sequence[TableRow]) -> None:
        """A recording has computed the newest token of each. The one after it is in its place, and there is one more
        before it."""
        for row in rows:
            self._newest_at[row.number] = self._before[row.number] = len(row.tokens)

    def make_room(self, rows: int) -> bool:
        """For `rows` rows of the table. → whether something has another address now: rarely, because there is twice
        the room then"""
        have = len(self.newest) - 1
        if rows <= have:
            return False
        more = max(rows, 2 * have, _FEWEST) - have
        self.newest, self.before, self.pages = (
            torch.cat((buffer, buffer.new_zeros((more, *buffer.shape[1:]))))
            for buffer in (self.newest, self.before, self.pages)
        )
        return True

    def prepare(self, rows: Sequence[TableRow], starts: Sequence[int], table: RowTable, parcel: Parcel) -> None:
        """What the device lacks to compute the newest token of each row travels."""
        updates, new_pages = [], []
        for row, start in zip(rows, starts, strict=True):
            number = row.number
            if self._newest_at.get(number) != start or self._before.get(number) != start:
                # A token that the device has sampled is not known here, but then only its place may be wrong.
                token = _AS_IT_IS if self._newest_at.get(number) == start else row.tokens[start]
                updates.append((number + 1, token, start))
            known, count = self._pages.get(number, 0), int(table.counts[number])
            if known < count:
                pages = table.pages[number, known:count].tolist()
                new_pages += [(number + 1, known + at, page) for at, page in enumerate(pages)]
        if updates:
            parcel.add(_UPDATES, np.array(updates, dtype=np.int64))
        if new_pages:
            parcel.add(_NEW_PAGES, np.array(new_pages, dtype=np.int64))

    def arrived(
        self, rows: Sequence[TableRow], starts: Sequence[int], table: RowTable, sent: dict[str, torch.Tensor]
    ) -> None:
        """What `prepare` has put into the parcel is on the device."""
        if _UPDATES in sent:
            numbers, tokens, before = sent[_UPDATES].unbind(1)
            kept = self.newest.index_select(0, numbers)
            self.newest.index_copy_(0, numbers, torch.where(tokens < 0, kept, tokens))
            self.before.index_copy_(0, numbers, before)
        if _NEW_PAGES in sent:
            numbers, places, pages = sent[_NEW_PAGES].unbind(1)
            self.pages.view(-1).index_copy_(0, numbers * self.pages.shape[1] + places, pages.int())
        for row, start in zip(rows, starts, strict=True):
            self._before[row.number] = self._newest_at[row.number] = start
            self._pages[row.number] = int(table.counts[row.number])


def numbers_of(rows: Sequence[TableRow]) -> np.ndarray:
    return np.array([row.number + 1 for row in rows], dtype=np.int64)
