"""The runner's streams to the scheduler, which places requests, and to the supervisor, which watches memory.

Whenever a stream opens, the runner sends everything again. Orders that are out of date (term, epoch, promise) are
ignored, here or in the engine. Nothing here blocks.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import structlog

from motet.api.v1 import common_pb2, scheduler_pb2, scheduler_pb2_grpc, supervisor_pb2, supervisor_pb2_grpc
from motet.clock import monotonic
from motet.domain import BASE, Digest, ParkMethod, RequestId
from motet.errors import Internal, MotetError
from motet.prefix_hints import MAX_CACHED_HINTS
from motet.promises import PromiseRule
from motet.rpc import Link
from motet_runner.accepted_requests import AcceptedRequests, has_work
from motet_runner.adapters.policy.life import AdapterLife
from motet_runner.adapters.registry import AdapterRegistry
from motet_runner.engine_loop import FINISHES
from motet_runner.engine_messages import Command, Extend, Park, Resume, SequenceEnded, SetOvercommit, SetSupervised
from motet_runner.interface import AdapterFailed, EngineInfo, EngineReport, OverflowAhead, ParkedNow, ResumedNow

log = structlog.get_logger(__name__)

PARK_METHOD_TO_PROTO = {
    ParkMethod.SWAP: common_pb2.PARK_METHOD_SWAP,
    ParkMethod.RECOMPUTE: common_pb2.PARK_METHOD_RECOMPUTE,
}
_ORDERS_WITH_TERM = (supervisor_pb2.Extend, supervisor_pb2.Park, supervisor_pb2.Resume)
PARK_METHOD_FROM_PROTO = {proto: method for method, proto in PARK_METHOD_TO_PROTO.items()}

SELF_PROTECTION = "Until the supervisor answers, this runner decides which sequences to park when its memory runs out."

EXPECT_SECONDS = 2.0
"""How long an announced request protects its adapter from eviction. Multiplied by the time scale."""

HEARTBEAT_SECONDS = 0.4
"""Seconds between two heartbeats to the supervisor. Multiplied by the time scale."""

PROGRESS_SECONDS = 2.0
"""Seconds between two messages about an adapter that is still being fetched. Multiplied by the time scale."""


@dataclass(frozen=True, slots=True)
class RunnerFacts:
    """What does not change while a runner's process runs."""

    identity: common_pb2.RunnerIdentity
    address: str
    info: EngineInfo
    base_digest: Digest
    asset_digest: Digest
    promise_rule: PromiseRule

    @property
    def capacity(self) -> common_pb2.Capacity:
        return common_pb2.Capacity(
            pages=self.info.pages,
            page_tokens=self.info.page_tokens,
            page_bytes=self.info.page_bytes,
            max_sequences=self.info.max_sequences,
            max_model_length=self.info.max_model_length,
            adapter_slots=self.info.adapter_slots,
            max_lora_rank=self.info.max_lora_rank,
            host_bytes=self.info.host_bytes,
            promise_rule=self.promise_rule,
            adapter_rank_bytes=self.info.adapter_rank_bytes,
            adapter_rank_tile=self.info.adapter_rank_tile,
        )

    @property
    def base(self) -> scheduler_pb2.BaseModel:
        return scheduler_pb2.BaseModel(
            digest=self.base_digest,
            asset_digest=self.asset_digest,
            architecture=self.info.architecture,
            vocabulary=self.info.vocabulary,
            dtype=self.info.dtype,
            device=self.info.device,
        )


class RequestControl(Protocol):
    """What the scheduler's orders need from the part that serves gateways."""

    asked_to_drain: bool

    def cancel(self, request: str, epoch: int) -> None: ...


