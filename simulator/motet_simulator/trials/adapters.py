"""Adapters of a trial: what is at their sources, and the disk cache of a runner, which has no real files.

`SimulatedAdapterFiles` stands in for `DiskAdapterFiles`: see there, and in `policy/effects.py`, what each answer means.
"""

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, cast

from motet.api.v1 import scheduler_pb2
from motet.domain import Digest
from motet.errors import AdapterIncompatible
from motet_runner.adapters.certification import Certification
from motet_runner.adapters.layout import AdapterLayout, FileStamp
from motet_runner.adapters.policy import effects
from motet_runner.adapters.policy.values import CacheContents, Cached, FetchRequest, Held
from motet_runner.adapters.proof import Proof
from motet_runner.sources.fetch_errors import another_digest, missing, no_space, temporary
from motet_runner.sources.process_pool import Room
from motet_simulator.fake_engine import MAX_RANK
from motet_simulator.trials.plan import AdapterChange, FaultKind
from motet_simulator.world import Process, World
from motet_simulator.world.surroundings import UNSYNCED_SECONDS

if TYPE_CHECKING:
    from motet_runner.adapters.digest_lease import DigestLease

FETCH_SECONDS = 0.2
SLOW_FETCH_SECONDS = 8.0
CHECK_SECONDS = 0.05
FOLDER_SECONDS = 0.002


def digest_of(content: int) -> Digest:
    return Digest(f"sha256:{content:064x}")


