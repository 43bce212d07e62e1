"""A shared lock on a folder that is being filled: while it is held, no process removes the folder."""

import fcntl
import os
from pathlib import Path


class FolderLease:
    """The lease ends with the process. Raises FileNotFoundError if the folder does not exist, or was just removed.

    Earlier versions lease the adapters of the cache in this way, too.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._file: int | None = file
        try:
            fcntl.flock(file, fcntl.LOCK_SH)
            live = self.is_live()
        except OSError:
            self.release()
            raise
        if not live:
            self.release()
            raise FileNotFoundError(f"{folder} was removed a moment ago")

    def is_live(self) -> bool:
        """True if the folder is still at its place."""
        try:
            return self._file is not None and os.path.samestat(os.fstat(self._file), self.folder.stat())
        except (FileNotFoundError, NotADirectoryError):
            return False

    def become_exclusive(self) -> bool:
        """True if nobody else has a lease of the folder, and it is still at its place; then nobody can lease it. False:
        the lease is released, because changing a lock is not atomic."""
        if self._file is None:
            return False
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.release()
            return False
        if not self.is_live():
            self.release()
            return False
        return True

    def release(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None
