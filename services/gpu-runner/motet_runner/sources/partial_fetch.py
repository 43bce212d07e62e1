"""Folders in which an interrupted fetch continues: one for each set of files, locked by the process that fetches."""

import asyncio
import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

KEPT_SECONDS = 24 * 3600
"""How long an interrupted fetch may be continued."""

LOCK_POLL_SECONDS = 0.1


def key_of(*words: str) -> str:
    return hashlib.sha256("\0".join(words).encode()).hexdigest()[:32]


@asynccontextmanager
async def locked(folder: Path) -> AsyncIterator[Path]:
    """The folder, for one fetch at a time among all runners of this machine. It is made if it does not exist."""
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            if _lock(file, folder):
                yield folder
                return
        finally:
            os.close(file)
        await asyncio.sleep(LOCK_POLL_SECONDS)  # a blocking lock could not be cancelled


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


def clear_old(root: Path) -> None:
    """Remove the folders of fetches that were not continued in time."""
    for folder in root.iterdir() if root.is_dir() else ():
        with suppress(OSError):
            if time.time() - folder.stat().st_mtime < KEPT_SECONDS:
                continue
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
