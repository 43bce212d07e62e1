"""Starts processes of the product without importing their modules each time, for tests that start many.

    server = ForkServer(["motet_operator.cluster"])
    process = server.start("motet_operator.cluster", env=..., output=log, network=path)

The server has imported the modules. It forks, and the new process, which becomes a child of the caller, runs the module
as `python -m` does. Such a start takes a tenth of the CPU time. What it does not show is that a process can import what
it needs by itself: tests of the chart, the local stack and the images start the same modules as users do.
"""

import ctypes
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_NEW_NETWORK = 0x40000000
_MOST_BYTES = 1 << 20
_ADOPTION_SECONDS = 10.0
_DECIDE_AT_START = ("PYTHON", "LD_")
"""An interpreter reads variables with these beginnings when it starts, which the server has done already."""


class ForkedProcess:
    """A child of this process, with the methods of `subprocess.Popen` that tests use."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        with self._lock:  # a process can be waited for once
            if self.returncode is None:
                ended, status = os.waitpid(self.pid, os.WNOHANG)
                if ended:
                    self.returncode = os.waitstatus_to_exitcode(status)
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            time.sleep(0.01)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """Ends with this process, or at `close`."""

    def __init__(self, modules: Sequence[str], *, also: Sequence[str] = ()) -> None:
        """`also`: what these modules import later."""
        self._modules = frozenset(modules)
        self._also = also
        self._wire: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def can_start(self, command: Sequence[str], env: Mapping[str, str] | None, cwd: Path | None) -> bool:
        """Whether a start by the server would be the same: of this interpreter, with this tree."""
        given = os.environ if env is None else env
        return (
            list(command[:-1]) == [sys.executable, "-P", "-m"]
            and command[-1] in self._modules
            and cwd is None
            and _decisive(given) == _decisive(os.environ)
        )

    def start(
        self,
        module: str,
        *arguments: str,
        env: Mapping[str, str] | None,
        output: int,
        network: Path | None = None,
        stdin: int | None = None,
        errors: int | None = None,
    ) -> ForkedProcess:
        """`output` is the descriptor of its log, `stdin` that of what it reads, `errors` that of its standard error if
        that is another one."""
        given = {0: stdin, 1: output, 2: errors}
        descriptors = {number: one for number, one in given.items() if one is not None}
        asked = {
            "command": [module, *arguments],
            "env": dict(os.environ if env is None else env),
            "network": None if network is None else str(network),
            "parent": os.getpid(),
            "descriptors": list(descriptors),
        }
        with self._lock:
            wire = self._connected()
            with _adopting_orphans():
                socket.send_fds(wire, [json.dumps(asked).encode()], list(descriptors.values()))
                answer = wire.recv(_MOST_BYTES)
        if not answer.isdigit():
            raise RuntimeError(answer.decode() or "the server that forks processes of tests has ended")
        return ForkedProcess(int(answer))

    def close(self) -> None:
        if self._wire is not None:
            self._wire.close()
        if self._process is not None:
            self._process.wait()

    @property
    def pid(self) -> int | None:
        """None: it has forked nothing yet."""
        return None if self._process is None else self._process.pid

    def _connected(self) -> socket.socket:
        """It starts when it is first needed."""
        if self._wire is None:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", __file__, str(theirs.fileno()), *self._also, "--", *sorted(self._modules)],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                )
            self._wire = ours
        return self._wire


def _decisive(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name.startswith(_DECIDE_AT_START)}


@contextmanager
def _adopting_orphans() -> Iterator[None]:
    """A process whose parent ends becomes ours, not that of init."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _serve(wire: socket.socket) -> None:
    """Ends the server when its wire is closed. In a new process it returns after that has run its module."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(wire, _MOST_BYTES, 3)
        if not message:
            sys.exit()
        asked = json.loads(message)
        read, write = os.pipe()
        between = os.fork()
        if between == 0:
            pid = os.fork()
            if pid:
                os.write(write, str(pid).encode())
                os._exit(0)
            for one in (read, write):
                os.close(one)
            wire.close()
            _become(asked, *descriptors)
            return
        os.close(write)
        os.waitpid(between, 0)  # then its child is the caller's
        wire.send(os.read(read, 100) or b"no process could be forked")
        for one in (read, *descriptors):
            os.close(one)


def _become(asked: dict[str, Any], *descriptors: int) -> None:
    received = dict(zip(asked["descriptors"], descriptors, strict=True))
    for number, one in ({2: received[1]} | received).items():
        os.dup2(one, number)
    for one in descriptors:
        os.close(one)
    deadline = time.monotonic() + _ADOPTION_SECONDS
    while os.getppid() != asked["parent"]:
        if time.monotonic() > deadline:
            sys.exit("the process that asked for this one did not adopt it")
        time.sleep(0.001)
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != asked["parent"]:  # it ended before the kernel was told
        os._exit(1)
    os.setsid()
    if asked["network"] is not None:
        network = os.open(asked["network"], os.O_RDONLY)
        if _LIBC.setns(network, _NEW_NETWORK) != 0:
            sys.exit(f"{asked['network']}: cannot be entered: {os.strerror(ctypes.get_errno())}")
        os.close(network)
    os.environ.clear()
    os.environ.update(asked["env"])
    sys.argv = asked["command"]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


def main() -> None:
    end = sys.argv.index("--")
    for module in sys.argv[2:end]:
        import_module(module)
    for module in sys.argv[end + 1 :]:
        run = f"{module}.__main__" if hasattr(import_module(module), "__path__") else module
        import_module(run)
        del sys.modules[run]  # it is run, not imported
    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads != 1:
        sys.exit(f"{threads} threads: a process with threads cannot be forked")
    with socket.socket(fileno=int(sys.argv[1])) as wire:
        _serve(wire)


if __name__ == "__main__":
    main()
