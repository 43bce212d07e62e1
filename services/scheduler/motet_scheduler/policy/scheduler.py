"""The scheduler: which part of the policy handles which event, and in which order the parts run.

`handle` is the only entry point. It changes the state and returns the effects. It never reads a clock: the caller
passes each event with its time."""

from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

from motet.domain import BASE
from motet_scheduler.policy import effects, events
from motet_scheduler.policy.adapters.cold_waits import ColdWaits
from motet_scheduler.policy.adapters.prefetches import Prefetches
from motet_scheduler.policy.adapters.replica_loads import ReplicaLoads
from motet_scheduler.policy.autoscaler import Autoscaler
from motet_scheduler.policy.catalog import CatalogPublisher, SavedCatalog
from motet_scheduler.policy.consolidation import Consolidation
from motet_scheduler.policy.drains import Drains
from motet_scheduler.policy.gateway_events import GatewayEvents
from motet_scheduler.policy.placement import Placer, Positions
from motet_scheduler.policy.quota_gate import QuotaGate
from motet_scheduler.policy.replaced_bases import ReplacedBases
from motet_scheduler.policy.request_lifecycle import RequestLifecycle
from motet_scheduler.policy.runner_events import RunnerEvents
from motet_scheduler.policy.state import SchedulerState, StartupWait
from motet_scheduler.policy.supervisor_events import SupervisorEvents
from motet_scheduler.policy.values import Catalog, SchedulerConfig


class Timed(Protocol):
    """Does something at times that it knows."""

    def next_due(self) -> float: ...

    def tick(self) -> None: ...


class LookedAt(Protocol):
    """Has to look from time to time, as long as something waits."""

    def look_from(self) -> float:
        """From when on: -inf if something waits now, inf if nothing does."""

    def look(self) -> None: ...


