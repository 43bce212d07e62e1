"""Simulated runners under the real scheduler and the real supervisor, and a gateway that plays a workload.

Nothing fails here: no message is lost, no process dies. Messages take as long as the profile says.
"""

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

from motet.domain import RequestId
from motet_scheduler.policy import effects as scheduler_effects
from motet_scheduler.policy import events as scheduler_events
from motet_scheduler.policy.scheduler import Scheduler
from motet_scheduler.policy.values import Promise
from motet_simulator.plan.answer import Answer
from motet_simulator.plan.catalog import catalog, digest_of
from motet_simulator.plan.clock import VirtualClock
from motet_simulator.plan.gateway import SimulatedGateway
from motet_simulator.plan.outcome import Outcome
from motet_simulator.plan.runner import SimulatedRunner
from motet_simulator.plan.setup import GATEWAY, MESSAGE_SECONDS, Setup
from motet_simulator.workloads.request import WorkloadRequest
from motet_supervisor.policy import effects as supervisor_effects
from motet_supervisor.policy import events as supervisor_events
from motet_supervisor.policy.supervisor import Supervisor

TICK_SECONDS = 0.5
"""Ticks of scheduler and supervisor end waits of seconds. Nothing here needs one sooner."""

REPORT_SECONDS, GIVE_UP_CHECK_SECONDS = 1.0, 10.0

TICKS_AGAIN_SECONDS, REPORTS_AGAIN_SECONDS = 30.0, 35.0
"""Before the next request. Until then nothing is repeated while no answer is open: a tick would only find what the last
one has found. Reports begin earlier, so that no tick finds a runner silent."""

Record = Callable[[float, scheduler_events.Event | supervisor_events.Event], None]