class AdapterSources:
    """What is at each URI, and which adapters' sources do not answer, or answer slowly."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._at: dict[str, AdapterChange] = {}
        self.away_until: dict[str, float] = {}
        """By the name of the adapter."""
        self.slow_until: dict[str, float] = {}

    def put(self, change: AdapterChange) -> None:
        self._at[change.source] = change

    def at(self, source: str) -> AdapterChange | None:
        return self._at.get(source)

    def is_away(self, adapter: str) -> bool:
        return self._meets("source away", adapter, self.away_until)

    def is_slow(self, adapter: str) -> bool:
        return self._meets("source slow", adapter, self.slow_until)

    def _meets(self, kind: FaultKind, adapter: str, until: Mapping[str, float]) -> bool:
        if until.get(adapter, 0.0) <= self._world.now:
            return False
        self._world.on_met(kind, adapter)
        return True


@dataclass(slots=True, eq=False)
class Folder:
    digest: Digest
    content: int
    inode: int
    used: int
    """The larger, the later it was used."""
    written_at: float
    """When its certificate or its origins were last written."""
    origins: dict[tuple[str, ...], None] = field(default_factory=dict)
    """Whose sources have had these bytes."""
    certificate: Certification | None = None


class AdapterCache:
    """The adapters on the disk of one host. They outlive its processes."""

    def __init__(self) -> None:
        self.folders: dict[Digest, Folder] = {}
        self.full = False
        self.numbers = itertools.count(1)

    def lose_unsynced(self, world: World, host: str) -> None:
        """The machine went off. Files of adapters were synced before their folder appeared; the rest was not."""
        for folder in self.folders.values():
            recent = world.now - folder.written_at < UNSYNCED_SECONDS
            if recent and world.draw("lost", host, folder.inode) < 0.5:
                folder.certificate = None
                folder.origins.clear()

    def read(self, layout: AdapterLayout) -> Digest:
        """What an engine reads that loads this. Raises AdapterIncompatible if it is not what was checked."""
        folder = next((one for one in self.folders.values() if one.inode == layout.stamp.inode), None)
        if folder is None:
            raise AdapterIncompatible(f"{layout.file} has changed since it was checked")
        return digest_of(folder.content)


class _Lease:
    def __init__(self, cache: AdapterCache, folder: Folder) -> None:
        self._cache = cache
        self.folder = folder
        self.released = False

    def is_live(self) -> bool:
        return not self.released and self._cache.folders.get(self.folder.digest) is self.folder

    def release(self) -> None:
        self.released = True


class SimulatedAdapterFiles:
    """The adapters of one process of a runner. No two runners of a trial share a disk."""

    def __init__(
        self, process: Process, cache: AdapterCache, sources: AdapterSources, *, base: Digest, adapter_bytes: int
    ) -> None:
        self._process = process
        self._cache = cache
        self._sources = sources
        self._base = base
        self._adapter_bytes = adapter_bytes
        self._calls = itertools.count(1)

    async def find(self, effect: effects.Find) -> Held | None:
        await self._passes(FOLDER_SECONDS)
        folder, request = self._cache.folders.get(effect.digest), effect.request
        if folder is None:
            return None
        if request is not None and not (request.digest_verified or request.origin in folder.origins):
            return None
        return self._hold(folder)

    async def fetch(self, effect: effects.Fetch, room: Room | None = None) -> Held:
        request = effect.request
        found = self._sources.at(request.source)
        if found is None:
            raise missing(f"There is nothing at {request.source}.")
        slow = found.slow or self._sources.is_slow(found.name)
        await self._passes(SLOW_FETCH_SECONDS if slow else FETCH_SECONDS)
        if self._sources.is_away(found.name):
            raise temporary(f"{request.source} does not answer.")
        if self._cache.full:
            self._process.world.on_met("disk full", self._process.host)
            raise no_space("There is no space left.")
        if room is not None:
            await room(self._adapter_bytes)
        found = self._sources.at(request.source)
        assert found is not None
        digest = digest_of(found.content)
        if request.expected and digest != request.expected:
            raise another_digest(f"{request.source} has the digest {digest}, but {request.expected} is asked for.")
        return self._store(found.content, request)

    def bytes_of(self, number: int) -> int:
        return 0

    async def keep_proof(self, held: Held, proof: Proof) -> None:
        """Its engines prove nothing."""

    async def forget_proofs(self, held: Held) -> None:
        """The same"""

    async def check(self, held: Held) -> Certification:
        await self._passes(CHECK_SECONDS)
        folder = _folder_of(held)
        if (earlier := self._earlier(folder)) is not None:
            return earlier
        if digest_of(folder.content) != held.digest:
            self._cache.folders.pop(held.digest, None)
            raise temporary(f"The cached files of {held.digest} have changed.")
        if folder.content >= AdapterChange.BROKEN:
            raise AdapterIncompatible(f"The files of {held.digest} do not fit the base model.")
        certificate = scheduler_pb2.Certificate(
            digest=held.digest, base_digest=self._base, rank=MAX_RANK, size_bytes=held.bytes, method="lora"
        )
        stamp = FileStamp(held.bytes, 0, folder.inode)
        layout = replace(AdapterLayout.of(Path(f"/{folder.inode}"), stamp, MAX_RANK, ()), size=self._adapter_bytes)
        if not self._cache.full:
            folder.certificate, folder.written_at = Certification.of(certificate, layout), self._process.world.now
        return Certification.of(certificate, layout)

    async def evict(self, effect: effects.Evict) -> effects.Answer:
        await self._passes(FOLDER_SECONDS)
        if effect.held is None or self._lease_of(effect.held).is_live():
            self._cache.folders.pop(effect.digest, None)
        return None

    async def contents(self, effect: effects.ListCache) -> CacheContents:
        await self._passes(FOLDER_SECONDS)
        total = self._adapter_bytes * len(self._cache.folders)
        if len(self._cache.folders) <= effect.capacity and total <= effect.room:
            return CacheContents(unfinished=0 if effect.room == inf else total)
        folders = sorted(self._cache.folders.values(), key=lambda one: one.used)
        return CacheContents(tuple(Cached(one.digest, self._adapter_bytes) for one in folders))

    async def look(self, held: Held, *, begins: Callable[[], None]) -> bool:
        begins()
        _folder_of(held).used = next(self._cache.numbers)
        live = self._lease_of(held).is_live()
        await self._passes(FOLDER_SECONDS)
        return live

    async def vanished(self, held: Sequence[Held]) -> list[Held]:
        gone = [one for one in held if not self._lease_of(one).is_live()]
        await self._passes(FOLDER_SECONDS)
        return gone

    async def wish(self, size: int) -> None:
        raise AssertionError("no cache of a trial is bounded in bytes")

    async def wished(self) -> bool:
        return False

    def release(self, held: Held) -> None:
        self._lease_of(held).release()

    async def forget_partial(self, request: FetchRequest) -> None: ...

    async def clear_partial(self) -> None: ...

    # ---------------------------------------------------------------------------------------------------------- inside

    def _store(self, content: int, request: FetchRequest) -> Held:
        digest, now = digest_of(content), self._process.world.now
        folder = self._cache.folders.get(digest)
        if folder is None:
            number = next(self._cache.numbers)
            folder = self._cache.folders[digest] = Folder(digest, content, number, number, now)
        folder.origins[request.origin], folder.written_at = None, now
        return self._hold(folder)

    def _hold(self, folder: Folder) -> Held:
        folder.used = next(self._cache.numbers)
        return Held(
            folder.digest,
            self._adapter_bytes,
            (0, folder.inode),
            cast("DigestLease", _Lease(self._cache, folder)),
            self._earlier(folder),
        )

    def _earlier(self, folder: Folder) -> Certification | None:
        earlier = folder.certificate
        return earlier if earlier is not None and earlier.certificate.base_digest == self._base else None

    @staticmethod
    def _lease_of(held: Held) -> _Lease:
        return cast("_Lease", held.lease)

    async def _passes(self, seconds: float) -> None:
        chance = self._process.world.draw("adapter files", self._process.name, next(self._calls))
        await asyncio.sleep(seconds * (0.5 + chance))


def _folder_of(held: Held) -> Folder:
    return cast("_Lease", held.lease).folder
