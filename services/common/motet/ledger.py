"""The book of promises, in pages: what has been said, not what lies in memory.

The scheduler keeps one per runner and admits by it; a runner keeps its own and may decline. Pure: no clock, no I/O.
Invariant: the sum of promises never exceeds capacity × overcommit, except where a promise was `adopted` from a runner
that already lives by it (after a restart) or the factor has been lowered under it; then nothing new fits until it does.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

Key = TypeVar("Key")


@dataclass(frozen=True, slots=True)
class Shortfall:
    """Why a promise was not written: so many pages were wanted and so many are left."""

    wanted: int
    free: int


class Ledger(Generic[Key]):
    def __init__(self, capacity: int, *, overcommit: float = 1.0) -> None:
        self.capacity = capacity
        self.overcommit = overcommit
        self._promises: dict[Key, int] = {}
        self._total = 0

    @property
    def limit(self) -> int:
        return int(self.capacity * self.overcommit)

    @property
    def promised(self) -> int:
        return self._total

    @property
    def free(self) -> int:
        """Pages that may still be promised; negative while adopted promises exceed the limit."""
        return self.limit - self._total

    def __contains__(self, key: Key) -> bool:
        return key in self._promises

    def __len__(self) -> int:
        return len(self._promises)

    def __iter__(self) -> Iterator[tuple[Key, int]]:
        return iter(self._promises.items())

    def promise_of(self, key: Key) -> int:
        return self._promises.get(key, 0)

    def fits_when_empty(self, pages: int) -> bool:
        """A promise larger than this would wait for ever: refuse it at admission (OR-09)."""
        return pages <= self.limit

    def promise(self, key: Key, pages: int) -> Shortfall | None:
        """Write or change a promise if it fits; say what is missing otherwise and leave the book as it was."""
        growth = pages - self._promises.get(key, 0)
        if growth > 0 and growth > self.free:
            return Shortfall(wanted=growth, free=self.free)
        self._write(key, pages)
        return None

    def adopt(self, key: Key, pages: int) -> None:
        """Write a promise that somebody already lives by, whether it fits or not."""
        self._write(key, pages)

    def release(self, key: Key) -> int:
        """Strike a promise; returns its pages, 0 when there was none."""
        pages = self._promises.pop(key, 0)
        self._total -= pages
        return pages

    def clear(self) -> None:
        self._promises.clear()
        self._total = 0

    def check(self) -> None:
        """Recount; raises AssertionError with the numbers if the total has drifted from its entries."""
        counted = sum(self._promises.values())
        assert counted == self._total, f"ledger says {self._total} pages, its entries add up to {counted}"

    def _write(self, key: Key, pages: int) -> None:
        if pages <= 0:
            raise ValueError(f"a promise must be at least one page, not {pages}")
        self._total += pages - self._promises.get(key, 0)
        self._promises[key] = pages
