"""Loads adapters into their runs without making sequences wait (PU-07).

A thread reads an adapter into host memory (`host_load.py`). With each plan, the worker's thread copies a part of it
into the pages that the plan gave to the adapter. If the load is to be proved, the adapter has arrived only once it is
proved (`execute/proof`).
"""

import math
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import torch

from motet.clock import Clock
from motet.domain import Digest
from motet.errors import AdapterError, AdapterUnproved, MotetError, Overloaded
from motet_kernels import PlacedAdapter, RunLayout
from motet_runner.adapters.host_load import BaseLinearOf, HostLoad
from motet_runner.adapters.layout import SCALE_ROWS, AdapterLayout
from motet_runner.adapters.proof import Proof
from motet_runner.adapters.slab import remove_damaged
from motet_runner.execute.adapters.proving import ProofUnderWay, Proves
from motet_runner.memory.copy_stream import CopyStream
from motet_runner.memory.marks import Mark
from motet_runner.memory.out_of_memory import device_has_failed, is_out_of_memory
from motet_runner.plan import AdapterLoad, LoadArrived, LoadFailed

SLICE_BYTES = 2 * 1024 * 1024
"""The most bytes of an adapter that one iteration reads, and the most that one plan copies, while sequences run: a
millisecond or two."""

MAX_KEPT_BYTES = 64 * 1024 * 1024
"""Host memory that is kept for the next load: that of the last one, if it is not larger"""

HURRY_SECONDS = 0.01
"""How long an iteration without work waits for an adapter that is still being read. Commands wait equally long."""


@dataclass(slots=True)
class LoadResults:
    arrived: tuple[LoadArrived, ...] = ()
    failed: tuple[LoadFailed, ...] = ()


@dataclass(slots=True)
class _Loading:
    load: AdapterLoad
    host: HostLoad
    began: float
    seen_bytes: int = 0
    """Of the bytes that have been read"""
    copied_bytes: int = 0
    pause: float = 0.0
    """For how long sequences have waited for its copies"""
    copied: Mark | None = None
    """A mark after the last copy, once that copy is launched"""
    proof: ProofUnderWay | None = None
    """Once all copies have ended, if the load is to be proved"""
    computed: Mark | None = None
    """A mark after the last part of the proof, once that part is launched"""

    def give_up(self) -> None:
        self.host.give_up()
        if self.proof is not None:
            self.proof.give_up()


@dataclass(slots=True)
class _Arrived:
    rank: int
    linears: frozenset[str]
    product_rank: int