class SchedulerLink:
    def __init__(
        self,
        address: str,
        *,
        facts: RunnerFacts,
        accepted: AcceptedRequests,
        adapters: AdapterRegistry,
        requests: RequestControl,
        last_report: Callable[[], EngineReport | None],
        welcomed: Callable[[], None],
        time_scale: float,
    ) -> None:
        self._welcomed = welcomed
        self._drain_ends: float | None = None
        self._facts = facts
        self._accepted = accepted
        self._adapters = adapters
        self._requests = requests
        self._last_report = last_report
        self._scale = time_scale
        self._sequence = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self.link: Link[scheduler_pb2.AttachUp, scheduler_pb2.AttachDown] = Link(
            "scheduler",
            address,
            lambda channel: scheduler_pb2_grpc.SchedulerStub(channel).Attach(),
            greet=self._greet,
            receive=self._receive,
            failed=self._on_failure,
        )

    async def run(self) -> None:
        try:
            await self.link.run()
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def report(self, report: EngineReport) -> None:
        self._sequence += 1
        up = scheduler_pb2.AttachUp(
            report=scheduler_pb2.Report(
                sequence=self._sequence,
                pages=max(1, report.pages),  # 0 would mean the capacity
                pages_free=report.pages_free,
                pages_promised=report.pages_promised,
                running=report.running,
                waiting=report.waiting,
                parked=report.parked,
                pending_prefill_tokens=report.pending_prefill_tokens,
                step_seconds=report.step_seconds,
                steps=report.steps,
                resident=self._adapters.resident(report.adapters),
                live=self._accepted.runner_requests(report),
                cached_prefixes=report.cached_prefixes[:MAX_CACHED_HINTS],
                host_bytes_free=report.host_bytes_free,
                kernels=report.kernels.to_proto() if report.kernels is not None else None,
            )
        )
        self.link.send(up)

    def declined(self, declined: scheduler_pb2.RunnerDeclined) -> None:
        self.link.send(scheduler_pb2.AttachUp(declined=declined))

    def draining(self, seconds: float) -> None:
        """Tell this scheduler, and each later one, to place no more requests here."""
        self._drain_ends = monotonic() + seconds
        self.link.send(self._draining())

    def _draining(self) -> scheduler_pb2.AttachUp:
        assert self._drain_ends is not None
        left = max(0.0, self._drain_ends - monotonic())
        return scheduler_pb2.AttachUp(draining=scheduler_pb2.RunnerDraining(deadline_seconds=left))

    def adapter_loaded(self, adapter: AdapterLife) -> None:
        """The engine has loaded the adapter: report it under each name that it has."""
        for ref in adapter.refs.values():
            self._report_adapter(state_of(ref, adapter))

    def adapter_failed(self, adapter: AdapterLife, event: AdapterFailed) -> None:
        for ref in adapter.refs.values():
            state = state_of(ref, adapter)
            state.failure.CopyFrom(event.error.to_proto())
            self._report_adapter(state)

    def _greet(self) -> Iterable[scheduler_pb2.AttachUp]:
        report = self._last_report()
        kernels = self._facts.info.kernels if report is None else report.kernels
        yield scheduler_pb2.AttachUp(
            hello=scheduler_pb2.RunnerHello(
                identity=self._facts.identity,
                address=self._facts.address,
                capacity=self._facts.capacity,
                base=self._facts.base,
                resident=self._adapters.resident(report.adapters if report is not None else []),
                live=self._accepted.runner_requests(report),
                highest_term=self._accepted.highest_term,
                kernels=kernels.to_proto() if kernels is not None else None,
            )
        )
        if self._drain_ends is not None:
            yield self._draining()

    def _receive(self, down: scheduler_pb2.AttachDown) -> None:
        kind = down.WhichOneof("message")
        if kind is None or kind == "not_leader":
            return  # a message of a later version, or one that counts only as the first of a stream
        order = getattr(down, kind)
        if not self._accepted.accepts_term(order.term, greeting=kind == "welcome"):
            log.info("stale_order_ignored", order=kind, term=order.term, highest=self._accepted.highest_term)
            return
        match kind:
            case "welcome":
                # A scheduler that then sends no drain wants this runner to work. Earlier versions send no take_work.
                self._requests.asked_to_drain = False
                self._welcomed()
            case "expect":
                self._accepted.expect(order.request, order.epoch)
                if order.adapter_digest != BASE:
                    self._adapters.expect(Digest(order.adapter_digest), EXPECT_SECONDS * self._scale)
            case "ensure":
                self._spawn(self._ensure(order))
            case "drop":
                self._adapters.drop(Digest(order.digest), f"{order.adapter.namespace}/{order.adapter.name}")
            case "cancel":
                self._requests.cancel(order.request, order.epoch)
            case "drain":
                self._requests.asked_to_drain = True
            case "take_work":
                self._requests.asked_to_drain = False

    def _on_failure(self, down: scheduler_pb2.AttachDown, error: MotetError) -> None:
        if down.HasField("ensure"):
            self._refuse(down.ensure, error)

    async def _ensure(self, order: scheduler_pb2.EnsureAdapter) -> None:
        progress = asyncio.create_task(self._report_progress(order))
        try:
            self._answer(order, state_of(order.adapter, await self._adapters.ensure(order)))
        except MotetError as error:
            log.warning(
                "adapter_refused",
                adapter=f"{order.adapter.namespace}/{order.adapter.name}",
                code=error.code,
                reason=error.message,
            )
            self._refuse(order, error)
        except Exception:
            log.exception("adapter_check_failed", adapter=f"{order.adapter.namespace}/{order.adapter.name}")
            self._refuse(order, Internal("The runner could not check this adapter. See the runner's log."))
        finally:
            progress.cancel()

    def _refuse(self, order: scheduler_pb2.EnsureAdapter, error: MotetError) -> None:
        state = scheduler_pb2.AdapterState(ref=order.adapter, digest=order.expected_digest, failure=error.to_proto())
        self._answer(order, state)

    async def _report_progress(self, order: scheduler_pb2.EnsureAdapter) -> None:
        """Report a long download again and again, so that the scheduler does not order it from another runner, too."""
        while True:
            await asyncio.sleep(PROGRESS_SECONDS * self._scale)
            bytes_fetched = self._adapters.bytes_fetched(order)
            state = scheduler_pb2.AdapterState(ref=order.adapter, digest=order.expected_digest, bytes=bytes_fetched)
            self._answer(order, state)

    def _answer(self, order: scheduler_pb2.EnsureAdapter, state: scheduler_pb2.AdapterState) -> None:
        state.order, state.answers = order.order, order.stage
        self._report_adapter(state)

    def _report_adapter(self, state: scheduler_pb2.AdapterState) -> None:
        self.link.send(scheduler_pb2.AttachUp(adapter=state))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def state_of(ref: common_pb2.AdapterRef, adapter: AdapterLife) -> scheduler_pb2.AdapterState:
    return scheduler_pb2.AdapterState(
        ref=ref,
        digest=adapter.digest,
        stage=adapter.stage,
        progress=1.0,
        certificate=adapter.certificate,
        bytes=adapter.bytes,
    )


