"""The supervisor's two streams: messages in become events, effects become messages out. Decides nothing."""

from collections.abc import AsyncIterator
from typing import Any

import structlog

from motet.api.v1 import supervisor_pb2, supervisor_pb2_grpc
from motet.clock import Clock, monotonic
from motet.errors import InvalidRequest
from motet.fleet import RunnerIdentity
from motet.rpc import Outbox, Sessions, converse
from motet_supervisor import translate
from motet_supervisor.metrics import Metrics
from motet_supervisor.policy import effects as do
from motet_supervisor.policy import events as on
from motet_supervisor.policy.supervisor import Supervisor
from motet_supervisor.policy.values import Instance, Policy

log = structlog.get_logger(__name__)

SERVICE = "motet.api.v1.Supervisor"


class SupervisorService(supervisor_pb2_grpc.SupervisorServicer):
    def __init__(self, policy: Policy, *, metrics: Metrics, clock: Clock = monotonic) -> None:
        self.supervisor = Supervisor(policy)
        self._metrics = metrics
        self._clock = clock
        self._runners: Sessions[supervisor_pb2.WatchDown] = Sessions()
        self._schedulers: Sessions[supervisor_pb2.AdviseDown] = Sessions()
        self._scheduler_count = 0

    def tick(self) -> None:
        self._happened(on.Tick())
        self._metrics.observe(self.supervisor)

    async def Watch(  # type: ignore[override]  # noqa: N802 - gRPC's name; a plain coroutine writes by itself
        self, request_iterator: AsyncIterator[supervisor_pb2.WatchUp], context: Any
    ) -> None:
        outbox: Outbox[supervisor_pb2.WatchDown] = Outbox()
        identity = RunnerIdentity(instance="")

        def receive(up: supervisor_pb2.WatchUp) -> None:
            nonlocal identity
            if up.WhichOneof("message") == "hello":
                event = translate.runner_connected(up.hello)
                identity = event.identity
                self._runners.open(identity.instance, outbox)
                outbox.put(supervisor_pb2.WatchDown(welcome=supervisor_pb2.WatchWelcome(supervisor="supervisor")))
                log.info("runner watched", runner=identity.instance, live=len(event.live))
                self._happened(event)
                return
            if not identity.instance:
                raise InvalidRequest("the first message of a stream must be its hello, with an instance in it")
            news = translate.watch_event(Instance(identity.instance), up)
            if news is not None:
                self._happened(news)

        try:
            await converse(context, request_iterator, outbox, receive)
        finally:
            if identity.instance and self._runners.close(identity.instance, outbox):
                log.info("runner gone", runner=identity.instance)
                self._happened(on.RunnerDisconnected(Instance(identity.instance), identity.incarnation))

    async def Advise(  # type: ignore[override]  # noqa: N802 - gRPC's name; a plain coroutine writes by itself
        self, request_iterator: AsyncIterator[supervisor_pb2.AdviseUp], context: Any
    ) -> None:
        outbox: Outbox[supervisor_pb2.AdviseDown] = Outbox()
        self._scheduler_count += 1
        name = str(self._scheduler_count)

        def receive(up: supervisor_pb2.AdviseUp) -> None:
            if up.WhichOneof("message") == "hello":
                log.info("scheduler connected", term=up.hello.term)
                return
            event = translate.advise_event(up)
            if event is not None:
                self._happened(event)

        self._schedulers.open(name, outbox)
        self._happened(on.SchedulerConnected())
        try:
            await converse(context, request_iterator, outbox, receive)
        finally:
            self._schedulers.close(name, outbox)
            log.info("scheduler gone")
            self._happened(on.SchedulerGone())

    def _happened(self, event: on.Event) -> None:
        if isinstance(event, on.OverflowAhead):
            self._metrics.overflows.inc()
        for effect in self.supervisor.handle(event, self._clock()):
            self._count(effect)
            match effect:
                case do.Extend() | do.Park() | do.Resume():
                    log.debug(
                        type(effect).__name__.lower(),
                        request=effect.request,
                        epoch=effect.epoch,
                        runner=effect.instance,
                        pages=effect.pages,
                    )
                    self._runners.send(effect.instance, translate.order(effect))
                case do.SetOvercommit():
                    self._runners.send(effect.instance, translate.order(effect))
                case _:
                    self._schedulers.broadcast(translate.advice(effect))

    def _count(self, effect: do.Effect) -> None:
        match effect:
            case do.Extend():
                self._metrics.extensions.inc()
            case do.Park():
                self._metrics.park_orders.labels(effect.method.value).inc()
            case do.Resume():
                self._metrics.resume_orders.inc()
            case do.TellLost(again=False):
                self._metrics.runners_lost.labels("hung" if effect.hung else "silent").inc()
                log.warning("runner condemned", runner=effect.identity.instance, why=effect.why, hung=effect.hung)
            case _:
                pass
