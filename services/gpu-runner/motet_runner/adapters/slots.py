"""Adapters on the device: a bounded number of slots, filled a few tensors at a time so that nobody else waits (PU-07).

A slot with live sequences is never evicted; of the others the least recently used goes first.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from motet.errors import AdapterError, AdapterIncompatible
from motet.model import Digest
from motet_kernels import RANKS, group_of
from motet_runner.adapters.check import check, place, read_weights
from motet_runner.adapters.peft_config import WEIGHTS_NAME, read_config
from motet_runner.execute.lora import LoraLinears

BYTES_A_SLICE = 4 * 1024 * 1024
"""How much of an adapter is loaded between two iterations while others run: about a millisecond of copying."""


@dataclass(slots=True)
class Known:
    """An adapter whose checked bytes lie in `folder`."""

    folder: Path
    bytes: int = 0
    place: tuple[int, int] | None = None
    """(rank class, slot) once it is on the device"""


@dataclass(slots=True)
class Loading:
    digest: Digest
    place: tuple[int, int]
    slices: Iterator[int]
    started: float
    seconds: float = 0.0
    bytes: int = 0


@dataclass(slots=True)
class Progress:
    loaded: list[tuple[Digest, int, float]] = field(default_factory=list)
    evicted: list[Digest] = field(default_factory=list)
    failed: list[tuple[Digest, AdapterError]] = field(default_factory=list)


class SlotStore:
    def __init__(
        self,
        linears: LoraLinears,
        *,
        slots: int,
        max_rank: int,
        live: Callable[[Digest], int],
        clock: Callable[[], float],
    ) -> None:
        self._linears = linears
        self._slots = slots
        self._max_rank = max_rank
        self._live = live
        self._clock = clock
        self._known: OrderedDict[Digest, Known] = OrderedDict()  # least recently used first
        self._wanted: OrderedDict[Digest, None] = OrderedDict()
        self._loading: Loading | None = None
        self._dropped: set[Digest] = set()
        self._progress = Progress()

    def __iter__(self) -> Iterator[tuple[Digest, Known]]:
        return iter(self._known.items())

    def on_device(self, digest: Digest) -> bool:
        known = self._known.get(digest)
        return known is not None and known.place is not None

    def place(self, digest: Digest) -> tuple[int, int]:
        """Where it lies; also marks it as used now."""
        self._known.move_to_end(digest)
        place_ = self._known[digest].place
        assert place_ is not None, digest
        return place_

    def know(self, digest: Digest, folder: Path) -> None:
        """Its bytes are here. It is brought to the device while there is room, or when a sequence asks."""
        self._dropped.discard(digest)
        if digest not in self._known:
            self._known[digest] = Known(folder)
        if self._live(digest) or self._in_use < self._slots:
            self.want(digest)

    def want(self, digest: Digest) -> None:
        """A sequence waits for it. All who wait share one load."""
        if digest in self._known and not self.on_device(digest) and not self._is_loading(digest):
            self._wanted[digest] = None

    def drop(self, digest: Digest) -> None:
        """Forget it once nobody uses it."""
        if digest in self._known:
            self._dropped.add(digest)
            self._forget_dropped()

    @property
    def busy(self) -> bool:
        """Whether `advance` could do something now."""
        return (
            self._loading is not None
            or any(self._room_for(digest) for digest in self._wanted)
            or any(not self._live(digest) for digest in self._dropped)
        )

    def advance(self, *, hurry: bool) -> Progress:
        """A slice of the load in flight; all of it when there is nobody to keep waiting (`hurry`)."""
        self._forget_dropped()
        if self._loading is None:
            self._begin()
        loading = self._loading
        if loading is not None:
            before = self._clock()
            try:
                with torch.inference_mode():
                    done = self._load_some(loading, everything=hurry)
                if done:
                    self._finish(loading)
            except (AdapterError, SafetensorError, OSError, ValueError, KeyError) as error:
                self._fail(loading.digest, error)
            loading.seconds += self._clock() - before
        progress, self._progress = self._progress, Progress()
        return progress

    # -- inside ------------------------------------------------------------------------------------------------------

    def _is_loading(self, digest: Digest) -> bool:
        return self._loading is not None and self._loading.digest == digest

    @property
    def _in_use(self) -> int:
        return sum(known.place is not None for known in self._known.values()) + (self._loading is not None)

    def _room_for(self, digest: Digest) -> bool:
        if self._in_use < self._slots:
            return True
        return bool(self._live(digest)) and self._evictable() is not None

    def _evictable(self) -> Digest | None:
        for digest, known in self._known.items():
            if known.place is not None and not self._live(digest):
                return digest
        return None

    def _begin(self) -> None:
        for digest in list(self._wanted):
            if digest not in self._known:
                del self._wanted[digest]
                continue
            if not self._room_for(digest):
                continue
            del self._wanted[digest]
            if self._in_use >= self._slots:
                self._evict()
            try:
                group, slices = self._open(self._known[digest])
            except (AdapterError, SafetensorError, OSError, ValueError) as error:
                self._fail(digest, error)
                continue
            place_ = group, self._free_slot(group)
            self._loading = Loading(digest, place_, slices(place_), self._clock())
            return

    def _evict(self) -> None:
        digest = self._evictable()
        assert digest is not None
        self._known[digest].place = None
        self._progress.evicted.append(digest)

    def _free_slot(self, group: int) -> int:
        taken = {known.place[1] for known in self._known.values() if known.place and known.place[0] == group}
        return next(slot for slot in range(len(taken) + 1) if slot not in taken)

    def _open(self, known: Known) -> tuple[int, Callable[[tuple[int, int]], Iterator[int]]]:
        """Check once more (bytes may have changed under us) and hand back its rank class and how to load it."""
        certificate = check(known.folder, self._linears.shapes, max_rank=min(self._max_rank, RANKS[-1]))
        known.bytes = certificate.bytes
        folder = known.folder
        return group_of(certificate.rank), lambda place_: self._slices(folder, place_)

    def _slices(self, folder: Path, place_: tuple[int, int]) -> Iterator[int]:
        """Writes the adapter's matrices, yielding the bytes of each slice; clears the projections it leaves alone."""
        group, slot = place_
        config = read_config(folder)
        names = place(read_weights(folder), self._linears.shapes)
        halves: dict[str, dict[str, str]] = {}
        for name, half in names.items():
            halves.setdefault(half.module, {})[half.half] = name
        size = 0
        with safe_open(folder / WEIGHTS_NAME, framework="pt") as file:
            for module, weights in self._linears.weights.items():
                of_module = halves.get(module)
                if of_module is None:
                    weights.write(group, slot, None, None)
                    continue
                a, b = file.get_tensor(of_module["A"]), file.get_tensor(of_module["B"])
                if not (torch.isfinite(a).all() and torch.isfinite(b).all()):
                    raise AdapterIncompatible(f"{module} has weights that are not finite numbers.")
                weights.write(group, slot, a, b, config.scale_of(module))
                size += a.nbytes + b.nbytes
                if size >= BYTES_A_SLICE:
                    yield size
                    size = 0
        yield size

    @staticmethod
    def _load_some(loading: Loading, *, everything: bool) -> bool:
        """The next slice, or all that are left; True when none is."""
        for size in loading.slices:
            loading.bytes += size
            if not everything:
                return False
        return True

    def _finish(self, loading: Loading) -> None:
        self._loading = None
        self._known[loading.digest].place = loading.place
        self._known.move_to_end(loading.digest)
        self._progress.loaded.append((loading.digest, loading.bytes, self._clock() - loading.started))

    def _fail(self, digest: Digest, error: Exception) -> None:
        if self._is_loading(digest):
            self._loading = None
        self._known.pop(digest, None)
        self._wanted.pop(digest, None)
        known = error if isinstance(error, AdapterError) else AdapterError(f"The adapter could not be loaded: {error}")
        self._progress.failed.append((digest, known))

    def _forget_dropped(self) -> None:
        for digest in list(self._dropped):
            if self._live(digest) or self._is_loading(digest):
                continue
            self._dropped.discard(digest)
            self._wanted.pop(digest, None)
            known = self._known.pop(digest, None)
            if known is not None and known.place is not None:
                self._progress.evicted.append(digest)
