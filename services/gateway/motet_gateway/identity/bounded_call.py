"""Calls a store that may never answer and may hang even while the call is cancelled."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import TypeVar

from motet.errors import StoreUnavailable

Answer = TypeVar("Answer")

CLEAN_UP_SECONDS = 1.0


class BoundedCall:
    """Makes one call at a time. Each returns or raises within `seconds`."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._asked: asyncio.Task[object] | None = None
        """The current call, or one that was cancelled and has not ended."""

    async def ask(self, do: Callable[[], Coroutine[object, object, Answer]]) -> Answer:
        """Raises StoreUnavailable if no answer comes, and what `do` raises."""
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
        if asked.cancelled():  # by itself: passing this on would cancel the caller
            raise StoreUnavailable("the driver cancelled the call")
        return asked.result()

    async def stop(self) -> bool:
        """Cancel the call, and if called again also its clean-up. False: it does not end."""
        asked = self._asked
        if asked is None:
            return True
        asked.cancel()
        await asyncio.wait({asked}, timeout=CLEAN_UP_SECONDS)
        if not asked.done():
            return False
        self._asked = None
        if not asked.cancelled():
            asked.exception()  # marks it as retrieved; nothing else reads it
        return True
