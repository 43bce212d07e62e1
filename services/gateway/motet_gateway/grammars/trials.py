"""Tries each grammar in a process that may be killed, before an engine that serves everybody compiles it."""

import asyncio
import hashlib
from collections import Counter, OrderedDict

from motet.errors import InvalidRequest, Overloaded
from motet.grammars.grammar import Grammar
from motet_gateway.grammars.trial_processes import TrialModel, TrialProcesses

MAX_KNOWN = 4096
MAX_WAITING = 4
"""Of each tenant. One is tried at a time."""


class GrammarTrials:
    def __init__(self) -> None:
        self._processes = TrialProcesses()
        self._turn = asyncio.Semaphore(1)
        self._waiting = Counter[str]()
        self._known: OrderedDict[bytes, str] = OrderedDict()
        """Digest → why it cannot be served; empty: it can. Each tenant has its own: how fast an answer comes betrays no
        other tenant's grammar."""
        self._running = set[asyncio.Task[str]]()

    async def check(self, grammar: Grammar, tenant: str, model: TrialModel) -> None:
        """Raises InvalidRequest if no runner can serve it, and Overloaded if this tenant tries too many."""
        text = f"{tenant}\n{model.tokenizer}\n{grammar.behind}\n{grammar.form}\n{grammar.text}"
        key = hashlib.sha256(text.encode()).digest()
        if (why := self._known.get(key)) is None:
            why = await self._begun(key, grammar, tenant, model)
        self._known[key] = why
        self._known.move_to_end(key)
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
        if why:
            raise InvalidRequest(why)

    async def close(self) -> None:
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self._processes.close()

    async def _begun(self, key: bytes, grammar: Grammar, tenant: str, model: TrialModel) -> str:
        if self._waiting[tenant] >= MAX_WAITING:
            raise Overloaded("Too many new grammars wait to be tried. Try again soon.")
        self._waiting[tenant] += 1
        # It goes on if its client hangs up: a process that was left in the middle would have to start again.
        task = asyncio.create_task(self._tried(key, grammar, tenant, model), name="grammar trial")
        self._running.add(task)
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    def _ended(self, task: asyncio.Task[str]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # its client may have hung up

    async def _tried(self, key: bytes, grammar: Grammar, tenant: str, model: TrialModel) -> str:
        try:
            async with self._turn:
                known = self._known.get(key)  # another request may have tried the same
                return await self._processes.tried(grammar, model) if known is None else known
        finally:
            self._waiting[tenant] -= 1
            if not self._waiting[tenant]:
                del self._waiting[tenant]
