"""Values that an option of sampling may have, for tests of each door."""

from typing import Any

from motet.sampling import OPTIONS, Biases, Number, TokenIds, TokenLists


def right_values(name: str, vocabulary: int) -> list[Any]:
    match OPTIONS[name]:
        case Number(lowest=lowest, highest=highest, above=above):
            return [lowest + 0.5 if above else lowest, 4 if highest is None else highest]
        case TokenIds():
            return [[vocabulary - 1, 3]]
        case TokenLists():
            return [[[vocabulary - 1, 3], [5]]]
        case Biases(bias=bias):
            return [{"0": bias.lowest, f"{vocabulary - 1}": bias.highest}]
    return [True, False]
