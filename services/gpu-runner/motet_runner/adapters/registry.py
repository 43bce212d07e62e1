"""The adapters that this runner knows: their files, what the check found, and their stage.

An adapter is in the registry from its first EnsureAdapter on, or from a request that finds it in the disk cache with a
certificate for this base model. It leaves when it is dropped, or evicted from the disk cache while no request uses it.
As long as it is in the registry, its folder is locked.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from motet.api.v1 import common_pb2, scheduler_pb2
from motet.clock import Clock, monotonic
from motet.domain import Digest
from motet.errors import MotetError
from motet_runner.adapters.certification import Certification
from motet_runner.adapters.compatibility_check import CHECK_VERSION
from motet_runner.adapters.fetcher import DiskCache, Fetched, Fetcher, FetchRequest, FolderLock, touch
from motet_runner.engine_messages import Command, DropAdapter, LoadAdapter
from motet_runner.interface import AdapterEvicted, AdapterFailed, AdapterLoaded, EngineAdapterReport
from motet_runner.metrics import Metrics
from motet_runner.sources.fetch_errors import temporary
from motet_runner.sources.source_access import Sources

log = structlog.get_logger(__name__)

Check = Callable[[Path], Certification]
"""Checks an adapter's folder against the base model. Raises AdapterIncompatible. Called in a thread."""


@dataclass(slots=True)
class RegisteredAdapter:
    digest: Digest
    folder: Path
    bytes: int
    lease: FolderLock
    checked: Certification | None = None
    refs: dict[str, common_pb2.AdapterRef] = field(default_factory=dict)
    """The manifests that it was ordered for, by namespace/name."""
    on_device: bool = False
    wanted_until: float = 0.0
    """A request for it was announced: it is not evicted before this time."""
    drop_when_idle: bool = False
    """Forget it once no request uses it."""

    @property
    def certificate(self) -> scheduler_pb2.Certificate | None:
        return None if self.checked is None else self.checked.certificate

    @property
    def stage(self) -> "common_pb2.AdapterStage.ValueType":
        if self.on_device:
            return common_pb2.ADAPTER_STAGE_DEVICE
        return common_pb2.ADAPTER_STAGE_FETCHED if self.checked is None else common_pb2.ADAPTER_STAGE_CERTIFIED

    @property
    def name(self) -> str:
        return next(iter(self.refs), self.digest)