class SupervisorLink:
    """The stream to the supervisor. While it is down, or an overflow stays unanswered, the engine decides alone."""

    def __init__(
        self,
        address: str,
        *,
        facts: RunnerFacts,
        accepted: AcceptedRequests,
        last_report: Callable[[], EngineReport | None],
        post: Callable[[Command], None],
        answer_seconds: float,
    ) -> None:
        self._facts = facts
        self._accepted = accepted
        self._last_report = last_report
        self._post = post
        self._answer_seconds = answer_seconds
        self._sequence = 0
        self._supervised = False
        self._unanswered: dict[RequestId, asyncio.TimerHandle] = {}
        self.link: Link[supervisor_pb2.WatchUp, supervisor_pb2.WatchDown] = Link(
            "supervisor",
            address,
            lambda channel: supervisor_pb2_grpc.SupervisorStub(channel).Watch(),
            greet=self._greet,
            receive=self._receive,
            closed=self._on_closed,
        )

    async def run(self) -> None:
        try:
            await self.link.run()
        finally:
            self._forget_overflows()

    def report(self, report: EngineReport) -> None:
        self._sequence += 1
        memory = supervisor_pb2.MemoryReport(
            sequence=self._sequence,
            pages=max(1, report.pages),  # 0 would mean the capacity
            pages_free=report.pages_free,
            pages_promised=report.pages_promised,
            host_bytes_free=report.host_bytes_free,
            steps=report.steps,
            work_pending=has_work(report, self._accepted),
            prefill_seconds_per_token=report.prefill_seconds_per_token,
            swap_seconds_per_page=report.swap_seconds_per_page,
            live=self._accepted.runner_requests(report),
        )
        self.link.send(supervisor_pb2.WatchUp(memory=memory))

    def heartbeat(self) -> None:
        """Say that this process lives. A report may wait for an iteration, and the next one for its turn."""
        self.link.send(supervisor_pb2.WatchUp(heartbeat=supervisor_pb2.Heartbeat()))

    def overflow(self, event: OverflowAhead) -> None:
        report = self._last_report()
        entry = next(
            (entry for entry in self._accepted.runner_requests(report) if entry.request == event.request), None
        )
        if entry is None or entry.epoch != event.epoch:
            return
        if entry.charged_pages:  # what the promise has grown by since the report is charged, too
            entry.charged_pages += max(0, event.promise - entry.promise.pages)
        entry.promise.pages = event.promise
        free = report.pages_free if report is not None else 0
        sent = self.link.send(supervisor_pb2.WatchUp(overflow=supervisor_pb2.Overflow(request=entry, pages_free=free)))
        if sent:
            self._on_answered(event.request)
            loop = asyncio.get_running_loop()
            self._unanswered[event.request] = loop.call_later(self._answer_seconds, self._on_unanswered, event.request)

    def parked(self, event: ParkedNow) -> None:
        self._on_answered(event.request)
        parked = supervisor_pb2.Parked(
            request=event.request,
            epoch=event.epoch,
            promise=common_pb2.Promise(pages=event.wanted),
            method=PARK_METHOD_TO_PROTO[event.method],
            by_itself=event.by_itself,
        )
        self.link.send(supervisor_pb2.WatchUp(parked=parked))

    def resumed(self, event: ResumedNow) -> None:
        resumed = supervisor_pb2.Resumed(
            request=event.request,
            epoch=event.epoch,
            promise=common_pb2.Promise(pages=event.promise),
            method=PARK_METHOD_TO_PROTO[event.method],
        )
        self.link.send(supervisor_pb2.WatchUp(resumed=resumed))

    def ended(self, ended: SequenceEnded) -> None:
        self._on_answered(ended.request)
        message = supervisor_pb2.Ended(
            request=ended.request,
            epoch=ended.epoch,
            output_tokens=ended.output_tokens,
            reason=FINISHES[ended.finish],
        )
        self.link.send(supervisor_pb2.WatchUp(ended=message))

    def _greet(self) -> Iterable[supervisor_pb2.WatchUp]:
        yield supervisor_pb2.WatchUp(
            hello=supervisor_pb2.WatchHello(
                identity=self._facts.identity,
                capacity=self._facts.capacity,
                live=self._accepted.runner_requests(self._last_report()),
                heartbeats=True,
            )
        )

    def _receive(self, down: supervisor_pb2.WatchDown) -> None:
        kind = down.WhichOneof("message")
        order = getattr(down, kind) if kind is not None else None
        # Only a scheduler's message raises the term. The term in a supervisor's order is only compared.
        if isinstance(order, _ORDERS_WITH_TERM) and self._accepted.is_stale_term(order.term):
            log.info("stale_order_ignored", order=kind, term=order.term, highest=self._accepted.highest_term)
            self._set_supervised(False)  # it follows a past leader: do not wait for its orders
            return
        match kind:
            case "welcome":
                self._set_supervised(True)
                return
            case "extend":
                extend = down.extend
                self._post(Extend(RequestId(extend.request), extend.epoch, extend.promise.pages, extend.extended.pages))
                self._on_answered(extend.request)
            case "park":
                park = down.park
                method = PARK_METHOD_FROM_PROTO.get(park.method, ParkMethod.RECOMPUTE)
                self._post(Park(RequestId(park.request), park.epoch, park.promise.pages, park.doubled.pages, method))
                # The supervisor may park one sequence so that another can continue. So a park answers all overflows.
                self._forget_overflows()
            case "resume":
                resume = down.resume
                self._post(Resume(RequestId(resume.request), resume.epoch, resume.promise.pages))
            case "overcommit":
                # Kept while the supervisor is away: the scheduler keeps it, too, so that both have the same limit.
                self._post(SetOvercommit(down.overcommit.factor))
            case "compact":
                return  # pages need not be contiguous
            case _:
                return  # a message of a later version
        self._set_supervised(True)

    def _on_closed(self, why: str) -> None:
        log.info("supervisor_disconnected", reason=why, hint=SELF_PROTECTION)
        self._forget_overflows()
        self._set_supervised(False)

    def _on_unanswered(self, request: RequestId) -> None:
        del self._unanswered[request]
        log.warning("supervisor_unresponsive", request=request, hint=SELF_PROTECTION)
        self._set_supervised(False)

    def _on_answered(self, request: str) -> None:
        if (timer := self._unanswered.pop(RequestId(request), None)) is not None:
            timer.cancel()

    def _forget_overflows(self) -> None:
        for timer in self._unanswered.values():
            timer.cancel()
        self._unanswered.clear()

    def _set_supervised(self, supervised: bool) -> None:
        if self._supervised != supervised:
            self._supervised = supervised
            self._post(SetSupervised(supervised))
