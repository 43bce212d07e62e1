"""The scheduler's three streams: messages in become events, effects become messages out. Decides nothing."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import structlog

from motet.api.v1 import scheduler_pb2, scheduler_pb2_grpc, supervisor_pb2, supervisor_pb2_grpc
from motet.api.v1.common_pb2 import Welcome
from motet.clock import Clock, monotonic
from motet.domain import InstanceName, RequestId
from motet.errors import Internal, InvalidRequest, NotFound, Overloaded
from motet.leadership import Leadership
from motet.rpc import Link, Session, Sessions
from motet.runner_info import Failure, RunnerIdentity
from motet.terms import check_term
from motet_scheduler import conversion, event_failures
from motet_scheduler.catalog_file import CatalogFile
from motet_scheduler.event_failures import EventFailures
from motet_scheduler.metrics import Metrics
from motet_scheduler.policy import effects, events
from motet_scheduler.policy.scheduler import Scheduler
from motet_scheduler.policy.values import SchedulerConfig
from motet_scheduler.welcomed_peers import WelcomedPeers

log = structlog.get_logger(__name__)

SERVICE = "motet.api.v1.Scheduler"

FAILED = Internal("the scheduler failed on this request again and again; it is not placed")
HELLO_REJECTED = Overloaded("the scheduler failed on this hello again and again; it is heard again in a minute")
RESTARTING = Overloaded("the scheduler begins anew; connect again")


class DecisionFailed(Exception):
    """The state is not to be trusted any more: begin with an empty one."""


class SchedulerService(scheduler_pb2_grpc.SchedulerServicer):
    def __init__(
        self,
        policy: SchedulerConfig,
        *,
        leadership: Leadership,
        metrics: Metrics,
        supervisor_address: str,
        catalog_file: CatalogFile,
        known_failures: EventFailures | None = None,
        clock: Clock = monotonic,
    ) -> None:
        self.scheduler = Scheduler(policy, now=clock(), remembered=catalog_file.read())
        self._leadership = leadership
        self._metrics = metrics
        self._file = catalog_file
        self._file_stale = False
        self._clock = clock
        self._failures = known_failures or EventFailures()
        self._failed = asyncio.Event()
        self._name = f"scheduler-{leadership.term}"
        self._catalog_revision = 0
        self._greeted = WelcomedPeers()
        self._gateways: Sessions[str, scheduler_pb2.ServeUp, scheduler_pb2.ServeDown] = Sessions(
            hello=lambda up: up.hello.gateway if up.HasField("hello") else None,
            heard=self._on_gateway_message,
            closed=self._on_gateway_disconnected,
        )
        self._runners: Sessions[RunnerIdentity, scheduler_pb2.AttachUp, scheduler_pb2.AttachDown] = Sessions(
            hello=lambda up: RunnerIdentity.from_proto(up.hello.identity) if up.HasField("hello") else None,
            key=lambda identity: identity.instance,
            heard=self._on_runner_message,
            closed=self._on_runner_disconnected,
        )
        self._operators: Sessions[int, scheduler_pb2.SyncUp, scheduler_pb2.SyncDown] = Sessions(
            opened=self._on_operator_connected,
            heard=self._on_operator_message,
            closed=lambda _: log.info("operator gone"),
        )
        self._operator_numbers = itertools.count(1)
        self._operator_term = 0
        self.supervisor: Link[supervisor_pb2.AdviseUp, supervisor_pb2.AdviseDown] = Link(
            "supervisor",
            supervisor_address,
            lambda channel: supervisor_pb2_grpc.SupervisorStub(channel).Advise(),
            greet=lambda: [supervisor_pb2.AdviseUp(hello=supervisor_pb2.AdviseHello(term=self.term))],
            receive=self._on_supervisor_message,
            opened=lambda: self._handle(events.SupervisorConnected()),
            closed=lambda _why: self._handle(events.SupervisorDisconnected()),
        )
        self._told_term = self.term
        metrics.term.set(self.term)

    @property
    def term(self) -> int:
        return self._leadership.term

    def tick(self) -> None:
        self._handle(events.Tick())
        if self._failed.is_set():
            return
        if self._file_stale:
            self._file_stale = not self._file.write(self.scheduler.remembered())
        self._metrics.observe(self.scheduler)

    # ------------------------------------------------------------------------------------------------------- streams

    async def Serve(  # type: ignore[override]  # noqa: N802 - gRPC's name; a plain coroutine writes by itself
        self, request_iterator: AsyncIterator[scheduler_pb2.ServeUp], context: Any
    ) -> None:
        await self._gateways.serve(request_iterator, context)

    async def Attach(  # type: ignore[override]  # noqa: N802 - gRPC's name; a plain coroutine writes by itself
        self, request_iterator: AsyncIterator[scheduler_pb2.AttachUp], context: Any
    ) -> None:
        await self._runners.serve(request_iterator, context)

    async def Sync(  # type: ignore[override]  # noqa: N802 - gRPC's name; a plain coroutine writes by itself
        self, request_iterator: AsyncIterator[scheduler_pb2.SyncUp], context: Any
    ) -> None:
        # An operator says nothing until it has read its manifests, and has no hello.
        await self._operators.serve(request_iterator, context, peer=next(self._operator_numbers))

    async def Explain(  # noqa: N802
        self, request: scheduler_pb2.ExplainRequest, context: Any
    ) -> scheduler_pb2.ExplainResponse:
        entries = self.scheduler.timelines.of(RequestId(request.request))
        if entries is None:
            error = NotFound(f"request {request.request!r} is not among the last ones")
            await context.abort(error.mapping.grpc, error.message)
            raise error
        return scheduler_pb2.ExplainResponse(
            request=request.request,
            entries=[
                scheduler_pb2.TimelineEntry(seconds=seconds, event=event, detail=detail)
                for seconds, event, detail in entries
            ],
        )

    async def Succeed(  # noqa: N802
        self,
        request: scheduler_pb2.SucceedRequest,
        context: Any,
    ) -> scheduler_pb2.SucceedResponse:
        try:
            check_term(request.term, self.term, "a scheduler")
        except InvalidRequest as error:
            await context.abort(error.mapping.grpc, error.message)
        self._leadership.step_down_for(request.term)
        return scheduler_pb2.SucceedResponse()

    # -------------------------------------------------------------------------------------------------------- hearing

    def _on_gateway_message(self, session: Session[str, scheduler_pb2.ServeDown], up: scheduler_pb2.ServeUp) -> None:
        self._check_not_failed()
        gateway = session.peer
        if up.HasField("hello"):
            if not self._raise_term_above(f"gateway {gateway}", up.hello.highest_term):
                session.send(scheduler_pb2.ServeDown(welcome=self._welcome()))
            log.info("gateway connected", gateway=gateway, live=len(up.hello.live))
            self._handle(conversion.gateway_connected(up.hello))
        elif (event := conversion.serve_event(gateway, up)) is not None:
            self._handle(event)

    def _on_gateway_disconnected(self, session: Session[str, scheduler_pb2.ServeDown]) -> None:
        log.info("gateway gone", gateway=session.peer)
        self._handle(events.GatewayDisconnected(session.peer))

    def _on_runner_message(
        self, session: Session[RunnerIdentity, scheduler_pb2.AttachDown], up: scheduler_pb2.AttachUp
    ) -> None:
        self._check_not_failed()
        identity = session.peer
        if up.HasField("hello"):
            if not self._raise_term_above(f"runner {identity.instance} {identity.incarnation}", up.hello.highest_term):
                session.send(scheduler_pb2.AttachDown(welcome=self._welcome()))
            log.info("runner attached", runner=identity.instance, pool=identity.pool, live=len(up.hello.live))
            self._handle(conversion.runner_attached(up.hello))
        elif (event := conversion.attach_event(identity, up)) is not None:
            self._handle(event)

    def _on_runner_disconnected(self, session: Session[RunnerIdentity, scheduler_pb2.AttachDown]) -> None:
        identity = session.peer
        log.info("runner gone", runner=identity.instance, pool=identity.pool)
        self._handle(events.RunnerDetached(InstanceName(identity.instance), identity.incarnation))

    def _on_operator_connected(self, session: Session[int, scheduler_pb2.SyncDown]) -> None:
        self._check_not_failed()
        session.send(scheduler_pb2.SyncDown(welcome=self._welcome()))
        log.info("operator connected")
        self._handle(events.OperatorConnected())

    def _on_operator_message(self, session: Session[int, scheduler_pb2.SyncDown], up: scheduler_pb2.SyncUp) -> None:
        self._check_not_failed()
        if up.term < self._operator_term:
            log.warning("an operator of a past term is not heard", term=up.term, highest=self._operator_term)
            session.send(scheduler_pb2.SyncDown(outranked=scheduler_pb2.Outranked(term=self._operator_term)))
            return
        check_term(up.term, self._operator_term, "an operator")
        self._operator_term = up.term
        if (event := conversion.sync_event(up)) is not None:
            self._handle(event)

    def _on_supervisor_message(self, down: supervisor_pb2.AdviseDown) -> None:
        for event in conversion.supervisor_event(down):
            self._handle(event)

    # ------------------------------------------------------------------------------------------------------- deciding

    def _handle(self, event: events.Event) -> None:
        if self._failed.is_set():
            return
        now = self._clock()
        if self._failures.rejects(event, now):
            self._reject_event(event)
            return
        try:
            self._decide(event, now)
        except Exception:
            self._failures.failed(event, now)
            self._metrics.failures.inc()
            log.exception("could not decide what follows from an event", event_=event_failures.shown(event))
            self._failed.set()
            # Whatever was to be said is lost: all who come back tell, and are told, everything again.
            for sessions in (self._gateways, self._runners, self._operators):
                sessions.end_all()

    def _reject_event(self, event: events.Event) -> None:
        """Others are served meanwhile; whoever waits for an answer gets one."""
        log.error("not heard, since deciding on it failed again and again", event_=event_failures.shown(event))
        match event:
            case events.Enqueued() | events.RequestLost():
                self._refuse(effects.SendRefused(event.gateway, event.request, event.epoch, Failure.of(FAILED)))
            case events.GatewayConnected() | events.RunnerAttached():
                raise HELLO_REJECTED

    async def until_it_fails(self) -> None:
        """Raises FailedToDecide; ends in no other way but by cancellation."""
        await self._failed.wait()
        raise DecisionFailed

    @property
    def has_failed_enough(self) -> bool:
        return self._failures.should_give_up(self._clock())

    def _check_not_failed(self) -> None:
        """Of a stream that opened before, and had no session yet when all sessions ended."""
        if self._failed.is_set():
            raise RESTARTING

    def _decide(self, event: events.Event, now: float) -> None:
        started = time.perf_counter()
        decided = self.scheduler.handle(event, now)
        self._metrics.decision_seconds.observe(time.perf_counter() - started)
        if isinstance(event, events.RequestLost):
            self._metrics.losses.inc()
            log.info("placement lost", request=event.request, epoch=event.epoch, why=event.why)
        elif isinstance(event, events.RunnerDeclined):
            self._metrics.declines.inc()
        elif isinstance(event, events.RunnerUnhealthy):
            log.warning("runner condemned", runner=event.runner.instance, why=event.why, hung=event.hung)
        for effect in decided:
            _CARRY_OUT[type(effect)](self, effect)

    def _welcome(self) -> Welcome:
        return Welcome(term=self.term, scheduler=self._name)

    def _raise_term_above(self, peer: str, seen: int) -> bool:
        """Lead in a term above any that somebody has seen, unless it was ours that they saw.

        Whether it had to: then all who are connected have been welcomed anew. A peer cannot be served before that: it
        would ignore all that we say in the lower term. So it is sent away, and comes again.
        """
        check_term(seen, self.term, peer)
        known = self._greeted.welcome(peer)
        if seen < self.term or (seen == self.term and known):
            return False
        log.warning("a peer has seen a later term", peer=peer, seen=seen, term=self.term)
        self._leadership.raise_term_above(seen, self._tell_term)
        if self.term <= seen:
            raise Overloaded(f"this scheduler leads in term {self.term}, below {seen}, until its Lease says more")
        return True

    def _tell_term(self) -> None:
        if self._told_term == self.term:
            return
        self._told_term = self.term
        self._metrics.term.set(self.term)
        log.warning("leading in a new term", term=self.term)
        self._gateways.broadcast(scheduler_pb2.ServeDown(welcome=self._welcome()))
        self._runners.broadcast(scheduler_pb2.AttachDown(welcome=self._welcome()))
        self._operators.broadcast(scheduler_pb2.SyncDown(welcome=self._welcome()))
        self.supervisor.send(supervisor_pb2.AdviseUp(raised=supervisor_pb2.TermRaised(term=self.term)))
        self._handle(events.TermRaised())

    # --------------------------------------------------------------------------------------------------- carrying out

    def _place(self, effect: effects.SendPlaced) -> None:
        self._metrics.placements.inc()
        if effect.moved_because:
            self._metrics.moves.inc()
            log.info(
                "moved",
                request=effect.request,
                tenant=effect.tenant,
                runner=effect.instance,
                why=effect.moved_because,
            )
        log.debug(
            "placed",
            request=effect.request,
            tenant=effect.tenant,
            epoch=effect.epoch,
            runner=effect.instance,
            pages=effect.promise.pages,
        )
        self._gateways.send(effect.gateway, conversion.place(effect, self.term))

    def _refuse(self, effect: effects.SendRefused) -> None:
        self._metrics.refusals.labels(effect.failure.code).inc()
        log.info(
            "refused",
            request=effect.request,
            tenant=effect.tenant,
            code=effect.failure.code,
            why=effect.failure.message,
        )
        self._gateways.send(effect.gateway, conversion.refuse(effect, self.term))

    def _tell_position(self, effect: effects.SendPosition) -> None:
        self._gateways.send(effect.gateway, conversion.position(effect))

    def _publish(self, effect: effects.PublishCatalog) -> None:
        if effect.gateway:
            self._gateways.send(effect.gateway, conversion.catalog(effect.catalog, self._catalog_revision))
            return
        # Wall time, so that a successor's revisions are higher.
        self._catalog_revision = max(self._catalog_revision + 1, int(time.time() * 1000))
        self._gateways.broadcast(conversion.catalog(effect.catalog, self._catalog_revision))

    def _order_runner(self, effect: effects.RunnerEffect) -> None:
        self._runners.send(effect.instance, conversion.runner_message(effect, self.term))

    def _tell_operators(self, effect: effects.OperatorEffect) -> None:
        self._operators.broadcast(conversion.operator_message(effect))

    def _readmit(self, effect: effects.AllowResume) -> None:
        self._metrics.readmissions.inc()
        self.supervisor.send(conversion.readmit(effect, self.term))

    def _remember(self, _effect: effects.SaveCatalog) -> None:
        self._file_stale = True


_CARRY_OUT: dict[type, Callable[[SchedulerService, Any], None]] = {
    effects.SendPlaced: SchedulerService._place,
    effects.SendRefused: SchedulerService._refuse,
    effects.SendPosition: SchedulerService._tell_position,
    effects.PublishCatalog: SchedulerService._publish,
    effects.ExpectRequest: SchedulerService._order_runner,
    effects.EnsureAdapter: SchedulerService._order_runner,
    effects.DropAdapter: SchedulerService._order_runner,
    effects.CancelAtRunner: SchedulerService._order_runner,
    effects.DrainRunner: SchedulerService._order_runner,
    effects.TakeWork: SchedulerService._order_runner,
    effects.ReportAdapter: SchedulerService._tell_operators,
    effects.ReportRunner: SchedulerService._tell_operators,
    effects.ReportDesiredReplicas: SchedulerService._tell_operators,
    effects.ReportDrained: SchedulerService._tell_operators,
    effects.AllowResume: SchedulerService._readmit,
    effects.SaveCatalog: SchedulerService._remember,
}
