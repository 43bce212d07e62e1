"""The supervisor's two streams: turns messages into events and effects into messages. Makes no decisions itself."""

import itertools
from collections.abc import Callable

import structlog

from motet.api.v1 import supervisor_pb2
from motet.clock import Clock
from motet.domain import InstanceName
from motet.due_timer import DueTimer
from motet.event_record import Write, recorded
from motet.levels import Levels
from motet.rpc import Session, Sessions
from motet.runner_info import RunnerIdentity
from motet.terms import check_leaders_term, check_term
from motet.transport import Handlers
from motet.transport.methods import ADVISE, WATCH
from motet_supervisor import conversion
from motet_supervisor.metrics import Metrics
from motet_supervisor.policy import effects, events
from motet_supervisor.policy.supervisor import Supervisor
from motet_supervisor.policy.values import SupervisorConfig

log = structlog.get_logger(__name__)


class SupervisorService:
    def __init__(
        self, config: SupervisorConfig, *, metrics: Metrics, clock: Clock, record: Write | None = None
    ) -> None:
        """`record`: takes the lines of a record of events (`motet.event_record`)."""
        self.supervisor = Supervisor(config)
        self._handle_event: Callable[[events.Event, float], list[effects.Effect]] = self.supervisor.handle
        if record is not None:
            self._handle_event = recorded(self.supervisor.handle, record, "supervisor", config=config)
        self.due_times = DueTimer(self.next_due, self.tick, clock=clock, pause=config.max_sleep / 4)
        self._levels = Levels(lambda: metrics.observe(self.supervisor))
        self._metrics = metrics
        self._clock = clock
        self.runners: Sessions[RunnerIdentity, supervisor_pb2.WatchUp, supervisor_pb2.WatchDown] = Sessions(
            hello=lambda up: RunnerIdentity.from_proto(up.hello.identity) if up.HasField("hello") else None,
            key=lambda identity: identity.instance,
            received=self._on_runner_message,
            closed=self._on_runner_disconnected,
        )
        self.schedulers: Sessions[int, supervisor_pb2.AdviseUp, supervisor_pb2.AdviseDown] = Sessions(
            # A new scheduler may connect before the old one disconnects, so each stream counts as its own scheduler.
            hello=lambda up: next(self._scheduler_numbers) if up.HasField("hello") else None,
            received=self._on_scheduler_message,
            closed=self._on_scheduler_disconnected,
        )
        self._scheduler_numbers = itertools.count(1)

    def tick(self) -> None:
        now = self._clock()
        self._handle(events.Tick(late=max(0.0, now - self.supervisor.tick_by)))
        self._levels.tick(now)

    def next_due(self) -> float:
        return min(self.supervisor.next_due(), self._levels.next_due())

    # ------------------------------------------------------------------------------------------------------- streams

    @property
    def handlers(self) -> Handlers:
        return {WATCH: self.runners.serve, ADVISE: self.schedulers.serve}

    # ------------------------------------------------------------------------------------------------------ messages

    def _on_runner_message(
        self, session: Session[RunnerIdentity, supervisor_pb2.WatchDown], up: supervisor_pb2.WatchUp
    ) -> None:
        instance = InstanceName(session.peer.instance)
        if up.HasField("hello"):
            session.send(supervisor_pb2.WatchDown(welcome=supervisor_pb2.WatchWelcome(supervisor="supervisor")))
            log.info("runner_connected", runner=instance, live=len(up.hello.live))
            self._handle(conversion.runner_connected(up.hello))
        elif (event := conversion.watch_event(instance, up)) is not None:
            self._handle(event)

    def _on_runner_disconnected(self, session: Session[RunnerIdentity, supervisor_pb2.WatchDown]) -> None:
        identity = session.peer
        log.info("runner_disconnected", runner=identity.instance)
        self._handle(events.RunnerDisconnected(InstanceName(identity.instance), identity.incarnation))

    def _on_scheduler_message(
        self, session: Session[int, supervisor_pb2.AdviseDown], up: supervisor_pb2.AdviseUp
    ) -> None:
        if up.HasField("hello"):
            check_leaders_term(up.hello.term, self.supervisor.highest_term, "a scheduler")
            log.info("scheduler_connected", term=up.hello.term)
        elif up.HasField("raised"):
            check_term(up.raised.term, self.supervisor.highest_term, "a scheduler")
        if (event := conversion.advise_event(session.peer, up)) is not None:
            self._handle(event)

    def _on_scheduler_disconnected(self, session: Session[int, supervisor_pb2.AdviseDown]) -> None:
        log.info("scheduler_disconnected")
        self._handle(events.SchedulerDisconnected(session.peer))

    # ------------------------------------------------------------------------------------------------------- deciding

    def _handle(self, event: events.Event) -> None:
        if isinstance(event, events.OverflowAnnounced):
            self._metrics.overflows.inc()
        for effect in self._handle_event(event, self._clock()):
            self._count(effect)
            match effect:
                case effects.Extend() | effects.Park() | effects.Resume():
                    log.debug(
                        "order_sent",
                        order=type(effect).__name__.lower(),
                        request=effect.request,
                        epoch=effect.epoch,
                        runner=effect.instance,
                        pages=effect.pages,
                    )
                    self.runners.send(effect.instance, conversion.order(effect, self.supervisor.term))
                case effects.SetOvercommit():
                    self.runners.send(effect.instance, conversion.order(effect, self.supervisor.term))
                case _:
                    self.schedulers.broadcast(conversion.scheduler_message(effect))
        self._levels.changed()
        self.due_times.changed()

    def _count(self, effect: effects.Effect) -> None:
        match effect:
            case effects.Extend():
                self._metrics.extensions.inc()
            case effects.Park():
                self._metrics.park_orders.labels(effect.method.value).inc()
            case effects.Resume():
                self._metrics.resume_orders.inc()
            case effects.ReportRunnerLost(again=False):
                self._metrics.runners_lost.labels("hung" if effect.hung else "silent").inc()
                log.warning("runner_unhealthy", runner=effect.identity.instance, why=effect.why, hung=effect.hung)
            case _:
                pass
