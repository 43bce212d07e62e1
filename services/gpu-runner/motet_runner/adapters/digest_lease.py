"""Shared locks on adapters of the disk cache: while one is held, no process evicts the adapter.

An adapter's lock is one byte of a lock file, at a place that its digest gives. So thousands of leases keep only the
lock files open. These are never removed: later processes would make others.

On a full disk there may be no lock file. Then an adapter's lock is one of its folder, as in earlier versions.
"""

import errno
import fcntl
import os
import struct
import threading
import time
import weakref
from collections import Counter
from contextlib import suppress
from pathlib import Path

from motet.digest import hex_of
from motet.domain import Digest
from motet_runner.adapters.folder_lease import FolderLease
from motet_runner.sources.file_selection import WEIGHTS

LOCK_FILES = ".leases"
"""The end of the name of the folder with the lock files, which is beside the cache. There are 16 files, by the digest's
first character: the kernel looks through all locks of a file for each new one."""

MAX_FOLDERS = 256
"""Folders that are locked themselves. Each keeps a file open, so those beyond have no lock. A process at this number
evicts nothing until there are lock files: the other runners of its cache use about as many. One that uses fewer may
evict what has no lock, and then it is fetched again."""

_NAMES = "0123456789abcdef"

_FLOCK = struct.Struct("hhqqi")
"""The kernel's `struct flock`: type, whence, start, length, process."""

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
MAX_WAIT_SECONDS = 2.0
"""How long a lease waits for a process that removes the adapter: that takes milliseconds, if it is not stopped and its
disk does not hang. All other leases of this runner wait behind this one."""
POLL_SECONDS = 0.002

_NOT_WRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOENT, *_NO_SPACE)


class DigestLeases:
    """The leases of this process in a disk cache. They end with the process.

    The kernel keeps one lock of an adapter for the process, so the leases are counted here. Calls may come from any
    thread.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, int] = {}
        self._not_made = errno.EROFS
        """Why the newest lock file could not be made"""
        self._read_only: set[str] = set()
        """Those that nothing can be removed with: the disk was read-only when they were opened."""
        self._opened: list[int] = []
        self._counts: Counter[Digest] = Counter()
        self._exclusive: set[Digest] = set()
        self._folders: dict[Digest, FolderLease] = {}
        self.changed = threading.Condition()
        """Its lock guards the counts and all leases."""
        weakref.finalize(self, _close, self._opened, self._folders)

    def path_of(self, digest: Digest) -> Path:
        """Raises ValueError if this is not a digest."""
        return self._folder / hex_of(digest)

    def lease(self, digest: Digest) -> "DigestLease":
        """Waits while another process removes the adapter: raises TimeoutError if that takes too long, and
        FileNotFoundError or NotADirectoryError if there is no folder."""
        folder = self.path_of(digest)
        self._acquire(digest)
        try:
            return DigestLease(self, digest, _inode(folder))
        except OSError:
            self.release(digest)
            raise

    def renew(self) -> None:
        """Open the lock files that are not open, that somebody has removed, or that were read-only, and take the locks
        of their leases."""
        with self.changed:
            for name in _NAMES:
                self._file(name, anew=name in self._read_only)

    def release(self, digest: Digest) -> None:
        with self.changed:
            self._counts[digest] -= 1
            if not self._counts[digest]:
                del self._counts[digest]
                self._exclusive.discard(digest)
                self.changed.notify_all()
                self._unlock_folder(digest)
                if (file := self._files.get(_name_of(digest))) is not None:
                    _lock(file, digest, fcntl.F_UNLCK)

    def become_exclusive(self, digest: Digest) -> bool:
        with self.changed:
            if self._counts[digest] > 1:
                return False
            file = self._file(_name_of(digest))
            if _name_of(digest) in self._read_only:
                raise OSError(self._not_made, os.strerror(self._not_made), str(self._folder))
            if file is None:
                # If only space is missing, what is removed makes room: whoever uses it has locked its folder, unless
                # processes use as many adapters as this one here.
                if self._not_made not in _NO_SPACE or len(self._folders) >= MAX_FOLDERS:
                    raise OSError(self._not_made, os.strerror(self._not_made), str(self._folder))
            elif not _lock(file, digest, fcntl.F_WRLCK):
                return False
            self._unlock_folder(digest)  # whoever removes it locks it for himself
            self._exclusive.add(digest)
            return True

    def become_shared(self, digest: Digest) -> None:
        with self.changed:
            if digest not in self._exclusive:
                return
            if (file := self._files.get(_name_of(digest))) is not None:
                _lock(file, digest, fcntl.F_RDLCK)
            self._exclusive.discard(digest)
            self.changed.notify_all()
        if file is None:
            with suppress(FileNotFoundError, NotADirectoryError):  # then the lease is not live any more
                self._lock_folder(digest)

    def _acquire(self, digest: Digest) -> None:
        with self.changed:
            self.changed.wait_for(lambda: digest not in self._exclusive)
            file = self._file(_name_of(digest))
            self._counts[digest] += 1  # before the lock is there: no other thread may unlock it from now on
        try:
            if file is not None:
                _lock_soon(file, digest)
                with self.changed:
                    if self._files.get(_name_of(digest)) != file:  # there is another one, with this lock, too
                        _lock(file, digest, fcntl.F_UNLCK)
            else:
                self._lock_folder(digest)
        except BaseException:
            self.release(digest)
            raise

    def _lock_folder(self, digest: Digest) -> None:
        """Where no lock file can be made because the disk is full. Elsewhere nobody removes anything without one."""
        if self._not_made in _NO_SPACE and digest not in self._folders and len(self._folders) < MAX_FOLDERS:
            lease = FolderLease(self.path_of(digest))
            with self.changed:
                if self._folders.setdefault(digest, lease) is not lease:
                    lease.release()

    def _unlock_folder(self, digest: Digest) -> None:
        if (lease := self._folders.pop(digest, None)) is not None:
            lease.release()

    def _file(self, name: str, *, anew: bool = False) -> int | None:
        """The lock file. None: it cannot be made. Until it can, this process locks and removes adapters only if the
        disk is full. `anew`: it is open, and may be opened for writing now."""
        file = self._files.get(name)
        gone = file is None or not os.fstat(file).st_nlink  # somebody has removed it
        if file is not None and not (gone or anew):
            return file
        # Beside the real folder: several paths may lead to it.
        path = Path(os.path.realpath(self._folder) + LOCK_FILES) / name
        try:
            opened = _open(path)
        except OSError as error:
            if error.errno not in _NOT_WRITABLE:
                raise
            if not gone:
                return file
            self._not_made = error.errno
            try:
                opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                return None
            self._read_only.add(name)
        else:
            self._read_only.discard(name)
        if file is not None and not gone:  # else its locks would keep the new ones out
            _unlock_all(file)
        self._opened.append(opened)  # the one before stays open: a thread may wait for its lock
        self._files[name] = opened
        self._lock_again(opened, name)
        return opened

    def _lock_again(self, file: int, name: str) -> None:
        """Take the locks of leases that have none: their lock file could not be made, or was removed. One that another
        process removes at this moment gets none, and its lease is not live any more."""
        for digest in [one for one in self._counts if _name_of(one) == name]:
            _lock(file, digest, fcntl.F_WRLCK if digest in self._exclusive else fcntl.F_RDLCK)
            self._unlock_folder(digest)


class DigestLease:
    """The lease of one adapter. It may be released twice."""

    __slots__ = ("_leases", "digest", "inode", "released")

    def __init__(self, leases: DigestLeases, digest: Digest, inode: tuple[int, ...]) -> None:
        self._leases = leases
        self.digest = digest
        self.inode = inode
        self.released = False

    @property
    def folder(self) -> Path:
        return self._leases.path_of(self.digest)

    def is_live(self) -> bool:
        """True if the folder is still at its place."""
        try:
            return not self.released and _inode(self.folder) == self.inode
        except (FileNotFoundError, NotADirectoryError):
            return False

    def touch(self) -> None:
        """Record that the folder is used, for the order of eviction. This clock is finer than the kernel's ticks."""
        now = time.time_ns()
        with suppress(FileNotFoundError):
            os.utime(self.folder, ns=(now, now))

    def become_exclusive(self) -> bool:
        """True if nobody else uses the adapter; then nobody can begin to use it. False: the lease is as before."""
        return not self.released and self._leases.become_exclusive(self.digest)

    def become_shared(self) -> None:
        if not self.released:
            self._leases.become_shared(self.digest)

    def release(self) -> None:
        with self._leases.changed:
            released, self.released = self.released, True
            if not released:
                self._leases.release(self.digest)


