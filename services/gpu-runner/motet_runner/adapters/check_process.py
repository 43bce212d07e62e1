"""`python -m motet_runner.adapters.check_process CPU_SECONDS MEMORY_BYTES`: checks adapters outside of the service.

A tenant's JSON, patterns and numbers may take long and much memory, and nothing in a process can stop a parser. So each
adapter is checked in a fork of this process, at low priority and without sockets, and the kernel limits the fork's
memory and CPU time.

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
from pathlib import Path
from typing import Any, NoReturn

from motet.imports import without_collections

with without_collections(__name__):
    import orjson
    import structlog

    from motet.confined import confine, without_sockets
    from motet.errors import AdapterIncompatible, Internal
    from motet_runner.adapters.certification import EngineLimits, certify
    from motet_runner.adapters.peft_config import WEIGHTS_NAME
    from motet_runner.adapters.safetensors_header import check_whole

SAID = struct.Struct("!iI")
LOWEST_PRIORITY = 19
OUT_OF_MEMORY = 3
"""The exit status of a fork that may have no more memory."""
MAX_TRACE_CHARS = 4000

log = structlog.get_logger(__name__)


def main() -> None:
    os.nice(LOWEST_PRIORITY)
    cpu_seconds, memory_bytes = float(sys.argv[1]), int(sys.argv[2])
    limits = EngineLimits.of(orjson.loads(sys.stdin.buffer.readline()))
    here = os.getpid()
    for line in sys.stdin.buffer:
        reads, writes = os.pipe()
        if (child := os.fork()) == 0:
            os.close(reads)
            confine(memory_bytes, parent=here)
            size_only, folder = orjson.loads(line)
            _check(Path(folder), None if size_only else limits, writes, cpu_seconds)
        os.close(writes)
        said = _said(reads)
        _, status = os.waitpid(child, 0)
        sys.stdout.buffer.write(SAID.pack(os.waitstatus_to_exitcode(status), len(said)) + said)
        sys.stdout.buffer.flush()


def _said(pipe: int) -> bytes:
    """All that the fork says. If the service ends meanwhile, so does this process, and the fork with it."""
    said = bytearray()
    while True:
        ready, _, _ = select.select([pipe, sys.stdin.fileno()], [], [])
        if pipe not in ready:
            os._exit(0)  # the service asks for nothing during a check, so its pipe has ended
        if not (part := os.read(pipe, 1 << 16)):
            os.close(pipe)
            return bytes(said)
        said += part


def _check(folder: Path, limits: EngineLimits | None, writes: int, cpu_seconds: float) -> NoReturn:
    status = 1
    gc.disable()  # it would look at all values of a long header again and again, and the fork ends soon
    try:
        without_sockets()
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        with os.fdopen(writes, "wb") as pipe:
            pipe.write(encoded(folder, limits))
        status = 0
    except MemoryError:
        status = OUT_OF_MEMORY
    finally:
        os._exit(status)


def encoded(folder: Path, limits: EngineLimits | None) -> bytes:
    """The result of the check, or the error that it raises. Without limits, only whether the weights are whole."""
    try:
        if limits is None:
            check_whole(folder / WEIGHTS_NAME)
            return orjson.dumps({"whole": True})
        found = certify(folder, limits)
        return orjson.dumps(
            {
                "certification": found.encode(),
                "linears": found.layout.packed.decode(),
                "template": found.template.decode(),
            }
        )
    except AdapterIncompatible as error:
        return orjson.dumps({"refused": error.message, "reason": error.reason, "param": error.param})
    except OSError as error:
        return orjson.dumps({"errno": error.errno, "strerror": error.strerror, "filename": str(error.filename or "")})
    except MemoryError:
        raise
    except Exception:  # a defect of ours: the service logs it
        return orjson.dumps({"defect": traceback.format_exc()[-MAX_TRACE_CHARS:].encode(errors="replace").decode()})


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
