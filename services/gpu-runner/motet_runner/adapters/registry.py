"""The adapters that this runner knows: their files, what the check found, and their stage.

`policy/` decides; here its effects are carried out, and what came of them goes back as events. No error of a disk or a
source leaves this module as anything but the answer to an order or to a request that waits.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

import structlog

from motet.api.v1 import common_pb2, scheduler_pb2
from motet.clock import Clock, monotonic
from motet.digest import hex_of
from motet.domain import Digest
from motet.errors import AdapterFetchFailed, Internal, MotetError, from_proto
from motet.runner_info import Failure
from motet_runner.adapters.cache import DiskCache, lease_of
from motet_runner.adapters.checks import Checks
from motet_runner.adapters.disk_patience import DiskPatience, disk_hangs
from motet_runner.adapters.fetches import Fetches
from motet_runner.adapters.policy import effects, events
from motet_runner.adapters.policy.adapter_policy import AdapterPolicy
from motet_runner.adapters.policy.failures import SourceFailures
from motet_runner.adapters.policy.life import AdapterLife
from motet_runner.adapters.policy.values import FetchRequest, Held, Order
from motet_runner.daemon_threads import CallHangs, DaemonThreads
from motet_runner.engine_messages import Command, DropAdapter, LoadAdapter
from motet_runner.interface import AdapterEvicted, AdapterFailed, AdapterLoaded, EngineAdapterReport
from motet_runner.metrics import Metrics
from motet_runner.sources.fetch_errors import temporary
from motet_runner.sources.source_access import Sources

log = structlog.get_logger(__name__)

FILE_THREADS = 4
"""For checks, and for storing what a fetch process has brought: each reads a whole adapter from the runner's disk."""


