"""The service's part of a check: it starts the processes that check adapters, at the lowest priority, and reads what
they say."""

import os
import select
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from math import inf
from pathlib import Path

import orjson
import structlog

from motet.errors import AdapterIncompatible
from motet_runner.adapters.certification import Certification, EngineLimits
from motet_runner.adapters.check_process import OUT_OF_MEMORY, SAID, decoded
from motet_runner.adapters.peft_config import WEIGHTS_NAME
from motet_runner.adapters.safetensors_header import check_whole, header_bytes
from motet_runner.sources.fetch_errors import temporary

log = structlog.get_logger(__name__)

CPU_SECONDS = 20.0
"""CPU time of one check: a common adapter takes a hundredth of a second, and one of 4 GB some seconds."""
MEMORY_BYTES = 1 << 30
"""What a check may take: a usual one takes a few megabytes, and the largest linear with the largest rank 300."""
LOWEST_PRIORITY = 19
START_SECONDS = 1.0
"""How long a check waits for a process that others use before it starts one: about as long as a start takes, which is
half a second of CPU time, and usual checks take some hundredths each."""
SPARE_SECONDS = 30.0
"""After this time, one process stays."""
SHORT_HEADER_BYTES = 1 << 18
"""Of the weights: whether they are whole is seen here. Nothing is parsed, and the worst header takes 4 ms. That of most
adapters has a tenth of this."""
_ENDING = "This runner is ending, and checks no more adapters. Motet tries again automatically."
_ENVIRONMENT = ("PATH", "PYTHONPATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH")
"""The environment variables that a check inherits: no addresses, secrets or settings."""
_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class CheckProcesses:
    """Checks adapters. Called in threads, each of which has a process of its own while it checks. One process stays for
    the next check, and the others stay for a while: starting one takes as long as tens of usual checks. So there are
    more only if checks take long."""

    def __init__(
        self,
        limits: EngineLimits,
        *,
        cpu_seconds: float = CPU_SECONDS,
        memory_bytes: int = MEMORY_BYTES,
        seconds: float = inf,
        bytes_per_second: float = inf,
    ) -> None:
        """`seconds`: how long a check may take on a machine that has little time for it, and longer by what its weights
        take at this rate. Whoever waits for it must wait longer: it would take a slow check for a disk that hangs."""
        self._limits = limits
        self._cpu_seconds = cpu_seconds
        self._memory_bytes = memory_bytes
        self._seconds, self._bytes_per_second = seconds, bytes_per_second
        self._idle: list[subprocess.Popen[bytes]] = []
        """As many as were checking at once, at most"""
        self._checking: set[subprocess.Popen[bytes]] = set()
        self._taken = 0
        """Those that check, or are being started"""
        self._closed = False
        self._spare: threading.Timer | None = None
        """While more than one is idle"""
        self._lock = threading.Condition()

    def check(self, folder: Path) -> Certification:
        """Raises AdapterIncompatible, OSError if the files can't be read, and AdapterFetchFailed if the check could not
        be finished for another reason than the adapter."""
        text, linears, template = self._checked(folder)
        return Certification.decode(text, folder, linears, template)

    def check_whole(self, folder: Path) -> None:
        """Only whether the weights are whole, which a fetch wants to know. Raises the same errors."""
        weights = folder / WEIGHTS_NAME
        if header_bytes(weights) <= SHORT_HEADER_BYTES:
            check_whole(weights)
        else:
            self._checked(folder, size_only=True)

    def _checked(self, folder: Path, *, size_only: bool = False) -> tuple[str, bytes, bytes]:
        seconds = self._seconds
        with suppress(OSError):  # the check says which file is missing
            seconds += (folder / WEIGHTS_NAME).stat().st_size / self._bytes_per_second
        process = self._take()
        try:
            if process is None:
                process = self._start()
                _send(process, self._limits.encode())
            status, said = _ask(process, folder, size_only, time.monotonic() + seconds)
        except BaseException as error:
            self._give_back(process)
            if process is not None:
                _end(process)
            if isinstance(error, _TooLate):
                raise temporary(
                    f"The check of the adapter's files did not end within {seconds:.0f} s: this machine has little "
                    "time for it, or its disk is slow. Motet tries again automatically."
                ) from None
            if not isinstance(error, OSError | EOFError):
                raise
            if self._closed:
                raise temporary(_ENDING) from None
            log.error("adapter_checks_ended", status=process and process.returncode, reason=str(error))
            raise temporary(
                "The process that checks adapters has ended. Motet tries again automatically. If that goes on, see the "
                "runner's log."
            ) from None
        self._keep(process)
        if status == 0:
            return decoded(said, folder)
        log.warning("adapter_check_died", folder=str(folder), status=status)
        if status == -signal.SIGKILL:  # by the kernel, for whatever has taken the machine's memory
            raise temporary("The check of the adapter's files was killed. Motet tries again automatically.")
        if status == -signal.SIGPROF:
            why = f"takes more than {self._cpu_seconds:g} s of CPU time"
        elif status == OUT_OF_MEMORY:
            why = f"takes more than {self._memory_bytes >> 20} MiB of memory"
        else:
            why = f"ends with status {status}"
        raise AdapterIncompatible(f"The check of the adapter's files {why}. Save the adapter again.", reason="TooLarge")

    def close(self) -> None:
        """Ends also those that check now: their threads see that, and there are no more."""
        with self._lock:
            self._closed = True
            for process in self._checking:
                process.kill()
            self._lock.notify_all()
        self._end_idle(0)

    def _take(self) -> subprocess.Popen[bytes] | None:
        """None: another one is to be started. Raises AdapterFetchFailed once this has closed."""
        with self._lock:
            self._lock.wait_for(lambda: self._idle or not self._taken or self._closed, START_SECONDS)
            if self._closed:
                raise temporary(_ENDING)
            self._taken += 1
            while self._idle:
                process = self._idle.pop()
                if process.poll() is None:
                    self._checking.add(process)
                    return process
                _end(process)
        return None

    def _give_back(self, process: subprocess.Popen[bytes] | None) -> None:
        with self._lock:
            self._taken -= 1
            self._checking.discard(process)
            self._lock.notify()

    def _keep(self, process: subprocess.Popen[bytes]) -> None:
        with self._lock:
            if not (closed := self._closed):
                self._idle.append(process)
            self._give_back(process)
            if not closed:
                if len(self._idle) == 1 or self._spare is not None:
                    return
                self._spare = spare = threading.Timer(SPARE_SECONDS, self._end_idle, (1,))
                spare.daemon = True
        if closed:
            _end(process)
            return
        try:
            spare.start()
        except RuntimeError:  # no more threads available
            self._end_idle(1)

    def _end_idle(self, kept: int) -> None:
        """All but the last `kept`, which were used last."""
        with self._lock:
            spare, self._spare = self._spare, None
            ended = self._idle[: len(self._idle) - kept]
            self._idle = self._idle[len(ended) :]
        if spare is not None:
            spare.cancel()
        for process in ended:
            _end(process)

    def _start(self) -> subprocess.Popen[bytes]:
        limits = (str(self._cpu_seconds), str(self._memory_bytes))
        # Not in a session of its own: where the kernel divides time between sessions first, priorities would not count.
        process = subprocess.Popen(
            (sys.executable, "-P", "-m", "motet_runner.adapters.check_process", *limits),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ} | _ONE_THREAD,
        )
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, process.pid, LOWEST_PRIORITY)  # before its imports, which take long
        with self._lock:
            self._checking.add(process)
            if self._closed:
                process.kill()  # its thread reads no answer
        return process


class _TooLate(Exception):
    pass


def _ask(process: subprocess.Popen[bytes], folder: Path, size_only: bool, until: float) -> tuple[int, bytes]:
    _send(process, orjson.dumps((size_only, str(folder))))
    status, length = SAID.unpack(_read(process, SAID.size, until))
    return status, _read(process, length, until)


def _send(process: subprocess.Popen[bytes], line: bytes) -> None:
    assert process.stdin is not None
    process.stdin.write(line + b"\n")
    process.stdin.flush()


def _read(process: subprocess.Popen[bytes], count: int, until: float) -> bytes:
    assert process.stdout is not None
    found, pipe, ready = bytearray(), process.stdout.fileno(), select.poll()
    ready.register(pipe, select.POLLIN)
    while len(found) < count:
        left = until - time.monotonic()
        if not ready.poll(None if left == inf else max(0.0, 1000 * left)):
            raise _TooLate
        if not (part := os.read(pipe, count - len(found))):
            raise EOFError
        found += part
    return bytes(found)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Its fork ends with it."""
    process.kill()
    with suppress(OSError), process:  # closes its pipes, also one that it has not read to its end, and waits for it
        pass
