"""The runner's stream to the supervisor, which watches memory.

Whenever the stream opens, the runner sends everything again. Orders that are out of date (term, epoch, promise) are
ignored, here or in the engine. Nothing here blocks.
"""

import asyncio
from collections.abc import Callable, Iterable

import structlog

from motet.api.v1 import common_pb2, supervisor_pb2
from motet.domain import ParkMethod, RequestId
from motet.rpc import Link
from motet.transport import Network
from motet.transport.methods import WATCH
from motet_runner.accepted_requests import AcceptedRequests
from motet_runner.engine_loop import FINISHES
from motet_runner.engine_messages import Command, Extend, Park, Resume, SequenceEnded, SetOvercommit, SetSupervised
from motet_runner.interface import EngineReport, OrderRefused, OverflowAhead, ParkedNow, ResumedNow
from motet_runner.runner_facts import RunnerFacts

log = structlog.get_logger(__name__)

PARK_METHOD_TO_PROTO = {one: common_pb2.ParkMethod.Value(f"PARK_METHOD_{one.name}") for one in ParkMethod}
_ORDERS_WITH_TERM = (supervisor_pb2.Extend, supervisor_pb2.Park, supervisor_pb2.Resume)
PARK_METHOD_FROM_PROTO = {proto: method for method, proto in PARK_METHOD_TO_PROTO.items()}

SELF_PROTECTION = "Until the supervisor answers, this runner decides which sequences to park when its memory runs out."

HEARTBEAT_SECONDS = 0.4
"""Seconds between two heartbeats to the supervisor. Multiplied by the time scale."""


class SupervisorLink:
    """While the stream is down, or an overflow stays unanswered, the engine decides alone."""

    def __init__(
        self,
        address: str,
        *,
        network: Network,
        facts: RunnerFacts,
        accepted: AcceptedRequests,
        last_report: Callable[[], EngineReport | None],
        has_scheduler: Callable[[], bool],
        post: Callable[[Command], None],
        answer_seconds: float,
    ) -> None:
        self._facts = facts
        self._accepted = accepted
        self._last_report = last_report
        self._has_scheduler = has_scheduler
        self._post = post
        self._answer_seconds = answer_seconds
        self._sequence = 0
        self._supervised = False
        self._overcommit = 0.0
        """The factor that it was told last"""
        self._unanswered: dict[RequestId, asyncio.TimerHandle] = {}
        self.link: Link[supervisor_pb2.WatchUp, supervisor_pb2.WatchDown] = Link(
            "supervisor",
            address,
            WATCH,
            network=network,
            greet=self._greet,
            receive=self._receive,
            closed=self._on_closed,
        )

    async def run(self) -> None:
        try:
            await self.link.run()
        finally:
            self._forget_overflows()

    def report(
        self, report: EngineReport, live: Iterable[common_pb2.RunnerRequest], *, work_pending: bool, again: bool
    ) -> None:
        """`live`: all accepted requests. `again`: the engine's report is the one before."""
        self._sequence += not again
        memory = supervisor_pb2.MemoryReport(
            sequence=self._sequence,
            pages=max(1, report.pages),  # 0 would mean the capacity
            pages_free=report.pages_free,
            pages_promised=report.pages_promised,
            host_bytes_free=report.host_bytes_free,
            steps=report.steps,
            load_parts=report.load_parts,
            work_pending=work_pending,
            prefill_seconds_per_token=report.prefill_seconds_per_token,
            swap_seconds_per_page=report.swap_seconds_per_page,
            live=live,
            has_scheduler=self._has_scheduler(),
        )
        self.link.send(supervisor_pb2.WatchUp(memory=memory))

    def heartbeat(self) -> None:
        """Report that this process lives. Memory reports may be late, because they wait for an iteration."""
        self.link.send(supervisor_pb2.WatchUp(heartbeat=supervisor_pb2.Heartbeat()))

    def overflow(self, event: OverflowAhead) -> None:
        report = self._last_report()
        reported = self._accepted.in_engine(report).get((event.request, event.epoch))
        charged = reported.charged_pages if reported is not None else None
        if reported is not None and charged is not None and not self._facts.info.by_forecast:
            # Pages added to the promise since the report are charged, too. A part of a forecast does not grow with it.
            charged = max(1, charged) + max(0, event.promise - reported.promise)
        entry = self._accepted.runner_request(event.entry._replace(charged_pages=charged))
        if entry is None:
            return
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
            promise=common_pb2.Promise(pages=event.wanted, number=event.number),
            method=PARK_METHOD_TO_PROTO[event.method],
            by_itself=event.by_itself,
        )
        self.link.send(supervisor_pb2.WatchUp(parked=parked))

    def resumed(self, event: ResumedNow) -> None:
        resumed = supervisor_pb2.Resumed(
            request=event.request,
            epoch=event.epoch,
            promise=common_pb2.Promise(pages=event.promise, number=event.number),
            method=PARK_METHOD_TO_PROTO[event.method],
        )
        self.link.send(supervisor_pb2.WatchUp(resumed=resumed))

    def refused(self, event: OrderRefused) -> None:
        refused = supervisor_pb2.OrderRefused(
            request=event.request, epoch=event.epoch, promise=common_pb2.Promise(number=event.number)
        )
        self.link.send(supervisor_pb2.WatchUp(refused=refused))

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
                overcommit=self._overcommit,
            )
        )

    def _receive(self, down: supervisor_pb2.WatchDown) -> None:
        kind = down.WhichOneof("message")
        order = getattr(down, kind) if kind is not None else None
        # Only a scheduler's message raises the term. The term in a supervisor's order is only compared.
        if isinstance(order, _ORDERS_WITH_TERM) and self._accepted.is_stale_term(order.term):
            log.info("stale_order_ignored", order=kind, term=order.term, highest=self._accepted.highest_term)
            self._set_supervised(False)  # the supervisor follows a past leader: do not wait for its orders
            return
        match kind:
            case "welcome":
                self._set_supervised(True)
                return
            case "extend":
                extend = down.extend
                of = extend.promise
                self._post(Extend(RequestId(extend.request), extend.epoch, of.pages, extend.extended.pages, of.number))
                self._on_answered(extend.request)
            case "park":
                park = down.park
                method = PARK_METHOD_FROM_PROTO.get(park.method, ParkMethod.RECOMPUTE)
                of, doubled = park.promise, park.doubled.pages
                self._post(Park(RequestId(park.request), park.epoch, of.pages, doubled, method, of.number))
                # The supervisor may park one sequence so that another can continue. So a park answers all overflows.
                self._forget_overflows()
            case "resume":
                resume = down.resume
                of = resume.promise
                self._post(Resume(RequestId(resume.request), resume.epoch, of.pages, of.number))
            case "overcommit":
                # Runner and scheduler both keep the factor while the supervisor is down, so that both have the same
                # limit.
                self._overcommit = down.overcommit.factor
                self._post(SetOvercommit(self._overcommit))
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