class Cluster:
    def __init__(self, setup: Setup, adapters: Iterable[str] = (), *, record: Record | None = None) -> None:
        """`adapters`: the names of all that the workload asks for, as tenant/name or name. `record` is told each event
        of scheduler and supervisor, before they handle it."""
        self.setup = setup
        self.clock = VirtualClock()
        self.outcome = Outcome()
        self.answers: dict[RequestId, Answer] = {}
        """Of requests that have not ended."""
        self.gave_up = False
        self.adapters = {name: digest_of(name) for name in adapters}
        self.saved = catalog(self.adapters, setup)
        self.scheduler = Scheduler(setup.scheduler, now=0.0, saved=self.saved)
        self.supervisor = Supervisor(setup.supervisor)
        self._refs = {one.serving.digest: one.spec.ref for one in self.saved.adapters if one.serving is not None}
        self.runners = {runner.instance: runner for runner in map(self._runner, range(setup.runners))}
        self._record = record
        self._gateway = self._gateway_of(iter(()))
        self._trying_more = False

    def _runner(self, number: int) -> SimulatedRunner:
        setup, after = self.setup, self.clock.after
        delivery = setup.profile.overheads.delivery
        return SimulatedRunner(
            f"r{number:04}",
            setup.profile,
            self.clock,
            seed=setup.seed * 100_003 + number,
            gaps=self.outcome.gaps,
            rank=setup.rank,
            refs=self._refs,
            to_scheduler=partial(after, MESSAGE_SECONDS, self._tell_scheduler),
            to_supervisor=partial(after, MESSAGE_SECONDS, self._tell_supervisor),
            ended=lambda answer: after(delivery, self._gateway.ended, answer),
            declined=lambda answer, why: after(delivery, self._gateway.declined, answer, why),
            leaps=setup.leaps,
        )

    def _gateway_of(self, requests: Iterator[WorkloadRequest]) -> SimulatedGateway:
        return SimulatedGateway(
            self.setup,
            self.clock,
            requests,
            adapters=self.adapters,
            outcome=self.outcome,
            answers=self.answers,
            tell_scheduler=self._tell_scheduler,
            submit=lambda instance, answer: self.runners[instance].submit(answer),
        )

    def run(self, requests: Iterator[WorkloadRequest], *, give_up: Callable[[], bool] | None = None) -> Outcome:
        """Play a workload until all of its requests have ended, or `give_up`, which is asked now and then."""
        clock, gateway = self.clock, self._gateway_of(requests)
        self._gateway = gateway
        if give_up is not None:
            clock.every(
                GIVE_UP_CHECK_SECONDS,
                partial(self._check, give_up),
                first=GIVE_UP_CHECK_SECONDS,
                idle_until=gateway.idle_until,
            )
        self._tell_scheduler(scheduler_events.GatewayConnected(GATEWAY))
        for runner in self.runners.values():
            runner.attach()
        self._tell_scheduler(scheduler_events.SupervisorConnected())
        self._tell_supervisor(supervisor_events.SchedulerConnected(1, 1))
        spread = REPORT_SECONDS / max(1, len(self.runners))
        for number, runner in enumerate(self.runners.values()):
            clock.every(
                REPORT_SECONDS,
                runner.ask_report,
                first=number * spread,
                idle_until=lambda: gateway.idle_until() - REPORTS_AGAIN_SECONDS,
            )
        for tick in (
            partial(self._tell_scheduler, scheduler_events.Tick()),
            partial(self._tell_supervisor, supervisor_events.Tick()),
        ):
            clock.every(TICK_SECONDS, tick, idle_until=lambda: gateway.idle_until() - TICKS_AGAIN_SECONDS)
        gateway.ask_next()
        with _without_collections():
            clock.run(until=lambda: self.gave_up or gateway.done)
        self.outcome.seconds = clock.now
        self.outcome.busy_seconds = tuple(runner.busy_seconds for runner in self.runners.values())
        return self.outcome

    def _check(self, give_up: Callable[[], bool]) -> None:
        self.gave_up = give_up()

    # -- scheduler and supervisor ------------------------------------------------------------------------------------

    def _tell_scheduler(self, event: scheduler_events.Event) -> None:
        if self._record is not None:
            self._record(self.clock.now, event)
        for effect in self.scheduler.handle(event, self.clock.now):
            match effect:
                case scheduler_effects.SendPlaced():
                    submit = self.setup.profile.overheads.submit
                    # One that moves is cancelled first: only then its gateway knows the tokens that it goes on from.
                    wait = submit + MESSAGE_SECONDS if effect.moved_reason else submit
                    self.clock.after(wait, self._gateway.placed, effect)
                case scheduler_effects.SendRefused():
                    self.clock.after(MESSAGE_SECONDS, self._gateway.refused, effect)
                case (
                    scheduler_effects.EnsureAdapter()
                    | scheduler_effects.DropAdapter()
                    | scheduler_effects.CancelAtRunner()
                ):
                    self.clock.after(MESSAGE_SECONDS, self.runners[effect.instance].order, effect)
                case scheduler_effects.AllowResume():
                    promise = effect.promise
                    allowed = supervisor_events.Resumable(
                        1, effect.instance, effect.request, effect.epoch, promise.pages, promise.number
                    )
                    self.clock.after(MESSAGE_SECONDS, self._tell_supervisor, allowed)
                case _:
                    pass  # hints, positions, and words for operators
        if self.scheduler.more_to_try and not self._trying_more:
            self._trying_more = True
            self.clock.at(self.clock.now, self._try_more)

    def _try_more(self) -> None:
        self._trying_more = False
        if self.scheduler.more_to_try:
            self._tell_scheduler(scheduler_events.TryMore())

    def _tell_supervisor(self, event: supervisor_events.Event) -> None:
        if self._record is not None:
            self._record(self.clock.now, event)
        for effect in self.supervisor.handle(event, self.clock.now):
            match effect:
                case (
                    supervisor_effects.Extend()
                    | supervisor_effects.Park()
                    | supervisor_effects.Resume()
                    | supervisor_effects.SetOvercommit()
                ):
                    self.clock.after(MESSAGE_SECONDS, self.runners[effect.instance].order, effect)
                case _:
                    for told in _for_scheduler(effect):
                        self.clock.after(MESSAGE_SECONDS, self._tell_scheduler, told)


def _for_scheduler(effect: supervisor_effects.SchedulerMessage) -> list[scheduler_events.Event]:
    match effect:
        case supervisor_effects.ReportPromise():
            promise = Promise(effect.pages)
            return [scheduler_events.PromiseChanged(effect.instance, effect.request, effect.epoch, promise)]
        case supervisor_effects.ReportParked():
            wanted = Promise(effect.wanted, number=effect.number)
            return [scheduler_events.RequestParked(effect.instance, effect.request, effect.epoch, wanted)]
        case supervisor_effects.ReportResumed():
            promise = Promise(effect.pages)
            return [scheduler_events.RequestResumed(effect.instance, effect.request, effect.epoch, promise)]
        case supervisor_effects.ReportOvercommit():
            return [scheduler_events.OvercommitSet(effect.pool, effect.factor)]
        case supervisor_effects.ReportRunnerLost():
            return [scheduler_events.RunnerUnhealthy(effect.identity, effect.why, effect.hung, effect.silent_seconds)]
        case supervisor_effects.ReportAllParked():
            return []  # nothing runs when the scheduler connects


@contextmanager
def _without_collections() -> Iterator[None]:
    """A simulation makes no garbage in cycles, and a collection would visit all adapters again and again."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
