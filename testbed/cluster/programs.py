"""A program of the test cluster: it can be started with a log, watched until ready, stopped, paused and restarted."""

import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from testbed.cluster.network import Network
from testbed.fork_server import ForkedProcess, ForkServer

START_WITHIN_S = 60.0
STOP_WITHIN_S = 20.0

fork_server: ForkServer | None = None
"""Starts what it can start, if tests have set it."""


class Program:
    """Runs inside the network during the `with` block. It also ends if the test run is killed."""

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        network: Network,
        ready: Callable[[], bool],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> None:
        self.log = log
        self._command = command
        self._network = network
        self._ready = ready
        self._env = env
        self._cwd = cwd
        self._process: subprocess.Popen[bytes] | ForkedProcess | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        assert self._process is not None, f"{self.log.stem} is not started"
        return self._process.pid

    def start(self, *, wait: bool = True) -> None:
        """Start it and wait until it is ready. Otherwise it is ended, and AssertionError has the end of its log."""
        with self.log.open("ab") as output, self._network.inside():
            self._process = self._launched(output)
        if not wait:
            return
        try:
            self.wait_until_ready()
        except BaseException:
            self.kill()  # otherwise the next program on its port would count as ready
            raise

    def _launched(self, output: IO[bytes]) -> subprocess.Popen[bytes] | ForkedProcess:
        if fork_server is not None and fork_server.can_start(self._command, self._env, self._cwd):
            return fork_server.start(
                self._command[-1], env=self._env, output=output.fileno(), network=self._network.path
            )
        return subprocess.Popen(
            ["setpriv", "--pdeathsig=KILL", *self._command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            env=self._env,
            cwd=self._cwd,
        )

    def wait_until_ready(self, within_s: float = START_WITHIN_S) -> None:
        deadline = time.monotonic() + within_s
        with self._network.inside():
            while not self._ready():
                self.assert_alive()
                assert time.monotonic() < deadline, f"{self.log.stem} was not ready in time:\n{self.tail()}"
                time.sleep(0.03)

    def assert_alive(self) -> None:
        code = None if self._process is None else self._process.poll()
        assert code is None, f"{self.log.stem} ended with {code}:\n{self.tail()}"

    def stop(self) -> None:
        """Stop it, also if it is paused, has ended, or never began."""
        if self._process is None:
            return
        self._process.terminate()
        self._process.send_signal(signal.SIGCONT)
        try:
            self._process.wait(STOP_WITHIN_S)
        except subprocess.TimeoutExpired:
            self.kill()
        self._process = None

    def kill(self) -> None:
        """Kill it, like a power cut."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def restart(self) -> None:
        """Restart it, as after a crash. An API server that is asked to end waits up to a minute for its clients."""
        self.kill()
        self.start()

    def pause(self) -> None:
        """Pause it: connections stay open, but it does not answer."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-30:])
