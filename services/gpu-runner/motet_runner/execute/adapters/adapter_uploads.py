"""Loads adapters into their runs without making sequences wait (PU-07).

A thread reads an adapter into host memory (`host_load.py`). With each plan, the worker's thread copies a part of it
into the pages that the plan gave to the adapter. How much that is, `load_pace.py` says. An adapter that is in the page
cache mostly arrives with the plan that begins it, because an iteration waits for a new load as long as it may. On a CPU
it needs no thread then: the worker's thread reads its slab into these pages (`slab_in_place.py`).

An adapter that has arrived is proved there, if a plan says so (`execute/proof`): also a part with each plan.
"""

import math
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import torch

from motet.clock import Clock
from motet.domain import Digest
from motet.errors import AdapterError, AdapterFetchFailed, AdapterUnproved, MotetError, Overloaded
from motet_kernels import PlacedAdapter, RunLayout
from motet_runner.adapters.host_load import BaseLinearOf, HostLoad, KeptInHost
from motet_runner.adapters.layout import SCALE_ROWS, AdapterLayout
from motet_runner.adapters.proof import Proof
from motet_runner.adapters.slab import Bytes, ReadFile, remove_damaged
from motet_runner.adapters.slab_in_place import NotInPlace, SlabInPlace
from motet_runner.execute.adapters.load_pace import LoadPace
from motet_runner.execute.adapters.memory_ahead import MemoryAhead
from motet_runner.execute.adapters.proving import ProofUnderWay, Proves
from motet_runner.memory.copy_stream import CopyStream
from motet_runner.memory.marks import Mark
from motet_runner.memory.out_of_memory import device_has_failed, is_out_of_memory
from motet_runner.plan import AdapterLoad, LoadArrived, LoadedContents, LoadFailed, ProofResult, ProofStep

MAX_KEPT_BYTES = 64 * 1024 * 1024
"""Host memory of ended loads that is kept for later ones"""

MAX_SILENT_SECONDS = 60.0
"""A proof for which the disk has read nothing for so long is given up."""

SILENT_SECONDS = 1.0
"""Others do not wait for a load for which the disk has read nothing for so long, though it may read."""

HURRY_SECONDS = 0.01
"""How long an iteration without work waits for an adapter that is still being read. Commands wait equally long."""


@dataclass(slots=True)
class LoadResults:
    arrived: tuple[LoadArrived, ...] = ()
    failed: tuple[LoadFailed, ...] = ()
    silent: tuple[int, ...] = ()
    """Loads whose disks do not answer any more, each once"""
    left: tuple[int, ...] = ()
    """Loads that have failed or were given up, and write to the host's memory no more"""
    proved: ProofResult | None = None


@dataclass(slots=True)
class _Loading:
    load: AdapterLoad
    host: HostLoad | KeptInHost | SlabInPlace
    began: float
    asked: bool = False
    """True if it may read since an earlier iteration."""
    waits: bool = False
    """True if this iteration waits for it, as long as it may"""
    seen: int = 0
    """Of the host's progress"""
    may_read: bool = False
    """True if the last iteration let it read something"""
    moved_at: float = 0.0
    """When it had last read something, or could read nothing"""
    silent: bool = False
    """True if the disk did not answer for long, once"""
    copied_bytes: int = 0
    pause: float = 0.0
    """For how long sequences have waited for its copies"""
    copied: Mark | None = None
    """A mark after the last copy, once that copy is launched"""


@dataclass(slots=True)
class _Proving:
    number: int
    proof: ProofUnderWay
    moved_at: float
    """When its last part was done"""
    computed: Mark | None = None
    """A mark after the last part, once that part is launched"""


@dataclass(slots=True)
class _Arrived:
    rank: int
    linears: frozenset[str]
    product_rank: int
    from_slab: bool


