"""A value that is made for each request, often many times: a dataclass that nobody may change.

Type checkers see to that. A dataclass that is frozen when it runs, too, sets each of its fields by a call: it takes
three times as long to make.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def value(*, kw_only: bool = False) -> Callable[[type[T]], type[T]]:
    """Equal values are one in sets and as keys."""

    def made(of: type[T]) -> type[T]:
        return dataclass(slots=True, unsafe_hash=True, kw_only=kw_only)(of)

    return made
