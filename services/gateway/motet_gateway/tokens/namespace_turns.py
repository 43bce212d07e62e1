"""Turns at the processes that render what strangers bring: one at a time of each namespace whose adapters bring chat
templates, and never all processes at once, so that one is left for the models' own."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from weakref import WeakValueDictionary

from motet.clock import Clock
from motet.errors import Overloaded

MAX_WAITING = 1024
"""Conversations of one namespace's adapters that wait to be rendered, at most. Dozens are rendered in a hundredth of a
second, and a hostile template takes a second for each."""
SLOW_SECONDS = 0.5
"""A turn that takes longer is followed by a rest."""
MAX_REST_SECONDS = 2.0


class NamespaceTurns:
    def __init__(self, processes: int, clock: Clock) -> None:
        self.free = asyncio.Semaphore(max(1, processes - 1))
        """Also for templates that requests bring"""
        self._clock = clock
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._rests: dict[str, float] = {}
        """Until when a namespace rests"""
        self._waiting = Counter[str]()
        self._closing = asyncio.Event()

    @asynccontextmanager
    async def turn(self, namespace: str) -> AsyncIterator[None]:
        """Slow turns are followed by a rest of the same length. So a hostile template has half of a process at most,
        however much is asked of it."""
        lock = self._locks.setdefault(namespace, asyncio.Lock())
        async with lock:
            if (rest := self._rests.pop(namespace, 0.0) - self._clock()) > 0:
                with suppress(TimeoutError):
                    async with asyncio.timeout(rest):
                        await self._closing.wait()
            async with self.free:
                began = self._clock()
                try:
                    yield
                finally:
                    took = (now := self._clock()) - began
                    self._rests = {name: until for name, until in self._rests.items() if until > now}
                    if took > SLOW_SECONDS:
                        self._rests[namespace] = now + min(took, MAX_REST_SECONDS)

    @asynccontextmanager
    async def waiting(self, namespace: str) -> AsyncIterator[None]:
        """Raises Overloaded if too many of this namespace wait."""
        if self._waiting[namespace] >= MAX_WAITING:
            raise Overloaded("Too many conversations wait for the chat templates of this adapter's namespace.")
        self._waiting[namespace] += 1
        try:
            yield
        finally:
            self._waiting[namespace] -= 1
            if not self._waiting[namespace]:
                del self._waiting[namespace]

    def close(self) -> None:
        """Nobody rests any more."""
        self._closing.set()
