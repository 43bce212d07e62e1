"""Copies as `copy.deepcopy` makes them, several times as fast: pickle does the work in C."""

import io
import pickle
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any, TypeVar

T = TypeVar("T")

_kept: list[object] = []


def quick_copy(of: T, instead: Mapping[int, object] | None = None) -> T:
    """`instead`: what the copy has in the place of an object, by its id. Functions and classes are not copied."""
    written = io.BytesIO()
    writer = _Writer(written, instead or {})
    writer.dump(of)
    _kept[:] = writer.kept
    try:
        return pickle.loads(written.getbuffer())  # type: ignore[no-any-return]
    finally:
        _kept.clear()


class _Writer(pickle.Pickler):
    def __init__(self, file: io.BytesIO, instead: Mapping[int, object]) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.kept: list[object] = []
        self._instead = instead

    def reducer_override(self, one: object) -> Any:
        if id(one) in self._instead:
            return self._keep(self._instead[id(one)])
        if isinstance(one, FunctionType | type) and one is not _taken:
            return self._keep(one)
        return NotImplemented

    def _keep(self, one: object) -> tuple[Callable[[int], object], tuple[int]]:
        self.kept.append(one)
        return _taken, (len(self.kept) - 1,)


def _taken(number: int) -> object:
    return _kept[number]
