"""Starts one process in its own session, without stdin, with its output in a log file of limited size."""

import os
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import orjson

MAX_LOG_BYTES = 16 * 1024 * 1024
"""A log file that is larger is renamed to `<name>.log.1`. One earlier file is kept."""

_TAIL_BYTES = 16 * 1024


def start(command: Sequence[str], *, env: Mapping[str, str], log: Path, cwd: Path | None) -> subprocess.Popen[bytes]:
    """Raises OSError if the log cannot be opened or the command cannot be run."""
    log.parent.mkdir(parents=True, exist_ok=True)
    rotate(log)
    # In append mode, so that `trim` can make the file shorter while the process writes to it.
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
    """Rename a large log. Call it before a process opens the log for writing."""
    with suppress(FileNotFoundError):
        if log.stat().st_size > limit:
            log.replace(log.with_name(log.name + ".1"))


def trim(log: Path, *, limit: int = MAX_LOG_BYTES) -> None:
    """Copy the end of a log that is too large to `.1`, and empty the file, while a process writes to it.

    Lines that are written between the two steps are lost. That is better than a full disk.
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
    """The last line that a process wrote after offset `since`, for people: of a JSON line, its reason or its event."""
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
