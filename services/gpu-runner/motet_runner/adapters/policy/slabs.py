"""Which adapter's slab is written next: one at a time, in the order in which they were found missing."""

from motet.domain import Digest

PAUSE_SECONDS = 60.0
"""After one that had no room on the disk, and after MAX_FAILURES. Those that waited then wait for their next load."""
MAX_FAILURES = 3
"""This number of failures, one after the other, is no fault of the adapters."""


class SlabQueue:
    def __init__(self) -> None:
        self.number = 0
        """Of the current order"""
        self.current: Digest | None = None
        self._waiting: dict[Digest, None] = {}
        self._not_before = 0.0
        self._failures = 0

    def add(self, digest: Digest) -> None:
        self._waiting[digest] = None

    def begin(self, now: float) -> Digest | None:
        """The next one, which is then the current one. None: another one is being written, or none is to be."""
        if self.current is not None or not self._waiting or now < self._not_before:
            return None
        self.current = next(iter(self._waiting))
        del self._waiting[self.current]
        self.number += 1
        return self.current

    def end(self) -> Digest | None:
        """Returns the one that was current."""
        ended, self.current = self.current, None
        return ended

    def written(self, now: float, *, success: bool) -> None:
        self._failures = 0 if success else self._failures + 1
        if self._failures >= MAX_FAILURES:
            self.pause(now)

    def pause(self, now: float) -> None:
        self._failures = 0
        self._waiting.clear()
        self._not_before = now + PAUSE_SECONDS
