"""Starting one process: a session of its own, no stdin, and a log file that stays within bounds."""

import os
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import orjson

MAX_LOG_BYTES = 16 * 1024 * 1024
"""When a log file is set aside as `<name>.log.1`. One earlier file is kept."""

_TAIL_BYTES = 16 * 1024


def start(command: Sequence[str], *, env: Mapping[str, str], log: Path, cwd: Path | None) -> subprocess.Popen[bytes]:
    """Raises OSError when the log cannot be opened or the command cannot be run."""
    log.parent.mkdir(parents=True, exist_ok=True)
    rotate(log)
    # Appending, so that the file can be cut short under a running writer.
    with log.open("ab") as output:
        return subprocess.Popen(
            command,
            env={**os.environ, **env},
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def rotate(log: Path, *, limit: int = MAX_LOG_BYTES) -> None:
    """Set a large log aside; to be done before a writer opens it."""
    with suppress(FileNotFoundError):
        if log.stat().st_size > limit:
            log.replace(log.with_name(log.name + ".1"))


def trim(log: Path, *, limit: int = MAX_LOG_BYTES) -> None:
    """Copy the end of a log that grew too large to `.1` and empty the file, while somebody is writing to it.

    A few lines written between the two steps may be lost: better than a full disk.
    """
    with suppress(OSError):
        if log.stat().st_size <= limit:
            return
        with log.open("rb") as source:
            source.seek(-limit // 4, os.SEEK_END)
            log.with_name(log.name + ".1").write_bytes(source.read())
        os.truncate(log, 0)


def size_of(log: Path) -> int:
    try:
        return log.stat().st_size
    except OSError:
        return 0


def last_log_line(log: Path, *, since: int = 0) -> str:
    """The last line that a process wrote after offset `since`, for people: the reason or event of a line of JSON."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            since = since if since <= size else 0
            file.seek(max(since, size - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").split("\n")
    except OSError:
        return ""
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    if last.startswith("{"):
        with suppress(orjson.JSONDecodeError):
            event = orjson.loads(last)
            last = str(event.get("reason") or str(event.get("event") or last).replace("_", " "))
    return last[:500]
