"""A file that grows by lines, such as a trace or a record."""

import os
from pathlib import Path

import structlog

log = structlog.get_logger(__name__)


class LineFile:
    """Appends lines to a file. With the first one that cannot be written it ends, and the process goes on.

    A new file is its owner's alone: lines may have names of tenants, and addresses with keys.

    A process that was killed while it wrote, or whose disk was full, leaves a part of a line. The next process begins
    a line of its own behind it.
    """

    def __init__(self, path: Path, *, stopped: str) -> None:
        """`stopped`: what the log calls its end."""
        self._path: Path | None = path
        self._stopped = stopped
        self._begun = False
        """Whether a line of this process is in the file."""

    @property
    def open(self) -> bool:
        return self._path is not None

    def append(self, line: bytes) -> None:
        """`line`: with its end."""
        if self._path is None:
            return
        try:
            begun = self._begun or not _ends_within_a_line(self._path)
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            with os.fdopen(os.open(self._path, flags, 0o600), "ab") as file:
                file.write(line if begun else b"\n" + line)
            self._begun = True
        except OSError as error:
            log.warning(self._stopped, path=str(self._path), reason=error.strerror or str(error))
            self._path = None


def _ends_within_a_line(path: Path) -> bool:
    if not path.is_file() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"
