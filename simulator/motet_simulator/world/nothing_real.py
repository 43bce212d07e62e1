"""Refuses Motet's code what is real: time, chance, files, threads, processes, sockets. A simulation switches it on.

Libraries may go on asking for the time, as for the time stamp of a metric. But nobody may start a thread or a process,
or open a socket: no seed repeats what these do.
"""

import _thread
import builtins
import datetime as dt
import io
import os
import random
import secrets
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from motet import surroundings

_REFUSED: dict[Any, tuple[str, ...]] = {
    time: (
        *("time", "monotonic", "perf_counter", "process_time", "thread_time", "clock_gettime"),
        *("time_ns", "monotonic_ns", "perf_counter_ns", "process_time_ns", "thread_time_ns", "clock_gettime_ns"),
        *("sleep", "localtime", "gmtime", "ctime", "asctime", "strftime"),
    ),
    random: tuple(name for name in random.__all__ if name[0].islower()),
    secrets: ("token_hex", "token_bytes", "token_urlsafe", "randbits", "randbelow", "choice"),
    uuid: ("uuid1", "uuid4"),
    os: ("urandom", "getrandom", "getpid"),
    builtins: ("open",),
    io: ("open",),
    Path: ("open", "read_bytes", "read_text", "write_bytes", "write_text"),
    surroundings: ("real_surroundings",),
}
"""What only a library may ask for."""

_BEGINS: dict[Any, dict[str, str]] = {
    threading.Thread: {"start": "a thread"},
    _thread: {"start_new_thread": "a thread", "start_new": "a thread"},
    subprocess.Popen: {"__init__": "a process"},
    os: dict.fromkeys(("fork", "forkpty", "posix_spawn", "posix_spawnp", "system"), "a process"),
}
"""What nobody may begin."""


class RealThingUsed(AssertionError):
    """Something inside a simulation asked for what only a real process has."""


@contextmanager
def nothing_real() -> Iterator[None]:
    """What our modules have taken from these modules before, as by `from time import monotonic`, is refused, too."""
    changed: list[tuple[Any, str, object]] = []

    def put(where: Any, name: str, instead: object) -> None:
        changed.append((where, name, getattr(where, name)))
        setattr(where, name, instead)

    try:
        refused: dict[Any, Any] = {dt.datetime: _DatetimeWithoutNow, dt.date: _DateWithoutToday}
        for owner, names in _REFUSED.items():
            for name in names:
                real = getattr(owner, name)
                refused[real] = _refusing_ours(f"{owner.__name__}.{name}", real)
                put(owner, name, refused[real])
        for module in [module for name, module in sys.modules.items() if _is_ours(name) and name != __name__]:
            for name, value in list(vars(module).items()):
                if isinstance(value, _KINDS) and isinstance(value, Hashable) and value in refused:
                    put(module, name, refused[value])
        put(dt, "datetime", _DatetimeWithoutNow)
        put(dt, "date", _DateWithoutToday)
        for owner, begins in _BEGINS.items():
            for name, what in begins.items():
                put(owner, name, _refusing(what))
        put(random.Random, "__init__", _only_with_a_seed(random.Random.__init__))
        put(socket.socket, "__init__", _only_for_open_files(socket.socket.__init__))
        yield
    finally:
        for where, name, real in reversed(changed):
            setattr(where, name, real)


_KINDS = (type(time.time), type(secrets.token_hex), type(random.uniform), type)
"""Kinds of functions, and classes. A callable of another kind may have no hash."""


def _is_ours(module: str) -> bool:
    return module.partition(".")[0].startswith("motet")


def _refusing_ours(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        _refuse_ours(sys._getframe(1), name)  # noqa: SLF001
        return real(*args, **kwargs)

    return call


def _refuse_ours(frame: FrameType, name: str) -> None:
    """Who asks decides."""
    caller = frame.f_globals.get("__name__", "")
    if _is_ours(caller):
        raise RealThingUsed(f"{caller} calls {name} inside a simulation. Take it from the process's surroundings.")


class _Like(type):
    """Of a class that takes the place of the real one: what was made by that is an instance, too."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls.__mro__[1])

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, cls.__mro__[1])


class _DatetimeWithoutNow(dt.datetime, metaclass=_Like):
    @classmethod
    def now(cls, tz: dt.tzinfo | None = None) -> "_DatetimeWithoutNow":
        _refuse_ours(sys._getframe(1), "datetime.now")  # noqa: SLF001
        return super().now(tz)

    @classmethod
    def utcnow(cls) -> "_DatetimeWithoutNow":
        _refuse_ours(sys._getframe(1), "datetime.utcnow")  # noqa: SLF001
        return super().utcnow()

    @classmethod
    def today(cls) -> "_DatetimeWithoutNow":
        _refuse_ours(sys._getframe(1), "datetime.today")  # noqa: SLF001
        return super().today()


class _DateWithoutToday(dt.date, metaclass=_Like):
    @classmethod
    def today(cls) -> "_DateWithoutToday":
        _refuse_ours(sys._getframe(1), "date.today")  # noqa: SLF001
        return super().today()


def _only_with_a_seed(real: Callable[..., None]) -> Callable[..., None]:
    """Also of SystemRandom, which has none."""

    def begin(self: Any, x: Any = None) -> None:
        if x is None:
            _refuse_ours(sys._getframe(1), "Random without a seed")  # noqa: SLF001
        real(self, x)

    return begin


def _refusing(what: str) -> Callable[..., Any]:
    def call(*_args: Any, **_kwargs: Any) -> Any:
        raise RealThingUsed(f"{what} begins inside a simulation, which could not repeat what it does")

    return call


def _only_for_open_files(real: Callable[..., None]) -> Callable[..., None]:
    """An event loop makes a pair of sockets by which it wakes itself: these are open already."""

    def begin(self: Any, family: int = -1, type: int = -1, proto: int = -1, fileno: int | None = None) -> None:  # noqa: A002
        if fileno is None:
            raise RealThingUsed("a socket opens inside a simulation. Use the network of the process's surroundings.")
        real(self, family, type, proto, fileno)

    return begin
