"""Limits a process to what strangers' text in it may take."""

import contextlib
import ctypes
import errno
import os
import platform
import resource
import signal
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

PAUSE_SECONDS = 0.00053
"""No part of a tick: the kernel counts the CPU time of who runs at a tick."""

_PR_SET_PDEATHSIG = 1
_PR_SET_SECCOMP = 22
_PR_SET_NO_NEW_PRIVS = 38
_SECCOMP_MODE_FILTER = 2
_LOAD_WORD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_FAIL, _ALLOW = 0x00050000, 0x7FFF0000
_SOCKET_CALLS = {"x86_64": 41, "aarch64": 198}
"""The number of the system call `socket`."""


def end_with_parent(parent: int | None = None) -> None:
    """`parent`: of a fork, whose parent may have ended before it gets here."""
    with contextlib.suppress(AttributeError):  # only on Linux; elsewhere the process ends with the socket
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def confine(memory_bytes: int, *, parent: int | None = None) -> None:
    """`memory_bytes`: more than the process has now. `parent`: of a fork."""
    end_with_parent(parent)
    with contextlib.suppress(OSError, ValueError):
        if now := address_space():
            resource.setrlimit(resource.RLIMIT_AS, (now + memory_bytes, now + memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def address_space() -> int:
    """Bytes of this process; 0 where the kernel does not say."""
    with contextlib.suppress(OSError, ValueError):
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    return 0


def without_sockets() -> None:
    """No socket can be made from now on. Where the kernel can't refuse that, it does nothing."""
    number = _SOCKET_CALLS.get(platform.machine())
    if sys.platform != "linux" or number is None:
        return
    filters = (_Instruction * 4)(
        _Instruction(_LOAD_WORD, 0, 0, 0),  # the number of the system call
        _Instruction(_JUMP_IF_EQUAL, 0, 1, number),
        _Instruction(_RETURN, 0, 0, _FAIL | errno.EPERM),
        _Instruction(_RETURN, 0, 0, _ALLOW),
    )
    program = _Program(len(filters), filters)
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0)


@contextlib.contextmanager
def pausing_often(after_seconds: float) -> Iterator[None]:
    """Once `after_seconds` have passed, this process sleeps for a moment every half millisecond.

    Linux lets also a process of the lowest priority run until the next tick, mostly for 4 ms, whoever waits meanwhile.
    For an engine beside it, that is half an iteration. And it leaves two threads of the engine on one processor while
    such a process keeps another one busy: only where one becomes idle, Linux looks at once who could run there.
    """
    _sleep_at_alarms()
    signal.setitimer(signal.ITIMER_REAL, after_seconds, PAUSE_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


@cache
def _sleep_at_alarms() -> None:
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
    # A handler of Python's would wait until a long call of a parser ends. This one gets the number of the signal, and
    # so asks for 14 µs, which Linux makes some 70.
    libc.signal(signal.SIGALRM, ctypes.cast(libc.usleep, ctypes.c_void_p))


class _Instruction(ctypes.Structure):
    """`struct sock_filter` of linux/filter.h"""

    _fields_ = (
        ("code", ctypes.c_ushort),
        ("if_true", ctypes.c_ubyte),
        ("if_false", ctypes.c_ubyte),
        ("operand", ctypes.c_uint),
    )


class _Program(ctypes.Structure):
    """`struct sock_fprog` of linux/filter.h"""

    _fields_ = (("length", ctypes.c_ushort), ("filters", ctypes.POINTER(_Instruction)))
