"""A device's state of its rows, at fixed addresses: newest tokens, lengths, page tables.

The host sends only what the device cannot know by itself: a row that has joined, new pages. The device itself keeps the
tokens that it has sampled, and the lengths that grow by one.
"""

from collections.abc import Sequence

import numpy as np
import torch

from motet_runner.execute.batch.row_table import RowTable, TableRow
from motet_runner.memory.link import Link
from motet_runner.memory.parcel import Parcel

NOBODY = 0
"""A row without a sequence, for padding. Row n of the table is row n + 1 here."""

_AS_IT_IS = -1
_FEWEST = 4

_UPDATES = "updates"
_NEW_PAGES = "new_pages"


class DeviceRows:
    def __init__(self, link: Link, rows: int, pages: int) -> None:
        """`rows`: the number of rows at first. `pages`: the number of pages of the longest sequence"""
        device = link.device
        self.newest = torch.zeros(rows + 1, dtype=torch.int64, device=device)
        """[rows] Each row's next input token"""
        self.before = torch.zeros(rows + 1, dtype=torch.int64, device=device)
        """[rows] How many tokens come before that token"""
        self.pages = torch.zeros((rows + 1, pages), dtype=torch.int32, device=device)
        """[rows, pages] Page tables"""
        self._newest_at: dict[int, int] = {}
        """Row → its newest token's place in its sequence, if the device sampled the token"""
        self._before: dict[int, int] = {}
        """Row → the device's value of `before`"""
        self._pages: dict[int, int] = {}
        """Row → how many of its pages the device has"""

    @staticmethod
    def room_bytes(rows: int, pages: int) -> int:
        """Bytes on the device for `rows` rows"""
        return (rows + 1) * (8 + 8 + 4 * pages)

    def leave(self, row: int) -> None:
        for known in (self._newest_at, self._before, self._pages):
            known.pop(row, None)

    def move_pages(self) -> None:
        """All page tables must be sent again."""
        self._pages.clear()

    def have(self, rows: Sequence[TableRow], places: Sequence[int]) -> list[bool]:
        """For each of these places in the rows' sequences: True if the device has sampled its token"""
        return [self._newest_at.get(row.number) == place for row, place in zip(rows, places, strict=True)]

    def got(self, rows: Sequence[TableRow], numbers: torch.Tensor, tokens: torch.Tensor) -> None:
        """Each of these rows has got its next token. `numbers` [rows]: from `numbers_of`, on the device. The host need
        not know the tokens yet. This allocates no memory."""
        self.newest.index_copy_(0, numbers, tokens)
        for row in rows:
            self._newest_at[row.number] = len(row.tokens)

    def went_on(self, rows: Sequence[TableRow]) -> None:
        """A graph has advanced these rows: on the device, `newest` has the next tokens, and `before` has grown by
        one."""
        for row in rows:
            self._newest_at[row.number] = self._before[row.number] = len(row.tokens)

    def make_room(self, rows: int) -> bool:
        """Makes room for `rows` rows of the table → True if addresses have changed. Sizes double, so that this is
        rare."""
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
        """Puts into the parcel what the device lacks to compute each row's newest token."""
        updates, new_pages = [], []
        for row, start in zip(rows, starts, strict=True):
            number = row.number
            if self._newest_at.get(number) != start or self._before.get(number) != start:
                # The host may not know a token that the device has sampled: then only `before` is updated.
                token = _AS_IT_IS if self._newest_at.get(number) == start else row.tokens[start]
                updates.append((number + 1, token, start))
            known, count = self._pages.get(number, 0), int(table.counts[number])
            if known < count:
                pages = table.pages[number, known:count].tolist()
                new_pages += [(number + 1, known + at, page) for at, page in enumerate(pages)]
        if updates:
            parcel[_UPDATES] = np.array(updates, dtype=np.int64)
        if new_pages:
            parcel[_NEW_PAGES] = np.array(new_pages, dtype=np.int64)

    def arrived(
        self, rows: Sequence[TableRow], starts: Sequence[int], table: RowTable, sent: dict[str, torch.Tensor]
    ) -> None:
        """Applies what `prepare` has put into the parcel, now on the device."""
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
