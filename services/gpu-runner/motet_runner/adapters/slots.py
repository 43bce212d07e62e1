"""Loads adapters into slots of device memory, so that no sequence waits (PU-07).

A thread reads the adapter into host memory (`host_load.py`). Then the engine's thread copies a part of it between two
iterations. `DeviceBudget` decides which pages an adapter gets, and which others are evicted or moved for it.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch

from motet.domain import Digest
from motet.errors import AdapterError, AdapterIncompatible, MotetError, Overloaded
from motet_kernels import PlacedAdapter, RunLayout
from motet_runner.adapters.host_load import HostLoad
from motet_runner.adapters.layout import AdapterLayout
from motet_runner.memory.out_of_memory import is_out_of_memory
from motet_runner.plan import Copy, DeviceBudget, Effect, PageAllocator, Wipe

SLICE_BYTES = 2 * 1024 * 1024
"""Bytes of an adapter that are read during an iteration, and copied before it, while sequences run: a millisecond or
two."""

HURRY_SECONDS = 0.01
"""How long an iteration without work waits for an adapter that is still read. Commands wait as long."""


@dataclass(slots=True)
class SlotEntry:
    """An adapter whose checked bytes are where `layout` says."""

    layout: AdapterLayout
    linears: frozenset[str] | None = None
    """Those that it changes; None: it is not on the device"""


@dataclass(slots=True)
class Loading:
    digest: Digest
    host: HostLoad
    started: float
    copied_bytes: int = 0


@dataclass(slots=True)
class SlotChanges:
    loaded: list[tuple[Digest, int, float]] = field(default_factory=list)
    evicted: list[Digest] = field(default_factory=list)
    failed: list[tuple[Digest, MotetError]] = field(default_factory=list)


class SlotStore:
    def __init__(
        self,
        memory: torch.Tensor,
        layout: Callable[[int], RunLayout],
        *,
        slots: int,
        live: Callable[[Digest], int],
        users: Callable[[Digest], int],
        clock: Callable[[], float],
    ) -> None:
        """`memory`: [pages, bytes of a page]"""
        self._memory = memory
        self._layout = layout
        self._slots = slots
        self._budget = DeviceBudget(PageAllocator(len(memory)), max_adapters=slots)
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
        return known is not None and known.linears is not None

    def first_page_of(self, digest: Digest) -> int:
        """Where the run of an adapter on the device begins. This also marks the adapter as used now."""
        self._known.move_to_end(digest)
        self._budget.use(digest)
        return self._budget.run_of(digest).start

    def placed(self, digest: Digest, first_page: int) -> PlacedAdapter:
        known = self._known[digest]
        assert known.linears is not None, digest
        offset = first_page * self._memory.shape[1]
        return PlacedAdapter(digest, offset, self._layout(known.layout.rank).rank, known.linears)

    def register(self, digest: Digest, layout: AdapterLayout) -> None:
        """The adapter's bytes are on this machine. Load it if a slot is free or a sequence waits for it."""
        self._dropped.discard(digest)
        self._known.setdefault(digest, SlotEntry(layout)).layout = layout
        if self._live(digest) or len(self._budget.adapters) < self._slots:
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
            or any(self._too_large(digest) or self._could_begin(digest) for digest in self._wanted)
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

    def _pages(self, digest: Digest) -> int:
        return -(-self._layout(self._known[digest].layout.rank).bytes // self._memory.shape[1])

    def _too_large(self, digest: Digest) -> bool:
        return self._pages(digest) > len(self._memory)

    def _could_begin(self, digest: Digest) -> bool:
        """Others are evicted only for an adapter that a sequence waits for."""
        budget, count = self._budget, self._pages(digest)
        if self._live(digest):
            return budget.could_grant(count, self._stays)
        return budget.pages.free >= count and len(budget.adapters) < self._slots

    def _stays(self, digest: Digest) -> bool:
        return self._live(digest) > 0 or self._is_loading(digest)

    def _begin(self) -> None:
        for digest in list(self._wanted):
            if self._too_large(digest):
                rank, needed = self._known[digest].layout.rank, self._pages(digest)
                self._fail(
                    digest,
                    AdapterIncompatible(
                        f"The adapter's rank is {rank}, for which it needs {needed} pages, but the memory for adapters "
                        f"has {len(self._memory)}. Raise the pool's engine.maxLoraRank or engine.maxResidentAdapters.",
                        reason="RankTooLarge",
                    ),
                )
                continue
            live = self._live(digest) > 0
            grant = self._budget.grant(digest, self._pages(digest), self._stays, evict=live)
            if grant is None:
                if not live:  # no sequence waits: it is loaded only into free pages
                    del self._wanted[digest]
                continue
            del self._wanted[digest]
            for evicted in grant.evicted:
                self._known[evicted].linears = None
                self._progress.evicted.append(evicted)
            self._carry_out(grant.effects)
            layout = self._known[digest].layout
            try:
                host = HostLoad(layout, self._layout(layout.rank), pinned=self._memory.is_cuda)
            except RuntimeError as error:  # the machine gives no more threads
                self._budget.release(digest)
                self._fail(digest, error)
                continue
            self._loading = Loading(digest, host, self._clock())
            return

    def _carry_out(self, effects: Iterable[Effect]) -> None:
        with torch.inference_mode():
            for effect in effects:
                match effect:
                    case Copy(_, pages, _, to):
                        self._memory[list(to)] = self._memory[list(pages)]
                    case Wipe(_, pages):
                        self._memory[list(pages)] = 0

    def _load_some(self, loading: Loading, *, hurry: bool) -> bool:
        """Copy the next slice, or in a hurry all that has been read. True if nothing is left."""
        host = loading.host
        host.allow(math.inf if hurry else SLICE_BYTES)
        host.ended(HURRY_SECONDS if hurry else 0.0)
        if host.run is None:
            return False
        first = self._budget.run_of(loading.digest).start * self._memory.shape[1]
        begin, end = loading.copied_bytes, host.read_bytes
        if not hurry:
            end = min(end, begin + SLICE_BYTES)
        self._memory.view(-1)[first + begin : first + end].copy_(host.run[begin:end], non_blocking=True)
        loading.copied_bytes = end
        return end == host.layout.bytes and host.ended()

    def _finish(self, loading: Loading) -> None:
        self._loading = None
        known = self._known[loading.digest]
        known.linears = loading.host.linears
        self._known.move_to_end(loading.digest)
        self._progress.loaded.append((loading.digest, known.layout.size, self._clock() - loading.started))

    def _fail(self, digest: Digest, error: Exception) -> None:
        if self._is_loading(digest):
            self._loading = None
            self._budget.release(digest)
        self._wanted.pop(digest, None)  # still known: a sequence that resumes asks again and gets the error, too
        self._progress.failed.append((digest, _as_motet_error(error)))

    def _forget_dropped(self) -> None:
        for digest in list(self._dropped):
            if self._users(digest) or self._is_loading(digest):
                continue
            self._dropped.discard(digest)
            self._wanted.pop(digest, None)
            known = self._known.pop(digest, None)
            if known is not None and known.linears is not None:
                self._budget.release(digest)
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
