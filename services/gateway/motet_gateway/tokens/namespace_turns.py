"""Turns at the processes that render what strangers bring: one at a time of each namespace whose adapters bring chat
templates, and never all processes at once, so that one is left for the models' own."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any
from weakref import WeakValueDictionary

from motet.clock import Clock
from motet.errors import Overloaded

MAX_WAITING = 1024
"""Conversations of one namespace's adapters that wait to be rendered, at most. Dozens are rendered in a hundredth of a
second, and a hostile template takes a second for each."""
SLOW_SECONDS = 0.5
"""A namespace whose conversations took more work in one turn counts as slow for a while."""
SLOW_FOR_SECONDS = 60.0
MAX_REST_SECONDS = 2.0


class NamespaceTurns:
    def __init__(self, processes: int, clock: Clock) -> None:
        self.free = asyncio.Semaphore(max(1, processes - 1))
        """Also for templates that requests bring"""
        self._clock = clock
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._slow_until: dict[str, float] = {}
        self._slow_turn = asyncio.Lock()
        self._rest_until = 0.0
        self._waiting: dict[str, dict[str, dict[asyncio.Future[Any], None]]] = {}
        """By namespace and tenant"""
        self._closing = asyncio.Event()

    @asynccontextmanager
    async def turn(self, namespace: str) -> AsyncIterator[None]:
        """Slow namespaces have one turn at a time among them, and rest after it for as long as it took. So hostile
        templates have half of a process at most, however many they are and however much is asked of them, and another
        namespace waits for one of their turns and not for several."""
        async with self._locks.setdefault(namespace, asyncio.Lock()), self._turn_among_slow(namespace), self.free:
            yield

    @asynccontextmanager
    async def _turn_among_slow(self, namespace: str) -> AsyncIterator[None]:
        if namespace not in self.slow:
            yield
            return
        async with self._slow_turn:
            if (rest := self._rest_until - self._clock()) > 0:
                with suppress(TimeoutError):
                    async with asyncio.timeout(rest):
                        await self._closing.wait()
            yield

    @property
    def slow(self) -> set[str]:
        """The namespaces that count as slow"""
        now = self._clock()
        return {name for name, until in self._slow_until.items() if until > now}

    def took(self, namespace: str, seconds: float) -> None:
        """So long a process has worked for it. What it has waited for is not its fault."""
        if seconds <= SLOW_SECONDS:
            return
        now = self._clock()
        self._slow_until = {name: self._slow_until[name] for name in self.slow}
        self._slow_until[namespace] = now + SLOW_FOR_SECONDS
        self._rest_until = now + min(seconds, MAX_REST_SECONDS)

    @contextmanager
    def waiting(self, namespace: str, tenant: str, answer: "asyncio.Future[Any]") -> Iterator[None]:
        """If too many of a namespace wait, the tenant with most of them is refused one: Overloaded is raised, or is
        the answer of its newest."""
        waiting = self._waiting.setdefault(namespace, {})
        if sum(map(len, waiting.values())) >= MAX_WAITING:
            has_most = max(waiting, key=lambda one: len(waiting[one]))
            refusal = Overloaded("Too many conversations wait for the chat templates of this adapter's namespace.")
            if len(waiting.get(tenant, ())) + 1 >= len(waiting[has_most]):
                raise refusal
            _leave(waiting, has_most, newest := next(reversed(waiting[has_most])))
            if not newest.done():
                newest.set_exception(refusal)
        waiting.setdefault(tenant, {})[answer] = None
        try:
            yield
        finally:
            _leave(waiting, tenant, answer)
            if not waiting and self._waiting.get(namespace) is waiting:
                del self._waiting[namespace]

    def close(self) -> None:
        """Nobody rests any more."""
        self._closing.set()


def _leave(waiting: dict[str, dict[asyncio.Future[Any], None]], tenant: str, answer: "asyncio.Future[Any]") -> None:
    own = waiting.get(tenant, {})
    own.pop(answer, None)
    if not own:
        waiting.pop(tenant, None)
