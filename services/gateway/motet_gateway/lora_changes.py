"""Changes the adapters of the local stack. Each change is a command of `motet adapter` in a process of its own, which
checks files, copies them and writes the manifest that the operator watches."""

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import structlog

from motet.domain import ObjectName
from motet.errors import Internal, Overloaded
from motet.json_object import json_object

log = structlog.get_logger(__name__)

COMMAND = (sys.executable, "-P", "-m", "motet_cli.main", "adapter")
MAX_CHANGES = 16
"""That run or wait for their turn"""
MAX_PROCESSES = 2
"""Each takes the memory of a Python with torch."""
MAX_REASON_CHARACTERS = 2000
WAIT_SECONDS = 120.0
"""How long an adapter may take until it is served or refused, once its manifest is written"""
MAX_SECONDS = 300.0
"""How long a command may take in all: it checks and copies files before"""
PRIORITY = 10
"""As of `nice`: checks must not slow down the answers of others."""

_ERROR = "\nmotet: "
"""What the command writes before its error. Other lines are of its log, or of a crash."""

WRONG_USE = 2
"""The exit status of a command that was given something wrong"""


class Done(NamedTuple):
    status: int
    document: dict[str, Any]
    """What it says with `--json`, also of an error; empty if it has crashed"""
    said: str
    """Its error, which is meant for who asks; empty if it has crashed"""


class LoraChanges:
    def __init__(self, data_dir: Path) -> None:
        self._data_dir = data_dir.absolute()
        self._processes = asyncio.Semaphore(MAX_PROCESSES)
        self._turns: WeakValueDictionary[ObjectName, asyncio.Lock] = WeakValueDictionary()
        """Of names that are changed now"""
        self._changes = 0

    @contextlib.asynccontextmanager
    async def turn(self, name: ObjectName) -> AsyncIterator[None]:
        """Waits for earlier changes of this name. Raises Overloaded if too many wait."""
        if self._changes >= MAX_CHANGES:
            raise Overloaded(
                f"{self._changes} changes of adapters are under way here. Try again soon.", retry_after=5.0
            )
        self._changes += 1
        turn = self._turns.get(name) or asyncio.Lock()
        self._turns[name] = turn
        try:
            async with turn, self._processes:
                yield
        finally:
            self._changes -= 1

    async def push(self, name: ObjectName, folder: Path, *, below: Path, group: str, new: bool) -> Done:
        """`group`: of the pools that are to serve it; `new`: a name that is declared already is refused"""
        options = ["--json", f"--below={below}", f"--model={group}", f"--wait={WAIT_SECONDS:g}", *["--new"] * new]
        return await self._run("push", str(folder), f"--as={name.name}", f"--namespace={name.namespace}", *options)

    async def rm(self, name: ObjectName) -> Done:
        return await self._run("rm", name.name, f"--namespace={name.namespace}", "--json")

    async def _run(self, *arguments: str) -> Done:
        """Raises Overloaded if it takes too long, and Internal if it fails by itself."""
        process = await asyncio.create_subprocess_exec(
            *COMMAND,
            *arguments,
            f"--data-dir={self._data_dir}",
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            with contextlib.suppress(ProcessLookupError):
                os.setpriority(os.PRIO_PROCESS, process.pid, PRIORITY)
            async with asyncio.timeout(MAX_SECONDS):
                output, errors = await process.communicate()
        except TimeoutError:
            raise Overloaded(f"motet adapter {arguments[0]} was not done after {MAX_SECONDS:g} s.") from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        assert process.returncode is not None
        written = errors.decode(errors="replace").strip()
        _, is_error, said = f"\n{written}".rpartition(_ERROR)
        said = said[:MAX_REASON_CHARACTERS] if is_error else ""
        document = json_object(output)
        done = Done(process.returncode, document, said)
        log.info("adapter_command", command=arguments[:2], status=done.status)
        if done.status not in {0, 1, WRONG_USE} or (done.status == 1 and not (document or said)):
            end = written[-MAX_REASON_CHARACTERS:]
            log.error("adapter_command_failed", command=arguments[:2], status=done.status, said=end)
            raise Internal(
                f"motet adapter {arguments[0]} has failed (status {done.status}); the gateway's log says more."
            )
        return done
