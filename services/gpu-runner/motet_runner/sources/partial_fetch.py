"""The folders of interrupted fetches: one for each set of files, locked by the process that fetches. A later fetch
continues there.

Each namespace has a folder with these folders. The number and size of its idle folders are limited.
"""

import asyncio
import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import AsyncIterator, Collection, Iterable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from motet_runner.daemon_threads import DaemonThreads

KEPT_SECONDS = 24 * 3600
"""How long an interrupted fetch may be continued."""

LOCK_POLL_SECONDS = 0.1

_NAMESPACE = "namespace-"


def key_of(*words: str) -> str:
    return hashlib.sha256("\0".join(words).encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class PartialFetches:
    """The files of interrupted fetches under `root`. The methods block: call them in a thread."""

    root: Path
    max_count: int
    max_bytes: int

    def folder_of(self, namespace: str, *words: str) -> Path:
        return self.root / (_NAMESPACE + key_of(namespace)) / key_of(*words, namespace)

    def make_room(self, namespace: str) -> None:
        """Keep a namespace's interrupted fetches within its limits. The oldest goes first."""
        kept = sorted(self._of(self.root / (_NAMESPACE + key_of(namespace))), key=_last_written, reverse=True)
        total = 0
        for count, folder in enumerate(kept, 1):
            total += _bytes_of(folder)
            if count > self.max_count or total > self.max_bytes:
                _remove_unlocked(folder)

    def clear(self, *, all_of_them: bool) -> None:
        """Remove the folders of fetches that were not continued in time. `all_of_them`: no space is left, so remove all
        folders into which nothing is fetched now."""
        for folder in self._of(self.root):
            if not folder.name.startswith(_NAMESPACE):  # left by earlier versions
                self._clear([folder], all_of_them=all_of_them)
                continue
            self._clear(self._of(folder), all_of_them=all_of_them)
            with suppress(OSError):
                folder.rmdir()

    def total_bytes(self, *, but: Collection[Path]) -> int:
        """The bytes of all folders, except these."""
        return sum(_bytes_of(one) for namespace in self._of(self.root) for one in self._of(namespace) if one not in but)

    def forget(self, namespace: str, *words: str) -> None:
        _remove_unlocked(self.folder_of(namespace, *words))

    @staticmethod
    def _clear(folders: Iterable[Path], *, all_of_them: bool) -> None:
        for folder in folders:
            if all_of_them or time.time() - _last_written(folder) >= KEPT_SECONDS:
                _remove_unlocked(folder)

    @staticmethod
    def _of(folder: Path) -> Iterator[Path]:
        with suppress(OSError):
            yield from list(folder.iterdir())


@asynccontextmanager
async def locked(folder: Path, threads: DaemonThreads) -> AsyncIterator[Path]:
    """The folder, for one fetch at a time among all runners of this machine. It is made if it does not exist."""
    while True:
        file = await threads.run(partial(_locked, folder), discard=_close)
        if file is not None:
            break
        await asyncio.sleep(LOCK_POLL_SECONDS)  # a blocking lock could not be cancelled
    try:
        yield folder
    finally:
        os.close(file)


def _locked(folder: Path) -> int | None:
    """The folder, open and locked. None: another fetch has locked the folder, or removed it a moment ago."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    if _lock(file, folder):
        return file
    os.close(file)
    return None


def _close(file: int | None) -> None:
    if file is not None:
        os.close(file)


@asynccontextmanager
async def locked_across_machines(folder: Path) -> AsyncIterator[None]:
    """The folder, for one fetch at a time among all machines that share it. It is made if it does not exist.

    The lock is on a file beside the folder: network file systems lock only files that are open for writing, and a
    folder can't be opened for writing. The file is never removed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = os.open(folder.with_name(f"{folder.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o660)
    try:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                await asyncio.sleep(LOCK_POLL_SECONDS)
            else:
                break
        yield
    finally:
        os.close(file)


def _remove_unlocked(folder: Path) -> None:
    with suppress(OSError):
        file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            if _lock(file, folder):
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(file)


def _lock(file: int, folder: Path) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(file), folder.stat())
    except (BlockingIOError, FileNotFoundError):
        return False


def _last_written(folder: Path) -> float:
    """When a file of the folder was last written; 0 if the folder is gone."""
    times = [0.0]
    with suppress(OSError):
        times += [path.stat().st_mtime for path in (folder, *folder.iterdir())]
    return max(times)


def _bytes_of(folder: Path) -> int:
    """The folder's bytes on the disk, with the files of the hub's library."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += (Path(parent) / name).lstat().st_blocks * 512
    return total
