"""The scheduler's three streams: messages in become events, effects become messages out. Decides nothing."""

import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import structlog

from motet.api.v1 import scheduler_pb2, scheduler_pb2_grpc, supervisor_pb2, supervisor_pb2_grpc
from motet.api.v1.common_pb2 import Welcome
from motet.clock import Clock, monotonic
from motet.errors import InvalidRequest, NotFound
from motet.fleet import RunnerIdentity
from motet.leadership import Leadership
from motet.model import RequestId
from motet.rpc import Link, Outbox, Sessions, converse
from motet_scheduler import translate
from motet_scheduler.catalog_file import CatalogFile
from motet_scheduler.metrics import Metrics
from motet_scheduler.policy import effects as do
from motet_scheduler.policy import events as on
from motet_scheduler.policy.scheduler import Scheduler
from motet_scheduler.policy.values import Instance, Policy

log = structlog.get_logger(__name__)

SERVICE = "motet.api.v1.Scheduler"


class SchedulerService(scheduler_pb2_grpc.SchedulerServicer):
    def __init__(
        self,
        policy: Policy,
        *,
        leadership: Leadership,
        metrics: Metrics,
        supervisor_address: str,
        catalog_file: CatalogFile,
        clock: Clock = monotonic,
    ) -> None:
        self.scheduler = Scheduler(policy, now=clock(), remembered=catalog_file.read())
        self._leadership = leadership
        self._metrics = metrics
        self._file = catalog_file
        self._file_stale = False
        self._clock = clock
        self._name = f"scheduler-{leadership.term}"
        self._catalog_revision = 0
        self._greeted: set[str] = set()
        self._gateways: Sessions[scheduler_pb2.ServeDown] = Sessions()
        self._runners: Sessions[scheduler_pb2.AttachDown] = Sessions()
        self._operators: Sessions[scheduler_pb2.SyncDown] = Sessions()
        self._operator_count = 0
        self._operator_term = 0
        self.supervisor: Link[supervisor_pb2.AdviseUp, supervisor_pb2.AdviseDown] = Link(
            "supervisor",
            supervisor_address,
            lambda channel: supervisor_pb2_grpc.SupervisorStub(channel).Advise(),
            greet=lambda: [supervisor_pb2.AdviseUp(hello=supervisor_pb2.AdviseHello(term=self.term))],
            receive=self._hear_advice,
            opened=lambda: self._happened(on.SupervisorConnected()),
            closed=lambda _why: self._happened(on.SupervisorGone()),
        )
        metrics.term.set(self.term)

    @property
    def term(self) -> int:
        return self._leadership.term

    def tick(self) -> None:
        self._happened(on.Tick())
        if self._file_stale:
            self._file_stale = not self._file.write(self.scheduler.remembered())
        self._metrics.observe(self.scheduler)

    # ------------------------------------------------------------------------------------------------------- streams

    async def Serve(  # type: ignore[override]  # noqa: N802 - gRPC's name; a plain coroutine writes by itself
        self, request_iterator: AsyncIterator[scheduler_pb2.ServeUp], context: Any
    ) -> None:
        outbox: Outbox[scheduler_pb2.ServeDown] = Outbox()
        gateway = ""

        def receive(up: scheduler_pb2.ServeUp) -> None:
            nonlocal gateway
            if up.WhichOneof("message") == "hello":
                gateway = up.hello.gateway
                self._exceed(f"gateway {gateway}", up.hello.highest_term)
                self._gateways.open(gateway, outbox)
                outbox.put(scheduler_pb2.ServeDown(welcome=self._welcome()))
                log.info("gateway connected", gateway=gateway, live=len(up.hello.live))
                self._happened(translate.gateway_connected(up.hello))
                return
            _must_have_said_hello(gateway)
            event = translate.serve_event(gateway, up)
            if event is not None:
                self._happened(event)

        try:
            await converse(context, request_iterator, outbox, receive)
        finally:
            if gateway and self._gateways.close(gateway, outbox):
                log.info("gateway gone", gateway=gateway)
                self._happened(on.GatewayGone(gateway))

    async def Attach(  # type: ignore[override]  # noqa: N802 - gRPC's name; a plain coroutine writes by itself
        self, request_iterator: AsyncIterator[scheduler_pb2.AttachUp], context: Any
    ) -> None:
        outbox: Outbox[scheduler_pb2.AttachDown] = Outbox()
        identity = RunnerIdentity(instance="")

        def receive(up: scheduler_pb2.AttachUp) -> None:
            nonlocal identity
            if up.WhichOneof("message") == "hello":
                event = translate.runner_attached(up.hello)
                identity = event.identity
                self._exceed(f"runner {identity.instance} {identity.incarnation}", up.hello.highest_term)
                self._runners.open(identity.instance, outbox)
                outbox.put(scheduler_pb2.AttachDown(welcome=self._welcome()))
                log.info("runner attached", runner=identity.instance, pool=identity.pool, live=len(event.live))
                self._happened(event)
                return
            _must_have_said_hello(identity.instance)
            news = translate.attach_event(identity, up)
            if news is not None:
                self._happened(news)

        try:
            await converse(context, request_iterator, outbox, receive)
        finally:
            if identity.instance and self._runners.close(identity.instance, outbox):
                log.info("runner gone", runner=identity.instance, pool=identity.pool)
                self._happened(on.RunnerDetached(Instance(identity.instance), identity.incarnation))

    async def Sync(  # type: ignore[override]  # noqa: N802 - gRPC's name; a plain coroutine writes by itself
        self, request_iterator: AsyncIterator[scheduler_pb2.SyncUp], context: Any
    ) -> None:
        outbox: Outbox[scheduler_pb2.SyncDown] = Outbox()
        self._operator_count += 1
        name = str(self._operator_count)

        def receive(up: scheduler_pb2.SyncUp) -> None:
            if up.term < self._operator_term:
                log.warning("an operator of a past term is not heard", term=up.term, highest=self._operator_term)
                outranked = scheduler_pb2.Outranked(term=self._operator_term)
                outbox.put(scheduler_pb2.SyncDown(outranked=outranked))
                return
            self._operator_term = up.term
            event = translate.sync_event(up)
            if event is not None:
                self._happened(event)

        self._operators.open(name, outbox)
        outbox.put(scheduler_pb2.SyncDown(welcome=self._welcome()))
        log.info("operator connected")
        self._happened(on.OperatorConnected())
        try:
            await converse(context, request_iterator, outbox, receive)
        finally:
            self._operators.close(name, outbox)
            log.info("operator gone")

    async def Explain(  # noqa: N802
        self, request: scheduler_pb2.ExplainRequest, context: Any
    ) -> scheduler_pb2.ExplainResponse:
        entries = self.scheduler.timelines.of(RequestId(request.request))
        if entries is None:
            error = NotFound(f"request {request.request!r} is not among the last ones")
            await context.abort(error.row.grpc, error.message)
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
        context: Any,  # noqa: ARG002
    ) -> scheduler_pb2.SucceedResponse:
        self._leadership.yield_to(request.term)
        return scheduler_pb2.SucceedResponse()

    # ------------------------------------------------------------------------------------------------------- deciding

    def _happened(self, event: on.Event) -> None:
        started = time.perf_counter()
        effects = self.scheduler.handle(event, self._clock())
        self._metrics.decision_seconds.observe(time.perf_counter() - started)
        if isinstance(event, on.RequestLost):
            self._metrics.losses.inc()
            log.info("placement lost", request=event.request, epoch=event.epoch, why=event.why)
        elif isinstance(event, on.RunnerDeclined):
            self._metrics.declines.inc()
        elif isinstance(event, on.RunnerCondemned):
            log.warning("runner condemned", runner=event.runner.instance, why=event.why, hung=event.hung)
        for effect in effects:
            _CARRY_OUT[type(effect)](self, effect)

    def _hear_advice(self, down: supervisor_pb2.AdviseDown) -> None:
        for event in translate.advice(down):
            self._happened(event)

    def _welcome(self) -> Welcome:
        return Welcome(term=self.term, scheduler=self._name)

    def _exceed(self, peer: str, seen: int) -> None:
        """Lead in a term above any that somebody has seen, unless it was ours that they saw."""
        known = peer in self._greeted
        self._greeted.add(peer)
        if seen < self.term or (seen == self.term and known):
            return
        term = self._leadership.exceed(seen)
        self._metrics.term.set(term)
        log.warning("a peer has seen a later term; leading in a new one", peer=peer, seen=seen, term=term)
        self._gateways.broadcast(scheduler_pb2.ServeDown(welcome=self._welcome()))
        self._runners.broadcast(scheduler_pb2.AttachDown(welcome=self._welcome()))
        self._operators.broadcast(scheduler_pb2.SyncDown(welcome=self._welcome()))

    # --------------------------------------------------------------------------------------------------- carrying out

    def _place(self, effect: do.Place) -> None:
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
        self._gateways.send(effect.gateway, translate.place(effect, self.term))

    def _refuse(self, effect: do.Refuse) -> None:
        self._metrics.refusals.labels(effect.failure.code).inc()
        log.info(
            "refused",
            request=effect.request,
            tenant=effect.tenant,
            code=effect.failure.code,
            why=effect.failure.message,
        )
        self._gateways.send(effect.gateway, translate.refuse(effect))

    def _tell_position(self, effect: do.TellPosition) -> None:
        self._gateways.send(effect.gateway, translate.position(effect))

    def _publish(self, effect: do.Publish) -> None:
        if effect.gateway:
            self._gateways.send(effect.gateway, translate.catalog(effect.catalog, self._catalog_revision))
            return
        # Wall time, so that a successor's revisions are higher.
        self._catalog_revision = max(self._catalog_revision + 1, int(time.time() * 1000))
        self._gateways.broadcast(translate.catalog(effect.catalog, self._catalog_revision))

    def _order_runner(self, effect: do.RunnerEffect) -> None:
        self._runners.send(effect.instance, translate.runner_order(effect, self.term))

    def _tell_operators(self, effect: do.OperatorEffect) -> None:
        self._operators.broadcast(translate.operator_word(effect))

    def _readmit(self, effect: do.Readmit) -> None:
        self._metrics.readmissions.inc()
        self.supervisor.send(translate.readmit(effect, self.term))

    def _remember(self, _effect: do.Remember) -> None:
        self._file_stale = True


def _must_have_said_hello(name: str) -> None:
    if not name:
        raise InvalidRequest("the first message of a stream must be its hello, with a name in it")


_CARRY_OUT: dict[type, Callable[[SchedulerService, Any], None]] = {
    do.Place: SchedulerService._place,
    do.Refuse: SchedulerService._refuse,
    do.TellPosition: SchedulerService._tell_position,
    do.Publish: SchedulerService._publish,
    do.Expect: SchedulerService._order_runner,
    do.Ensure: SchedulerService._order_runner,
    do.Drop: SchedulerService._order_runner,
    do.CancelAtRunner: SchedulerService._order_runner,
    do.DrainRunner: SchedulerService._order_runner,
    do.TellAdapter: SchedulerService._tell_operators,
    do.TellRunner: SchedulerService._tell_operators,
    do.TellDesired: SchedulerService._tell_operators,
    do.TellDrained: SchedulerService._tell_operators,
    do.Readmit: SchedulerService._readmit,
    do.Remember: SchedulerService._remember,
}