@dataclass(slots=True)
class AdapterLoads:
    """The adapters of one device: the loaded ones, and those still being loaded."""

    memory: torch.Tensor
    """[pages, bytes of a page]"""
    layout: Callable[[int], RunLayout]
    """The back end's layout by rank"""
    clock: Clock
    base: BaseLinearOf | None = None
    prover: Proves | None = None
    """None: no load is to be proved."""
    stream: CopyStream = field(default_factory=CopyStream)
    parts: int = 0
    """How often more of an adapter had been read, or proved"""
    _memory: torch.Tensor | None = None
    """Of the last load, for the next one"""
    _arrived: dict[Digest, _Arrived] = field(default_factory=dict)
    _loading: dict[int, _Loading] = field(default_factory=dict)

    def forget(self, gone: Iterable[Digest]) -> None:
        """These adapters are no longer on the device."""
        for digest in gone:
            self._arrived.pop(digest, None)

    def placed(self, digest: Digest, first_page: int) -> PlacedAdapter:
        """A loaded adapter, whose run begins at this page."""
        return self._place(digest, self._arrived[digest], first_page)

    def _place(self, digest: Digest, arrived: _Arrived, first_page: int) -> PlacedAdapter:
        return PlacedAdapter(
            digest, first_page * self.memory.shape[1], arrived.rank, arrived.linears, arrived.product_rank
        )

    def advance(self, begin: Iterable[AdapterLoad], first_page_of: Mapping[int, int], *, hurry: bool) -> LoadResults:
        """Begin loads, and copy the next part of each current load. `hurry`: no sequence has to wait. So wait a moment
        for more bytes, and copy all that have been read."""
        results = LoadResults()
        for load in begin:
            try:
                host = HostLoad(
                    load.layout,
                    self.layout(load.layout.rank),
                    self.base,
                    pinned=self.memory.is_cuda,
                    memory=self._memory,
                )
            except RuntimeError as error:  # no more threads available
                results.failed += (LoadFailed(load.number, _as_motet_error(error)),)
            else:
                self._memory = None
                self._loading[load.number] = _Loading(load, host, self.clock())
        for number, loading in list(self._loading.items()):
            if number not in first_page_of:
                loading.give_up()
                del self._loading[number]
                self.stream.let_model_wait()  # the adapter's pages may get other contents at once
                continue
            began = self.clock()
            proof: Proof | None = None
            try:
                complete = self._has_arrived(loading, first_page_of[number], hurry=hurry)
                if complete and loading.load.prove:
                    proof = self._prove(loading, first_page_of[number], hurry=hurry)
                    complete = proof is not None
            except (AdapterError, OSError, MemoryError, RuntimeError) as error:
                if device_has_failed(error):  # the adapter is not to blame
                    raise
                loading.give_up()
                if isinstance(error, AdapterUnproved) and loading.host.from_slab:
                    _remove_slab(loading.load.layout)
                del self._loading[number]
                self.stream.let_model_wait()
                results.failed += (LoadFailed(number, _as_motet_error(error)),)
                continue
            if not hurry:
                loading.pause += self.clock() - began
            if complete:
                del self._loading[number]
                host = loading.host
                self._arrived[loading.load.digest] = self._what_arrived(loading)
                if host.memory is not None and len(host.memory) <= MAX_KEPT_BYTES:
                    self._memory = host.memory
                seconds = self.clock() - loading.began
                results.arrived += (LoadArrived(number, seconds, loading.pause, host.lacks_slab, proof),)
        return results

    def _what_arrived(self, loading: _Loading) -> _Arrived:
        host = loading.host
        products = self.layout(loading.load.layout.rank - SCALE_ROWS).rank if host.scales else 0
        return _Arrived(host.layout.rank, host.linears, products)

    def _prove(self, loading: _Loading, first_page: int, *, hurry: bool) -> Proof | None:
        """Do the next part of the proof; with `hurry`, one after the other. None if it goes on."""
        assert self.prover is not None, "this engine proves nothing"
        if loading.proof is None:
            loading.proof = self.prover.begin(loading.load.layout, loading.host.layout, self.base)
        proof, before = loading.proof, loading.proof.parts
        if loading.computed is None:
            placed = self._place(loading.load.digest, self._what_arrived(loading), first_page)
            self.stream.let_model_wait()
            complete = proof.advance(placed, wait_seconds=HURRY_SECONDS if hurry else 0.0)
            self.parts += proof.parts > before
            if not complete:
                return None
            loading.computed = self.stream.model_mark()
        if hurry:
            loading.computed.wait()
        return proof.result() if loading.computed.passed() else None

    def before_copies(self) -> None:
        """Call this before pages are copied or moved: some of them may belong to runs still being loaded."""
        if self._loading:
            self.stream.let_model_wait()

    def _has_arrived(self, loading: _Loading, first_page: int, *, hurry: bool) -> bool:
        """Copy the next part. True if all copies have ended. Only with `hurry`, this waits for the last copy."""
        if loading.copied is None:
            if not self._copy_some(loading, first_page, hurry=hurry):
                return False
            loading.copied = self.stream.mark()
        if hurry:
            loading.copied.wait()
        return loading.copied.passed()

    def _copy_some(self, loading: _Loading, first_page: int, *, hurry: bool) -> bool:
        """Copy the next part, or with `hurry` all that has been read. True if nothing is left."""
        host = loading.host
        host.allow(math.inf if hurry else SLICE_BYTES)
        host.ended(HURRY_SECONDS if hurry else 0.0)
        if host.run is None:
            return False
        begin, end = loading.copied_bytes, host.read_bytes
        self.parts += end > loading.seen_bytes
        loading.seen_bytes = end
        if not hurry:
            end = min(end, begin + SLICE_BYTES)
        offset = first_page * self.memory.shape[1]
        self.stream.follow_model()
        self.stream.copy(self.memory.view(-1)[offset + begin : offset + end], host.run[begin:end])
        loading.copied_bytes = end
        return end == host.layout.bytes and host.ended()


def _remove_slab(layout: AdapterLayout) -> None:
    """What the engine computes from it is wrong. In a thread: the disk may hang."""
    with suppress(RuntimeError):  # no more threads available
        threading.Thread(target=remove_damaged, args=(layout,), name="slab-removal", daemon=True).start()


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
