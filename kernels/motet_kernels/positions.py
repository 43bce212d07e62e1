"""How many positions a table of cosines and sines has."""

FIRST_POSITIONS = 4096
"""The first size of a table. The size doubles, or more, when a sequence needs more positions."""


def more_positions(positions: int, longest: int) -> int:
    """The new size of a table of `positions`, for a sequence of `longest` tokens."""
    return max(FIRST_POSITIONS, 2 * positions, longest)