class AdapterRegistry:
    """`users_of` counts the requests that use an adapter; `post` sends a command to the engine; `capacity` is that of
    the disk cache."""

    def __init__(
        self,
        cache: DiskCache,
        *,
        checks: Checks,
        capacity: int,
        users_of: Callable[[Digest], int],
        post: Callable[[Command], None],
        metrics: Metrics,
        sources: Sources | None = None,
        patience: DiskPatience | None = None,
        clock: Clock = monotonic,
    ) -> None:
        self._cache = cache
        self._checks = checks
        self._users_of = users_of
        self._post = post
        self._metrics = metrics
        self._clock = clock
        failures = SourceFailures(
            spread=lambda: random.uniform(0.8, 1.2),  # noqa: S311
            scale=sources.time_scale if sources is not None else 1.0,
        )
        self._policy = AdapterPolicy(capacity=capacity, users_of=users_of, failures=failures)
        self._patience = patience = patience or DiskPatience()
        self._files = DaemonThreads("adapter files", FILE_THREADS, seconds=patience.stall_seconds)
        # One, so that a touch comes before a later listing.
        self._folders = DaemonThreads("adapter folders", 1, seconds=patience.stall_seconds)
        self._fetches = Fetches(cache, sources, self._files, patience)
        self._orders: dict[int, asyncio.Future[AdapterLife]] = {}
        self._waiters: dict[int, asyncio.Future[None]] = {}
        self._numbers = 0
        self._looks: set[tuple[type, tuple[int, int]]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._releases: set[Future[None]] = set()
        self._closed = False
        self.copies = 0
        """How many fetches have brought files."""

    # ----------------------------------------------------------------------------------------------------- questions

    def get(self, digest: str) -> AdapterLife | None:
        return self._policy.get(Digest(digest))

    def for_request(self, digest: Digest) -> AdapterLife | None:
        """The adapter, if requests may use it now. The engine is sent its layout unless it has loaded it."""
        life = self._policy.get(digest)
        if life is None or not life.ready:
            return None
        self._handle(events.Used(digest))
        return life

    async def wait_for(self, digest: Digest, manifest: str = "") -> None:
        """Wait until `for_request` returns this adapter. `manifest` is the adapter that the client has named, as
        namespace/name. Raises the error of that one's fetch, or of the check."""
        number = self._number()
        future = self._waiters[number] = asyncio.get_running_loop().create_future()
        try:
            self._handle(events.RequestWaits(number, digest, manifest))
            await future
        finally:
            if self._waiters.pop(number, None) is not None:
                self._handle(events.RequestLeft(number, digest))

    def resident(self, entries: list[EngineAdapterReport]) -> list[common_pb2.ResidentAdapter]:
        """Every checked adapter of the registry, with the highest tier that it has reached."""
        in_engine = {entry.digest: entry for entry in entries}
        residents = []
        for adapter in self._policy:
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

    def bytes_fetched(self, order: scheduler_pb2.EnsureAdapter) -> int:
        """How many bytes of a remote adapter have arrived, while its fetch runs."""
        number = self._policy.fetch_of(fetch_request_of(order))
        return self._fetches.bytes_of(number) if number is not None else 0

    # -------------------------------------------------------------------------------------------------------- orders

    async def ensure(self, order: scheduler_pb2.EnsureAdapter) -> AdapterLife:
        """Fetch and check an adapter, as the order says. If the order asks for more, the engine gets a command to load
        it."""
        started = time.monotonic()
        try:
            life = await self.order(
                fetch_request_of(order),
                order.adapter,
                check=order.stage >= common_pb2.ADAPTER_STAGE_CERTIFIED,
                load=order.stage >= common_pb2.ADAPTER_STAGE_HOST,
            )
        except MotetError:
            self._metrics.adapter_failures.inc()
            raise
        self._metrics.adapter_fetch_seconds.observe(time.monotonic() - started)
        return life

    async def order(
        self, fetch: FetchRequest, ref: common_pb2.AdapterRef, *, check: bool = True, load: bool = False
    ) -> AdapterLife:
        _check_digest(fetch.expected)
        number = self._number()
        future: asyncio.Future[AdapterLife] = asyncio.get_running_loop().create_future()
        self._orders[number] = future
        try:
            self._handle(events.Ordered(Order(number, ref, fetch, check, load)))
            return await future
        finally:
            if self._orders.pop(number, None) is not None:
                self._handle(events.OrderCancelled(number))

    def expect(self, digest: Digest, seconds: float) -> None:
        """A request for this adapter will come: start to load it, and keep it for `seconds`."""
        self._handle(events.Used(digest, self._clock() + seconds))

    def drop(self, digest: Digest, manifest: str = "") -> None:
        """Forget an adapter, now or when its last request ends. Its files stay until the disk cache needs the space.
        Without a digest: the manifest has gone, and what is left of its fetches goes."""
        self._handle(events.Dropped(digest) if digest else events.ManifestGone(manifest))

    def request_ended(self, digest: Digest) -> None:
        """A request has ended: forget its adapter if it was kept only for this request."""
        self._handle(events.RequestEnded(digest))

    def tick(self) -> None:
        """Now and then: see whether the folders are still there, and clear what is too old."""
        self._handle(events.Tick())
        self._spawn(self._quietly(self._fetches.clear_partial))

    # ------------------------------------------------------------------------------------------------- engine's events

    def on_loaded(self, event: AdapterLoaded) -> AdapterLife | None:
        self._metrics.adapter_loads.inc()
        self._metrics.adapter_load_seconds.observe(event.seconds)
        self._handle(events.EngineLoaded(event.digest))
        return self._policy.get(event.digest)

    def on_evicted(self, event: AdapterEvicted) -> None:
        self._metrics.adapter_evictions.inc()
        self._handle(events.EngineEvicted(event.digest))

    def on_failed(self, event: AdapterFailed) -> AdapterLife | None:
        self._metrics.adapter_failures.inc()
        self._handle(events.EngineFailed(event.digest))
        return self._policy.get(event.digest)

    @property
    def settled(self) -> bool:
        """Whether everything that was begun has ended."""
        return self._policy.settled and not self._tasks and not self._releases

    def close(self) -> None:
        """The leases are released soon after, and at the latest when the process ends."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        for life in self._policy:
            if life.held is not None:
                self._release(life.held)

    # ---------------------------------------------------------------------------------------------------------- inside

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers

    def _handle(self, event: events.Event) -> None:
        if self._closed:
            if isinstance(event, events.FolderHeld):
                self._release(event.held)
            return
        for effect in self._policy.handle(event, self._clock()):
            self._carry_out(effect)

    def _carry_out(self, effect: effects.Effect) -> None:
        match effect:
            case effects.Find():
                self._spawn(self._answer(effect.number, lambda: self._in_folders(partial(self._find, effect))))
            case effects.Fetch():
                self._spawn(self._answer(effect.number, lambda: self._fetch(effect)))
            case effects.Check():
                self._spawn(self._answer(effect.number, lambda: self._check_files(effect)))
            case effects.Evict():
                self._spawn(self._answer(effect.number, lambda: self._evict_folder(effect)))
            case effects.ListCache():
                self._spawn(self._answer(effect.number, lambda: self._in_folders(partial(self._list, effect))))
            case effects.Touch() | effects.Confirm():
                self._look_after(effect)
            case effects.Release():
                self._release(effect.held)
            case effects.ForgetPartial():
                self._spawn(self._quietly(lambda: self._fetches.forget_partial(effect.request)))
            case effects.Load():
                self._post(LoadAdapter(effect.digest, effect.layout))
            case effects.Unload():
                self._post(DropAdapter(effect.digest))
            case effects.AnswerOrder():
                life = self._policy.get(effect.digest)
                assert life is not None
                _answer(self._orders.pop(effect.order, None), life)
            case effects.FailOrder():
                _fail(self._orders.pop(effect.order, None), effect.failure)
            case effects.AnswerRequest():
                _answer(self._waiters.pop(effect.waiter, None), None)
            case effects.FailRequest():
                _fail(self._waiters.pop(effect.waiter, None), effect.failure)

    async def _answer(self, number: int, work: Callable[[], Awaitable[events.Answer]]) -> None:
        answer: events.Answer
        try:
            answer = await work()
        except Exception as error:  # whatever it is, somebody waits for an answer
            answer = events.Failed(number, _failure_of(error))
        self._handle(answer)

    async def _quietly(self, work: Callable[[], Awaitable[None]]) -> None:
        """For what nobody waits for."""
        try:
            await work()
        except CallHangs:
            pass  # whoever waits for the disk hears of it
        except Exception:
            log.exception("adapter_upkeep_failed")

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _release(self, held: Held) -> None:
        """In the thread for folders: a call that hangs there may hold up whoever closes a folder."""
        release = self._folders.submit(lease_of(held).release)
        self._releases.add(release)
        release.add_done_callback(self._releases.discard)

    async def _in_folders(self, call: Callable[[], events.Answer]) -> events.Answer:
        return await self._folders.run(call, discard=_discard)

    # ---------------------------------------------------------------------------------------------------------- effects

    async def _fetch(self, effect: effects.Fetch) -> events.Answer:
        held = await self._fetches.fetch(effect)
        if effect.before is None or effect.before.inode != held.inode:
            self.copies += 1
        return events.FolderHeld(effect.number, held)

    def _find(self, effect: effects.Find) -> events.Answer:
        held = self._cache.find(effect.digest, effect.request)
        if held is None:
            return events.NotThere(effect.number)
        return events.FolderHeld(effect.number, replace(held, certification=self._checks.earlier(held)))

    async def _check_files(self, effect: effects.Check) -> events.Answer:
        check = partial(self._checks.certify, effect.held)
        certification = await self._files.run(check, seconds=self._patience.seconds_for(effect.held.bytes))
        return events.Checked(effect.number, certification)

    async def _evict_folder(self, effect: effects.Evict) -> events.Answer:
        try:
            return await self._in_folders(partial(self._evict, effect))
        except CallHangs:
            # It may go at any later time, or stay for another process. For this runner it has gone now.
            if effect.held is not None:
                self._release(effect.held)
            return events.NotThere(effect.number)

    def _evict(self, effect: effects.Evict) -> events.Answer:
        if self._cache.evict(effect.digest, effect.held):
            log.info("adapter_evicted_from_disk", adapter=effect.digest)
            return events.NotThere(effect.number)
        if effect.held is not None:
            return events.FolderHeld(effect.number, effect.held)
        return events.Failed(effect.number, Failure.of(temporary(f"Another runner uses {effect.digest}.")))

    def _list(self, effect: effects.ListCache) -> events.Answer:
        return events.Listed(effect.number, self._cache.by_last_use())

    def _look_after(self, effect: effects.Touch | effects.Confirm) -> None:
        """At most one look of each kind waits for a folder: requests may come faster than a disk answers."""
        key = (type(effect), effect.held.inode)

        def look() -> bool:
            self._looks.discard(key)
            if isinstance(effect, effects.Touch):
                self._cache.touch(effect.held)
            return lease_of(effect.held).is_live()

        async def look_in_thread() -> None:
            try:
                lives = await self._folders.run(look)
            finally:
                self._looks.discard(key)
            if not lives:
                self._handle(events.FolderVanished(effect.held))

        if key not in self._looks:
            self._looks.add(key)
            self._spawn(self._quietly(look_in_thread))


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


def _answer(future: "asyncio.Future[Any] | None", value: object) -> None:
    if future is not None and not future.done():
        future.set_result(value)


def _fail(future: "asyncio.Future[Any] | None", failure: Failure) -> None:
    if future is not None and not future.done():
        future.set_exception(from_proto(failure.to_proto()))


def _failure_of(error: Exception) -> Failure:
    match error:
        case MotetError():
            return Failure.of(error)
        case CallHangs():
            return Failure.of(disk_hangs(error))
        case OSError():
            return Failure.of(
                temporary(
                    f"This runner's disk cache fails: {error.strerror or error} ({error.filename}). Motet tries again "
                    "automatically."
                )
            )
        case _:
            log.error("adapter_work_failed", exc_info=error)
            return Failure.of(Internal("The runner could not handle this adapter. See the runner's log."))


def _check_digest(text: str) -> None:
    try:
        if text:
            hex_of(Digest(text))
    except ValueError:
        raise AdapterFetchFailed(
            f"source.digest {text!r} is not a digest. Write `sha256:` and 64 hexadecimal digits."
        ) from None


def _discard(answer: events.Answer) -> None:
    if isinstance(answer, events.FolderHeld):
        lease_of(answer.held).release()
