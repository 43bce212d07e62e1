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
from motet_runner.adapters.fetcher import DiskCache, Fetched, Fetcher, FetchRequest, FolderLock, touch
from motet_runner.adapters.file_check import CHECK_VERSION
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
    """`users_of` counts the requests that use an adapter; `post` sends a command to the engine; `engine` is what
    `limits_of` says about the engine that `check` checks for."""

    def __init__(
        self,
        cache: DiskCache,
        *,
        check: Check,
        base_digest: Digest,
        engine: str = "",
        checker: int = CHECK_VERSION,
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
        self._engine = engine
        self._checker = checker
        self._capacity = capacity
        self._users_of = users_of
        self._post = post
        self._metrics = metrics
        self._clock = clock
        self._shelved: dict[Digest, RegisteredAdapter] = {}
        self._checking: dict[Digest, asyncio.Lock] = {}
        self._arrivals: dict[Digest, set[asyncio.Future[None]]] = {}

    # ----------------------------------------------------------------------------------------------------- questions

    def get(self, digest: str) -> RegisteredAdapter | None:
        return self._shelved.get(Digest(digest))

    def for_request(self, digest: Digest) -> RegisteredAdapter | None:
        """The adapter, if it is checked. The engine is sent its layout unless it has loaded it. None while the adapter
        isn't ready for requests."""
        one = self._shelved.get(digest) or self._adopt(digest)
        if one is None or one.checked is None:
            return None
        one.drop_when_idle = False
        touch(one.folder)
        if not one.on_device:
            self._post(LoadAdapter(digest, one.checked.layout))
        return one

    async def wait_for(self, digest: Digest) -> None:
        """Wait until `for_request` returns this adapter. Raises the error of its fetch or check."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = self._arrivals.setdefault(digest, set())
        waiting.add(future)
        try:
            await future
        finally:
            waiting.discard(future)
            if not waiting:
                self._arrivals.pop(digest, None)

    def resident(self, entries: list[EngineAdapterReport]) -> list[common_pb2.ResidentAdapter]:
        """Every checked adapter of the registry, with the highest tier that it has reached."""
        in_engine = {entry.digest: entry for entry in entries}
        residents = []
        for one in self._shelved.values():
            if one.drop_when_idle or one.checked is None:
                continue
            entry = in_engine.get(one.digest)
            tier = common_pb2.MEMORY_TIER_DISK
            if one.on_device or (entry is not None and entry.on_device):
                tier = common_pb2.MEMORY_TIER_DEVICE
            residents.append(
                common_pb2.ResidentAdapter(
                    digest=one.digest,
                    tier=tier,
                    bytes=entry.bytes if entry is not None else one.bytes,
                    live=self._users_of(one.digest),
                )
            )
        return residents

    # -------------------------------------------------------------------------------------------------------- orders

    async def ensure(self, order: scheduler_pb2.EnsureAdapter) -> RegisteredAdapter:
        """Fetch and check an adapter, as the order says. If the order asks for more, the engine is told to load it."""
        started = time.monotonic()
        digest = Digest(order.expected_digest)
        try:
            fetched = await self.fetcher.fetch(wanted(order))
            digest = fetched.digest
            one = self._put(fetched, order.adapter)
            if order.stage >= common_pb2.ADAPTER_STAGE_CERTIFIED:
                await self._certify(one)
        except MotetError as error:
            self._metrics.adapter_failures.inc()
            self._arrived(digest, error)
            raise
        self._metrics.adapter_fetch_seconds.observe(time.monotonic() - started)
        self._arrived(digest)
        if order.stage >= common_pb2.ADAPTER_STAGE_HOST and not one.on_device and one.checked is not None:
            self._post(LoadAdapter(digest, one.checked.layout))
        await self._evict_from_disk(spare=digest)
        return one

    def expect(self, digest: Digest, seconds: float) -> None:
        """A request for this adapter will come: start to load it, and keep it for `seconds`."""
        one = self.for_request(digest)
        if one is not None:
            one.wanted_until = self._clock() + seconds

    def drop(self, digest: Digest) -> None:
        """Forget an adapter, now or when its last request ends. Its files stay until the disk cache needs the space."""
        one = self._shelved.get(digest)
        if one is not None:
            one.drop_when_idle = True
            self.request_ended(digest)

    def request_ended(self, digest: Digest) -> None:
        """A request has ended: forget its adapter if it was kept only for this request."""
        one = self._shelved.get(digest)
        if one is not None and one.drop_when_idle and not self._users_of(digest):
            self._forget(one)

    # ------------------------------------------------------------------------------------------------- engine's events

    def on_loaded(self, event: AdapterLoaded) -> RegisteredAdapter | None:
        self._metrics.adapter_loads.inc()
        self._metrics.adapter_load_seconds.observe(event.seconds)
        one = self._shelved.get(event.digest)
        if one is not None:
            one.on_device = True
        return one

    def on_evicted(self, event: AdapterEvicted) -> None:
        self._metrics.adapter_evictions.inc()
        one = self._shelved.get(event.digest)
        if one is not None:
            one.on_device = False

    def on_failed(self, event: AdapterFailed) -> RegisteredAdapter | None:
        self._metrics.adapter_failures.inc()
        one = self._shelved.get(event.digest)
        if one is not None:
            one.on_device = False
            if one.checked is not None and not one.checked.layout.file_unchanged():
                one.checked = None  # the next order checks the files again
        return one

    def close(self) -> None:
        for one in self._shelved.values():
            one.lease.release()
        self._shelved.clear()

    # --------------------------------------------------------------------------------------------------------- inside

    def _put(self, fetched: Fetched, ref: common_pb2.AdapterRef | None) -> RegisteredAdapter:
        one = self._shelved.get(fetched.digest)
        if one is None:
            try:
                lease = FolderLock(fetched.folder)
            except FileNotFoundError:
                raise temporary(f"{fetched.folder} was removed a moment ago; it will be fetched again.") from None
            one = self._shelved[fetched.digest] = RegisteredAdapter(
                fetched.digest, fetched.folder, fetched.bytes, lease
            )
        one.drop_when_idle = False
        if ref is not None:
            one.refs[f"{ref.namespace}/{ref.name}"] = ref
        return one

    async def _certify(self, one: RegisteredAdapter) -> None:
        async with self._checking.setdefault(one.digest, asyncio.Lock()):
            if one.checked is not None:
                return
            try:
                one.checked = await asyncio.to_thread(self._check_once, one)
            except MotetError:
                self._forget(one)
                raise

    def _check_once(self, one: RegisteredAdapter) -> Certification:
        """What an earlier check has left, or else a new check."""
        checked = self._earlier_check(one.digest, one.folder)
        if checked is None:
            self._cache.verify(one.digest)
            checked = self._check(one.folder)
            certificate = checked.certificate
            certificate.digest, certificate.base_digest = one.digest, self._base_digest
            certificate.size_bytes, certificate.checker = one.bytes, self._checker
            self._cache.write_certificate(one.folder, checked.encode())
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
        same = found == (digest, self._base_digest, self._checker, self._engine)
        return checked if same and checked.layout.file_unchanged() else None

    def _adopt(self, digest: Digest) -> RegisteredAdapter | None:
        """Add an adapter that is in the disk cache with a certificate for this base model."""
        try:
            fetched = self._cache.find(digest)
            checked = self._earlier_check(digest, fetched.folder) if fetched is not None else None
            if fetched is None or checked is None:
                return None
            one = self._put(fetched, None)
        except (MotetError, ValueError, OSError):
            return None
        one.checked = checked
        return one

    def _arrived(self, digest: Digest, error: MotetError | None = None) -> None:
        for future in self._arrivals.get(digest, ()):
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
            one = self._shelved.get(digest)
            if digest == spare:
                continue
            if one is not None:
                if self._is_busy(one) or not one.lease.is_alone():
                    continue
                self._forget(one)
            if await asyncio.to_thread(self._cache.remove, digest):
                log.info("adapter_evicted_from_disk", adapter=digest)
                excess -= 1

    def _is_busy(self, one: RegisteredAdapter) -> bool:
        checking = self._checking.get(one.digest)
        return (
            self._users_of(one.digest) > 0
            or one.digest in self._arrivals
            or self._clock() < one.wanted_until
            or (checking is not None and checking.locked())
            or one.checked is None
        )

    def _forget(self, one: RegisteredAdapter) -> None:
        if self._shelved.pop(one.digest, None) is None:
            return
        self._checking.pop(one.digest, None)
        self._post(DropAdapter(one.digest))
        one.lease.release()


def wanted(order: scheduler_pb2.EnsureAdapter) -> FetchRequest:
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
