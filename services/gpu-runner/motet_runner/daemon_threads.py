"""Threads for calls that may hang, such as a stat on a network volume.

asyncio's own threads are shared by everything in the process, and its end waits for them: a few calls that hang would
stop all others, and the process could not end. These are daemons, a few for each purpose, and end when they are idle.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

IDLE_SECONDS = 10.0

T = TypeVar("T")


class DaemonThreads:
    """Runs calls in the order in which they came, at most `most` at a time."""

    def __init__(self, name: str, most: int) -> None:
        self._name = name
        self._most = most
        self._calls: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._changed = threading.Condition()
        self._threads = 0
        self._idle = 0

    @property
    def unused(self) -> bool:
        """Whether no thread runs or hangs."""
        return self._threads == 0

    @property
    def waiting(self) -> int:
        """How many calls have not begun."""
        return len(self._calls)

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """A call that has not begun can be cancelled."""
        future: Future[T] = Future()
        with self._changed:
            if self._idle <= len(self._calls) and self._threads < self._most:
                threading.Thread(target=self._work, name=self._name, daemon=True).start()
                self._threads += 1
            self._calls.append((future, call))
            self._changed.notify()
        future.add_done_callback(self._forget_cancelled)
        return future

    async def run(self, call: Callable[[], T], *, discard: Callable[[T], object] = lambda _: None) -> T:
        """Wait for a call. Whoever is cancelled meanwhile leaves the result to `discard`."""
        future = self.submit(call)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            discard_later(future, discard)
            raise

    def _work(self) -> None:
        while (work := self._next()) is not None:
            future, call = work
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = call()
            except BaseException as error:  # whoever waits for the call gets it
                future.set_exception(error)
            else:
                future.set_result(result)
            del future, call, work

    def _forget_cancelled(self, future: Future[Any]) -> None:
        """Behind a call that hangs for days, cancelled ones must not pile up."""
        if future.cancelled():
            with self._changed:
                self._calls = deque(call for call in self._calls if call[0] is not future)

    def _next(self) -> tuple[Future[Any], Callable[[], Any]] | None:
        with self._changed:
            self._idle += 1
            self._changed.wait_for(lambda: self._calls, IDLE_SECONDS)
            self._idle -= 1
            if self._calls:
                return self._calls.popleft()
            self._threads -= 1
            return None


def discard_later(future: "Future[T]", discard: Callable[[T], object]) -> None:
    """Nobody wants the result any more: when there is one, hand it to `discard`."""

    def done(future: "Future[T]") -> None:
        if not future.cancelled() and future.exception() is None:
            discard(future.result())

    future.cancel()
    future.add_done_callback(done)
