"""Refuses Motet's code what is real: time, chance, threads, processes, sockets. A simulation switches it on.

Libraries may go on asking for the time, as for the time stamp of a metric. But nobody may start a thread or a process,
or open a socket: no seed repeats what these do.
"""

import os
import random
import secrets
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from motet import surroundings

_REFUSED: dict[ModuleType, tuple[str, ...]] = {
    time: ("time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "sleep"),
    random: ("random", "uniform", "randint", "randrange", "choice", "choices", "shuffle", "sample", "getrandbits"),
    secrets: ("token_hex", "token_bytes", "token_urlsafe", "randbits", "randbelow", "choice"),
    uuid: ("uuid1", "uuid4"),
    os: ("urandom",),
    surroundings: ("real_surroundings",),
}


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
        refused = {}
        for module, names in _REFUSED.items():
            for name in names:
                real = getattr(module, name)
                refused[real] = _refusing_ours(f"{module.__name__}.{name}", real)
                put(module, name, refused[real])
        for module in [module for name, module in sys.modules.items() if _is_ours(name) and name != __name__]:
            for name, value in list(vars(module).items()):
                if callable(value) and isinstance(value, _HASHABLE) and value in refused:
                    put(module, name, refused[value])
        put(threading.Thread, "start", _refusing("a thread"))
        put(subprocess.Popen, "__init__", _refusing("a process"))
        put(socket.socket, "__init__", _only_for_open_files(socket.socket.__init__))
        yield
    finally:
        for where, name, real in reversed(changed):
            setattr(where, name, real)


_HASHABLE = (type(time.time), type(secrets.token_hex), type(random.random))
"""Kinds of functions. A callable of another kind may have no hash."""


def _is_ours(module: str) -> bool:
    return module.partition(".")[0].startswith("motet")


def _refusing_ours(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1).f_globals.get("__name__", "")  # noqa: SLF001 - who asks decides
        if _is_ours(caller):
            raise RealThingUsed(f"{caller} calls {name} inside a simulation. Take it from the process's surroundings.")
        return real(*args, **kwargs)

    return call


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
