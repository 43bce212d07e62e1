"""Processes that try grammars, one for each tokenizer: they need a second or more to start, so they stay."""

import asyncio
import os
import signal
import sys
from collections import OrderedDict
from pathlib import Path
from typing import NamedTuple

import structlog

from motet.api.v1 import runner_pb2
from motet.errors import Overloaded
from motet.grammars.grammar import Grammar, impossible
from motet_gateway.grammars.trial_process import ASKED, SAID

log = structlog.get_logger(__name__)

CPU_SECONDS = 0.5
"""A usual schema takes a hundredth of it."""
MEMORY_BYTES = 256 << 20
MAX_PROCESSES = 2
"""Those of the tokenizers that were used last. A large tokenizer takes 0.1 GB."""
BACKSTOP_SECONDS = 30.0
"""Also for the start of a process"""
_ENVIRONMENT = ("PATH", "PYTHONPATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH")
"""The environment variables that a trial inherits: no addresses, secrets or settings."""


class TrialModel(NamedTuple):
    """What a trial needs of a model."""

    tokenizer: Path
    vocabulary: int
    eos: tuple[int, ...]


class TrialProcesses:
    """Not to be used by two tasks at once."""

    def __init__(self) -> None:
        self._processes: OrderedDict[TrialModel, asyncio.subprocess.Process] = OrderedDict()

    async def tried(self, grammar: Grammar, model: TrialModel) -> str:
        """Why it cannot be served; empty: it can. Raises Overloaded if that could not be found out."""
        try:
            async with asyncio.timeout(BACKSTOP_SECONDS):
                process = await self._of(model)
                status, said = await _ask(process, grammar)
        except (TimeoutError, asyncio.IncompleteReadError, ConnectionError):
            await self._end(model)
            log.warning("grammar_trials_died", tokenizer=str(model.tokenizer))
            raise Overloaded("A grammar could not be tried. Try again soon.") from None
        except BaseException:
            await self._end(model)
            raise
        if status == 0:
            return said.decode(errors="replace")
        log.warning("grammar_trial_died", status=status, bytes=len(grammar.text))
        if status == -signal.SIGPROF:
            return impossible(f"it takes more than {CPU_SECONDS:g} s to compile").message
        return impossible(f"it needs more than {MEMORY_BYTES >> 20} MiB to compile, or is nested too deeply").message

    async def close(self) -> None:
        for model in list(self._processes):
            await self._end(model)

    async def _of(self, model: TrialModel) -> asyncio.subprocess.Process:
        if (process := self._processes.get(model)) is not None:
            self._processes.move_to_end(model)
            return process
        if len(self._processes) >= MAX_PROCESSES:
            await self._end(next(iter(self._processes)))
        eos = ",".join(map(str, model.eos))
        limits = (str(CPU_SECONDS), str(MEMORY_BYTES))
        process = self._processes[model] = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "motet_gateway.grammars.trial_process"),
            *(str(model.tokenizer), str(model.vocabulary), eos, *limits),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
            start_new_session=True,
        )
        return process

    async def _end(self, model: TrialModel) -> None:
        """Its fork ends with it."""
        process = self._processes.pop(model, None)
        if process is not None:
            if process.returncode is None:
                process.kill()
            await process.wait()


async def _ask(process: asyncio.subprocess.Process, grammar: Grammar) -> tuple[int, bytes]:
    assert process.stdin is not None
    assert process.stdout is not None
    message = runner_pb2.Sampling()
    grammar.write(message)
    asked = message.SerializeToString()
    process.stdin.write(ASKED.pack(len(asked)) + asked)
    await process.stdin.drain()
    status, length = SAID.unpack(await process.stdout.readexactly(SAID.size))
    return status, await process.stdout.readexactly(length)
