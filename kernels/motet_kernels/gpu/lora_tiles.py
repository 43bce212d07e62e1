"""How the matrices of LoRA are cut into the tiles of `lora_kernels.py`. Pure: it imports neither torch nor Triton.

The tiles depend on shapes alone, never on the batch. So the order in which a row's numbers are added does not depend on
the other rows, and a captured launch stays right.
"""

from functools import cache

ROWS = 16
"""Rows that are multiplied together: the shortest side of a GPU's matrix products. If there are fewer rows, the others
are padding, and never read."""

CHUNK_ROWS = 64
"""The most rows that a program multiplies with a tile after one read of the tile"""

RANK_STEP = 16
"""The rows of A in one tile. The ranks of runs are multiples of this number."""

MAX_RANK = 512

HELD_RANKS = (16, 32, 64, 128)
"""How many ranks a tile of B may hold. An adapter uses the smallest tile that holds its rank. A rank above all of these
uses several of the largest tiles, whose products are added."""

CLASSES = len(HELD_RANKS)

SCALED_COLUMNS = 128
"""The columns of y that a program scales at once"""

_TILE_BYTES = 16384
"""The most bytes of a tile of B: the tile stays in registers for all rows."""

_WIDEST_BYTES = 512


@cache
def rank_class(rank: int) -> int:
    """The index in HELD_RANKS of the rank's tile"""
    return next((place for place, held in enumerate(HELD_RANKS) if rank <= held), CLASSES - 1)


def tile_columns(rank_class: int, widest: int, itemsize: int) -> int:
    """The columns of a tile of B, for linears of at most `widest` outputs"""
    most = min(_TILE_BYTES // HELD_RANKS[rank_class], _WIDEST_BYTES) // itemsize
    return max(16, min(most, _power_of_two(widest)))


def tile_inputs(inputs: int) -> int:
    """The columns of a tile of A. The tile stays in registers for all rows."""
    return max(64, min(512, _power_of_two(inputs)))


def splits(inputs: int) -> int:
    """The number of partial sums of x · A: one for each tile of the inputs"""
    return -(-inputs // tile_inputs(inputs))


def _power_of_two(number: int) -> int:
    """The smallest power of two ≥ `number`"""
    return 1 << (number - 1).bit_length()
