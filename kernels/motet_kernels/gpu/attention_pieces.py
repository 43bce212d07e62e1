"""How decoding sequences are cut into pieces for different programs. Pure: it imports neither torch nor Triton."""

from typing import NamedTuple

SLOTS = 2048
"""The most results of pieces that are kept at a time, for all sequences together."""

AT_ONCE = 512
"""How many pieces of one KV head a GPU computes at a time, about (compute capability 9.0). Few sequences are cut into
as many, and many sequences into more."""

MAX_ROOM = 128
"""Slots of a sequence"""

ALWAYS = 8
"""The pieces that a sequence may have beside many others, if SLOTS has room: it may be longer than they are."""


class Cut(NamedTuple):
    least: int
    """The tokens of a piece. If a sequence would have more than `most` pieces, its pieces are longer."""
    most: int
    """The most pieces of a sequence"""
    room: int
    """The slots of a sequence: at least `most`. It is a constant of kernels, and so the same for few rows."""

    def pieces(self, tokens: int) -> int:
        """The pieces of a sequence that sees `tokens` tokens; the kernel `cut_sequences` computes the same."""
        needed = -(-tokens // self.most)
        return -(-tokens // max(self.least, -(-needed // self.least) * self.least))


def cut_for(rows: int, kv_heads: int, least: int | None = None) -> Cut:
    """Few sequences are cut into short pieces, so that all of the GPU has work; with many sequences, long pieces have
    less overhead. `least` sets `Cut.least` for any number of rows.

    Numbers of rows with the same next power of two share one cut, so that a sequence's bits seldom depend on the number
    of rows.
    """
    rows = 1 << max(0, rows - 1).bit_length()
    heads = rows * kv_heads
    if least is None:
        least = 64 if heads <= 16 else 128 if heads <= 64 else 512 if heads < AT_ONCE else 1024
    room = max(1, min(SLOTS // rows, MAX_ROOM))
    return Cut(least, min(room, max(ALWAYS, AT_ONCE // heads)), room)