@dataclass(slots=True)
class AdapterLoads:
    """The adapters of one device: the loaded ones, and those still being loaded. The current loads share what one
    iteration may read and copy: the first in a plan has the most of it."""

    memory: torch.Tensor
    """[pages, bytes of a page]"""
    layout: Callable[[int], RunLayout]
    """The back end's layout by rank"""
    clock: Clock
    base: BaseLinearOf | None = None
    prover: Proves | None = None
    """None: no adapter is to be proved."""
    stream: CopyStream = field(default_factory=CopyStream)
    pace: LoadPace = field(default_factory=LoadPace)
    in_host: torch.Tensor | None = None
    """[bytes] that keep adapters for their next load. None: loads come with no place in it."""
    offer: Callable[[AdapterLayout, HostLoad], bool] = lambda *_: False
    """Gets what a load has made of checked bytes, for its slab. True: the memory is in use there."""
    read_file: ReadFile | None = None
    """Of the compiled kernels, while they serve"""
    parts: int = 0
    """How often more of an adapter had been read, or proved"""
    _kept: list[torch.Tensor] = field(default_factory=list)
    """Memory for the next loads"""
    _arrived: dict[Digest, _Arrived] = field(default_factory=dict)
    _loading: dict[int, _Loading] = field(default_factory=dict)
    _leaving: list[_Loading] = field(default_factory=list)
    """Given up, but the thread may still write to the host's memory"""
    _proving: _Proving | None = None
    _last_proof: int = 0
    """The number of the newest attempt"""
    _ahead: MemoryAhead | None = None
    """On a CPU"""

    def __post_init__(self) -> None:
        if self.memory.device.type == "cpu":
            self._ahead = MemoryAhead(self.memory.view(-1))

    def forget(self, gone: Iterable[Digest]) -> None:
        """These adapters are no longer on the device."""
        for digest in gone:
            self._arrived.pop(digest, None)

    def placed(self, digest: Digest, first_page: int) -> PlacedAdapter:
        """A loaded adapter, whose run begins at this page."""
        return self._place(digest, self._arrived[digest], first_page)

    def any_scales(self, digests: Iterable[Digest]) -> bool:
        """True if one of these loaded adapters scales the linears' own results"""
        return any(self._arrived[digest].product_rank for digest in digests)

    def _place(self, digest: Digest, arrived: _Arrived, first_page: int) -> PlacedAdapter:
        return PlacedAdapter(
            digest, first_page * self.memory.shape[1], arrived.rank, arrived.linears, arrived.product_rank
        )

    def advance(
        self,
        begin: Iterable[AdapterLoad],
        first_page_of: Mapping[int, int],
        proof: ProofStep | None = None,
        *,
        hurry: bool,
    ) -> LoadResults:
        """Begin loads, copy the next part of each current load, and do the next part of the current proof. `hurry`: no
        sequence has to wait. So wait a moment for more bytes, and copy all that have been read."""
        results = LoadResults()
        for load in begin:
            try:
                self._loading[load.number] = self._begin(load)
            except RuntimeError as error:  # no more threads available
                results.failed += (LoadFailed(load.number, _as_motet_error(error)),)
                results.left += (load.number,)
        for number in self._loading.keys() - first_page_of.keys():
            self._give_up(number)
        pace = self.pace
        share = _Share(pace.bytes, pace.bytes, pace.seconds)
        if hurry:  # a proof that goes on waits for no load
            share = _Share(math.inf, math.inf, HURRY_SECONDS if proof is None or proof.paused else 0.0)
        # Some may have ended, and the plan was made before that was known.
        numbers = [number for number in first_page_of if number in self._loading]
        current = [(number, first_page_of[number], self._loading[number]) for number in numbers]
        for _, _, loading in current:
            self._allow(loading, share, hurry=hurry)
            results.silent += self._newly_silent(loading)
        for number, first_page, loading in current:
            began = self.clock()
            try:
                complete = self._has_arrived(loading, first_page, share, hurry=hurry)
            except Exception as error:  # whatever one adapter brings about ends its own load alone
                if device_has_failed(error):  # the adapter is not to blame
                    raise
                self._give_up(number)
                results.failed += (LoadFailed(number, _as_motet_error(error)),)
                continue
            if not hurry:
                loading.pause += self.clock() - began
            if complete:
                host, place = loading.host, loading.load.host
                del self._loading[number]
                self._arrived[loading.load.digest] = self._what_arrived(loading)
                if self._ahead is not None:
                    self._ahead.before(first_page * self.memory.shape[1])
                if place is None and not self._offered(loading.load.layout, host):
                    self._keep(host.memory)
                if place is None or place.contents is None:
                    self.pace.loaded(host.layout.bytes, host.cpu_seconds)
                contents = None if place is None else LoadedContents(host.linears, host.scales, host.from_slab)
                seconds = self.clock() - loading.began
                results.arrived += (LoadArrived(number, seconds, loading.pause, host.lacks_slab, contents),)
        leaving, self._leaving = self._leaving, []
        for one in leaving:
            if one.host.thread_ended:
                results.left += (one.load.number,)
            else:
                self._leaving.append(one)
        results.proved = self._prove(proof, hurry=hurry)
        return results

    def _begin(self, load: AdapterLoad) -> _Loading:
        """Raises RuntimeError."""
        layout = self.layout(load.layout.rank)
        place = None
        if load.host is not None:
            assert self.in_host is not None, "the plan keeps adapters in the host's memory, and there is none for them"
            place = self.in_host[load.host.begin : load.host.begin + layout.bytes]
            if load.host.contents is not None:
                return _Loading(load, KeptInHost(layout, place, load.host.contents), self.clock())
        elif load.layout.slab and not self.memory.is_cuda:
            with suppress(*NotInPlace):
                return _Loading(load, SlabInPlace(load.layout, layout, self.read_file), self.clock())
        return _Loading(load, self._on_thread(load, layout, place), self.clock())

    def _on_thread(self, load: AdapterLoad, layout: RunLayout, place: torch.Tensor | None = None) -> HostLoad:
        """Raises RuntimeError."""
        memory = place if place is not None else self._kept.pop() if self._kept else None
        return HostLoad(load.layout, layout, self.base, pinned=self.memory.is_cuda, memory=memory)

    def _give_up(self, number: int) -> None:
        loading = self._loading.pop(number)
        loading.host.give_up()
        if loading.load.host is not None:
            self._leaving.append(loading)
        self.stream.let_model_wait()  # the adapter's pages may get other contents at once

    def _offered(self, adapter: AdapterLayout, host: HostLoad | KeptInHost | SlabInPlace) -> bool:
        if isinstance(host, KeptInHost | SlabInPlace):
            return False
        return host.lacks_slab and self.offer(adapter, host)

    def _keep(self, memory: torch.Tensor | None) -> None:
        if memory is not None and len(memory) + sum(map(len, self._kept)) <= MAX_KEPT_BYTES:
            self._kept.append(memory)

    def _what_arrived(self, loading: _Loading) -> _Arrived:
        host = loading.host
        products = self.layout(loading.load.layout.rank - SCALE_ROWS).rank if host.scales else 0
        return _Arrived(host.layout.rank, host.linears, products, host.from_slab)

    def _prove(self, step: ProofStep | None, *, hurry: bool) -> ProofResult | None:
        """Do the next part of a proof. None if it goes on, or there is none."""
        if self._proving is not None and (step is None or step.number != self._proving.number):
            self._end_proof()
        if step is None or (self._proving is None and step.number <= self._last_proof):
            return None  # it has ended, and the plan was made before that was known
        found: Proof | MotetError | None
        from_slab = False
        try:
            if self._proving is None:
                self._proving = self._begin_proof(step)
            found = self._advance_proof(self._proving, step, hurry=hurry)
        except Exception as error:  # whatever one adapter brings about ends its own proof alone
            if device_has_failed(error):  # the adapter is not to blame
                raise
            found = _as_motet_error(error)
            if isinstance(error, AdapterUnproved) and self._arrived[step.digest].from_slab:
                from_slab = True
                _remove_slab(step.layout)
        if found is None:
            return None
        self._end_proof()
        return ProofResult(step.number, found, from_slab)

    def _begin_proof(self, step: ProofStep) -> _Proving:
        assert self.prover is not None, "this engine proves nothing"
        self._last_proof = step.number
        proof = self.prover.begin(step.order, step.layout, self.layout(step.layout.rank), self.base)
        return _Proving(step.number, proof, self.clock())

    def _advance_proof(self, proving: _Proving, step: ProofStep, *, hurry: bool) -> Proof | None:
        if step.paused:
            proving.moved_at = self.clock()
            return None
        proof, before = proving.proof, proving.proof.parts
        if proving.computed is None:
            complete = proof.advance(
                self.placed(step.digest, step.first_page), wait_seconds=HURRY_SECONDS if hurry else 0.0
            )
            if proof.parts > before:
                self.parts += 1
                proving.moved_at = self.clock()
            elif self.clock() - proving.moved_at > MAX_SILENT_SECONDS:
                raise AdapterFetchFailed(
                    f"The runner could not prove the adapter: in {MAX_SILENT_SECONDS:.0f} s, the disk has read nothing."
                )
            if not complete:
                return None
            proving.computed = self.stream.model_mark()
        if hurry:
            proving.computed.wait()
        return proof.result() if proving.computed.passed() else None

    def _end_proof(self) -> None:
        if self._proving is not None:
            self._proving.proof.give_up()
            self._proving = None

    def before_copies(self) -> None:
        """Call this before pages are copied or moved: some of them may belong to runs still being loaded."""
        if self._loading:
            self.stream.let_model_wait()

    def _has_arrived(self, loading: _Loading, first_page: int, share: "_Share", *, hurry: bool) -> bool:
        """Copy the next part. True if all copies have ended. Only with `hurry`, this waits for the last copy."""
        if loading.copied is None:
            if not self._copy_some(loading, first_page, share):
                return False
            loading.copied = self.stream.mark()
        if hurry:
            loading.copied.wait()
        return loading.copied.passed()

    def _allow(self, loading: _Loading, share: "_Share", *, hurry: bool) -> None:
        """Let it read as much as the share has. It may be waited for if that is all of it: without hurry once only,
        because a disk that has not answered may take long."""
        host = loading.host
        host.allow(share.to_read)
        left = host.layout.bytes - host.read_bytes
        loading.waits = hurry or (not loading.asked and left <= share.to_read)
        answers = host.progress > loading.seen or not loading.asked
        if answers or not loading.may_read or not left:
            loading.moved_at = self.clock()
        loading.may_read = share.to_read > 0
        if answers:  # a disk that does not answer takes no share
            share.to_read -= min(share.to_read, left)
        loading.asked = True

    def _newly_silent(self, loading: _Loading) -> tuple[int, ...]:
        if loading.silent or self.clock() - loading.moved_at < SILENT_SECONDS:
            return ()
        loading.silent = True
        return (loading.load.number,)

    def _copy_some(self, loading: _Loading, first_page: int, share: "_Share") -> bool:
        """Copy the next part, at most the share. True if nothing is left."""
        host = loading.host
        if isinstance(host, SlabInPlace):
            return self._read_in_place(loading, host, first_page, share)
        began = self.clock()
        host.ended(share.wait if loading.waits else 0.0)
        share.wait = max(0.0, share.wait - (self.clock() - began))
        if host.run is None:
            return False
        begin, progress = loading.copied_bytes, host.progress
        self.parts += progress > loading.seen
        loading.seen = progress
        end = int(min(host.read_bytes, begin + share.to_copy))
        share.to_copy -= end - begin
        offset = first_page * self.memory.shape[1]
        self.stream.follow_model()
        self.stream.copy(self.memory.view(-1)[offset + begin : offset + end], host.run[begin:end])
        loading.copied_bytes = end
        return end == host.layout.bytes and host.ended()

    def _read_in_place(self, loading: _Loading, host: SlabInPlace, first_page: int, share: "_Share") -> bool:
        """The same, where the next part is read into its place."""
        begin, offset = host.read_bytes, first_page * self.memory.shape[1]
        try:
            host.read(self._places[offset : offset + host.layout.bytes], share.to_copy)
        except NotInPlace:
            host.give_up()
            loading.host, loading.asked, loading.seen = self._on_thread(loading.load, host.layout), False, 0
            return False
        self.parts += host.read_bytes > begin
        loading.seen = host.progress
        share.to_copy -= host.read_bytes - begin
        return host.read_bytes == host.layout.bytes

    @property
    def _places(self) -> Bytes:
        """Of a CPU's device"""
        return self.memory.view(-1).numpy()


@dataclass(slots=True)
class _Share:
    """What the loads of one iteration may still take"""

    to_read: float
    to_copy: float
    wait: float
    """Seconds"""


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
    first_line = (str(error).strip().splitlines() or [""])[0]
    kind = "" if first_line and isinstance(error, OSError | RuntimeError) else f"{type(error).__name__} "
    return AdapterError(f"The runner could not load the adapter: {kind}{first_line}".strip())
