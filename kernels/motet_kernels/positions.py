"""How many positions a table of cosines and sines has."""

FIRST_POSITIONS = 4096
"""The positions with which a table begins. It doubles when a sequence gets longer."""


def more_positions(positions: int, longest: int) -> int:
    """The new size of a table of `positions`, for a sequence of `longest` tokens."""
    return max(FIRST_POSITIONS, 2 * positions, longest)
