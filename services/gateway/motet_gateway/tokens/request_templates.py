"""Renders the chat templates that requests bring: one at a time of each tenant, and never in all processes at once."""

import asyncio
from collections import Counter
from contextlib import AsyncExitStack
from weakref import WeakValueDictionary

from motet.errors import Overloaded
from motet_gateway.tokens.render_pool import RenderPool, TemplateText, asks_whether_it_reads
from motet_gateway.tokens.render_process import YES

MAX_WAITING = 64
"""Of each tenant, the one that is rendered included. Each may take a second, and waits with its body."""


class RequestTemplates:
    def __init__(self, processes: RenderPool) -> None:
        self._processes = processes
        self._free = processes.turns.free
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._waiting = Counter[str]()
        self._running = set[asyncio.Task[str]]()

    async def render(self, tenant: str, template: TemplateText, context: bytes) -> str:
        """Raises Overloaded if too many of this tenant wait, and what `RenderPool.render` raises."""
        if self._waiting[tenant] >= MAX_WAITING:
            raise Overloaded("Too many of your chat templates wait to be rendered. Try again soon.")
        self._waiting[tenant] += 1
        try:
            async with AsyncExitStack() as turn:
                await turn.enter_async_context(self._turns.setdefault(tenant, asyncio.Lock()))
                await turn.enter_async_context(self._free)
                # The turn ends with the work of the process, which goes on if the client hangs up.
                task = asyncio.create_task(self._rendered(template, context, turn.pop_all()), name="render in turn")
                self._running.add(task)
                task.add_done_callback(self._ended)
            return await asyncio.shield(task)
        finally:
            self._waiting[tenant] -= 1
            if not self._waiting[tenant]:
                del self._waiting[tenant]

    async def reads(self, tenant: str, template: TemplateText, variable: str) -> bool:
        """Whether it reads the variable of this name. A process finds out: a stranger's text may take long to read."""
        if variable not in template.text:
            return False
        return await self.render(tenant, template, asks_whether_it_reads(variable)) == YES

    async def close(self) -> None:
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def _rendered(self, template: TemplateText, context: bytes, turn: AsyncExitStack) -> str:
        async with turn:
            return await self._processes.render(template, context)

    def _ended(self, task: asyncio.Task[str]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # its client may have hung up
