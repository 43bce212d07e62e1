"""An engine in a thread of this process, behind the pipe with which a runner's service calls the engine's process."""

import socket
import threading
from collections.abc import Callable
from pathlib import Path

import structlog

from motet.settings import ProcessSettings
from motet_runner.engine_client import EngineClient
from motet_runner.engine_messages import Start
from motet_runner.engine_process import drive
from motet_runner.interface import Engine, EngineConfig
from motet_runner.pipe import Pipe

log = structlog.get_logger(__name__)


class ThreadEngineClient(EngineClient):
    """Any engine, with the same pipe and the same loop as in a process. `crash` ends it without a message, as if its
    process had been killed."""

    def __init__(self, load: Callable[[], Engine]) -> None:
        super().__init__(EngineConfig(model=Path()), ProcessSettings())
        self._load = load
        self._connection: socket.socket | None = None
        self._thread: threading.Thread | None = None

    def crash(self) -> None:
        assert self._connection is not None
        self._connection.shutdown(socket.SHUT_RDWR)

    def _spawn(self, connection: socket.socket) -> None:
        self._connection = connection.dup()
        self._thread = threading.Thread(target=self._run, args=(self._connection,), name="engine", daemon=True)
        self._thread.start()

    def _send(self, message: Start) -> None:
        """It is loaded already."""

    def _run(self, connection: socket.socket) -> None:
        with connection:
            try:
                drive(self._load, Pipe(connection))
            except EOFError:
                pass
            except Exception:
                log.exception("engine_failed")

    def _wait_for_exit(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def _exit_reason(self) -> str:
        return "its thread ended"
