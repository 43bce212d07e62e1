"""Reads a slab that is in the page cache straight into the adapter's run on a device that is the host's own memory: no
thread that waits for a disk, no host memory between, no second copy (PU-07). The compiled kernels' threads help."""

import time
from contextlib import ExitStack

from motet.errors import AdapterFetchFailed
from motet_kernels import RunLayout
from motet_runner.adapters.cached_files import status_of_cached
from motet_runner.adapters.layout import AdapterLayout, FileStamp
from motet_runner.adapters.slab import Bytes, ReadFile, Slab, SlabDamaged
from motet_runner.adapters.weight_reader import has_changed

MAX_READ_BYTES = 16 * 1024 * 1024
"""An iteration reads at most this number of bytes of an adapter, also when nobody else has to wait: commands do."""


NotInPlace = (OSError, SlabDamaged, AdapterFetchFailed)
"""It is not in the page cache, there is none, or it is not right. The adapter is loaded on a thread then, which says
what is wrong with it."""


class SlabInPlace:
    """The load of one adapter. It is not to be used any more once it has raised NotInPlace. See `HostLoad`."""

    lacks_slab = False
    thread_ended = True
    from_slab = True
    memory = None

    def __init__(self, adapter: AdapterLayout, layout: RunLayout, read_file: ReadFile | None = None) -> None:
        """`read_file`: is faster than one thread of Python. Raises NotInPlace."""
        if FileStamp.of_status(status_of_cached(adapter.path)) != adapter.stamp:
            raise has_changed(adapter)
        self._read_file = read_file
        self.layout = layout
        self.read_bytes = 0
        """The first `read_bytes` bytes of the run are final."""
        self.cpu_seconds = 0.0
        self._opened = ExitStack()
        self._slab = self._opened.enter_context(Slab(adapter, layout.bytes, layout.offsets, only_cached=True))
        self.linears, self.scales = self._slab.changed, self._slab.scales
        self._parts = self._slab.places()
        self._part = next(self._parts, None)

    def read(self, run: Bytes, most: float) -> None:
        """Read `most` more bytes of the run, or zeros where the slab has none. Raises NotInPlace."""
        began = time.thread_time()
        until = min(self.layout.bytes, self.read_bytes + int(min(most, MAX_READ_BYTES)))
        while self.read_bytes < until:
            if self._part is None:
                self.read_bytes = self._zeros(run, until)
                break
            part, at = self._part
            self.read_bytes = self._zeros(run, min(until, part.begin))
            end = min(until, part.end)
            if end <= self.read_bytes:
                break
            if (self.read_bytes, end) == (part.begin, part.end):
                self._slab.read(part, at, run, self._read_file)
            else:
                self._slab.read_some(run[self.read_bytes : end], at + self.read_bytes - part.begin)
                if end == part.end:
                    self._slab.compare(part, run)
            self.read_bytes = end
            if end == part.end:
                self._part = next(self._parts, None)
        self.cpu_seconds += time.thread_time() - began
        if self.read_bytes == self.layout.bytes:
            self._slab.verified()
            self._opened.close()

    def _zeros(self, run: Bytes, until: int) -> int:
        """The place holds what its last owner has left there."""
        if until > self.read_bytes:
            run[self.read_bytes : until] = 0
        return max(self.read_bytes, until)

    @property
    def progress(self) -> int:
        return self.read_bytes

    def allow(self, size: float) -> None:
        pass

    def give_up(self) -> None:
        self._opened.close()