class AdapterRegistry:
    """`users_of` counts the requests that use an adapter; `post` sends a command to the engine; `engine_limits` is
    what `limits_of` says about the engine that `check` checks for."""

    def __init__(
        self,
        cache: DiskCache,
        *,
        check: Check,
        base_digest: Digest,
        engine_limits: str = "",
        check_version: int = CHECK_VERSION,
        capacity: int,
        users_of: Callable[[Digest], int],
        post: Callable[[Command], None],
        metrics: Metrics,
        sources: Sources | None = None,
        clock: Clock = monotonic,
    ) -> None:
        self._cache = cache
        self.fetcher = Fetcher(cache, sources)
        self._check = check
        self._base_digest = base_digest
        self._engine_limits = engine_limits
        self._check_version = check_version
        self._capacity = capacity
        self._users_of = users_of
        self._post = post
        self._metrics = metrics
        self._clock = clock
        self._adapters: dict[Digest, RegisteredAdapter] = {}
        self._checking: dict[Digest, asyncio.Lock] = {}
        self._waiting: dict[Digest, set[asyncio.Future[None]]] = {}

    # ----------------------------------------------------------------------------------------------------- questions

    def get(self, digest: str) -> RegisteredAdapter | None:
        return self._adapters.get(Digest(digest))

    def for_request(self, digest: Digest) -> RegisteredAdapter | None:
        """The adapter, if it is checked. The engine is sent its layout unless it has loaded it. None while the adapter
        isn't ready for requests."""
        adapter = self._adapters.get(digest) or self._add_cached(digest)
        if adapter is None or adapter.checked is None:
            return None
        adapter.drop_when_idle = False
        touch(adapter.folder)
        if not adapter.on_device:
            self._post(LoadAdapter(digest, adapter.checked.layout))
        return adapter

    async def wait_for(self, digest: Digest) -> None:
        """Wait until `for_request` returns this adapter. Raises the error of its fetch or check."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = self._waiting.setdefault(digest, set())
        waiting.add(future)
        try:
            await future
        finally:
            waiting.discard(future)
            if not waiting:
                self._waiting.pop(digest, None)

    def resident(self, entries: list[EngineAdapterReport]) -> list[common_pb2.ResidentAdapter]:
        """Every checked adapter of the registry, with the highest tier that it has reached."""
        in_engine = {entry.digest: entry for entry in entries}
        residents = []
        for adapter in self._adapters.values():
            if adapter.drop_when_idle or adapter.checked is None:
                continue
            entry = in_engine.get(adapter.digest)
            tier = common_pb2.MEMORY_TIER_DISK
            if adapter.on_device or (entry is not None and entry.on_device):
                tier = common_pb2.MEMORY_TIER_DEVICE
            residents.append(
                common_pb2.ResidentAdapter(
                    digest=adapter.digest,
                    tier=tier,
                    bytes=entry.bytes if entry is not None else adapter.bytes,
                    live=self._users_of(adapter.digest),
                )
            )
        return residents

    # -------------------------------------------------------------------------------------------------------- orders

    async def ensure(self, order: scheduler_pb2.EnsureAdapter) -> RegisteredAdapter:
        """Fetch and check an adapter, as the order says. If the order asks for more, the engine gets a command to load
        it."""
        started = time.monotonic()
        digest = Digest(order.expected_digest)
        try:
            fetched = await self.fetcher.fetch(fetch_request_of(order))
            digest = fetched.digest
            adapter = self._add(fetched, order.adapter)
            if order.stage >= common_pb2.ADAPTER_STAGE_CERTIFIED:
                await self._certify(adapter)
        except MotetError as error:
            self._metrics.adapter_failures.inc()
            self._notify_waiting(digest, error)
            raise
        self._metrics.adapter_fetch_seconds.observe(time.monotonic() - started)
        self._notify_waiting(digest)
        if order.stage >= common_pb2.ADAPTER_STAGE_HOST and not adapter.on_device and adapter.checked is not None:
            self._post(LoadAdapter(digest, adapter.checked.layout))
        await self._evict_from_disk(spare=digest)
        return adapter

    def expect(self, digest: Digest, seconds: float) -> None:
        """A request for this adapter will come: start to load it, and keep it for `seconds`."""
        adapter = self.for_request(digest)
        if adapter is not None:
            adapter.wanted_until = self._clock() + seconds

    def drop(self, digest: Digest) -> None:
        """Forget an adapter, now or when its last request ends. Its files stay until the disk cache needs the space."""
        adapter = self._adapters.get(digest)
        if adapter is not None:
            adapter.drop_when_idle = True
            self.request_ended(digest)

    def request_ended(self, digest: Digest) -> None:
        """A request has ended: forget its adapter if it was kept only for this request."""
        adapter = self._adapters.get(digest)
        if adapter is not None and adapter.drop_when_idle and not self._users_of(digest):
            self._forget(adapter)

    # ------------------------------------------------------------------------------------------------- engine's events

    def on_loaded(self, event: AdapterLoaded) -> RegisteredAdapter | None:
        self._metrics.adapter_loads.inc()
        self._metrics.adapter_load_seconds.observe(event.seconds)
        adapter = self._adapters.get(event.digest)
        if adapter is not None:
            adapter.on_device = True
        return adapter

    def on_evicted(self, event: AdapterEvicted) -> None:
        self._metrics.adapter_evictions.inc()
        adapter = self._adapters.get(event.digest)
        if adapter is not None:
            adapter.on_device = False

    def on_failed(self, event: AdapterFailed) -> RegisteredAdapter | None:
        self._metrics.adapter_failures.inc()
        adapter = self._adapters.get(event.digest)
        if adapter is not None:
            adapter.on_device = False
            if adapter.checked is not None and not adapter.checked.layout.file_unchanged():
                adapter.checked = None  # the next order checks the files again
        return adapter

    def close(self) -> None:
        for adapter in self._adapters.values():
            adapter.lease.release()
        self._adapters.clear()

    # --------------------------------------------------------------------------------------------------------- inside

    def _add(self, fetched: Fetched, ref: common_pb2.AdapterRef | None) -> RegisteredAdapter:
        adapter = self._adapters.get(fetched.digest)
        if adapter is None:
            try:
                lease = FolderLock(fetched.folder)
            except FileNotFoundError:
                raise temporary(
                    f"Another runner has just removed {fetched.folder}. Motet fetches it again automatically."
                ) from None
            adapter = self._adapters[fetched.digest] = RegisteredAdapter(
                fetched.digest, fetched.folder, fetched.bytes, lease
            )
        adapter.drop_when_idle = False
        if ref is not None:
            adapter.refs[f"{ref.namespace}/{ref.name}"] = ref
        return adapter

    async def _certify(self, adapter: RegisteredAdapter) -> None:
        async with self._checking.setdefault(adapter.digest, asyncio.Lock()):
            if adapter.checked is not None:
                return
            try:
                adapter.checked = await asyncio.to_thread(self._checked, adapter)
            except MotetError:
                self._forget(adapter)
                raise

    def _checked(self, adapter: RegisteredAdapter) -> Certification:
        """The result of an earlier check, or of a new one."""
        checked = self._earlier_check(adapter.digest, adapter.folder)
        if checked is None:
            self._cache.verify(adapter.digest)
            checked = self._check(adapter.folder)
            certificate = checked.certificate
            certificate.digest, certificate.base_digest = adapter.digest, self._base_digest
            certificate.size_bytes, certificate.checker = adapter.bytes, self._check_version
            self._cache.write_certificate(adapter.folder, checked.encode())
        return checked

    def _earlier_check(self, digest: Digest, folder: Path) -> Certification | None:
        """The result of an earlier check of these files, if the checks, base model and engine were the same."""
        try:
            text = self._cache.read_certificate(folder)
            checked = Certification.decode(text, folder) if text is not None else None
        except ValueError:
            return None
        if checked is None:
            return None
        certificate = checked.certificate
        found = (certificate.digest, certificate.base_digest, certificate.checker, checked.engine)
        same = found == (digest, self._base_digest, self._check_version, self._engine_limits)
        return checked if same and checked.layout.file_unchanged() else None

    def _add_cached(self, digest: Digest) -> RegisteredAdapter | None:
        """Add an adapter that is in the disk cache with a certificate for this base model."""
        try:
            fetched = self._cache.find(digest)
            checked = self._earlier_check(digest, fetched.folder) if fetched is not None else None
            if fetched is None or checked is None:
                return None
            adapter = self._add(fetched, None)
        except (MotetError, ValueError, OSError):
            return None
        adapter.checked = checked
        return adapter

    def _notify_waiting(self, digest: Digest, error: MotetError | None = None) -> None:
        for future in self._waiting.get(digest, ()):
            if future.done():
                continue
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)

    async def _evict_from_disk(self, *, spare: Digest) -> None:
        """Keep the disk cache within its limit. The adapter that was not used for longest is removed first; adapters in
        use are never removed."""
        cached = await asyncio.to_thread(self._cache.by_last_use)
        excess = len(cached) - self._capacity
        for digest in cached:
            if excess <= 0:
                return
            adapter = self._adapters.get(digest)
            if digest == spare:
                continue
            if adapter is not None:
                if self._is_busy(adapter) or not adapter.lease.is_alone():
                    continue
                self._forget(adapter)
            if await asyncio.to_thread(self._cache.remove, digest):
                log.info("adapter_evicted_from_disk", adapter=digest)
                excess -= 1

    def _is_busy(self, adapter: RegisteredAdapter) -> bool:
        checking = self._checking.get(adapter.digest)
        return (
            self._users_of(adapter.digest) > 0
            or adapter.digest in self._waiting
            or self._clock() < adapter.wanted_until
            or (checking is not None and checking.locked())
            or adapter.checked is None
        )

    def _forget(self, adapter: RegisteredAdapter) -> None:
        if self._adapters.pop(adapter.digest, None) is None:
            return
        self._checking.pop(adapter.digest, None)
        self._post(DropAdapter(adapter.digest))
        adapter.lease.release()


def fetch_request_of(order: scheduler_pb2.EnsureAdapter) -> FetchRequest:
    return FetchRequest(
        source=order.source,
        revision=order.revision,
        expected=order.expected_digest,
        credentials=order.credentials,
        namespace=order.adapter.namespace,
        max_bytes=order.max_bytes,
        volume=order.volume,
        folder=order.folder,
        # A revision is checked once. After that the scheduler knows that its source has files of this digest.
        digest_verified=order.stage > common_pb2.ADAPTER_STAGE_CERTIFIED,
    )
