"""The adapters that this runner knows, with their stages and the results of their checks. `AdapterFiles` has their
files.

`policy/` decides. This module carries out the policy's effects, and tells the policy their results as events. Errors of
disks and sources leave this module only as answers to orders or waiting requests.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from functools import partial
from itertools import count
from typing import Any, ParamSpec

import structlog

from motet.api.v1 import common_pb2, scheduler_pb2
from motet.digest import hex_of
from motet.domain import Digest
from motet.errors import AdapterFetchFailed, AdapterUnproved, MotetError, from_proto
from motet.runner_info import Failure
from motet.surroundings import Surroundings
from motet_runner.adapters.adapter_files import AdapterFiles, failure_of
from motet_runner.adapters.policy import effects
from motet_runner.adapters.policy.adapter_policy import AdapterPolicy
from motet_runner.adapters.policy.eviction import CacheLimits
from motet_runner.adapters.policy.failures import SourceFailures
from motet_runner.adapters.policy.life import AdapterLife
from motet_runner.adapters.policy.values import FetchRequest, Held, Order
from motet_runner.adapters.proof import Proof
from motet_runner.adapters.residency import Residency
from motet_runner.daemon_threads import CallHangs
from motet_runner.engine_messages import Command, DropAdapter, LoadAdapter, WriteSlab
from motet_runner.interface import (
    AdapterEvicted,
    AdapterFailed,
    AdapterLeftHost,
    AdapterLoaded,
    EngineAdapterReport,
    ProofEnded,
    SlabWritten,
)
from motet_runner.metrics import Metrics

log = structlog.get_logger(__name__)

P = ParamSpec("P")

NOBODY: frozenset[str] = frozenset()


class AdapterRegistry:
    """`users_of` counts the requests that use an adapter; `post` sends a command to the engine; `limits` are the disk
    cache's, and `time_scale` scales pauses after a failed fetch."""

    def __init__(
        self,
        files: AdapterFiles,
        *,
        limits: CacheLimits,
        users_of: Callable[[Digest], int],
        post: Callable[[Command], None],
        metrics: Metrics,
        surroundings: Surroundings,
        time_scale: float = 1.0,
        slab_bytes: Callable[[int], int] = lambda _: 0,
        proves_with: str | None = None,
        proves_linears: bool = True,
        build: str = "",
    ) -> None:
        """`slab_bytes`, `proves_with`, `proves_linears`, `build`: see `AdapterPolicy`"""
        self.files = files
        self._post = post
        self._metrics = metrics
        self._clock = clock = surroundings.clock
        failures = SourceFailures(
            spread=lambda: surroundings.random.uniform(0.8, 1.2),
            scale=time_scale,
        )
        self.policy = AdapterPolicy(
            limits=limits,
            users_of=users_of,
            clock=clock,
            failures=failures,
            slab_bytes=slab_bytes,
            proves_with=proves_with,
            proves_linears=proves_linears,
            build=build,
        )
        self._waiting: dict[int, asyncio.Future[AdapterLife]] = {}
        """Orders, and waiting requests, by number."""
        self._numbers = count(1)
        self._room: dict[int, asyncio.Future[None]] = {}
        """Running fetches that wait for room in the disk cache."""
        self._bounded = limits.bytes is not None
        self._on_device: set[Digest] = set()
        """The adapters that are on the device, by the last report and the events since."""
        self.residency = Residency(self.policy)
        self._looks: set[tuple[int, ...]] = set()
        self.tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    # ----------------------------------------------------------------------------------------------------- questions

    def get(self, digest: str) -> AdapterLife | None:
        return self.policy.get(Digest(digest))

    def name_of(self, digest: Digest) -> str:
        life = self.policy.get(digest)
        return life.name if life is not None else digest

    def awaited(self, digest: Digest) -> frozenset[str]:
        """The manifests whose orders to check this adapter will be answered"""
        life = self.policy.get(digest)
        return frozenset(one.manifest for one in life.orders.values() if not one.load) if life is not None else NOBODY

    def for_request(self, digest: Digest) -> AdapterLife | None:
        """The adapter, if requests may use it now. If the engine has not loaded it yet, its layout is sent to the
        engine."""
        life = self.policy.get(digest)
        if life is None or not life.ready:
            return None
        self._decide(self.policy.use, digest)
        return life

    async def wait_for(self, digest: Digest, manifest: str = "") -> None:
        """Wait until `for_request` returns this adapter. `manifest`: the adapter that the client has named, as
        namespace/name. Raises the error of its fetch, or of the check."""
        number, future = self._wait()
        try:
            self._decide(self.policy.request_waits, number, digest, manifest)
            await future
        finally:
            if self._waiting.pop(number, None) is not None:
                self._decide(self.policy.request_left, number, digest)

    def bytes_fetched(self, order: scheduler_pb2.EnsureAdapter) -> int:
        """How many bytes of a remote adapter have arrived, while its fetch runs."""
        number = self.policy.fetch_of(fetch_request_of(order))
        return self.files.bytes_of(number) if number is not None else 0

    # -------------------------------------------------------------------------------------------------------- orders

    async def ensure(self, order: scheduler_pb2.EnsureAdapter) -> AdapterLife:
        """Fetch and check an adapter, as the order says. If the order also asks for loading, the engine gets a command
        for it."""
        started = self._clock()
        try:
            life = await self.order(
                fetch_request_of(order),
                order.adapter,
                check=order.stage >= common_pb2.ADAPTER_STAGE_CERTIFIED,
                load=order.stage >= common_pb2.ADAPTER_STAGE_HOST,
                requires_record=order.requires_record,
                refuses_mismatch=order.refuses_mismatch,
                proved_builds=tuple(order.proved_builds),
                cached_only=order.cached_only,
            )
        except MotetError:
            self._metrics.adapter_failures.inc()
            raise
        self._metrics.adapter_fetch_seconds.observe(self._clock() - started)
        return life

    async def order(
        self,
        fetch: FetchRequest,
        ref: common_pb2.AdapterRef,
        *,
        check: bool = True,
        load: bool = False,
        requires_record: bool = False,
        refuses_mismatch: bool = False,
        proved_builds: tuple[str, ...] = (),
        cached_only: bool = False,
    ) -> AdapterLife:
        _check_digest(fetch.expected)
        number, future = self._wait()
        try:
            order = Order(
                number, ref, fetch, check, load, requires_record, refuses_mismatch, proved_builds, cached_only
            )
            self._decide(self.policy.order, order)
            return await future
        finally:
            if self._waiting.pop(number, None) is not None:
                self._decide(self.policy.cancel_order, number)

    def expect(self, digest: Digest, seconds: float) -> None:
        """A request for this adapter will come: start to load it, and keep it for `seconds`."""
        self._decide(self.policy.use, digest, self._clock() + seconds)

    def drop(self, digest: Digest, manifest: str = "") -> None:
        """Forget an adapter, now or when its last request ends. Its files stay until the disk cache needs the space.
        `manifest`: it has another revision now. Without a digest: the manifest is gone, so its unfinished fetch is
        removed."""
        if digest:
            self._decide(self.policy.drop, digest, manifest)
        else:
            self._decide(self.policy.manifest_gone, manifest)

    def pin(self, digests: Iterable[str]) -> None:
        """These adapters, and no others, leave the device and the disk cache last."""
        self._decide(self.policy.pin, frozenset(map(Digest, digests)))

    def request_ended(self, digest: Digest) -> None:
        """A request has ended: forget its adapter if it was kept only for this request."""
        self._decide(self.policy.request_ended, digest)

    def tick(self) -> None:
        """Called at intervals: checks that the folders still exist, and removes old partial fetches."""
        self._decide(self.policy.tick)
        self._spawn(self._quietly(self.files.clear_partial))

    # ------------------------------------------------------------------------------------------------- engine's events

    def on_report(self, entries: list[EngineAdapterReport]) -> None:
        """A new report. It may list an adapter on the device that was forgotten here, and is known again since."""
        on_device = {entry.digest for entry in entries if entry.on_device}
        for digest in self._on_device - on_device:
            self._decide(self.policy.engine_lists, digest, on_device=False)
        for digest in on_device:
            self._decide(self.policy.engine_lists, digest, on_device=True)
        self._on_device = on_device

    def on_kernels(self, serving: str) -> None:
        """What computes adapters in the engine now"""
        self._decide(self.policy.kernels_serve, serving)

    def on_loaded(self, event: AdapterLoaded) -> AdapterLife | None:
        self._metrics.adapter_loads.inc()
        self._metrics.adapter_load_seconds.observe(event.seconds)
        self._metrics.adapter_host_loads.inc(event.from_host)
        self._on_device.add(event.digest)
        self._decide(self.policy.engine_keeps, event.digest, in_host=event.in_host)
        self._decide(self.policy.engine_has, event.digest, on_device=True)
        if event.lacks_slab:
            self._decide(self.policy.slab_missing, event.digest)
        return self.policy.get(event.digest)

    def on_proof_ended(self, event: ProofEnded) -> AdapterLife | None:
        """Orders for the adapter are answered. A proof is kept for the next start; none is, if the results are
        wrong. → the adapter; None if the order does not count any more"""
        life, found = self.policy.get(event.digest), event.found
        if not self.policy.proofs.awaits(event.digest, event.number):
            return None
        if isinstance(found, Proof):
            self._decide(self.policy.engine_proved, event.digest, event.number, found)
            if life is not None and (held := life.held) is not None:
                self._spawn(self._quietly(lambda: self.files.keep_proof(held, found)))
            return life
        if isinstance(found, AdapterUnproved) and life is not None and (wrong := life.held) is not None:
            self._spawn(self._quietly(lambda: self.files.forget_proofs(wrong)))
        self._metrics.adapter_failures.inc()
        self._decide(self.policy.engine_proved_not, event.digest, event.number, Failure.of(found))
        return life

    def on_slab(self, event: SlabWritten) -> None:
        self._decide(self.policy.slab_written, event.number, event.bytes)

    def on_evicted(self, event: AdapterEvicted) -> AdapterLife | None:
        self._metrics.adapter_evictions.inc()
        self._decide(self.policy.engine_has, event.digest, on_device=False)
        return self.policy.get(event.digest)

    def on_left_host(self, event: AdapterLeftHost) -> None:
        self._decide(self.policy.engine_keeps, event.digest, in_host=False)

    def on_failed(self, event: AdapterFailed) -> AdapterLife | None:
        self._metrics.adapter_failures.inc()
        self._decide(self.policy.engine_failed, event.digest)
        return self.policy.get(event.digest)

    def template_lost(self, digest: Digest) -> None:
        """The chat template of this adapter is not on the disk as it was."""
        self._decide(self.policy.template_lost, digest)

    def close(self) -> None:
        """Close the registry. Leases are released soon after, and at the latest when the process ends."""
        self._closed = True
        for task in self.tasks:
            task.cancel()
        for life in self.policy:
            if life.held is not None:
                self.files.release(life.held)

    # ---------------------------------------------------------------------------------------------------------- inside

    def _wait(self) -> tuple[int, "asyncio.Future[AdapterLife]"]:
        number = next(self._numbers)
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        return number, future

    def _decide(self, happened: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Tell the policy an event, and carry out the effects."""
        if not self._closed:
            happened(*args, **kwargs)
            for effect in self.policy.take_effects():
                self._carry_out(effect)

    def _carry_out(self, effect: effects.Effect) -> None:
        match effect:
            case effects.Find():
                self._spawn(self._answer(effect.number, lambda: self.files.find(effect)))
            case effects.Fetch():
                room = partial(self._make_room, effect.number) if self._bounded else None
                self._spawn(self._answer(effect.number, lambda: self.files.fetch(effect, room)))
            case effects.Check():
                self._spawn(self._answer(effect.number, lambda: self.files.check(effect.held)))
            case effects.Evict():
                self._spawn(self._answer(effect.number, lambda: self.files.evict(effect)))
            case effects.ListCache():
                self._spawn(self._answer(effect.number, lambda: self.files.contents(effect)))
            case effects.Confirm():
                self._confirm(effect)
            case effects.ConfirmAll():
                self._confirm_all(effect)
            case effects.Release():
                self.files.release(effect.held)
            case effects.ForgetPartial():
                self._spawn(self._quietly(lambda: self.files.forget_partial(effect.request)))
            case effects.GrantRoom():
                if (asked := self._room.get(effect.fetch)) is not None and not asked.done():
                    asked.set_result(None)
            case effects.WishRoom():
                self._spawn(self._quietly(lambda: self.files.wish(effect.bytes)))
            case effects.RefuseRoom():
                if (asked := self._room.get(effect.fetch)) is not None and not asked.done():
                    asked.set_exception(from_proto(effect.failure.to_proto()))
            case LoadAdapter() | DropAdapter() | WriteSlab():
                self._post(effect)
            case effects.Succeed():
                life = self.policy.get(effect.digest)
                assert life is not None
                if (future := self._waiting.pop(effect.who, None)) is not None and not future.done():
                    future.set_result(life)
            case effects.Fail():
                if (future := self._waiting.pop(effect.who, None)) is not None and not future.done():
                    future.set_exception(from_proto(effect.failure.to_proto()))

    async def _make_room(self, fetch: int, size: int) -> None:
        """Wait until a running fetch may write `size` bytes in all. Raises the error with which it ends otherwise."""
        future = self._room[fetch] = asyncio.get_running_loop().create_future()
        try:
            self._decide(self.policy.needs, fetch, size)
            await future
        finally:
            del self._room[fetch]

    async def _answer(self, number: int, work: Callable[[], Awaitable[effects.Answer]]) -> None:
        answer: effects.Answer
        try:
            answer = await work()
        except Exception as error:  # any error: the effect needs an answer
            answer = failure_of(error)
        if self._closed and isinstance(answer, Held):
            self.files.release(answer)
        self._decide(self.policy.answered, number, answer)

    async def _quietly(self, work: Callable[[], Awaitable[None]]) -> None:
        """For work without an answer."""
        try:
            await work()
        except CallHangs:
            pass  # the calls with an answer report a hanging disk
        except Exception:
            log.exception("adapter_upkeep_failed")

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def _confirm(self, effect: effects.Confirm) -> None:
        """Requests may come faster than the disk answers: at most one look waits per folder."""
        inode = effect.held.inode

        async def look() -> None:
            try:
                lives = await self.files.look(effect.held, begins=lambda: self._looks.discard(inode))
            finally:
                self._looks.discard(inode)
            if not lives:
                self._decide(self.policy.vanished, effect.held)

        if inode not in self._looks:
            self._looks.add(inode)
            self._spawn(self._quietly(look))

    def _confirm_all(self, effect: effects.ConfirmAll) -> None:
        async def look() -> None:
            vanished: list[Held] = []
            wished = False
            try:
                vanished = await self.files.vanished(effect.held)
                wished = self._bounded and await self.files.wished()
            finally:
                self._decide(partial(self.policy.confirmed, wished=wished), vanished)

        self._spawn(self._quietly(look))


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


def _check_digest(text: str) -> None:
    try:
        if text:
            hex_of(Digest(text))
    except ValueError:
        raise AdapterFetchFailed(
            f"source.digest {text!r} is not a digest. Write `sha256:` and 64 hexadecimal digits."
        ) from None