def _inode(folder: Path) -> tuple[int, ...]:
    """Of the weights, or of the folder if they are missing. A number may be given again, so the time counts, too."""
    weights = f"{folder}/{WEIGHTS}"
    try:
        status = os.stat(weights)  # noqa: PTH116 - thousands are looked at
    except FileNotFoundError:
        incomplete = folder.stat()
        try:
            status = os.stat(weights)  # noqa: PTH116 - another runner may have stored the folder between both looks
        except FileNotFoundError:
            return incomplete.st_dev, incomplete.st_ino, 0
    return status.st_dev, status.st_ino, status.st_mtime_ns


def _name_of(digest: Digest) -> str:
    return hex_of(digest)[0]


def _lock_soon(file: int, digest: Digest) -> None:
    """A shared lock. Raises TimeoutError."""
    ends = time.monotonic() + MAX_WAIT_SECONDS
    while not _lock(file, digest, fcntl.F_RDLCK):
        if time.monotonic() >= ends:
            raise TimeoutError(errno.ETIMEDOUT, "another process removes this adapter, and does not go on", digest)
        time.sleep(POLL_SECONDS)


def _unlock_all(file: int) -> None:
    fcntl.fcntl(file, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, 0, 0, 0))


def _lock(file: int, digest: Digest, how: int) -> bool:
    """False if another process has a lock that forbids this one."""
    place = int(hex_of(digest)[1:16], 16)
    try:
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, _FLOCK.pack(how, os.SEEK_SET, place, 1, 0))
    except BlockingIOError:
        return False
    return True


def _open(path: Path) -> int:
    """Makes the file if it is missing."""
    path.parent.mkdir(exist_ok=True)
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)


def _close(files: list[int], folders: dict[Digest, FolderLease]) -> None:
    for file in files:
        os.close(file)
    for lease in folders.values():
        lease.release()
