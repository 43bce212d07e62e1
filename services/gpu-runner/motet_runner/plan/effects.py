"""What must happen to memory before the next model call, in the order in which the book asked for it."""

from dataclasses import dataclass

from motet_runner.plan.sequence import Sequence


@dataclass(frozen=True, slots=True)
class SwapOut:
    sequence: Sequence
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SwapIn:
    sequence: Sequence
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DropHostCopy:
    sequence: Sequence


Effect = SwapOut | SwapIn | DropHostCopy