class Scheduler:
    def __init__(
        self, config: SchedulerConfig, *, now: float, saved: SavedCatalog | None = None, first_order: int = 1
    ) -> None:
        """`first_order` is the number of the first order to a runner. No two schedulers may give the same ones."""
        awaited = saved.runners if saved is not None else ()
        state = self.state = SchedulerState(config, now, StartupWait(awaited, now + config.startup_wait), first_order)
        self.lifecycle = RequestLifecycle(state)
        self._cold_waits = ColdWaits(state, self.lifecycle)
        self.placer = Placer(state, self.lifecycle, self._cold_waits)
        self.positions = Positions(state)
        self.capacity = Autoscaler(state)
        self.publisher = CatalogPublisher(state, self.capacity)
        self._quota_gate = QuotaGate(state, self.lifecycle, self.positions)
        self._gateway_events = GatewayEvents(state, self.lifecycle, self._quota_gate, self.placer, self.positions)
        self._drains = Drains(state, self.lifecycle)
        self._replaced_bases = ReplacedBases(state, self.lifecycle)
        self._runner_events = RunnerEvents(state, self.lifecycle, self.publisher, self._drains)
        self._supervisor_events = SupervisorEvents(state, self.lifecycle)
        self._timed: tuple[Timed, ...] = (
            state,
            self.lifecycle,
            self._quota_gate,
            self._runner_events,
            self._cold_waits,
            self.positions,
            self.capacity,
            Consolidation(state, self.lifecycle, self.placer, self.capacity),
            Prefetches(state),
            ReplicaLoads(state),
        )
        self._looked_at: tuple[LookedAt, ...] = (
            self.lifecycle,
            self._gateway_events,
            self._drains,
            self._replaced_bases,
            self.publisher,
        )
        if saved is not None:
            self.publisher.restore(saved)
        # Public, for metrics and tests to read.
        self.config = config
        self.requests = state.requests
        self.queues = state.queues
        self.runners = state.runners
        self.adapters = state.adapters
        self.timelines = state.timelines
        self.look_at = now
        """When to look again at what has no time of its own."""
        self._handlers: dict[type, Callable[[Any], None]] = {
            events.Enqueued: self._gateway_events.enqueued,
            events.GatewayConnected: self._gateway_events.connected,
            events.GatewayTold: self._gateway_events.told,
            events.GatewayDisconnected: self._gateway_events.disconnected,
            events.CancelRequested: self._gateway_events.cancel_requested,
            events.RequestFinished: self._gateway_events.finished,
            events.RequestLost: self._gateway_events.lost,
            events.RequestsHeld: self._gateway_events.requests_held,
            events.LevelsTold: self._gateway_events.levels_told,
            events.RunnerAttached: self._runner_events.attached,
            events.RunnerDetached: self._runner_events.detached,
            events.RunnerReported: self._runner_events.reported,
            events.RunnerListed: self._runner_events.listed,
            events.RunnerDeclined: self._runner_events.declined,
            events.SequencesEnded: self._runner_events.sequences_ended,
            events.ResidencyChanged: self._runner_events.residency_changed,
            events.RunnerShuttingDown: self._drains.shutting_down,
            events.TermRaised: self._term_raised,
            events.AdapterStateChanged: self._runner_events.adapter_changed,
            events.OperatorConnected: self.publisher.operator_connected,
            events.CatalogReplaced: self.publisher.catalog_replaced,
            events.CatalogUpdated: self.publisher.catalog_updated,
            events.DrainsDeclared: self._drains.declared,
            events.SupervisorConnected: self._supervisor_events.connected,
            events.SupervisorDisconnected: self._supervisor_events.disconnected,
            events.PromiseChanged: self._supervisor_events.promise_changed,
            events.RequestParked: self._supervisor_events.parked,
            events.RequestResumed: self._supervisor_events.resumed,
            events.RunnerUnhealthy: self._supervisor_events.unhealthy,
            events.OvercommitSet: self._runner_events.overcommit_set,
            events.Tick: self._tick,
            events.TryMore: self._try_more,
        }

    @property
    def may_place(self) -> bool:
        """Whether placing is safe: the runners that were attached before the start have reported their requests."""
        return self.state.may_place

    @property
    def more_to_try(self) -> bool:
        """Whether requests are left that should be tried or ended: doing all at once would delay everything else."""
        if self.lifecycle.more_to_end or self._cold_waits.more_to_end or self._quota_gate.more_to_let_in:
            return True
        if self.publisher.more_to_tell:
            return True
        return self.state.may_place and any(queue.changed for queue in self.queues.values())

    @property
    def catalog(self) -> Catalog | None:
        """The last one published."""
        return self.state.catalog

    def handle(self, event: events.Event, now: float) -> list[effects.Effect]:
        state = self.state
        state.now = now
        state.effects = []
        self._handlers[type(event)](event)
        if state.residency.loaded:
            self._cold_waits.end_of_loaded()
        self.lifecycle.end_forgotten()
        self.lifecycle.move_some()
        if state.bases_changed:
            self.publisher.bases_changed()
        self._quota_gate.let_in()
        self.placer.place_all()
        self.publisher.drop_unused_adapters()
        self.publisher.tell_changes()
        return state.effects

    def catalog_to_save(self) -> SavedCatalog:
        return self.publisher.to_save()

    def queued(self) -> int:
        return sum(len(queue) for queue in self.queues.values())

    def check(self) -> None:
        """Recount all ledgers and counters (in tests). Raises AssertionError if they differ."""
        waiting = {request.id for queue in self.queues.values() for *_, request in queue.unordered()}
        assert waiting == {r.id for r in self.requests.values() if r.waiting and not r.held}, (
            "queued and waiting differ"
        )
        self.state.quotas.check(self.requests.values())
        self.lifecycle.check()
        assert all(r.waiting for r in self.requests.values() if r.deadline_at is not None), "what runs has a deadline"
        for queue in self.queues.values():
            assert queue.bases == Counter(r.base for *_, r in queue.unordered()), (
                "base models of a queue were miscounted"
            )
            assert queue.adapters == Counter(r.digest for *_, r in queue.unordered()), (
                "adapters of a queue were miscounted"
            )
            assert queue.replaced.keys() == {r for *_, r in queue.unordered() if r.replaced}, (
                "requests of replaced revisions were miscounted"
            )
            for share in (share for one in queue.class_queues.values() for share in one.shares):
                assert share.waiting == sum(map(len, share.flows.values())), "requests that wait were miscounted"
            queue.headroom.check()
            queue.rooms.check([one for one in self.runners.values() if self.queues.get(one.group) is queue])
        for runner in self.runners.values():
            runner.check()
        counted = Counter(r.digest for r in self.requests.values() if r.digest != BASE)
        assert counted == self.state.adapter_uses, "uses of adapters were miscounted"
        self.state.families.check(self.requests)
        self.state.adapters.to_check.check(self.state.adapters.by_name)

    def next_due(self) -> float:
        """When to send the next Tick: one before does nothing. After a Tick it is later than that one, unless there is
        more to try. Any other event may make it earlier."""
        timed = min(self.publisher.next_due(), *(part.next_due() for part in self._timed))
        return min(timed, max(self.look_from(), self.look_at))

    def look_from(self) -> float:
        """From when on something waits for what has no time of its own, or may have to wait longer than its own time.
        It is looked at now and then, as long as it waits."""
        return min(part.look_from() for part in self._looked_at)

    def _try_more(self, _event: events.TryMore) -> None:
        """Each event tries some, and ends some."""
        self.lifecycle.expire_deadlines()
        self._cold_waits.end_some()

    def _term_raised(self, event: events.TermRaised) -> None:
        """Runners have ignored what they were told under the lower one."""
        self._drains.send_all(event)
        self.state.loads.pin_again(self.runners.values())

    def _tick(self, _event: events.Tick) -> None:
        for timed in self._timed:
            timed.tick()
        if self.state.now >= self.look_at:
            self.look_at = self.state.now + self.config.look_again
            for part in self._looked_at:
                part.look()
        self.state.drop_unused_queues()
