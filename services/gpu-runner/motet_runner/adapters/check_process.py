"""`python -m motet_runner.adapters.check_process CPU_SECONDS MEMORY_BYTES`: checks adapters outside of the service.

A tenant's JSON, patterns and numbers may take long and much memory, and nothing in a process can stop a parser. So
adapters are checked in a fork of this process, without sockets, and the kernel limits its memory, and its CPU time for
each. To fork takes as long as a usual check, so one fork checks many, until it refuses one.

On stdin: what the engine serves, then the folders, each in a line of JSON with whether only the weights' size counts.
On stdout, for each folder: the fork's exit status and the length of what it has said, then that, as `encoded` makes it.
"""

import gc
import os
import select
import signal
import struct
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from motet.imports import without_collections

with without_collections(__name__):
    import orjson
    import structlog

    from motet.confined import address_space, confine, pausing_often, without_sockets
    from motet.errors import AdapterIncompatible, Internal
    from motet_runner.adapters.certification import EngineLimits, certify
    from motet_runner.adapters.peft_config import WEIGHTS_NAME
    from motet_runner.adapters.safetensors_header import check_whole

SAID = struct.Struct("!iI")
OUT_OF_MEMORY = 3
"""The exit status of a fork that may have no more memory."""
MAX_TRACE_CHARS = 4000
ANSWER = struct.Struct("!?I")
"""Of a fork: whether it goes on, and the length of what it says"""
MAX_CHECKS = 100
"""By one fork"""
QUICK_SECONDS = 0.02
"""A check that takes longer pauses often, because others are served beside it."""
MAX_GROWN_BYTES = 64 << 20
"""A fork that has grown by more ends: the next check may take all that a check may."""

log = structlog.get_logger(__name__)


def main() -> None:
    cpu_seconds, memory_bytes = float(sys.argv[1]), int(sys.argv[2])
    limits = EngineLimits.of(orjson.loads(sys.stdin.buffer.readline()))
    fork: _Fork | None = None
    for line in sys.stdin.buffer:
        fork = fork or _Fork(limits, cpu_seconds, memory_bytes)
        goes_on, said = fork.check(line)
        status = 0
        if not goes_on:
            status, fork = fork.end(), None
        sys.stdout.buffer.write(SAID.pack(status, len(said)) + said)
        sys.stdout.buffer.flush()


class _Fork:
    def __init__(self, limits: EngineLimits, cpu_seconds: float, memory_bytes: int) -> None:
        here = os.getpid()
        asked, self._asks = os.pipe()
        self._answers, answers = os.pipe()
        if (pid := os.fork()) == 0:
            os.close(self._asks)
            os.close(self._answers)
            confine(memory_bytes, parent=here)
            _check_all(asked, answers, limits, cpu_seconds)
        self._pid = pid
        os.close(asked)
        os.close(answers)

    def check(self, line: bytes) -> tuple[bool, bytes]:
        """Whether the fork goes on, and what it says. If the service ends meanwhile, so does this process, and the fork
        with it."""
        with suppress(BrokenPipeError):  # it has been killed: there is no answer
            os.write(self._asks, line)
        said = bytearray()
        while len(said) < ANSWER.size or len(said) < ANSWER.size + ANSWER.unpack_from(said)[1]:
            ready, _, _ = select.select([self._answers, sys.stdin.fileno()], [], [])
            if self._answers not in ready:
                os._exit(0)  # the service asks for nothing during a check, so its pipe has ended
            if not (part := os.read(self._answers, 1 << 16)):
                return False, b""
            said += part
        return bool(ANSWER.unpack_from(said)[0]), bytes(said[ANSWER.size :])

    def end(self) -> int:
        """Its exit status"""
        os.close(self._asks)
        os.close(self._answers)
        _, status = os.waitpid(self._pid, 0)
        return os.waitstatus_to_exitcode(status)


def _check_all(asked: int, answers: int, limits: EngineLimits, cpu_seconds: float) -> NoReturn:
    status = 1
    gc.disable()  # it would look at all values of a long header again and again
    gc.freeze()
    try:
        without_sockets()
        least = address_space()
        with os.fdopen(asked, "rb") as orders, os.fdopen(answers, "wb") as pipe:
            for left in reversed(range(MAX_CHECKS)):
                if not (line := orders.readline()):
                    break
                signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
                size_only, folder = orjson.loads(line)
                with pausing_often(QUICK_SECONDS):
                    found = _found(Path(folder), None if size_only else limits)
                said = orjson.dumps(found)
                accepts = not found.keys() & {"refused", "errno", "defect"}
                del found
                gc.collect()
                goes_on = accepts and left > 0 and address_space() - least <= MAX_GROWN_BYTES
                pipe.write(ANSWER.pack(goes_on, len(said)) + said)
                pipe.flush()
                if not goes_on:
                    break
        status = 0
    except MemoryError:
        status = OUT_OF_MEMORY
    finally:
        os._exit(status)


def encoded(folder: Path, limits: EngineLimits | None) -> bytes:
    """The result of the check, or the error that it raises. Without limits, only whether the weights are whole."""
    return orjson.dumps(_found(folder, limits))


def _found(folder: Path, limits: EngineLimits | None) -> dict[str, Any]:
    try:
        if limits is None:
            check_whole(folder / WEIGHTS_NAME)
            return {"whole": True}
        found = certify(folder, limits)
        return {
            "certification": found.encode(),
            "linears": found.layout.packed.decode(),
            "template": found.template.decode(),
        }
    except AdapterIncompatible as error:
        return {"refused": error.message, "reason": error.reason, "param": error.param}
    except OSError as error:
        return {"errno": error.errno, "strerror": error.strerror, "filename": str(error.filename or "")}
    except MemoryError:
        raise
    except Exception:  # a defect of ours: the service logs it
        return {"defect": traceback.format_exc()[-MAX_TRACE_CHARS:].encode(errors="replace").decode()}


def decoded(said: bytes, folder: Path) -> tuple[str, bytes, bytes]:
    """The text of the certification, the packed linears of its layout and the chat template; empty if only
    that was asked. Raises the error of the check."""
    found: dict[str, Any] = orjson.loads(said)
    if "defect" in found:
        log.error("adapter_check_failed", folder=str(folder), trace=found["defect"])
        raise Internal("The runner could not check this adapter. See the runner's log.")
    if "refused" in found:
        raise AdapterIncompatible(found["refused"], reason=found["reason"], param=found["param"])
    if "errno" in found:
        raise OSError(found["errno"], found["strerror"], found["filename"] or None)
    return found.get("certification", ""), found.get("linears", "").encode(), found.get("template", "").encode()


if __name__ == "__main__":
    main()
