"""The gateway's side of `render_forks`: starts that process when it is needed, and orders forks of it."""

import asyncio
import os
import resource
import signal
import socket
import sys
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Final, Self

import structlog

from motet_gateway.tokens.render_forks import END, NOT_STARTED, ORDER, SAID, START, START_TOGETHER, STARTED

log = structlog.get_logger(__name__)

FORK_BYTES = 4_000_000
"""Of the memory that a fork shares at first, so much is soon its own: it has been written to."""
END_SECONDS = 5.0
STUCK_SECONDS = 20.0
"""A process that has not answered for so long forks no more and tells of no end: it is ended, with its forks."""
_CPU_TIME = 2
"""With a process's number it makes a clock's, on Linux: see `clock_getcpuclockid`."""
_ENVIRONMENT = ("PATH", "PYTHONPATH", "TZ", "LANG", "LC_ALL", "LD_LIBRARY_PATH")
"""The environment variables that a process inherits: no addresses, secrets or settings."""


class RenderParent:
    def __init__(self, cpu_seconds: float, memory_bytes: int) -> None:
        self._arguments = (str(cpu_seconds), str(memory_bytes))
        self._starting = asyncio.Lock()
        self._running: _Running | None = None
        self._closed = False

    async def fork(self, link: socket.socket, *, together: bool) -> "Fork":
        """One that serves at the other end of `link`. Raises OSError."""
        try:
            return await (await self._parent()).fork(link, together=together)
        except ConnectionError:  # it has been killed, or was stuck
            return await (await self._parent()).fork(link, together=together)

    async def close(self) -> None:
        self._closed = True
        async with self._starting:
            if self._running is not None:
                await self._running.close()

    async def _parent(self) -> "_Running":
        async with self._starting:
            if self._closed:
                raise ConnectionAbortedError("the gateway ends")
            if self._running is None or self._running.ended:
                self._running = await _Running.start(self._arguments)
            return self._running


class Fork:
    def __init__(self, pid: int, parent: "_Running") -> None:
        self.pid: Final = pid
        self.ended: Final[asyncio.Future[int]] = asyncio.get_running_loop().create_future()
        """With its exit status, or the negative number of the signal that has ended it"""
        self._parent = parent
        self._at_start = self._bytes_written()

    def kill(self) -> None:
        if not self.ended.done():
            self._parent.end(self.pid)

    async def status(self) -> int:
        """Its exit status, once it has ended or nobody can tell any more whether it has"""
        try:
            async with asyncio.timeout(STUCK_SECONDS):
                return await asyncio.shield(self.ended)
        except TimeoutError:
            self._parent.end_stuck()
            return await self.ended

    @property
    def cpu_seconds(self) -> float | None:
        """That it has used so far; None if it has ended, or where the kernel doesn't say."""
        with suppress(OSError):
            return time.clock_gettime((~self.pid << 3) | _CPU_TIME)
        return None

    @property
    def bytes_taken(self) -> int:
        """About how much memory it alone takes. Where the kernel doesn't say, as for one that has rendered little."""
        return FORK_BYTES + max(0, self._bytes_written() - self._at_start)

    def _bytes_written(self) -> int:
        with suppress(OSError, ValueError, IndexError):  # it may have ended
            _, resident, of_files, *_ = Path(f"/proc/{self.pid}/statm").read_text().split()
            return (int(resident) - int(of_files)) * resource.getpagesize()
        return 0


class _Running:
    def __init__(self, process: asyncio.subprocess.Process, orders: socket.socket) -> None:
        self.ended = False
        self._process = process
        self._orders = orders
        self._asked = deque[asyncio.Future[Fork]]()
        self._forks: dict[int, Fork] = {}
        self._received = bytearray()
        asyncio.get_running_loop().add_reader(orders, self._on_said)

    @classmethod
    async def start(cls, arguments: tuple[str, ...]) -> Self:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        try:
            with theirs:
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-P", "-m", "motet_gateway.tokens.render_forks", *arguments),
                    stdin=theirs.fileno(),
                    stdout=asyncio.subprocess.DEVNULL,
                    stderr=asyncio.subprocess.DEVNULL,
                    env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
                    start_new_session=True,
                )
        except BaseException:
            ours.close()
            raise
        return cls(process, ours)

    async def fork(self, link: socket.socket, *, together: bool) -> Fork:
        if self.ended:
            raise ConnectionResetError
        order = ORDER.pack(START_TOGETHER if together else START, 0)
        try:
            socket.send_fds(self._orders, [order], [link.fileno()])
        except ConnectionError:
            self._on_end()
            raise
        answer: asyncio.Future[Fork] = asyncio.get_running_loop().create_future()
        self._asked.append(answer)
        try:
            async with asyncio.timeout(STUCK_SECONDS):
                return await answer
        except TimeoutError:
            self.end_stuck()
            raise ConnectionResetError("the process that forks renderers was stuck") from None

    def end(self, pid: int) -> None:
        if self.ended:
            return
        try:
            self._orders.send(ORDER.pack(END, pid))
        except OSError:  # it reads nothing any more, or has ended: so do its forks
            self._kill()

    def end_stuck(self) -> None:
        if not self.ended:
            log.error("render_parent_stuck", seconds=STUCK_SECONDS)
            self._kill()
            self._on_end()

    async def close(self) -> None:
        if not self.ended:
            self._on_end()
        try:
            async with asyncio.timeout(END_SECONDS):
                await self._process.wait()
        except TimeoutError:
            self._kill()
            await self._process.wait()

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            self._process.kill()

    def _on_said(self) -> None:
        try:
            said = self._orders.recv(64 * SAID.size)
        except BlockingIOError:
            return
        except OSError:
            said = b""
        if not said:
            log.error("render_parent_died")
            self._on_end()
            return
        self._received += said
        while len(self._received) >= SAID.size:
            what, pid, number = SAID.unpack_from(self._received)
            del self._received[: SAID.size]
            if what == STARTED:
                self._on_started(pid)
            elif what == NOT_STARTED:
                _fail(self._asked.popleft(), OSError(number, os.strerror(number)))
            elif not (fork := self._forks.pop(pid)).ended.done():
                fork.ended.set_result(number)

    def _on_started(self, pid: int) -> None:
        self._forks[pid] = fork = Fork(pid, self)
        if not (answer := self._asked.popleft()).done():
            answer.set_result(fork)
        # Who has left has closed the socket that the fork serves, so it ends.

    def _on_end(self) -> None:
        self.ended = True
        asyncio.get_running_loop().remove_reader(self._orders)
        self._orders.close()
        for answer in self._asked:
            _fail(answer, ConnectionResetError("the process that forks renderers has ended"))
        for fork in self._forks.values():
            if not fork.ended.done():
                fork.ended.set_result(-signal.SIGKILL)
        self._asked.clear()
        self._forks.clear()


def _fail(answer: "asyncio.Future[Fork]", error: Exception) -> None:
    if not answer.done():
        answer.set_exception(error)
