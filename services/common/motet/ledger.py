"""The ledger: the promises of a runner, in pages. It does not say how many pages are in use.

The scheduler keeps one ledger for each runner, and places a request only where its promise fits. A runner keeps its
own ledger, and may decline a request. Pure: no clock, no I/O.

The sum of promises never exceeds capacity × overcommit, with two exceptions: after a restart the scheduler adopts the
promises that runners already keep, and the factor may be lowered. Nothing new fits then until the sum is lower.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from motet.errors import InvalidRequest

Key = TypeVar("Key")

MIN_OVERCOMMIT = 1.0
MAX_OVERCOMMIT = 4.0
"""Pools may choose a factor between these two."""


@dataclass(frozen=True, slots=True)
class Shortfall:
    """Why a promise does not fit: how many more pages it needs, and how many are free."""

    wanted: int
    free: int


class Ledger(Generic[Key]):
    def __init__(self, capacity: int, *, overcommit: float = 1.0) -> None:
        self._capacity = capacity
        self._overcommit = overcommit
        self._limit = int(capacity * overcommit)  # made when one of the two changes, as it is asked very often
        self._promises: dict[Key, int] = {}
        self.total = 0

    @property
    def capacity(self) -> int:
        return self._capacity

    @capacity.setter
    def capacity(self, pages: int) -> None:
        self._capacity, self._limit = pages, int(pages * self._overcommit)

    @property
    def overcommit(self) -> float:
        return self._overcommit

    @overcommit.setter
    def overcommit(self, factor: float) -> None:
        self._overcommit, self._limit = factor, int(self._capacity * factor)

    @property
    def limit(self) -> int:
        return self._limit

    @property
    def promised(self) -> int:
        return self.total

    @property
    def free(self) -> int:
        """Pages that may still be promised. Negative while the promises exceed the limit."""
        return self._limit - self.total

    def __contains__(self, key: Key) -> bool:
        return key in self._promises

    def __len__(self) -> int:
        return len(self._promises)

    def __iter__(self) -> Iterator[tuple[Key, int]]:
        return iter(self._promises.items())

    def promise_of(self, key: Key) -> int:
        return self._promises.get(key, 0)

    def fits_when_empty(self, pages: int) -> bool:
        """Whether it fits when nothing else is promised. The scheduler refuses a request that never fits (OR-09)."""
        return pages <= self.limit

    def promise(self, key: Key, pages: int) -> Shortfall | None:
        """Add or change a promise if it fits. Otherwise change nothing, and return how many pages are missing."""
        growth = pages - self._promises.get(key, 0)
        if growth > 0 and growth > self.free:
            return Shortfall(wanted=growth, free=self.free)
        self._write(key, pages)
        return None

    def adopt(self, key: Key, pages: int) -> None:
        """Add a promise that a runner already keeps, whether it fits or not."""
        self._write(key, pages)

    def release(self, key: Key) -> int:
        """Remove a promise and return its pages; 0 if there was no such promise."""
        pages = self._promises.pop(key, 0)
        self.total -= pages
        return pages

    def clear(self) -> None:
        self._promises.clear()
        self.total = 0

    def check(self) -> None:
        """Count again. Raises AssertionError with both numbers if the total is not the sum of the entries."""
        counted = sum(self._promises.values())
        assert counted == self.total, f"ledger says {self.total} pages, its entries add up to {counted}"

    def _write(self, key: Key, pages: int) -> None:
        if pages <= 0:
            raise ValueError(f"a promise must be at least one page, not {pages}")
        self.total += pages - self._promises.get(key, 0)
        self._promises[key] = pages


def check_overcommit(factor: float) -> None:
    """Raise InvalidRequest for a factor that no pool may choose."""
    if not MIN_OVERCOMMIT <= factor <= MAX_OVERCOMMIT:  # also NaN
        raise InvalidRequest(
            f"overcommit is {factor}: use {MIN_OVERCOMMIT:g} to {MAX_OVERCOMMIT:g}", param="overcommit"
        )
