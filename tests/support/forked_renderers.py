"""A gateway's process that forks renderers, forked itself: to start it takes a tenth of a second of CPU time, and two
thousand tests have a gateway of their own.

Tests of the renderers themselves, of the gateway's process and of the stack start it as users do.
"""

import asyncio
import atexit
import os
import socket
from pathlib import Path
from typing import Any, cast

from motet_gateway.tokens import render_forks
from motet_gateway.tokens.render_parent import _ENVIRONMENT, RenderParent, _Running
from testbed.fork_server import ForkedProcess, ForkServer

SERVER = ForkServer([render_forks.__name__])
atexit.register(SERVER.close)


class ForkedRenderParent(RenderParent):
    async def _parent(self) -> _Running:
        async with self._starting:
            if self._closed:
                raise ConnectionAbortedError("the gateway ends")
            if self._running is None or self._running.ended:
                self._running = self._forked()
            return self._running

    def _forked(self) -> _Running:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        env = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        with theirs, Path(os.devnull).open("wb") as nothing:
            process = SERVER.start(
                *(render_forks.__name__, *self._arguments), env=env, output=nothing.fileno(), stdin=theirs.fileno()
            )
        return _Running(cast("Any", _Awaited(process)), ours)


class _Awaited:
    """As `asyncio.subprocess.Process`"""

    def __init__(self, process: ForkedProcess) -> None:
        self._process = process

    async def wait(self) -> int:
        while (code := self._process.poll()) is None:
            await asyncio.sleep(0.005)
        return code

    def kill(self) -> None:
        self._process.kill()
