"""Threads for calls that may hang, such as a stat on a network volume.

The whole process shares asyncio's own threads, and waits for them at its end: a few hanging calls would block all other
calls, and the process could not end. The threads here are daemons, a few for each purpose, and end when they are idle.
"""

import asyncio
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from motet_runner.turn_queue import TurnQueue

IDLE_SECONDS = 10.0

T = TypeVar("T")


class CallHangs(Exception):
    """A call has exceeded its time limit, or could not begin because other calls have."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"no answer for {seconds:g} s")
        self.seconds = seconds


@dataclass(slots=True, eq=False)
class _Call:
    work: Callable[[], Any]
    seconds: float
    future: Future[Any]
    late_at: float = math.inf
    """From this time on, the call counts as hanging; infinite before the call has begun"""


class DaemonThreads:
    """Runs calls, at most `most` at a time: in order, but that owners take turns, and urgent ones come first. A call
    hangs if it takes longer than `seconds`, or than its own limit."""

    def __init__(self, name: str, most: int, *, seconds: float = math.inf) -> None:
        self._name = name
        self._most = most
        self._seconds = seconds
        self.calls = TurnQueue[_Call]()
        self._running: set[_Call] = set()
        self._changed = threading.Condition()
        self._threads = 0
        self._idle = 0

    @property
    def unused(self) -> bool:
        """True if no thread runs or hangs."""
        return self._threads == 0

    def submit(self, call: Callable[[], T], *, owner: str = "", urgent: bool = False) -> Future[T]:
        """A call that has not begun can be cancelled."""
        return self._add(call, self._seconds, owner=owner, urgent=urgent).future

    async def run(
        self, call: Callable[[], T], *, discard: Callable[[T], object] = lambda _: None, seconds: float | None = None
    ) -> T:
        """Wait for a call. Raises CallHangs; before the call has begun, only if all threads hang."""
        added = self._add(call, self._seconds if seconds is None else seconds)

        def seconds_left() -> float:
            left = self._late_at(added) - time.monotonic()
            if left <= 0:
                raise CallHangs(added.seconds)
            return min(left, added.seconds)  # the call may have begun meanwhile

        return await result_of(added.future, seconds_left, discard)

    def _add(self, work: Callable[[], Any], seconds: float, *, owner: str = "", urgent: bool = False) -> _Call:
        call = _Call(work, seconds, Future())
        with self._changed:
            if self._idle <= len(self.calls) and self._threads < self._most:
                threading.Thread(target=self._work, name=self._name, daemon=True).start()
                self._threads += 1
            self.calls.add(call, owner, urgent=urgent)
            self._changed.notify()
        call.future.add_done_callback(self._forget_cancelled)
        return call

    def _late_at(self, call: _Call) -> float:
        with self._changed:
            if call.late_at < math.inf or len(self._running) < self._most:
                return call.late_at
            return max(one.late_at for one in self._running)

    def _work(self) -> None:
        while (call := self._next()) is not None:
            try:
                if call.future.set_running_or_notify_cancel():
                    call.future.set_result(call.work())
            except BaseException as error:  # raised where the call is awaited
                call.future.set_exception(error)
            finally:
                with self._changed:
                    self._running.discard(call)
            del call

    def _forget_cancelled(self, future: Future[Any]) -> None:
        """Cancelled calls must not pile up behind a call that hangs for days."""
        if future.cancelled():
            with self._changed:
                self.calls.keep(lambda call: call.future is not future)

    def _next(self) -> _Call | None:
        with self._changed:
            self._idle += 1
            self._changed.wait_for(lambda: self.calls, IDLE_SECONDS)
            self._idle -= 1
            if self.calls:
                call = self.calls.take()
                call.late_at = time.monotonic() + call.seconds
                self._running.add(call)
                return call
            self._threads -= 1
            return None


async def result_of(future: "Future[T]", seconds_left: Callable[[], float], discard: Callable[[T], object]) -> T:
    """Wait for a call, or until `seconds_left` raises an error: this function is called again after the seconds that it
    returns. If the wait ends early, the result goes to `discard`."""

    def done(future: "Future[T]") -> None:
        if not future.cancelled() and future.exception() is None:
            discard(future.result())

    waiting = asyncio.wrap_future(future)
    try:
        while not waiting.done():
            left = seconds_left()
            await asyncio.wait({waiting}, timeout=left if left < math.inf else None)
        return waiting.result()
    except BaseException:
        waiting.cancel()
        future.cancel()
        future.add_done_callback(done)
        raise
