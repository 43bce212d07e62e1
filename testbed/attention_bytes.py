"""The bytes that attention of decodes moves in a layer, and the least that any could. Pure, and imports no Triton.

Memory is what is slow, so `moved` counts what has to come from it or go there: the keys and values of each piece, which
one program reads once; queries, page numbers and the list of pieces once, because a cache answers the later loads; the
results of pieces once out and once in; and what comes out.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from motet_kernels.gpu.attention_pieces import cut_for

NUMBER_BYTES = 4
"""Of the results of pieces, and of page numbers"""
ENTRY_BYTES = 16
"""Of the list of pieces"""


@dataclass(frozen=True)
class AttentionSizes:
    heads: int
    kv_heads: int
    width: int
    itemsize: int
    page_tokens: int = 16


def floor_bytes(lengths: Sequence[int], sizes: AttentionSizes, *, window: int | None = None) -> int:
    """Keys and values of all tokens that are seen, once"""
    seen = sum(length if window is None else min(length, window) for length in lengths)
    return 2 * seen * sizes.kv_heads * sizes.width * sizes.itemsize


def moved_bytes(
    lengths: Sequence[int], sizes: AttentionSizes, *, window: int | None = None, max_rows: int | None = None
) -> int:
    """`lengths`: tokens of each sequence, with the new one; 0: nobody's. `max_rows`: of the graph, if it has room for
    more."""
    cut = cut_for(max_rows or len(lengths), sizes.kv_heads)
    row = sizes.heads * sizes.width
    moved = floor_bytes(lengths, sizes, window=window)
    for length in lengths:
        seen = length if window is None else min(length, window)
        pieces = cut.pieces(seen)
        moved += ENTRY_BYTES * pieces + -(-seen // sizes.page_tokens) * NUMBER_BYTES + row * sizes.itemsize
        moved += row * sizes.itemsize * (pieces > 0)
        if pieces > 1:
            moved += 2 * pieces * (row + sizes.heads) * NUMBER_BYTES
    return moved
