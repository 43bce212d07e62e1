"""Loads adapters into slots of device memory, so that no sequence waits (PU-07).

A thread reads the adapter into host memory (`host_load.py`). Then the engine's thread copies a few tensors of it
between two iterations. `eviction.py` decides which slot an adapter gets, and which others are evicted or moved for it.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from motet.domain import Digest
from motet.errors import AdapterError, AdapterIncompatible, MotetError, Overloaded
from motet_kernels import RANKS, AdapterSlot, rank_class_of
from motet_runner.adapters.eviction import DeviceAdapter, SlotAllocation, allocate_slot
from motet_runner.adapters.host_load import HostLoad
from motet_runner.adapters.layout import AdapterLayout
from motet_runner.execute.lora import LoraLinears
from motet_runner.memory.out_of_memory import is_out_of_memory

SLICE_BYTES = 2 * 1024 * 1024
"""Bytes of an adapter that are read during an iteration, and copied before it, while sequences run: a millisecond or
two."""

HURRY_SECONDS = 0.01
"""How long an iteration without work waits for an adapter that is still read. Commands wait as long."""


@dataclass(slots=True)
class SlotEntry:
    """An adapter whose checked bytes are where `layout` says."""

    layout: AdapterLayout
    slot: AdapterSlot | None = None
    """None: it is not on the device."""

    @property
    def rank_class(self) -> int:
        return rank_class_of(self.layout.rank)


@dataclass(slots=True)
class Loading:
    digest: Digest
    slot: AdapterSlot
    host: HostLoad
    started: float
    slices: Iterator[bool] | None = None
    """None: nothing of it is in host memory yet."""


@dataclass(slots=True)
class SlotChanges:
    loaded: list[tuple[Digest, int, float]] = field(default_factory=list)
    evicted: list[Digest] = field(default_factory=list)
    failed: list[tuple[Digest, MotetError]] = field(default_factory=list)


class SlotStore:
    def __init__(
        self,
        linears: LoraLinears,
        *,
        slots: int,
        live: Callable[[Digest], int],
        users: Callable[[Digest], int],
        clock: Callable[[], float],
    ) -> None:
        self._linears = linears
        self._slots = slots
        self._live = live
        self._users = users
        self._clock = clock
        self._known: OrderedDict[Digest, SlotEntry] = OrderedDict()  # least recently used first
        self._wanted: OrderedDict[Digest, None] = OrderedDict()
        self._loading: Loading | None = None
        self._dropped: set[Digest] = set()
        self._progress = SlotChanges()

    def __iter__(self) -> Iterator[tuple[Digest, SlotEntry]]:
        return iter(self._known.items())

    def on_device(self, digest: Digest) -> bool:
        known = self._known.get(digest)
        return known is not None and known.slot is not None

    def slot_of(self, digest: Digest) -> AdapterSlot:
        """The slot of an adapter on the device. This also marks the adapter as used now."""
        self._known.move_to_end(digest)
        slot = self._known[digest].slot
        assert slot is not None, digest
        return slot

    def register(self, digest: Digest, layout: AdapterLayout) -> None:
        """The adapter's bytes are on this machine. Load it if a slot is free or a sequence waits for it."""
        self._dropped.discard(digest)
        self._known.setdefault(digest, SlotEntry(layout)).layout = layout
        if self._live(digest) or self._in_use < self._slots:
            self.request_load(digest)

    def request_load(self, digest: Digest) -> None:
        """A sequence waits for the adapter. All sequences that wait share one load."""
        if digest in self._known and not self.on_device(digest) and not self._is_loading(digest):
            self._wanted[digest] = None

    def drop(self, digest: Digest) -> None:
        """Forget the adapter once no sequence uses it. Parked sequences count: they could not load it again."""
        if digest in self._known:
            self._dropped.add(digest)
            self._forget_dropped()

    @property
    def busy(self) -> bool:
        """Whether `advance` could do or report something now."""
        return (
            self._loading is not None
            or bool(self._progress.evicted)
            or any(self._too_large(digest) or self._allocate(digest) is not None for digest in self._wanted)
            or any(not self._users(digest) for digest in self._dropped)
        )

    def advance(self, *, hurry: bool) -> SlotChanges:
        """Copy the next slice of an adapter that has been read. With `hurry`, when no sequence has to wait meanwhile,
        wait a moment until it is read, and copy all of it."""
        self._forget_dropped()
        if self._loading is None:
            self._begin()
        loading = self._loading
        if loading is not None:
            try:
                with torch.inference_mode():
                    done = self._load_some(loading, hurry=hurry)
            except (AdapterError, OSError, MemoryError, RuntimeError) as error:
                self._fail(loading.digest, error)
            else:
                if done:
                    self._finish(loading)
        progress, self._progress = self._progress, SlotChanges()
        return progress

    # -- inside ------------------------------------------------------------------------------------------------------

    def _is_loading(self, digest: Digest) -> bool:
        return self._loading is not None and self._loading.digest == digest

    @property
    def _in_use(self) -> int:
        return sum(known.slot is not None for known in self._known.values()) + (self._loading is not None)

    def _too_large(self, digest: Digest) -> bool:
        return RANKS[self._known[digest].rank_class] > self._linears.rows

    def _allocate(self, digest: Digest) -> SlotAllocation | None:
        """The slot that the adapter could get now. Others are evicted only for an adapter that a sequence waits for."""
        residents = [
            DeviceAdapter(one, known.slot, self._live(one) > 0)
            for one, known in self._known.items()
            if known.slot is not None
        ]
        return allocate_slot(
            self._known[digest].rank_class,
            residents,
            rows=self._linears.rows,
            max_adapters=self._slots,
            evict=self._live(digest) > 0,
        )

    def _begin(self) -> None:
        without_slot: set[tuple[int, bool]] = set()  # (rank class, evicts): many adapters may wait for the same slots
        for digest in list(self._wanted):
            if self._too_large(digest):
                rank, largest = self._known[digest].layout.rank, self._linears.rows
                self._fail(
                    digest,
                    AdapterIncompatible(
                        f"The adapter's rank is {rank}, but the memory for adapters holds a total rank of {largest}. "
                        "Raise the pool's engine.maxLoraRank or engine.maxResidentAdapters.",
                        reason="RankTooLarge",
                    ),
                )
                continue
            kind = self._known[digest].rank_class, self._live(digest) > 0
            allocation = None if kind in without_slot else self._allocate(digest)
            if allocation is None:
                without_slot.add(kind)
                if not self._live(digest):  # no sequence waits: it is loaded only into a free slot
                    del self._wanted[digest]
                continue
            del self._wanted[digest]
            self._make_space(allocation)
            layout = self._known[digest].layout
            try:
                host = HostLoad(layout, self._linears.layout(layout.rank), pinned=self._linears.pinned)
            except RuntimeError as error:  # the machine gives no more threads
                self._fail(digest, error)
                continue
            self._loading = Loading(digest, allocation.slot, host, self._clock())
            return

    def _make_space(self, allocation: SlotAllocation) -> None:
        for digest in allocation.evicted:
            self._known[digest].slot = None
            self._progress.evicted.append(digest)
        for digest, old, new in allocation.moved:
            with torch.inference_mode():
                self._linears.move(old, new)
            self._known[digest].slot = new

    def _load_some(self, loading: Loading, *, hurry: bool) -> bool:
        """Copy the next slice, or in a hurry all that has been read. True if nothing is left."""
        host = loading.host
        host.allow(math.inf if hurry else SLICE_BYTES)
        host.ended(HURRY_SECONDS if hurry else 0.0)
        if host.run is None:
            return False
        if loading.slices is None:
            loading.slices = self._slices(host, host.run, loading.slot)
        for copied in loading.slices:
            if not (copied and hurry):
                return False
        return host.ended()

    def _slices(self, host: HostLoad, run: torch.Tensor, slot: AdapterSlot) -> Iterator[bool]:
        """Copy the adapter's matrices. Yields True after each slice, and False while the next matrices are not read.
        Linears that it does not change are cleared."""
        size = 0
        for linear in host.layout.offsets:
            if linear not in host.linears:
                self._linears.write(linear, slot, None, None)
                continue
            while not host.is_read(linear):
                yield False
            a, b = host.layout.matrices(run, linear)
            self._linears.write(linear, slot, a, b)
            size += a.nbytes + b.nbytes
            if size >= SLICE_BYTES:
                yield True
                size = 0

    def _finish(self, loading: Loading) -> None:
        self._loading = None
        known = self._known[loading.digest]
        known.slot = loading.slot
        self._known.move_to_end(loading.digest)
        self._progress.loaded.append((loading.digest, known.layout.size, self._clock() - loading.started))

    def _fail(self, digest: Digest, error: Exception) -> None:
        if self._is_loading(digest):
            self._loading = None
        self._wanted.pop(digest, None)  # still known: a sequence that resumes asks again and gets the error, too
        self._progress.failed.append((digest, _as_motet_error(error)))

    def _forget_dropped(self) -> None:
        for digest in list(self._dropped):
            if self._users(digest) or self._is_loading(digest):
                continue
            self._dropped.discard(digest)
            self._wanted.pop(digest, None)
            known = self._known.pop(digest, None)
            if known is not None and known.slot is not None:
                self._progress.evicted.append(digest)


def _as_motet_error(error: Exception) -> MotetError:
    if isinstance(error, MotetError):
        return error
    if is_out_of_memory(error):
        return Overloaded(
            "This runner ran out of memory while it loaded the adapter. If this happens again, lower the pool's "
            "engine.memoryUtilizationPercent, engine.kvCacheMiB or engine.maxResidentAdapters."
        )
    first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return AdapterError(f"The runner could not load the adapter: {first_line}")
