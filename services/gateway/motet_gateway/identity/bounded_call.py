"""Waiting for a store that may never answer, and may hang again while it is told to stop."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import TypeVar

from motet.errors import StoreUnavailable

Answer = TypeVar("Answer")

CLEAN_UP_SECONDS = 1.0


class BoundedCall:
    """Asks one thing at a time. Whatever becomes of it, whoever asks hears of it within `seconds`."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._asked: asyncio.Task[object] | None = None
        """What was told to stop, and has not."""

    async def ask(self, do: Callable[[], Coroutine[object, object, Answer]]) -> Answer:
        """Raises StoreUnavailable when no answer comes, and what `do` raises."""
        if not await self.stop():
            raise StoreUnavailable("the previous call still hangs")
        asked = asyncio.create_task(do())
        self._asked = asked
        try:
            await asyncio.wait({asked}, timeout=self._seconds)
        except asyncio.CancelledError:
            asked.cancel()
            raise
        if not asked.done():
            await self.stop()
            raise StoreUnavailable(f"no answer within {self._seconds:g} seconds")
        self._asked = None
        if asked.cancelled():  # by itself: were it passed on, it would end whoever asks without a word
            raise StoreUnavailable("the driver cancelled the call")
        return asked.result()

    async def stop(self) -> bool:
        """Cancel what still runs, for the second time also its clean-up. False: it does not end."""
        asked = self._asked
        if asked is None:
            return True
        asked.cancel()
        await asyncio.wait({asked}, timeout=CLEAN_UP_SECONDS)
        if not asked.done():
            return False
        self._asked = None
        if not asked.cancelled():
            asked.exception()  # nobody asks for it any more
        return True
