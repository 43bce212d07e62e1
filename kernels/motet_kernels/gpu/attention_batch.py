"""The rows and the pages of each sequence of an iteration: tensors on the device, the same for all layers."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from motet_kernels.gpu.attention_pieces import Cut

Numbers = npt.NDArray[np.int64]


@dataclass(slots=True)
class Pieces:
    """The pieces of all decodes."""

    list: torch.Tensor
    """[all, 4] see `cut_sequences`"""
    total: torch.Tensor
    """[1]"""
    counts: torch.Tensor
    """[sequences]"""
    current: bool = False
    """True if the pieces match the sequences' present lengths"""


@dataclass(slots=True)
class Decodes:
    """Sequences with one new row each."""

    rows: torch.Tensor
    """[sequences] each sequence's row of the iteration"""
    lengths: torch.Tensor
    """[sequences] tokens, with the new token; 0: there is no sequence"""
    table_rows: torch.Tensor
    """[sequences] each sequence's row of the page table"""
    cut: Cut
    pieces: dict[int | None, Pieces] = field(default_factory=dict)
    """Window → its pieces"""

    def pieces_of(self, window: int | None) -> Pieces:
        found = self.pieces.get(window)
        if found is None:
            sequences = len(self.rows)
            found = self.pieces[window] = Pieces(
                self.rows.new_empty((sequences * self.cut.most, 4)),
                self.rows.new_empty(1),
                self.rows.new_empty(sequences),
            )
        return found


@dataclass(slots=True)
class Prompts:
    """Sequences with several new rows each."""

    described: torch.Tensor
    """[sequences, 4] first row, number of new rows, tokens before the new rows, row of the page table"""
    host: Numbers
    """`described` on the host"""
    tiles: dict[int, torch.Tensor] = field(default_factory=dict)
    """Rows of a tile → [tiles, 2] the sequence, and the tile's first row, counted within the sequence's new rows"""

    def tiles_of(self, rows: int) -> torch.Tensor:
        found = self.tiles.get(rows)
        if found is None:
            found = self.tiles[rows] = on_device(_tiles(self.host, rows), self.described.device)
        return found


def _tiles(described: Numbers, rows: int) -> Numbers:
    """The tiles. Those that see the most tokens come first, because they take longest."""
    each = -(-described[:, 1] // rows)
    sequence = np.repeat(np.arange(len(described)), each)
    first = (np.arange(len(sequence)) - np.repeat(each.cumsum() - each, each)) * rows
    order = np.argsort(-(described[sequence, 2] + first), kind="stable")
    return np.stack((sequence, first), axis=1)[order]


@dataclass(slots=True)
class GpuAttentionBatch:
    rows: int
    """One more than the last row of any sequence"""
    positions: torch.Tensor
    """[rows] the place of each row's token in its sequence"""
    pages: torch.Tensor
    """[rows] the page of each row's keys and values; -1: none"""
    offsets: torch.Tensor
    """[rows] the token's place in that page"""
    table: torch.Tensor
    """[any, pages] page numbers"""
    decodes: Decodes | None
    prompts: Prompts | None
    kept: tuple[npt.NDArray[np.int32], Numbers] | None
    """The caller's table and sequences; None for a captured graph"""

    def changed(self) -> None:
        """The decodes' lengths have changed: the next attention cuts them into pieces again."""
        if self.decodes is not None:
            for pieces in self.decodes.pieces.values():
                pieces.current = False


def on_device(numbers: npt.NDArray[np.int64] | npt.NDArray[np.int32], device: torch.device) -> torch.Tensor:
    """Copies to the device as 32-bit numbers, without waiting for the device's work."""
    there = torch.from_numpy(np.ascontiguousarray(numbers, dtype=np.int32))
    return there.clone() if device.type == "cpu" else there.pin_memory().to(device, non_blocking=True)
