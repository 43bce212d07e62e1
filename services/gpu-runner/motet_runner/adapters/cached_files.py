"""Opens and reads files only if that needs no disk: what the kernel does not have in its memory is refused at once,
with BlockingIOError.

Some file systems ask another machine or process even when a file is opened. So a file is only opened here if another
one in the folder above its own was read before, on a thread, and its file system reads without waiting: only those of
this machine's own disks and memory do.
"""

import ctypes
import os
from functools import cache

MAX_FOLDERS = 64
"""Of which it is known how their files are read. An adapter of another folder is read on a thread."""

NOWAIT: int = getattr(os, "RWF_NOWAIT", 0)
"""For os.preadv; 0 where there is no such read"""

_NO_TIMES: int = getattr(os, "O_NOATIME", 0)
"""To write down when a file was read may wait for the disk, too. A file of another user is refused."""
_O_PATH: int = getattr(os, "O_PATH", 0)
_OPENAT2 = 437
"""Of all processors but Alpha. Python has no function for it."""
_FROM_HERE = -100
_RESOLVE_CACHED = 0x20

_known: set[str] = set()


class _How(ctypes.Structure):
    _fields_ = [("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64)]


def note_read(path: str, file: int) -> None:
    """This open file was just read. May wait for its disk."""
    folder = _above(path)
    if not NOWAIT or folder in _known or len(_known) >= MAX_FOLDERS:
        return
    try:
        os.preadv(file, [bytearray(1)], 0, NOWAIT)
    except BlockingIOError:
        pass
    except OSError:  # it only reads files that may wait
        return
    _known.add(folder)


def open_cached(path: str) -> int:
    """Raises OSError."""
    if _above(path) not in _known:
        raise BlockingIOError
    return _open(path, os.O_RDONLY | os.O_CLOEXEC | _NO_TIMES)


def status_of_cached(path: str) -> os.stat_result:
    """Raises OSError."""
    if _above(path) not in _known:
        raise BlockingIOError
    file = _open(path, _O_PATH | os.O_CLOEXEC)
    try:
        return os.fstat(file)
    finally:
        os.close(file)


def _open(path: str, flags: int) -> int:
    how = _How(flags, 0, _RESOLVE_CACHED)
    file = int(_system_call()(_OPENAT2, _FROM_HERE, os.fsencode(path), ctypes.byref(how), ctypes.sizeof(how)))
    if file < 0:  # also where the kernel, or what confines this process, knows no such call
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), path)
    return file


@cache
def _system_call() -> "ctypes._NamedFuncPointer":
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    call.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_size_t)
    return call


def _above(path: str) -> str:
    """The folder above the file's own: that of all adapters of a cache"""
    return path.rsplit("/", 2)[0]  # a Path takes longer than to open the file
