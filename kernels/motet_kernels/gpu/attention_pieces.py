"""How decoding sequences are cut into pieces for different programs. Pure, and imports no Triton."""

from typing import NamedTuple

SLOTS = 2048
"""The most results of pieces that are kept at a time, for all sequences with more than one piece together."""


class Cut(NamedTuple):
    least: int
    """Tokens of a piece, unless a sequence would have too many pieces"""
    most: int
    """The most pieces of a sequence"""

    def pieces(self, tokens: int) -> int:
        """The pieces of a sequence that sees `tokens` tokens; the kernel `cut_sequences` computes the same."""
        needed = -(-tokens // self.most)
        return -(-tokens // max(self.least, -(-needed // self.least) * self.least))


def cut_for(rows: int, kv_heads: int, least: int | None = None) -> Cut:
    """Few sequences need short pieces, or part of the GPU idles; with many, long pieces have less overhead. `least`:
    fixes the length of pieces for any number of rows that leaves room for them.

    Ranges of row counts share one cut, so that a sequence's bits seldom depend on the number of rows.
    """
    rows = 1 << max(0, rows - 1).bit_length()
    if least is None:
        heads = rows * kv_heads
        least = 64 if heads <= 16 else 128 if heads <= 64 else 256
    return Cut(least, max(1, min(SLOTS // rows, 128)))
