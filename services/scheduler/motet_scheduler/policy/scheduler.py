"""The scheduler: who hears which event, and in which order the parts of the policy have their say.

`handle` is the only way in: it changes the state and returns what is to be done. It never looks at a clock; events are
handled in the order they are handed in, each with its time.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

from motet.domain import BASE
from motet_scheduler.policy import effects, events
from motet_scheduler.policy.autoscaler import Autoscaler
from motet_scheduler.policy.catalog import CatalogPublisher, SavedCatalog
from motet_scheduler.policy.drains import Drains
from motet_scheduler.policy.gateway_events import GatewayEvents
from motet_scheduler.policy.placement import Placer, Positions
from motet_scheduler.policy.request_lifecycle import RequestLifecycle
from motet_scheduler.policy.runner_events import RunnerEvents
from motet_scheduler.policy.state import SchedulerState, StartupWait
from motet_scheduler.policy.supervisor_events import SupervisorEvents
from motet_scheduler.policy.values import Catalog, SchedulerConfig


class Scheduler:
    def __init__(self, policy: SchedulerConfig, *, now: float, remembered: SavedCatalog | None = None) -> None:
        awaited = remembered.runners if remembered is not None else ()
        state = self._state = SchedulerState(policy, now, StartupWait(awaited, now + policy.startup_wait))
        self._lives = RequestLifecycle(state)
        self._placing = Placer(state, self._lives)
        self._positions = Positions(state)
        self.capacity = Autoscaler(state)
        self._offering = CatalogPublisher(state, self.capacity)
        self._gateways = GatewayEvents(state, self._lives, self._placing, self._positions)
        self._drains = Drains(state, self._lives)
        self._attachments = RunnerEvents(state, self._lives, self._offering, self._drains)
        self._advice = SupervisorEvents(state, self._lives)
        if remembered is not None:
            self._offering.restore(remembered)
        # What others may look at.
        self.policy = policy
        self.requests = state.requests
        self.queues = state.queues
        self.runners = state.runners
        self.adapters = state.adapters
        self.timelines = state.timelines
        self._handlers: dict[type, Callable[[Any], None]] = {
            events.Enqueued: self._gateways.enqueued,
            events.GatewayConnected: self._gateways.connected,
            events.GatewayDisconnected: self._gateways.gone,
            events.CancelRequested: self._gateways.cancel_asked,
            events.RequestFinished: self._gateways.finished,
            events.RequestLost: self._gateways.lost,
            events.RequestsHeld: self._gateways.requests_held,
            events.RunnerAttached: self._attachments.attached,
            events.RunnerDetached: self._attachments.detached,
            events.RunnerReported: self._attachments.reported,
            events.RunnerDeclined: self._attachments.declined,
            events.RunnerShuttingDown: self._drains.ending,
            events.TermRaised: self._drains.tell_all,
            events.AdapterStateChanged: self._attachments.adapter_changed,
            events.OperatorConnected: self._offering.operator_connected,
            events.CatalogReplaced: self._offering.catalog_replaced,
            events.CatalogUpdated: self._offering.catalog_updated,
            events.DrainsDeclared: self._drains.declared,
            events.SupervisorConnected: self._advice.connected,
            events.SupervisorDisconnected: self._advice.gone,
            events.PromiseChanged: self._advice.promise_changed,
            events.RequestParked: self._advice.parked,
            events.RequestResumed: self._advice.resumed,
            events.RunnerUnhealthy: self._advice.condemned,
            events.OvercommitSet: self._attachments.overcommit_set,
            events.Tick: self._tick,
        }

    @property
    def settled(self) -> bool:
        """Whether placing is safe: those runners that were there before have said what they hold."""
        return self._state.settled

    @property
    def catalog(self) -> Catalog | None:
        """The last one published."""
        return self._state.catalog

    def handle(self, event: events.Event, now: float) -> list[effects.Effect]:
        state = self._state
        state.now = now
        state.effects = []
        self._handlers[type(event)](event)
        self._placing.place_all()
        self._offering.drop_unused_adapters()
        # One that has just taken over knows nothing before an operator speaks, and gateways believe what they are told.
        if state.catalog_changed and state.settled and (state.catalog_known or state.pools):
            self._offering.publish()
        return state.effects

    def remembered(self) -> SavedCatalog:
        return self._offering.to_save()

    def queued(self) -> int:
        return sum(len(queue) for queue in self.queues.values())

    def check(self) -> None:
        """Recount every book (tests, and when idle); raises AssertionError with the numbers."""
        waiting = {request.id for queue in self.queues.values() for request in queue}
        assert waiting == {r.id for r in self.requests.values() if r.waiting}, "queued and waiting differ"
        for runner in self.runners.values():
            runner.check()
        counted = Counter(r.digest for r in self.requests.values() if r.digest != BASE)
        assert counted == self._state.adapter_uses, "uses of adapters were miscounted"

    def _tick(self, _event: events.Tick) -> None:
        if self._state.settling.expires(self._state.now):
            for queue in self.queues.values():
                queue.retry_everywhere()
        self._lives.tick()
        self._gateways.tick()
        self._attachments.tick()
        self._drains.tick()
        self._offering.order_adapter_loads()
        self._positions.tick()
        self.capacity.tick()
