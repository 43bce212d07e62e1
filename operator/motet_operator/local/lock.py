"""The lock of a state directory: an flock that ends with its holder, and a file content that names the holder."""

import fcntl
import os
import shlex
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import orjson

from motet.errors import StateDirectoryError
from motet.processes import ProcessIdentity, identity_of, is_alive


@dataclass(frozen=True, slots=True, kw_only=True)
class LockHolder:
    """What the holder writes into the lock file for others to read."""

    pid: int = 0
    start_ticks: int = 0
    url: str = ""
    stops: bool = False
    """It is a `motet down`."""

    @property
    def identity(self) -> ProcessIdentity:
        return ProcessIdentity(self.pid, self.start_ticks)

    @property
    def is_up(self) -> bool:
        """False also if nobody knows who holds the lock: a command that only looks writes nothing."""
        return not self.stops and is_alive(self.identity)


class StackLock:
    """Held while entered. Entering raises StateDirectoryError when a stack runs in this state directory."""

    def __init__(self, path: Path, *, url: str = "", to_stop: bool = False) -> None:
        self._path = path
        self._url = url
        self._to_stop = to_stop
        """Held only to stop a stack: a full disk must not prevent that, so the holder need not be written."""

        self._file: int | None = None

    def take(self) -> bool:
        """Whether it is ours now, or was before. Does not wait."""
        if self._file is None and (file := _take(self._path)) is not None:
            self._file = file
            me = identity_of(os.getpid())
            assert me is not None
            self._write_holder(LockHolder(pid=me.pid, start_ticks=me.start_ticks, url=self._url, stops=self._to_stop))
        return self._file is not None

    def __enter__(self) -> Self:
        for _ in range(10):
            # Another process that only checks (`is_held`) holds it for a moment.
            if self.take() or is_alive(read_holder(self._path).identity):
                break
            time.sleep(0.05)
        if not self.take():
            holder = read_holder(self._path)
            if not holder.is_up:
                raise StateDirectoryError(
                    f"`motet down` or another command uses the state directory {self._path.parent}"
                    f"{f' (pid {holder.pid})' if holder.pid else ''}. Try again once it has ended."
                )
            where = f" at {holder.url}" if holder.url else ""
            folder = shlex.quote(str(self._path.parent))
            raise StateDirectoryError(
                f"a stack already runs{where} with this state directory (pid {holder.pid}). "
                f"Stop it with `motet down --data-dir {folder}`, or use another --data-dir."
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            with suppress(OSError):
                os.ftruncate(self._file, 0)
            os.close(self._file)
            self._file = None

    def _write_holder(self, holder: LockHolder) -> None:
        assert self._file is not None
        try:
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, orjson.dumps(asdict(holder)), 0)
        except OSError as error:
            if self._to_stop:
                return
            raise StateDirectoryError(
                f"cannot write to {self._path}: {error.strerror}. Free some space, or choose another --data-dir."
            ) from error


def _take(path: Path) -> int | None:
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StateDirectoryError(
            f"cannot use the state directory {path.parent}: {error.strerror}. Choose another one with --data-dir."
        ) from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        return None
    return file


def is_held(path: Path) -> bool:
    """Whether a `motet up` runs here. The check holds the lock for a moment if it is free."""
    if not path.exists():
        return False
    file = _take(path)
    if file is None:
        return True
    os.close(file)
    return False


def read_holder(path: Path) -> LockHolder:
    with suppress(OSError, ValueError, TypeError):
        return LockHolder(**orjson.loads(path.read_bytes()))
    return LockHolder()
