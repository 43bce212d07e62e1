"""Fetch processes, forked: to start one and to import what it needs takes more than half of the CPU time of a small
fetch, and four hundred tests fetch something.

Tests of the runner's process, of the stack and of what can be seen of a fetch process start it as users do.
"""

import asyncio
import atexit
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from motet_runner.sources import fetch_process
from testbed.fork_server import ForkedProcess, ForkServer

# Without the hub's library: it reads the environment when it is imported.
NEEDS = [f"motet_runner.sources.{name}" for name in ("oci_artifact", "s3_folder", "web_folder", "web_requests")]
NOWHERE = Path(os.devnull).open("wb")  # noqa: SIM115 - as long as this process
SERVER = ForkServer([fetch_process.__name__], also=NEEDS)
atexit.register(SERVER.close)


async def start(*command: str, env: Mapping[str, str], limit: int, **pipes: Any) -> Any:
    """In the place of `asyncio.create_subprocess_exec`, as the pool calls it."""
    if not SERVER.can_start(command, env, None):  # a test has a program of its own
        return await asyncio.create_subprocess_exec(*command, env=env, limit=limit, **pipes)
    (ours, stdin), (stdout, theirs) = socket.socketpair(), socket.socketpair()
    with stdin, theirs:
        process = SERVER.start(
            command[-1], env=env, output=theirs.fileno(), stdin=stdin.fileno(), errors=NOWHERE.fileno()
        )
    try:
        _, writer = await asyncio.open_connection(sock=ours)
        reader, said = await asyncio.open_connection(sock=stdout, limit=limit)
    except BaseException:  # a fetch that nobody wants any more
        process.kill()
        for one in (ours, stdout):
            one.close()
        raise
    return _Process(process, writer, reader, said)


forking_asyncio = SimpleNamespace(**vars(asyncio) | {"create_subprocess_exec": start})


class _Process:
    """As `asyncio.subprocess.Process`"""

    def __init__(
        self,
        process: ForkedProcess,
        stdin: asyncio.StreamWriter,
        stdout: asyncio.StreamReader,
        said: asyncio.StreamWriter,
    ) -> None:
        self._process = process
        self.stdin = stdin
        self.stdout = stdout
        self._said = said

    @property
    def returncode(self) -> int | None:
        return self._process.poll()

    async def wait(self) -> int:
        while (code := self._process.poll()) is None:
            await asyncio.sleep(0.002)
        for one in (self.stdin, self._said):
            one.close()
        return code

    def kill(self) -> None:
        self._process.kill()
