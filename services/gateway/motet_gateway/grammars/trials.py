"""Tries each grammar in a process that may be killed, before an engine that serves everybody compiles it."""

import asyncio
import hashlib
from collections import Counter, OrderedDict
from functools import partial
from weakref import WeakValueDictionary

from motet.errors import InvalidRequest, MotetError, Overloaded
from motet.grammars.grammar import Grammar
from motet_gateway.grammars.trial_processes import TrialModel, TrialProcesses

MAX_KNOWN = 4096
MAX_WAITING = 4
"""Different grammars of each tenant. One is tried at a time, and one of each tenant waits for its turn: whoever comes
waits for at most one of each other tenant."""


class GrammarTrials:
    def __init__(self) -> None:
        self._processes = TrialProcesses()
        self._turn = asyncio.Semaphore(1)
        self._turns_of: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        """One per tenant that has grammars waiting"""
        self._waiting = Counter[str]()
        self._known: OrderedDict[bytes, str] = OrderedDict()
        """Digest → why it cannot be served; empty: it can. Each tenant has its own: how fast an answer comes betrays no
        other tenant's grammar."""
        self._running: dict[bytes, asyncio.Task[str]] = {}
        """By digest, as above: what came first. All others with the same grammar wait for it."""

    async def check(self, grammar: Grammar, tenant: str, model: TrialModel) -> None:
        """Raises InvalidRequest if no runner can serve it, and Overloaded if this tenant tries too many."""
        text = f"{tenant}\n{model.tokenizer}\n{grammar.behind}\n{grammar.form}\n{grammar.text}"
        key = hashlib.sha256(text.encode()).digest()
        if (why := self._known.get(key)) is None:
            # It goes on if its clients hang up: a process that was left in the middle would have to start again.
            try:
                why = await asyncio.shield(self._running.get(key) or self._begun(key, grammar, tenant, model))
            except MotetError as error:
                raise error.again() from None
        self._note(key, why)
        if why:
            raise InvalidRequest(why)

    async def close(self) -> None:
        running = list(self._running.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self._processes.close()

    def _begun(self, key: bytes, grammar: Grammar, tenant: str, model: TrialModel) -> asyncio.Task[str]:
        if self._waiting[tenant] >= MAX_WAITING:
            raise Overloaded("Too many new grammars wait to be tried. Try again soon.")
        self._waiting[tenant] += 1
        task = self._running[key] = asyncio.create_task(self._tried(grammar, tenant, model), name="grammar trial")
        task.add_done_callback(partial(self._ended, key, tenant))
        return task

    def _ended(self, key: bytes, tenant: str, task: asyncio.Task[str]) -> None:
        del self._running[key]
        self._waiting[tenant] -= 1
        if not self._waiting[tenant]:
            del self._waiting[tenant]
        if not task.cancelled() and task.exception() is None:
            self._note(key, task.result())  # its clients may have hung up

    def _note(self, key: bytes, why: str) -> None:
        self._known[key] = why
        self._known.move_to_end(key)
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)

    async def _tried(self, grammar: Grammar, tenant: str, model: TrialModel) -> str:
        own = self._turns_of.setdefault(tenant, asyncio.Semaphore(1))
        async with own, self._turn:
            return await self._processes.tried(grammar, model)
