"""What a device knows of its rows, at addresses that stay: the newest token of each."""

from collections.abc import Sequence

import numpy as np
import torch

from motet_runner.execute.device.link import Link
from motet_runner.execute.row_table import TableRow


class DeviceRows:
    def __init__(self, link: Link, rows: int) -> None:
        """`rows`: so many at first"""
        self.newest = torch.zeros(rows, dtype=torch.int64, device=link.device)
        """[rows] The token that was sampled last"""
        self._held: dict[int, int] = {}
        """Row → the place of that token in its sequence. A row that has sampled none is not in it."""

    def leave(self, row: int) -> None:
        self._held.pop(row, None)

    def have(self, rows: Sequence[TableRow], places: Sequence[int]) -> list[bool]:
        """Which of these tokens, by their places in the sequences, are the newest ones"""
        return [self._held.get(row.number) == place for row, place in zip(rows, places, strict=True)]

    def got(self, rows: Sequence[TableRow], numbers: torch.Tensor, tokens: torch.Tensor) -> None:
        """Each of these rows has got its next token. `numbers` [rows]: those of the table, on the device. The host may
        learn the tokens later, but it knows how many there are."""
        self._make_room(max(row.number for row in rows) + 1)
        self.newest.index_copy_(0, numbers, tokens.clamp(min=0))
        for row in rows:
            self._held[row.number] = len(row.tokens)

    def _make_room(self, rows: int) -> None:
        if rows > len(self.newest):
            more = max(rows, 2 * len(self.newest)) - len(self.newest)
            self.newest = torch.cat((self.newest, self.newest.new_zeros(more)))


def numbers_of(rows: Sequence[TableRow]) -> np.ndarray:
    return np.array([row.number for row in rows], dtype=np.int64)
