"""Wakes the task of one answer when something has changed for it, or when its time has come."""

import asyncio
from collections.abc import Awaitable, Callable

MIN_DUE_SECONDS = 0.02


class Changes:
    def __init__(self) -> None:
        self._changed = False
        self._due = False
        """The time has come. A task that is busy then sees it when it waits: its client may not read for long."""
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def awaited(self) -> bool:
        """Whether the task waits, and nothing has woken it yet."""
        waiter = self._waiter
        return waiter is not None and not waiter.done() and not self._changed

    def wake(self) -> None:
        self._changed = True
        if (waiter := self._waiter) is not None and not waiter.done():
            waiter.set_result(None)

    def due_in(self, seconds: float) -> None:
        """Instead of the time before."""
        self.close()
        self._timer = asyncio.get_running_loop().call_later(max(seconds, MIN_DUE_SECONDS), self._on_timer)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    async def wait(self, when_due: Callable[[], Awaitable[None]]) -> None:
        """Wait until something has changed. Meanwhile call `when_due` when its time has come."""
        while not self._changed:
            if not self._due:
                self._waiter = asyncio.get_running_loop().create_future()
                await self._waiter
                self._waiter = None
            if self._due:
                self._due = False
                await when_due()
        self._changed = False

    def _on_timer(self) -> None:
        self._due = True
        if (waiter := self._waiter) is not None and not waiter.done():
            waiter.set_result(None)
