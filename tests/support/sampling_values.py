"""Values that an option of sampling may have, for tests of each door."""

from typing import Any

from motet.sampling import OPTIONS, Biases, Number, TokenIds
from tests.runner.plan.fake_device import VOCABULARY


def right_values(name: str) -> list[Any]:
    match OPTIONS[name]:
        case Number(lowest=lowest, highest=highest, above=above):
            return [lowest + 0.5 if above else lowest, 4 if highest is None else highest]
        case TokenIds():
            return [[VOCABULARY - 1, 3]]
        case Biases(bias=bias):
            return [{"0": bias.lowest, f"{VOCABULARY - 1}": bias.highest}]
    return [True, False]
