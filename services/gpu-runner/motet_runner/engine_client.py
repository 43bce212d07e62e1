"""The engine as its service sees it: an object that takes commands and returns `EngineOutputs`. The engine runs in a
child process, so that torch and its threads are not in the service's process."""

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence

from motet.errors import ErrorMapping, MotetError
from motet.settings import ProcessSettings
from motet_runner.engine_messages import Answer, Command, EngineOutputs, Loading, Start
from motet_runner.interface import EngineConfig, EngineInfo, LoadProgress
from motet_runner.pipe import HEADER, pack, unpack
from motet_runner.thread_environment import THREAD_ENVIRONMENT

STOP_SECONDS = 0.5
"""How long an engine may take to end before it is killed. An engine has nothing to save."""

REASON_SECONDS = 1.0
"""How long to wait for the status of an engine whose connection is closed. It ends soon, but not on a busy machine. Its
requests wait meanwhile, too."""

BUFFER_BYTES = 1 << 18

ENGINE_COMMAND = (sys.executable, "-m", "motet_runner.engine_process")
"""Starts the engine's process. The number of the process's socket is appended."""


NO_VARIABLES: Mapping[str, str] = {}


class EngineDied(MotetError):
    """The engine has ended, and its KV is lost. The service ends too, and its requests move to other runners."""

    mapping = ErrorMapping("engine_died", 500, "server_error", MotetError.mapping.grpc)


class EngineClient:
    """An engine behind a pipe. `start` begins to load the engine, `loaded` waits until it is loaded, `run` hands on all
    outputs."""

    def __init__(
        self,
        config: EngineConfig,
        process: ProcessSettings,
        command: Sequence[str] = ENGINE_COMMAND,
        variables: Mapping[str, str] = NO_VARIABLES,
    ) -> None:
        """`variables`: of the engine's environment, in place of the service's"""
        self._start = Start(config, os.getpid(), process)
        self._command = command
        self._variables = variables
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._commands: list[bytes] = []

    async def start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._spawn(theirs)
        self._reader, self._writer = await asyncio.open_connection(sock=ours, limit=BUFFER_BYTES)
        self._send(self._start)

    async def loaded(self, on_progress: LoadProgress) -> EngineInfo:
        """Wait until the engine has loaded its model. Raises the engine's error if it can't."""
        while isinstance(answer := await self._receive(), Loading):
            on_progress(answer.read_bytes, answer.total_bytes)
        if isinstance(answer, MotetError):
            raise answer
        assert isinstance(answer, EngineInfo)
        return answer

    def post(self, command: Command) -> None:
        """Send a command, together with all other commands of this turn of the event loop. The error of a command that
        cannot be packed is raised here, and no other command is lost."""
        packed = pack(command)
        if not self._commands:
            asyncio.get_running_loop().call_soon(self._flush)
        self._commands.append(packed)

    async def run(self, receive: Callable[[EngineOutputs], None]) -> None:
        """Hand all outputs to `receive` until cancelled. Raises EngineDied when the engine ends."""
        while True:
            batch = await self._receive()
            assert isinstance(batch, EngineOutputs)
            receive(batch)

    async def stop(self) -> None:
        """End the engine and wait until it has ended."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        await asyncio.to_thread(self._wait_for_exit)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def _spawn(self, connection: socket.socket) -> None:
        """Start the engine with this end of the socket. The caller then closes its own copy."""
        self._process = subprocess.Popen(
            [*self._command, str(connection.fileno())],
            pass_fds=[connection.fileno()],
            env=THREAD_ENVIRONMENT | os.environ | dict(self._variables),
            stdin=subprocess.DEVNULL,
        )

    def _wait_for_exit(self) -> None:
        if self._process is None:
            return
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _exit_reason(self) -> str:
        """How the engine ended, as text for an error message."""
        assert self._process is not None
        try:
            status = self._process.wait(REASON_SECONDS)
        except subprocess.TimeoutExpired:
            return "it closed its connection"
        return f"killed by signal {-status}" if status < 0 else f"exit status {status}"

    def _send(self, message: Start) -> None:
        self._write(pack(message))

    def _write(self, data: bytes) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(data)

    def _flush(self) -> None:
        commands, self._commands = self._commands, []
        self._write(b"".join(commands))

    async def _receive(self) -> Answer:
        assert self._reader is not None, "start comes first"
        try:
            (size,) = HEADER.unpack(await self._reader.readexactly(HEADER.size))
            return unpack(await self._reader.readexactly(size))  # type: ignore[no-any-return]
        except (asyncio.IncompleteReadError, ConnectionError):
            raise EngineDied(f"The engine has ended: {await asyncio.to_thread(self._exit_reason)}.") from None
