"""How the matrices of LoRA are cut into the tiles of `lora_kernels.py`. Pure: it imports neither torch nor Triton.

All of it depends on shapes alone, never on the batch. So a row's numbers are added in one order, whatever the other
rows, and a captured launch stays right.
"""

ROWS = 16
"""Rows that are multiplied together: the shortest side of a GPU's matrix products. Missing rows are padding, never
read."""

CHUNK_ROWS = 64
"""The most rows of an adapter for which a program reads a tile once"""

RANK_STEP = 16
"""Rows of A in one tile. The ranks of runs are multiples of it."""

MAX_RANK = 512

HELD_RANKS = (16, 32, 64, 128)
"""How many ranks a tile of B may hold. An adapter takes the smallest tile that holds its rank. If its rank is above all
of these, it takes several of the largest tile, and their products are added."""

CLASSES = len(HELD_RANKS)

_TILE_BYTES = 16384
"""The most bytes of a tile of B, which stays in registers for all rows."""

_WIDEST_BYTES = 512


def rank_class(rank: int) -> int:
    """The index in HELD_RANKS of the rank's tile"""
    return next((place for place, held in enumerate(HELD_RANKS) if rank <= held), CLASSES - 1)


def tile_columns(rank_class: int, widest: int, itemsize: int) -> int:
    """The columns of a tile of B, where the widest linear has `widest` outputs."""
    most = min(_TILE_BYTES // HELD_RANKS[rank_class], _WIDEST_BYTES) // itemsize
    return max(16, min(most, _power_of_two(widest)))


def tile_inputs(inputs: int) -> int:
    """The columns of a tile of A. It stays in registers for all rows."""
    return max(64, min(1024, _power_of_two(inputs)))


def splits(inputs: int) -> int:
    """The number of partial sums of x · A: one for each tile of the inputs"""
    return -(-inputs // tile_inputs(inputs))


def _power_of_two(number: int) -> int:
    """The smallest power of two ≥ `number`"""
    return 1 << (number - 1).bit_length()
