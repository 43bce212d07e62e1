"""How the matrices of LoRA are cut into the tiles of `lora_kernels.py`. Pure: it imports neither torch nor Triton.

All of it depends on shapes alone, and on nothing of a batch. So a row's numbers are added in one order, whoever
computes beside it, and a captured launch stays right.
"""

ROWS = 16
"""Rows that are multiplied together: the shortest side of a GPU's matrix products. Fewer are padded, without being
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
"""Of a tile of B: it stays in registers while the rows pass."""

_WIDEST_BYTES = 512


def rank_class(rank: int) -> int:
    """The place of its tile in HELD_RANKS"""
    return next((place for place, held in enumerate(HELD_RANKS) if rank <= held), CLASSES - 1)


def tile_columns(rank_class: int, widest: int, itemsize: int) -> int:
    """The columns of a tile of B, where the widest linear has `widest` outputs."""
    most = min(_TILE_BYTES // HELD_RANKS[rank_class], _WIDEST_BYTES) // itemsize
    return max(16, min(most, _power_of_two(widest)))


def tile_inputs(inputs: int) -> int:
    """The columns of a tile of A. Its numbers stay in registers while the rows pass."""
    return max(64, min(1024, _power_of_two(inputs)))


def splits(inputs: int) -> int:
    """The sums of x · A that are computed apart, one for each tile of the inputs."""
    return -(-inputs // tile_inputs(inputs))


def _power_of_two(number: int) -> int:
    """The first that is not below it"""
    return 1 << (number - 1).bit_length()
