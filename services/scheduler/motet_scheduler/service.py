"""The scheduler's three streams: turns messages into events and effects into messages. It makes no decisions itself."""

import asyncio
import itertools
from collections.abc import Callable
from math import inf
from typing import Any, ClassVar

import structlog

from motet.api.v1 import scheduler_pb2, supervisor_pb2
from motet.api.v1.common_pb2 import Welcome
from motet.domain import InstanceName, RequestId, Tenant
from motet.due_timer import DueTimer
from motet.errors import Internal, InvalidRequest, MotetError, Overloaded
from motet.event_record import Write, recorded
from motet.leadership import Leadership
from motet.levels import Levels
from motet.rpc import REPLACED, EndStream, Link, Session, Sessions
from motet.rpc.sessions import HELLO_SECONDS
from motet.runner_info import Failure, RunnerIdentity, check_listed
from motet.surroundings import Surroundings
from motet.terms import check_term
from motet.transport import Handlers, ServerStream
from motet.transport.methods import ADVISE, ATTACH, EXPLAIN, SERVE, SUCCEED, SYNC
from motet_scheduler import conversion, event_failures
from motet_scheduler.catalog_file import CatalogFile
from motet_scheduler.conversion import CatalogRevision
from motet_scheduler.event_failures import EventFailures
from motet_scheduler.explanation import explanation
from motet_scheduler.metrics import Metrics
from motet_scheduler.policy import effects, events
from motet_scheduler.policy.adapters.table import MAX_RESIDENT
from motet_scheduler.policy.scheduler import Scheduler
from motet_scheduler.policy.values import SchedulerConfig
from motet_scheduler.welcomed_peers import WelcomedPeers

log = structlog.get_logger(__name__)

TELLING_SECONDS = HELLO_SECONDS
"""A gateway may take this long to tell what runs: until then its requests have no end, and it has no other."""

TICK_PAUSE_SECONDS = 0.02
"""Between two ticks at least: the resolution of deadlines and retries."""

SAVE_PAUSE = 49
"""The pause after the catalog was saved, as a multiple of the time that this took. Thousands of adapters that come
together change it all the time, and each save writes all of them: saves take a fiftieth of the event loop."""

MAX_SAVE_PAUSE = 5.0
"""In seconds, however slow the disk is: a scheduler that starts meanwhile waits for the operator's catalog."""

FAILED = Internal("the scheduler failed repeatedly on this request and does not place it")
HELLO_REJECTED = Overloaded("the scheduler failed repeatedly on this hello; connect again in a minute")
CHANGE_REJECTED = Overloaded("the scheduler failed repeatedly on this change; connect again in a minute")
RESIDENCY_DIFFERS = Internal("the scheduler knows of more or fewer adapters than were told; connect again")
RESTARTING = Overloaded("the scheduler resets its state; connect again")


class DecisionFailed(Exception):
    """A decision failed and left half-changed state. The scheduler must start again from an empty state."""


