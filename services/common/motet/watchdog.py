"""Calls a function when a time has come, also while the event loop hangs."""

import threading
from collections.abc import Callable
from typing import Protocol

from motet.clock import Clock


class Watchdog(Protocol):
    """Waits for a time that can be moved, until it is stopped or has called its function, once."""

    @property
    def in_time(self) -> bool:
        """Whether the time has not come yet."""

    def until(self, end: float) -> None:
        """The time is `end` from now on, which is never sooner than before."""

    def stop(self) -> None:
        """Call nothing any more."""


class ThreadWatchdog:
    """A thread, because the event loop may hang."""

    def __init__(self, end: float, late: Callable[[], None], *, clock: Clock) -> None:
        self._end = end
        self._late = late
        self._clock = clock
        self._stopped = threading.Event()
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    @property
    def in_time(self) -> bool:
        return self._clock() < self._end

    def until(self, end: float) -> None:
        self._end = end

    def stop(self) -> None:
        self._stopped.set()

    def _watch(self) -> None:
        while not self._stopped.wait(max(0.0, self._end - self._clock())):
            if not self.in_time:
                self._late()
                return
