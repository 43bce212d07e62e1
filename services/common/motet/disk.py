"""Small files that a process keeps for its successor. Each call may raise OSError."""

import fcntl
import os
from pathlib import Path
from typing import Protocol


class LockedFile(Protocol):
    """A file that no other process has locked. The lock ends with `close`, and with the process."""

    def read(self) -> bytes: ...

    def write(self, content: bytes) -> None:
        """Replace the content. It is on the disk when this returns. Contents of equal length replace each other as a
        whole."""

    def close(self) -> None: ...


class Disk(Protocol):
    def read(self, path: Path) -> bytes:
        """Raises FileNotFoundError if there is no such file."""

    def replace(self, path: Path, content: bytes) -> None:
        """Write a file and its folder. A reader sees the old content or the new one. It may be lost with the machine,
        but not with the process. After an OSError the old content may be there."""

    def remove(self, path: Path) -> None:
        """No effect if there is no such file."""

    def lock(self, path: Path) -> LockedFile:
        """Open a file, made with its folder if there is none, and lock it. Raises BlockingIOError if another process
        has locked it."""


class RealDisk:
    def read(self, path: Path) -> bytes:
        return path.read_bytes()

    def replace(self, path: Path, content: bytes) -> None:
        beside = path.with_suffix(".new")
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_bytes(content)
        beside.replace(path)

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def lock(self, path: Path) -> LockedFile:
        path.parent.mkdir(parents=True, exist_ok=True)
        return _RealLockedFile(path)


def sync_folder(folder: Path) -> None:
    """What was renamed in it outlives the machine."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


class _RealLockedFile:
    def __init__(self, path: Path) -> None:
        self._file: int | None = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise

    def read(self) -> bytes:
        return os.pread(self._open, os.fstat(self._open).st_size, 0)

    def write(self, content: bytes) -> None:
        written = os.pwrite(self._open, content, 0)
        os.ftruncate(self._open, written)  # a damaged file may be longer
        os.fsync(self._open)

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    @property
    def _open(self) -> int:
        assert self._file is not None, "the file is closed"
        return self._file
