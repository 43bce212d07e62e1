"""Wakes a policy when it has something to do, and not before."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from math import inf

import structlog

from motet.clock import Clock

log = structlog.get_logger(__name__)

PAUSE_AFTER_ERROR_SECONDS = 1.0
"""Before the next attempt: a lasting error must not fill the log."""

STOOD_STILL_SECONDS = 0.5
"""Who wakes up as late was paused."""

CATCH_UP_SECONDS = 0.5
"""After that, this long only what others send is heard."""


class DueTimer:
    """Calls `ring` when the time of `next_due` comes.

    Whoever may have changed what `next_due` says calls `changed`. That costs next to nothing: the new time is looked at
    `pause` seconds after the last look, for all changes until then at once. Two calls of `ring` are at least as far
    apart.

    After the process was paused, `ring` is called a moment later: what others have sent meanwhile still waits in the
    sockets, and while that is not known, a policy would take them for silent.
    """

    def __init__(self, next_due: Callable[[], float], ring: Callable[[], None], *, clock: Clock, pause: float) -> None:
        self._next_due = next_due
        self._ring = ring
        self._clock = clock
        self._pause = pause
        self._changed = asyncio.Event()

    def changed(self) -> None:
        self._changed.set()

    async def run(self) -> None:
        """Until cancelled. An error is logged, and the next call comes nevertheless. While nobody can say when
        something is due, `ring` is called again and again: it does nothing where nothing is due."""
        while True:
            self._changed.clear()
            pause, looked_at = self._pause, self._clock()
            try:
                wait = self._next_due() - self._clock()
            except Exception:
                wait, pause = 0.0, PAUSE_AFTER_ERROR_SECONDS
                log.exception("periodic_task_failed", work="when something is due")
            if wait > 0:
                until = self._clock() + wait
                with suppress(TimeoutError):
                    async with asyncio.timeout(wait if wait < inf else None):
                        await self._changed.wait()
                        await asyncio.sleep(looked_at + self._pause - self._clock())  # mostly it need not wake again
            else:
                try:
                    self._ring()
                except Exception:
                    pause = PAUSE_AFTER_ERROR_SECONDS
                    log.exception("periodic_task_failed", work="what is due")
                until = self._clock() + max(pause, self._pause)
                await asyncio.sleep(until - self._clock())
            if self._clock() > until + STOOD_STILL_SECONDS:
                await asyncio.sleep(CATCH_UP_SECONDS)
