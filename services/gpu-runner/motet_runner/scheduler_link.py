"""The runner's stream to the scheduler, which places requests.

Whenever the stream opens, the runner sends everything again. Orders that are out of date (term, epoch) are ignored,
here or in the engine. Nothing here blocks.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from typing import Any

import structlog

from motet.api.v1 import common_pb2, scheduler_pb2
from motet.clock import Clock
from motet.domain import BASE, Digest
from motet.errors import Internal, MotetError
from motet.prefix_hints import MAX_CACHED_HINTS
from motet.rpc import EndStream, Link
from motet.runner_info import MAX_LISTED_AT_ONCE
from motet.transport import Network
from motet.transport.methods import ATTACH
from motet_runner.accepted_requests import AcceptedRequests
from motet_runner.adapters.policy.life import AdapterLife
from motet_runner.adapters.registry import NOBODY, AdapterRegistry
from motet_runner.engine_messages import SequenceEnded
from motet_runner.generate_service import GenerateService
from motet_runner.interface import EngineReport
from motet_runner.runner_facts import RunnerFacts

log = structlog.get_logger(__name__)

EXPECT_SECONDS = 2.0
"""How long an announced request protects its adapter from eviction. Multiplied by the time scale."""

PROGRESS_SECONDS = 2.0
"""Seconds between two messages about an adapter that is still being fetched. Multiplied by the time scale."""


class SchedulerLink:
    def __init__(
        self,
        address: str,
        *,
        network: Network,
        facts: RunnerFacts,
        accepted: AcceptedRequests,
        adapters: AdapterRegistry,
        requests: GenerateService,
        last_report: Callable[[], EngineReport | None],
        clock: Clock,
        time_scale: float,
    ) -> None:
        self.welcomed = False
        """True once a scheduler has accepted this runner"""
        self.attached = False
        """Whether the scheduler of the present stream has accepted it"""
        self._takes_residency: bool | None = None
        """Whether this scheduler takes changes of what the runner holds. None: its welcome has not come yet, which says
        so."""
        self._takes_listed = self._lists_in_parts = False
        """Whether the last scheduler could hear in parts what runs, and whether this one is told so."""
        self._drain_ends: float | None = None
        self._facts = facts
        self._accepted = accepted
        self._adapters = adapters
        self._requests = requests
        self._last_report = last_report
        self._clock = clock
        self._scale = time_scale
        self._sequence = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self.link: Link[scheduler_pb2.AttachUp, scheduler_pb2.AttachDown] = Link(
            "scheduler",
            address,
            ATTACH,
            network=network,
            greet=self._greet,
            receive=self._receive,
            failed=self._on_failure,
            closed=self._on_closed,
        )

    async def run(self) -> None:
        try:
            await self.link.run()
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def report(self, report: EngineReport, live: Iterable[common_pb2.RunnerRequest]) -> None:
        """`live`: all accepted requests."""
        self._sequence += 1
        first, *others = self._in_parts(live)
        residency = self._adapters.residency
        self._tell_residency()
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
                prefill_seconds_per_token=report.prefill_seconds_per_token,
                steps=report.steps,
                # A list replaces what the hello has told. So the changes begin anew with each one.
                resident=residency.tell_all() if self._takes_residency is False else (),
                residency_told=self._takes_residency is not False,
                resident_count=residency.count,
                live=first,
                live_follows=bool(others),
                cached_prefixes=report.cached_prefixes[:MAX_CACHED_HINTS],
                host_bytes_free=report.host_bytes_free,
                kernels=report.kernels.to_proto() if report.kernels is not None else None,
                batch_cap=report.batch_cap.to_proto() if report.batch_cap is not None else None,
                fixed_seconds=report.fixed_seconds,
                sequence_seconds=report.sequence_seconds,
            )
        )
        self.link.send(up)
        for part in _listed(others):
            self.link.send(part)

    def _in_parts(self, live: Iterable[common_pb2.RunnerRequest]) -> list[list[common_pb2.RunnerRequest]]:
        """The first part may be empty."""
        known = list(live)
        size = MAX_LISTED_AT_ONCE if self._takes_listed else max(1, len(known))
        return [known[begin : begin + size] for begin in range(0, max(1, len(known)), size)]

    def _tell_residency(self) -> None:
        if self._takes_residency:
            for changed in self._adapters.residency.changes():
                self.link.send(scheduler_pb2.AttachUp(residency=changed))

    def declined(self, declined: scheduler_pb2.RunnerDeclined) -> None:
        self.link.send(scheduler_pb2.AttachUp(declined=declined))

    def ended(self, sequences: Iterable[SequenceEnded]) -> None:
        """Tell the scheduler that the pages of these are free: it places others before their gateways have read all
        tokens."""
        ended = [scheduler_pb2.EndedSequence(request=one.request, epoch=one.epoch) for one in sequences]
        if ended:
            self.link.send(scheduler_pb2.AttachUp(ended=scheduler_pb2.SequencesEnded(sequences=ended)))

    def draining(self, seconds: float) -> None:
        """Tell this scheduler, and each later one, to place no more requests here."""
        self._drain_ends = self._clock() + seconds
        self.link.send(self._draining())

    def _draining(self) -> scheduler_pb2.AttachUp:
        assert self._drain_ends is not None
        left = max(0.0, self._drain_ends - self._clock())
        return scheduler_pb2.AttachUp(draining=scheduler_pb2.RunnerDraining(deadline_seconds=left))

    def adapter_changed(
        self, adapter: AdapterLife, error: MotetError | None = None, *, awaited: frozenset[str] = NOBODY
    ) -> bool:
        """The engine has loaded or proved the adapter, or cannot: report that under each of the adapter's names →
        whether the scheduler learns where it is now. Not if it has no name any more, or no checked files. `awaited`:
        the names under which an order to check it is answered, which tells the same."""
        for ref in adapter.refs:
            if f"{ref.namespace}/{ref.name}" not in awaited:
                state = state_of(ref, adapter)
                if error is not None:
                    state.failure.CopyFrom(error.to_proto())
                self.report_adapter(state)
        return self._learns_place(adapter)

    def adapter_left(self, adapter: AdapterLife) -> bool:
        """The same, when the engine has evicted it. What the checks have found was told when it was loaded."""
        for ref in adapter.refs:
            self.report_adapter(scheduler_pb2.AdapterState(ref=ref, digest=adapter.digest, stage=adapter.stage))
        return self._learns_place(adapter)

    @staticmethod
    def _learns_place(adapter: AdapterLife) -> bool:
        return bool(adapter.generations) and (adapter.on_device or adapter.checked is not None)

    def _greet(self) -> Iterable[scheduler_pb2.AttachUp]:
        self._takes_residency = None
        report = self._last_report()
        kernels = self._facts.info.kernels if report is None else report.kernels
        first, *others = self._in_parts(self._accepted.runner_requests(report))
        self._lists_in_parts = bool(others)
        yield scheduler_pb2.AttachUp(
            hello=scheduler_pb2.RunnerHello(
                identity=self._facts.identity,
                address=self._facts.address,
                capacity=self._facts.capacity,
                base=self._facts.base,
                resident=self._adapters.residency.tell_first(),
                live=first,
                live_follows=self._lists_in_parts,
                highest_term=self._accepted.highest_term,
                kernels=kernels.to_proto() if kernels is not None else None,
                refused=[
                    scheduler_pb2.RefusedAdapter(digest=digest, failure=failure.to_proto())
                    for digest, failure in self._adapters.policy.refused.items()
                ],
                refused_is_all=self._adapters.policy.knows_all_refused,
            )
        )
        yield from _listed(others)
        if self._drain_ends is not None:
            yield self._draining()

    def _receive(self, down: scheduler_pb2.AttachDown) -> None:
        kind = down.WhichOneof("message")
        if kind is None or kind == "not_leader":
            return  # a message of a later version, or a message that counts only as the first of a stream
        order = getattr(down, kind)
        if not self._accepted.accepts_term(order.term, greeting=kind == "welcome"):
            log.info("stale_order_ignored", order=kind, term=order.term, highest=self._accepted.highest_term)
            return
        match kind:
            case "welcome":
                # A scheduler that then sends no drain wants this runner to work. Earlier versions send no take_work.
                self._requests.asked_to_drain = False
                self.welcomed = self.attached = True
                self._takes_residency, self._takes_listed = order.takes_residency, order.takes_listed
                if self._lists_in_parts and not self._takes_listed:
                    raise EndStream(Internal("this scheduler is of an earlier version and has not heard all requests"))
                self._tell_residency()
            case "expect":
                self._accepted.expect(order.request, order.epoch, order.gateway)
                if order.adapter_digest != BASE:
                    self._adapters.expect(Digest(order.adapter_digest), EXPECT_SECONDS * self._scale)
            case "ensure":
                self._spawn(self._ensure(order))
            case "pin":
                self._adapters.pin(order.digests)
            case "drop":
                ref = order.adapter
                self._adapters.drop(Digest(order.digest), f"{ref.namespace}/{ref.name}" if ref.name else "")
            case "cancel":
                self._accepted.cancel(order.request, order.epoch)
                self._requests.cancel(order.request, order.epoch)
            case "drain":
                self._requests.asked_to_drain = True
            case "take_work":
                self._requests.asked_to_drain = False

    def _on_closed(self, _why: str) -> None:
        self.attached = False

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
        """Report a long download repeatedly, so that the scheduler does not also order it from another runner."""
        while True:
            await asyncio.sleep(PROGRESS_SECONDS * self._scale)
            bytes_fetched = self._adapters.bytes_fetched(order)
            state = scheduler_pb2.AdapterState(ref=order.adapter, digest=order.expected_digest, bytes=bytes_fetched)
            self._answer(order, state)

    def _answer(self, order: scheduler_pb2.EnsureAdapter, state: scheduler_pb2.AdapterState) -> None:
        state.order, state.answers = order.order, order.stage
        self.report_adapter(state)

    def report_adapter(self, state: scheduler_pb2.AdapterState) -> None:
        self.link.send(scheduler_pb2.AttachUp(adapter=state))
        if state.stage:
            self._adapters.residency.tell_again(Digest(state.digest))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _listed(parts: Sequence[list[common_pb2.RunnerRequest]]) -> Iterator[scheduler_pb2.AttachUp]:
    for number, part in enumerate(parts, 1):
        yield scheduler_pb2.AttachUp(listed=scheduler_pb2.ListedRequests(requests=part, more=number < len(parts)))


def state_of(ref: common_pb2.AdapterRef, adapter: AdapterLife) -> scheduler_pb2.AdapterState:
    return scheduler_pb2.AdapterState(
        ref=ref,
        digest=adapter.digest,
        stage=adapter.stage,
        progress=1.0,
        certificate=adapter.certificate,
        bytes=adapter.bytes,
    )