class SchedulerService:
    def __init__(
        self,
        config: SchedulerConfig,
        *,
        leadership: Leadership,
        metrics: Metrics,
        supervisor_address: str,
        catalog_file: CatalogFile | None,
        surroundings: Surroundings,
        known_failures: EventFailures | None = None,
        record: Write | None = None,
    ) -> None:
        """`record`: takes the lines of a record of events (`motet.event_record`)."""
        saved = catalog_file.read(leadership.term) if catalog_file is not None else None
        # Random, so that no answer to a predecessor's order is taken for one to ours.
        first_order = 1 + surroundings.random.getrandbits(62)
        began = surroundings.clock()
        self.scheduler = Scheduler(config, now=began, saved=saved, first_order=first_order)
        self._handle_event: Callable[[events.Event, float], list[effects.Effect]] = self.scheduler.handle
        if record is not None:
            given = {"config": config, "began": began, "saved": saved, "first_order": first_order}
            self._handle_event = recorded(self.scheduler.handle, record, "scheduler", **given)
        self._leadership = leadership
        self._metrics = metrics
        self._file = catalog_file
        self.file_stale = saved is not None
        """The file lacks what has changed, or has another term."""
        self._clock = surroundings.clock
        self._failures = known_failures or EventFailures()
        self._failed = asyncio.Event()
        self._trying_more = False
        """Whether the event loop will call `_try_more`."""
        self._name = f"scheduler-{leadership.term}"
        self.catalog_revision = CatalogRevision(self.term, 0)
        self._take_changes: set[str] = set()
        """Gateways that need only the changes of a catalog."""
        self._told_by: dict[str, float] = {}
        """When gateways must have told what runs."""
        self._welcomed = WelcomedPeers()
        self.gateways: Sessions[str, scheduler_pb2.ServeUp, scheduler_pb2.ServeDown] = Sessions(
            hello=lambda up: up.hello.gateway if up.HasField("hello") else None,
            received=self._on_gateway_message,
            failed=self._on_gateway_failure,
            closed=self._on_gateway_disconnected,
        )
        self.runners: Sessions[RunnerIdentity, scheduler_pb2.AttachUp, scheduler_pb2.AttachDown] = Sessions(
            hello=lambda up: RunnerIdentity.from_proto(up.hello.identity) if up.HasField("hello") else None,
            key=lambda identity: identity.instance,
            received=self._on_runner_message,
            closed=self._on_runner_disconnected,
        )
        self.operators: Sessions[int, scheduler_pb2.SyncUp, scheduler_pb2.SyncDown] = Sessions(
            opened=self._on_operator_connected,
            received=self._on_operator_message,
            closed=lambda _: log.info("operator_disconnected"),
        )
        self._operator_numbers = itertools.count(1)
        self._operator = (0, 0)
        """Who has said what the catalog is: the term, and of its streams the newest."""
        self._known_adapters: conversion.KnownAdapters = {}
        self.supervisor: Link[supervisor_pb2.AdviseUp, supervisor_pb2.AdviseDown] = Link(
            "supervisor",
            supervisor_address,
            ADVISE,
            network=surroundings.network,
            greet=lambda: [supervisor_pb2.AdviseUp(hello=supervisor_pb2.AdviseHello(term=self.term))],
            receive=self._on_supervisor_message,
            opened=lambda: self.handle(events.SupervisorConnected()),
            closed=lambda _why: self.handle(events.SupervisorDisconnected()),
        )
        self.due_times = DueTimer(self.next_due, self.tick, clock=self._clock, pause=TICK_PAUSE_SECONDS)
        self._levels = Levels(lambda: metrics.observe(self.scheduler))
        self._saved_at = -inf
        self._save_pause = 0.0
        self._announced_term = self.term
        metrics.term.set(self.term)

    @property
    def term(self) -> int:
        return self._leadership.term

    def tick(self) -> None:
        now = self._clock()
        self.handle(events.Tick())
        if self._failed.is_set():
            return
        if self._file is not None and self.file_stale and self._clock() >= self._save_at():
            began = self._clock()
            self.file_stale = not self._file.write(self.scheduler.catalog_to_save(), self.term)
            self._saved_at = self._clock()
            pause = min(SAVE_PAUSE * (self._saved_at - began), MAX_SAVE_PAUSE)
            self._save_pause = max(self.scheduler.config.look_again, pause)
        self._levels.tick(now)

    def next_due(self) -> float:
        due = min(self.scheduler.next_due(), self._levels.next_due())
        return min(due, self._save_at()) if self._file is not None and self.file_stale else due

    def _save_at(self) -> float:
        return self._saved_at + self._save_pause

    # ------------------------------------------------------------------------------------------------------- streams

    @property
    def handlers(self) -> Handlers:
        return {
            SERVE: self.gateways.serve,
            ATTACH: self.runners.serve,
            SYNC: self._serve_operator,
            EXPLAIN: self._explain,
            SUCCEED: self._succeed,
        }

    async def _serve_operator(self, stream: ServerStream[scheduler_pb2.SyncDown, scheduler_pb2.SyncUp]) -> None:
        # An operator has no hello, and sends nothing until it has read its manifests.
        await self.operators.serve(stream, peer=next(self._operator_numbers))

    async def _explain(self, request: scheduler_pb2.ExplainRequest) -> scheduler_pb2.ExplainResponse:
        return explanation(self.scheduler, RequestId(request.request), Tenant(request.tenant), self._clock())

    async def _succeed(self, request: scheduler_pb2.SucceedRequest) -> scheduler_pb2.SucceedResponse:
        check_term(request.term, self.term, "a scheduler")
        self._leadership.step_down_for(request.term)
        return scheduler_pb2.SucceedResponse()

    # ------------------------------------------------------------------------------------------------------- messages

    def _on_gateway_message(self, session: Session[str, scheduler_pb2.ServeDown], up: scheduler_pb2.ServeUp) -> None:
        self._check_not_failed()
        gateway = session.peer
        if up.HasField("hello"):
            if not self._raise_term_above(f"gateway {gateway}", up.hello.highest_term):
                session.send(scheduler_pb2.ServeDown(welcome=self._welcome()))
            if up.hello.takes_changes:
                self._take_changes.add(gateway)
            else:
                self._take_changes.discard(gateway)
            self._told_by[gateway] = self._clock() + TELLING_SECONDS
            log.info("gateway_connected", gateway=gateway, live=len(up.hello.live))
            self.handle(conversion.gateway_connected(up.hello))
        elif up.HasField("live") and self._clock() > self._told_by[gateway]:
            raise EndStream(
                InvalidRequest(f"tell all in `live` within {TELLING_SECONDS:g} s of the hello", param="live")
            )
        elif (event := conversion.serve_event(gateway, up)) is not None:
            self.handle(event)

    def _on_gateway_failure(
        self, session: Session[str, scheduler_pb2.ServeDown], up: scheduler_pb2.ServeUp, error: MotetError
    ) -> None:
        """Refuse the request if its gateway waits for a placement. Other messages need no answer."""
        if up.HasField("enqueue"):
            request, epoch = up.enqueue.request, up.enqueue.epoch
        elif up.HasField("lost"):
            request, epoch = up.lost.request, up.lost.epoch
        else:
            return
        self._refuse(effects.SendRefused(session.peer, RequestId(request), epoch, Failure.of(error)))

    def _on_gateway_disconnected(self, session: Session[str, scheduler_pb2.ServeDown]) -> None:
        log.info("gateway_disconnected", gateway=session.peer)
        self._take_changes.discard(session.peer)
        self._told_by.pop(session.peer, None)
        self.handle(events.GatewayDisconnected(session.peer))

    def _on_runner_message(
        self, session: Session[RunnerIdentity, scheduler_pb2.AttachDown], up: scheduler_pb2.AttachUp
    ) -> None:
        self._check_not_failed()
        identity = session.peer
        if up.HasField("hello"):
            if not self._raise_term_above(f"runner {identity.instance} {identity.incarnation}", up.hello.highest_term):
                session.send(scheduler_pb2.AttachDown(welcome=self._welcome()))
            log.info("runner_connected", runner=identity.instance, pool=identity.pool, live=len(up.hello.live))
            self.handle(conversion.runner_attached(up.hello))
        elif (event := conversion.attach_event(identity, up)) is not None:
            if isinstance(event, events.RunnerListed):
                self._check_listed(identity, event)
            self.handle(event)
            if up.HasField("report"):
                self._check_residency(identity, up.report)

    def _check_listed(self, identity: RunnerIdentity, event: events.RunnerListed) -> None:
        """All parts together have no more than one message may have."""
        runner = self.scheduler.state.current(InstanceName(identity.instance), identity.incarnation)
        if runner is not None and runner.listing is not None:
            try:
                check_listed(runner.listing.heard + len(event.live), "requests")
            except InvalidRequest as error:
                raise EndStream(error) from error

    def _check_residency(self, identity: RunnerIdentity, report: scheduler_pb2.Report) -> None:
        """A runner tells only changes. If some were lost, because of a defect of Motet, its next hello tells all."""
        runner = self.scheduler.state.current(InstanceName(identity.instance), identity.incarnation)
        if runner is None or len(runner.adapters.tiers) >= MAX_RESIDENT:
            return
        if report.HasField("resident_count") and report.resident_count != len(runner.adapters.tiers):
            log.error(
                "residency_differs",
                runner=identity.instance,
                told=report.resident_count,
                known=len(runner.adapters.tiers),
                hint="A change of the adapters that it holds was lost. It connects again, and tells all of them.",
            )
            raise EndStream(RESIDENCY_DIFFERS)

    def _on_runner_disconnected(self, session: Session[RunnerIdentity, scheduler_pb2.AttachDown]) -> None:
        identity = session.peer
        log.info("runner_disconnected", runner=identity.instance, pool=identity.pool)
        self.handle(events.RunnerDetached(InstanceName(identity.instance), identity.incarnation))

    def _on_operator_connected(self, session: Session[int, scheduler_pb2.SyncDown]) -> None:
        self._check_not_failed()
        session.send(scheduler_pb2.SyncDown(welcome=self._welcome()))
        log.info("operator_connected")
        self.handle(events.OperatorConnected())

    def _on_operator_message(self, session: Session[int, scheduler_pb2.SyncDown], up: scheduler_pb2.SyncUp) -> None:
        self._check_not_failed()
        term, newest = self._operator
        if up.term < term:
            log.warning("operator_rejected_stale_term", term=up.term, highest=term)
            session.send(scheduler_pb2.SyncDown(outranked=scheduler_pb2.Outranked(term=term)))
            return
        check_term(up.term, term, "an operator")
        if up.term == term and session.peer < newest:
            # The operator has another stream already. What was under way on this one is older.
            session.end(REPLACED)
            return
        self._operator = (up.term, session.peer)
        if (event := conversion.sync_event(up, self._known_adapters)) is not None:
            self.handle(event)

    def _on_supervisor_message(self, down: supervisor_pb2.AdviseDown) -> None:
        for event in conversion.supervisor_event(down):
            self.handle(event)

    # ------------------------------------------------------------------------------------------------------- deciding

    def handle(self, event: events.Event) -> None:
        if self._failed.is_set():
            return
        now = self._clock()
        if self._failures.rejects(event, now):
            self._reject_event(event)
            return
        self._levels.changed()
        try:
            self._decide(event, now)
        except Exception:
            self._failures.failed(event, now)
            self._metrics.failures.inc()
            log.exception("decision_failed", event_=event_failures.shown(event))
            self._failed.set()
            # The effects of this decision are lost. Peers that reconnect exchange their full state again.
            for sessions in (self.gateways, self.runners, self.operators):
                sessions.end_all()
            return
        if self.scheduler.more_to_try and not self._trying_more:
            self._trying_more = True
            asyncio.get_running_loop().call_soon(self._try_more)  # messages that have come go first
        self.due_times.changed()

    def _try_more(self) -> None:
        self._trying_more = False
        if self.scheduler.more_to_try:
            self.handle(events.TryMore())

    def _reject_event(self, event: events.Event) -> None:
        """Answer the peer if it waits for an answer. Other events are handled as usual."""
        log.error(
            "event_rejected",
            event_=event_failures.shown(event),
            reason="Handling this event failed repeatedly. It is rejected for one minute.",
        )
        match event:
            case events.Enqueued() | events.RequestLost():
                self._refuse(effects.SendRefused(event.gateway, event.request, event.epoch, Failure.of(FAILED)))
            case events.GatewayConnected() | events.GatewayTold() | events.RunnerAttached():
                raise EndStream(HELLO_REJECTED)
            case events.ResidencyChanged():
                raise EndStream(CHANGE_REJECTED)

    async def until_it_fails(self) -> None:
        """Wait until a decision fails, then raise DecisionFailed."""
        await self._failed.wait()
        raise DecisionFailed

    @property
    def has_failed_enough(self) -> bool:
        return self._failures.should_give_up(self._clock())

    def _check_not_failed(self) -> None:
        """Reject messages of streams that opened before the failure and had no session when all sessions ended."""
        if self._failed.is_set():
            raise EndStream(RESTARTING)

    def _decide(self, event: events.Event, now: float) -> None:
        decided = self._handle_event(event, now)
        self._metrics.decision_seconds.observe(self._clock() - now)
        if isinstance(event, events.RequestLost):
            self._metrics.losses.inc()
            log.info("placement_lost", request=event.request, epoch=event.epoch, why=event.why)
        elif isinstance(event, events.RunnerDeclined):
            self._metrics.declines.inc()
        elif isinstance(event, events.RunnerUnhealthy):
            log.warning("runner_unhealthy", runner=event.runner.instance, why=event.why, hung=event.hung)
        for effect in decided:
            self._handlers[type(effect)](self, effect)

    def _welcome(self) -> Welcome:
        return Welcome(term=self.term, scheduler=self._name, takes_parts=True, takes_residency=True, takes_listed=True)

    def _raise_term_above(self, peer: str, seen: int) -> bool:
        """Raise our term above the highest term that a peer has seen, unless the peer saw that term from us.

        Returns whether the term was raised. In that case all connected peers have been welcomed again. A peer ignores
        messages of a lower term. If the term cannot be raised yet, the peer is disconnected and connects again.
        """
        check_term(seen, self.term, peer)
        known = self._welcomed.welcome(peer)
        if seen < self.term or (seen == self.term and known):
            return False
        log.warning("higher_term_seen", peer=peer, seen=seen, term=self.term)
        self._leadership.raise_term_above(seen, self._announce_term)
        if self.term <= seen:
            raise Overloaded(
                f"this scheduler leads in term {self.term}, below {seen}, until its Lease has a higher one; try again"
            )
        return True

    def _announce_term(self) -> None:
        if self._announced_term == self.term:
            return
        self._announced_term = self.term
        self.file_stale = True
        self._metrics.term.set(self.term)
        log.warning("term_raised", term=self.term)
        self.gateways.broadcast(scheduler_pb2.ServeDown(welcome=self._welcome()))
        self.runners.broadcast(scheduler_pb2.AttachDown(welcome=self._welcome()))
        self.operators.broadcast(scheduler_pb2.SyncDown(welcome=self._welcome()))
        self.supervisor.send(supervisor_pb2.AdviseUp(raised=supervisor_pb2.TermRaised(term=self.term)))
        self.handle(events.TermRaised())

    # --------------------------------------------------------------------------------------------------- carrying out

    def _place(self, effect: effects.SendPlaced) -> None:
        self._metrics.placements.inc()
        if effect.moved_reason:
            self._metrics.moves.inc()
            log.info(
                "request_moved",
                request=effect.request,
                tenant=effect.tenant,
                runner=effect.instance,
                why=effect.moved_reason,
            )
        log.debug(
            "request_placed",
            request=effect.request,
            tenant=effect.tenant,
            epoch=effect.epoch,
            runner=effect.instance,
            pages=effect.promise.pages,
        )
        self.gateways.send(effect.gateway, conversion.place(effect, self.term))

    def _refuse(self, effect: effects.SendRefused) -> None:
        self._metrics.refusals.labels(effect.failure.code).inc()
        log.info(
            "request_refused",
            request=effect.request,
            tenant=effect.tenant,
            code=effect.failure.code,
            why=effect.failure.message,
        )
        self.gateways.send(effect.gateway, conversion.refuse(effect, self.term))

    def _send_position(self, effect: effects.SendPosition) -> None:
        self.gateways.send(effect.gateway, conversion.position(effect))

    def _publish(self, effect: effects.PublishCatalog) -> None:
        before = self.catalog_revision
        if effect.gateway and before.term == self.term:
            self.gateways.send(effect.gateway, conversion.catalog(effect.catalog, before))
            return
        # Under a lower term than one that a gateway has seen it would count as older: all get it anew.
        self.catalog_revision = CatalogRevision(self.term, before.number + 1)
        changes = whole = None
        for session in self.gateways:
            if effect.changes is not None and session.peer in self._take_changes:
                changes = changes or conversion.catalog_changes(
                    effect.catalog, effect.changes, before, self.catalog_revision
                )
                session.send(changes)
            else:
                whole = whole or conversion.catalog(effect.catalog, self.catalog_revision)
                session.send(whole)

    def _order_runner(self, effect: effects.RunnerEffect) -> None:
        self.runners.send(effect.instance, conversion.runner_message(effect, self.term))

    def _send_operators(self, effect: effects.OperatorEffect) -> None:
        self.operators.broadcast(conversion.operator_message(effect))

    def _allow_resume(self, effect: effects.AllowResume) -> None:
        self._metrics.readmissions.inc()
        self.supervisor.send(conversion.allow_resume(effect, self.term))

    def _save_catalog(self, effect: effects.SaveCatalog) -> None:
        """Soon, since many changes come together. Gateways hear of this one before, so an outdated file goes now."""
        if effect.outdates and self._file is not None:
            self._file.remove()
        self.file_stale = True

    def _ignore_answer(self, effect: effects.IgnoreAnswer) -> None:
        self._metrics.answers_ignored.inc()
        log.info(
            "adapter_answer_ignored",
            runner=effect.instance,
            adapter=str(effect.ref.object),
            order=effect.order,
            hint="Another order has replaced this one, or an earlier scheduler gave it.",
        )

    def _end_runner_stream(self, effect: effects.EndRunnerStream) -> None:
        log.warning(
            "runner_hello_not_ended",
            runner=effect.instance,
            hint="It has not told all of its requests since its hello. Its requests move, and it connects again.",
        )
        self.runners.end(effect.instance)

    _handlers: ClassVar[dict[type, Callable[[Any, Any], None]]] = {
        effects.SendPlaced: _place,
        effects.SendRefused: _refuse,
        effects.SendPosition: _send_position,
        effects.PublishCatalog: _publish,
        effects.ExpectRequest: _order_runner,
        effects.EnsureAdapter: _order_runner,
        effects.PinAdapters: _order_runner,
        effects.DropAdapter: _order_runner,
        effects.ForgetManifest: _order_runner,
        effects.CancelAtRunner: _order_runner,
        effects.DrainRunner: _order_runner,
        effects.TakeWork: _order_runner,
        effects.ReportAdapter: _send_operators,
        effects.ReportRunner: _send_operators,
        effects.ReportDesiredReplicas: _send_operators,
        effects.ReportDrained: _send_operators,
        effects.ReportedAll: _send_operators,
        effects.AllowResume: _allow_resume,
        effects.SaveCatalog: _save_catalog,
        effects.IgnoreAnswer: _ignore_answer,
        effects.EndRunnerStream: _end_runner_stream,
    }
