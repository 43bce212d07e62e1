"""Tries each grammar in a process of its own, before a runner compiles it in the engine that serves everybody."""

import asyncio
import hashlib
import os
import signal
import sys
from collections import Counter, OrderedDict

import structlog

from motet.errors import InvalidRequest, Overloaded
from motet.grammars.grammar import Grammar, impossible

log = structlog.get_logger(__name__)

CPU_SECONDS = 0.5
"""A usual schema takes a hundredth of it."""
MEMORY_BYTES = 256 << 20
MAX_KNOWN = 4096
MAX_WAITING = 4
"""Of each tenant. One is tried at a time."""
BACKSTOP_SECONDS = 20.0
_ENVIRONMENT = ("PATH", "PYTHONPATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH")
"""The environment variables that a trial inherits: no addresses, secrets or settings."""


class GrammarTrials:
    def __init__(self) -> None:
        self._turn = asyncio.Semaphore(1)
        self._waiting = Counter[str]()
        self._known: OrderedDict[bytes, str] = OrderedDict()
        """Digest → why it cannot be served; empty: it can. Each tenant has its own: how fast an answer comes betrays no
        other tenant's grammar."""

    async def check(self, grammar: Grammar, tenant: str) -> None:
        """Raises InvalidRequest if no runner can serve it, and Overloaded if this tenant tries too many."""
        key = hashlib.sha256(f"{tenant}\n{grammar.form}\n{grammar.text}".encode()).digest()
        if (why := self._known.get(key)) is None:
            why = await self._tried(key, grammar, tenant)
        self._known[key] = why
        self._known.move_to_end(key)
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
        if why:
            raise InvalidRequest(why)

    async def _tried(self, key: bytes, grammar: Grammar, tenant: str) -> str:
        if self._waiting[tenant] >= MAX_WAITING:
            raise Overloaded("Too many new grammars wait to be tried. Try again soon.")
        self._waiting[tenant] += 1
        try:
            async with self._turn:
                known = self._known.get(key)  # another request may have tried the same
                return await _try(grammar) if known is None else known
        finally:
            self._waiting[tenant] -= 1
            if not self._waiting[tenant]:
                del self._waiting[tenant]


async def _try(grammar: Grammar) -> str:
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "motet_gateway.grammars.trial_process", str(CPU_SECONDS), str(MEMORY_BYTES)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(BACKSTOP_SECONDS):
            said, _ = await child.communicate(f"{grammar.form}\n{grammar.text}".encode())
    except TimeoutError:
        raise Overloaded("A grammar could not be tried in time. Try again soon.") from None
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    if child.returncode == 0:
        return said.decode(errors="replace")
    log.warning("grammar_trial_died", status=child.returncode, bytes=len(grammar.text))
    if child.returncode == -signal.SIGPROF:
        return impossible(f"it takes more than {CPU_SECONDS:g} s to compile").message
    return impossible(f"it needs more than {MEMORY_BYTES >> 20} MiB to compile, or is nested too deeply").message
