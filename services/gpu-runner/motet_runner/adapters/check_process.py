"""`python -m motet_runner.adapters.check_process CPU_SECONDS MEMORY_BYTES`: checks adapters outside of the service.

A tenant's JSON, patterns and numbers may take long and much memory, and nothing in a process can stop a parser. So each
adapter is checked in a fork of this process, at low priority and without sockets, and the kernel limits the fork's
memory and CPU time.

On stdin: what the engine serves, then the folders, each in a line of JSON. On stdout, for each folder: the fork's exit
status and the length of what it has said, then that, as `encoded` makes it.
"""

import os
import signal
import struct
import sys
from pathlib import Path
from typing import Any, NoReturn

import orjson

from motet.confined import confine, without_sockets
from motet.errors import AdapterIncompatible
from motet_runner.adapters.certification import Certification, EngineLimits, certify

SAID = struct.Struct("!iI")
LOWEST_PRIORITY = 19
OUT_OF_MEMORY = 3
"""The exit status of a fork that may have no more memory."""


def main() -> None:
    os.nice(LOWEST_PRIORITY)
    cpu_seconds, memory_bytes = float(sys.argv[1]), int(sys.argv[2])
    limits = EngineLimits.of(orjson.loads(sys.stdin.buffer.readline()))
    for line in sys.stdin.buffer:
        reads, writes = os.pipe()
        if (child := os.fork()) == 0:
            os.close(reads)
            _check(Path(orjson.loads(line)), limits, writes, cpu_seconds, memory_bytes)
        os.close(writes)
        with os.fdopen(reads, "rb") as pipe:
            said = pipe.read()
        _, status = os.waitpid(child, 0)
        sys.stdout.buffer.write(SAID.pack(os.waitstatus_to_exitcode(status), len(said)) + said)
        sys.stdout.buffer.flush()


def _check(folder: Path, limits: EngineLimits, writes: int, cpu_seconds: float, memory_bytes: int) -> NoReturn:
    status = 1
    try:
        confine(memory_bytes)
        without_sockets()
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        with os.fdopen(writes, "wb") as pipe:
            pipe.write(encoded(folder, limits))
        status = 0
    except MemoryError:
        status = OUT_OF_MEMORY
    finally:
        os._exit(status)


def encoded(folder: Path, limits: EngineLimits) -> bytes:
    """The result of the check, or the error that it raises."""
    try:
        return orjson.dumps({"certification": certify(folder, limits).encode()})
    except AdapterIncompatible as error:
        return orjson.dumps({"refused": error.message, "reason": error.reason, "param": error.param})
    except OSError as error:
        return orjson.dumps({"errno": error.errno, "strerror": error.strerror, "filename": str(error.filename or "")})


def decoded(said: bytes, folder: Path) -> Certification:
    """The certification. Raises the error of the check."""
    found: dict[str, Any] = orjson.loads(said)
    if "refused" in found:
        raise AdapterIncompatible(found["refused"], reason=found["reason"], param=found["param"])
    if "errno" in found:
        raise OSError(found["errno"], found["strerror"], found["filename"] or None)
    return Certification.decode(found["certification"], folder)


if __name__ == "__main__":
    main()
