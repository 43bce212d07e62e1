"""What happened to one thing: its first entries and its last ones, so that neither its beginning nor its latest turns
are lost, however often something repeats. One entry stands for those between.

An entry is a kind and its arguments. Words are made when somebody asks: most timelines are never read.
"""

from collections import deque
from collections.abc import Iterator
from enum import Enum
from itertools import chain, starmap
from typing import NamedTuple

MAX_FIRST, MAX_LAST = 16, 48


class Kind(Enum):
    """A kind of entry. Its value: the word for it, and a sentence with a place for each argument."""

    @property
    def event(self) -> str:
        word: str = self.value[0]
        return word

    def detail(self, arguments: tuple[object, ...]) -> str:
        sentence: str = self.value[1]
        return sentence.format(*arguments)


class _Gap(Kind):
    LEFT_OUT = "left out", "{0} entries"


class Entry(NamedTuple):
    at: float
    kind: Kind
    arguments: tuple[object, ...]

    @property
    def event(self) -> str:
        return self.kind.event

    @property
    def detail(self) -> str:
        return self.kind.detail(self.arguments)


Noted = tuple[float, Kind, tuple[object, ...]]
"""An entry, as it is kept: most are never read, so it gets its names when it is."""


class Timeline:
    __slots__ = ("_first", "_last", "_left_out_from", "left_out")

    def __init__(self) -> None:
        self._first: list[Noted] = []
        self._last: deque[Noted] | None = None
        self.left_out = 0
        """Entries between the first and the last ones."""
        self._left_out_from = 0.0

    def note(self, at: float, kind: Kind, *arguments: object) -> None:
        self.add((at, kind, arguments))

    def add(self, entry: Noted) -> None:
        if len(self._first) < MAX_FIRST:
            self._first.append(entry)
            return
        if self._last is None:
            self._last = deque(maxlen=MAX_LAST)
        if len(self._last) == MAX_LAST:
            if not self.left_out:
                self._left_out_from = self._last[0][0]
            self.left_out += 1
        self._last.append(entry)

    def __iter__(self) -> Iterator[Entry]:
        between: list[Noted] = [(self._left_out_from, _Gap.LEFT_OUT, (self.left_out,))] if self.left_out else []
        return starmap(Entry, chain(self._first, between, self._last or ()))
