"""A shared lock on a folder of the disk cache: while it is held, no process evicts the folder."""

import fcntl
import os
import threading
import time
from pathlib import Path


class FolderLease:
    """The lease ends with the process. Raises FileNotFoundError if the folder does not exist, or was just removed.

    Calls may come from any thread, also after the release.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._mutex = threading.Lock()
        file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self.file: int | None = file
        try:
            fcntl.flock(file, fcntl.LOCK_SH)
            status = os.fstat(file)
        except OSError:
            self.release()
            raise
        self.inode = (status.st_dev, status.st_ino)
        if not self.is_live():
            self.release()
            raise FileNotFoundError(f"{folder} was removed a moment ago")

    def is_live(self) -> bool:
        """True if the folder is still at its place."""
        with self._mutex:
            return self.file is not None and self._is_at_its_place()

    def touch(self) -> None:
        """Record that the folder is used, for the order of eviction. This clock is finer than the kernel's ticks."""
        now = time.time_ns()
        with self._mutex:
            if self.file is not None:
                os.utime(self.file, ns=(now, now))

    def become_exclusive(self) -> bool:
        """True if no other process uses the folder; then none can begin to use it. False: the lease is a shared lock
        again. Changing a lock is not atomic: if the folder was removed meanwhile, the lease is released.
        """
        with self._mutex:
            if self.file is None:
                return False
            try:
                fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                fcntl.flock(self.file, fcntl.LOCK_SH)
            else:
                if self._is_at_its_place():
                    return True
            if not self._is_at_its_place():
                self._release()
            return False

    def become_shared(self) -> None:
        with self._mutex:
            if self.file is not None:
                fcntl.flock(self.file, fcntl.LOCK_SH)

    def release(self) -> None:
        with self._mutex:
            self._release()

    def _release(self) -> None:
        if self.file is not None:
            os.close(self.file)
            self.file = None

    def _is_at_its_place(self) -> bool:
        assert self.file is not None
        try:
            return os.path.samestat(os.fstat(self.file), self.folder.stat())
        except (FileNotFoundError, NotADirectoryError):
            return False
