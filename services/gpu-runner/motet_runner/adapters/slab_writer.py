"""Writes the slabs of checked adapters, in a thread of the engine's process: only the engine knows the layout, and what
DoRA needs of the base.

One adapter after the other, slowly: an adapter that is not written yet serves from its checked bytes. What was written
is read again before any load can find it: a proof has seen what a load makes of the checked bytes, so a slab must give
the same. A load that has made an adapter's run of its checked bytes offers it, so that it is not made twice.
"""

import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import replace
from time import sleep

import structlog

from motet.errors import MotetError
from motet_kernels import RunLayout
from motet_runner.adapters.host_load import BaseLinearOf, HostLoad
from motet_runner.adapters.layout import AdapterLayout
from motet_runner.adapters.load_threads import THREADS
from motet_runner.adapters.slab import Slab, SlabDamaged, check_room, write_slab
from motet_runner.interface import SlabWritten

log = structlog.get_logger(__name__)

PACE_BYTES = 1 << 20
MAX_OFFERED_BYTES = 16 << 20
"""Of runs that loads have made: enough for the slabs that are asked for next"""
PACE_SECONDS = 0.02
"""In each of these intervals, this number of bytes is read and converted: that takes a millisecond or two."""


class SlabWriter:
    def __init__(self, layout: Callable[[int], RunLayout], base: BaseLinearOf | None = None) -> None:
        """`layout`: the back end's layout by rank"""
        self._layout = layout
        self._base = base
        self._orders: deque[tuple[int, AdapterLayout]] = deque()
        self._ended: deque[SlabWritten] = deque()
        self._offered: OrderedDict[str, HostLoad] = OrderedDict()
        """By the names of their slabs"""
        self._lock = threading.Lock()
        self._works = False
        self._noted: set[str] = set()

    @property
    def busy(self) -> bool:
        return self._works or bool(self._ended)

    def write(self, number: int, adapter: AdapterLayout) -> None:
        """`take_ended` says when it is done, and with what result."""
        with self._lock:
            self._orders.append((number, adapter))
            if self._works:
                return
            self._works = True
        try:
            THREADS.run(self._work)
        except RuntimeError:  # no more threads available
            self._works = False
            self._orders.remove((number, adapter))
            self._ended.append(SlabWritten(number, 0))

    def offer(self, adapter: AdapterLayout, host: HostLoad) -> bool:
        """`host`: has read all of the adapter, which has no slab. True: its memory is in use here until the slab is
        written, or newer ones need the room."""
        if _memory_of(host) > MAX_OFFERED_BYTES:
            return False
        with self._lock:
            self._offered[adapter.slab] = host
            while sum(map(_memory_of, self._offered.values())) > MAX_OFFERED_BYTES:
                self._offered.popitem(last=False)
        return True

    def take_ended(self) -> list[SlabWritten]:
        ended = []
        while self._ended:
            ended.append(self._ended.popleft())
        return ended

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._orders:
                    self._works = False
                    return
                number, adapter = self._orders.popleft()
            size = 0
            try:
                size = self._write(adapter)
            except (MotetError, OSError, MemoryError, RuntimeError) as error:
                self._note(error)
            except Exception:
                log.exception("slab_not_written", file=adapter.slab)
            self._ended.append(SlabWritten(number, size))

    def _write(self, adapter: AdapterLayout) -> int:
        layout = self._layout(adapter.rank)
        linears = layout.offsets
        try:
            with Slab(adapter, layout.bytes, linears):
                return adapter.file.with_name(adapter.slab).stat().st_size  # another runner was faster
        except (FileNotFoundError, SlabDamaged):
            pass
        check_room(adapter.file.parent, layout.bytes)
        with self._lock:
            host = self._offered.pop(adapter.slab, None)
        if host is None:
            host = HostLoad(replace(adapter, slab=""), layout, self._base, pinned=False)
            while not host.ended(PACE_SECONDS):
                host.allow(PACE_BYTES)
                sleep(PACE_SECONDS)
        assert host.run is not None
        run = host.run.numpy()

        def check(file: int) -> None:
            with Slab(adapter, layout.bytes, linears, file=file) as written:
                written.check(run, host.linears, scales=host.scales)

        return write_slab(adapter, run, linears, host.linears, scales=host.scales, check=check)

    def _note(self, error: Exception) -> None:
        """Once: the adapters serve all the same."""
        reason = getattr(error, "strerror", None) or str(error)
        if reason not in self._noted and len(self._noted) < 16:
            self._noted.add(reason)
            log.warning("slab_not_written", reason=reason, result="these adapters load from their checked bytes")


def _memory_of(host: HostLoad) -> int:
    return 0 if host.memory is None else len(host.memory)
