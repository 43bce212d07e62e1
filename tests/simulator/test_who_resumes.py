"""Who resumes a parked request: docs/architecture.md has the table.

Here are all of its cases, with the policies of scheduler and supervisor, and a runner with the real plan.
"""

from itertools import product

import pytest

from motet.domain import BASE, InstanceName, ParkMethod, RequestId, Tenant
from motet.runner_info import RequestClass, RunnerIdentity, RunnerRequest, SequenceState
from motet_runner.engine_loop import EngineLoop
from motet_runner.engine_messages import Add, Park, ReportNow, Resume, SetSupervised
from motet_runner.interface import EngineReport, NewSequence, ParkedNow, ResumedNow, Sampling
from motet_runner.plan import preset_named
from motet_scheduler.policy import effects as scheduler_effects
from motet_scheduler.policy import events as scheduler_events
from motet_scheduler.policy.scheduler import Scheduler
from motet_scheduler.policy.values import GroupName, Promise, SchedulerConfig
from motet_simulator.fake_engine import FakeEngine
from motet_supervisor.policy import effects as supervisor_effects
from motet_supervisor.policy import events as supervisor_events
from motet_supervisor.policy.supervisor import Supervisor
from motet_supervisor.policy.values import SupervisorConfig

R0, REQUEST, TICK = InstanceName("r0"), RequestId("a"), 0.1
IDENTITY = RunnerIdentity(instance="r0", incarnation="1", pool="default/demo", group="default/demo")
MAX_TOKENS = 600

SECONDS_TO_RESUME = 5.0
"""The supervisor waits for two, from the first report after a stream has broken; reports come each second."""


class System:
    def __init__(self, preset: str, *, says: bool) -> None:
        """`says`: whether this runner's reports say that it has a scheduler."""
        self.now = 0.0
        self.to_scheduler = self.to_supervisor = self.between = True
        """Whether the streams of the runner to both are up, and the one between them."""
        self.says = says
        self.engine = FakeEngine(pages=100, preset=preset)
        self.loop = EngineLoop(self.engine, clock=lambda: self.now)
        self.scheduler = Scheduler(SchedulerConfig(), now=0.0)
        self.supervisor = Supervisor(SupervisorConfig())
        self.epoch = 0
        self.tokens = 0
        capacity = self.engine.info.capacity(preset_named(preset).promise)
        self.tell_scheduler(scheduler_events.GatewayConnected("g"))
        self.tell_scheduler(scheduler_events.RunnerAttached(identity=IDENTITY, address="x", capacity=capacity))
        self.tell_scheduler(scheduler_events.SupervisorConnected())
        self.tell_supervisor(supervisor_events.SchedulerConnected(1, 1))
        self.tell_supervisor(supervisor_events.RunnerConnected(IDENTITY, capacity))
        self.loop.apply([SetSupervised(supervised=True)])
        self.run(2.0)
        self.tell_scheduler(
            scheduler_events.Enqueued(
                gateway="g",
                request=REQUEST,
                tenant=Tenant("t"),
                group=GroupName("default/demo"),
                digest=BASE,
                request_class=RequestClass.STANDARD,
                prompt_tokens=20,
                max_tokens=MAX_TOKENS,
                deadline=300.0,
            )
        )

    def tell_scheduler(self, event: scheduler_events.Event) -> None:
        for effect in self.scheduler.handle(event, self.now):
            match effect:
                case scheduler_effects.SendPlaced():
                    self.epoch = effect.epoch
                    new = NewSequence(
                        request=REQUEST,
                        epoch=effect.epoch,
                        prompt=tuple(range(20)),
                        promise=effect.promise.pages,
                        sampling=Sampling(max_tokens=MAX_TOKENS),
                    )
                    self.loop.apply([Add(new, 1, self.now)])
                case scheduler_effects.AllowResume() if self.between:
                    wanted = effect.promise
                    self.tell_supervisor(
                        supervisor_events.Resumable(1, R0, REQUEST, effect.epoch, wanted.pages, wanted.number)
                    )

    def tell_supervisor(self, event: supervisor_events.Event) -> None:
        for effect in self.supervisor.handle(event, self.now):
            match effect:
                case supervisor_effects.Resume() if self.to_supervisor:
                    self.loop.apply([Resume(REQUEST, effect.epoch, effect.pages, effect.number)])
                case supervisor_effects.ReportParked() if self.between:
                    wanted = Promise(effect.wanted, number=effect.number)
                    self.tell_scheduler(scheduler_events.RequestParked(R0, REQUEST, effect.epoch, wanted))
                case supervisor_effects.ReportResumed() if self.between:
                    pages = Promise(effect.pages)
                    self.tell_scheduler(scheduler_events.RequestResumed(R0, REQUEST, effect.epoch, pages))

    def cut(self, *, to_scheduler: bool, to_supervisor: bool, between: bool) -> None:
        """The streams that are True stay up."""
        self.to_scheduler, self.to_supervisor, self.between = to_scheduler, to_supervisor, between
        if not to_scheduler:
            self.tell_scheduler(scheduler_events.RunnerDetached(R0, "1"))
        if not to_supervisor:
            self.loop.apply([SetSupervised(supervised=False)])
            self.tell_supervisor(supervisor_events.RunnerDisconnected(R0, "1"))
        if not between:
            self.tell_scheduler(scheduler_events.SupervisorDisconnected())
            self.tell_supervisor(supervisor_events.SchedulerDisconnected(1))

    def run(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            self.now += TICK
            if int(self.now / TICK + 0.5) % 10 == 0:
                self.loop.apply([ReportNow()])
            batch = self.loop.turn()
            self.tokens += batch.generated if batch is not None else 0
            for event in batch.events if batch is not None and self.to_supervisor else ():
                match event:
                    case ParkedNow():
                        self.tell_supervisor(
                            supervisor_events.RequestParked(
                                R0, REQUEST, event.epoch, event.wanted, event.method, event.number
                            )
                        )
                    case ResumedNow():
                        self.tell_supervisor(
                            supervisor_events.RequestResumed(R0, REQUEST, event.epoch, event.promise, event.number)
                        )
            if batch is not None and batch.report is not None:
                self.report(batch.report)
            self.tell_scheduler(scheduler_events.Tick())
            self.tell_supervisor(supervisor_events.Tick())

    def report(self, report: EngineReport) -> None:
        live = tuple(
            RunnerRequest(
                request=one.request,
                epoch=one.epoch,
                pages=one.promise,
                pages_used=one.pages_used,
                state=SequenceState(one.state.value),
                prompt_tokens=one.prompt_tokens,
                output_tokens=one.output_tokens,
                max_tokens=MAX_TOKENS,
                gateway="g",
                promise_number=one.promise_number,
                parked_times=one.parked_times,
                charged_pages=one.charged_pages or 0,
            )
            for one in report.sequences
        )
        if self.to_scheduler:
            self.tell_scheduler(
                scheduler_events.RunnerReported(
                    instance=R0,
                    incarnation="1",
                    pages=report.pages,
                    pages_free=report.pages_free,
                    running=report.running,
                    waiting=report.waiting,
                    steps=report.steps,
                    live=live,
                )
            )
        if self.to_supervisor:
            self.tell_supervisor(
                supervisor_events.MemoryReported(
                    instance=R0,
                    pages=report.pages,
                    host_bytes_free=report.host_bytes_free,
                    steps=report.steps,
                    work_pending=report.running + report.waiting > 0,
                    prefill_seconds_per_token=1e-4,
                    swap_seconds_per_page=1e-3,
                    live=live,
                    has_scheduler=self.to_scheduler if self.says else None,
                )
            )

    def park(self) -> None:
        sequence = self.engine.planner.sequences.get(REQUEST)
        assert sequence is not None
        order = Park(
            REQUEST, self.epoch, sequence.promise, sequence.doubled, ParkMethod.RECOMPUTE, sequence.promise_number
        )
        self.loop.apply([order])
        assert sequence.parked_times == 1


def tokens_after_a_park(system: System, *, cut_first: bool, **up: bool) -> int:
    system.run(0.5)
    assert system.tokens, "it runs"
    if cut_first:
        system.cut(**up)
    system.park()
    if not cut_first:
        system.run(TICK)
        system.cut(**up)
    before = system.tokens
    system.run(SECONDS_TO_RESUME)
    return system.tokens - before


@pytest.mark.parametrize("preset", ["paged-chunk", "s3"])
@pytest.mark.parametrize("cut_first", [True, False])
@pytest.mark.parametrize(("to_scheduler", "to_supervisor", "between"), list(product([True, False], repeat=3)))
def test_a_parked_request_runs_again_whichever_streams_are_down(
    to_scheduler, to_supervisor, between, cut_first, preset
):
    up = {"to_scheduler": to_scheduler, "to_supervisor": to_supervisor, "between": between}
    assert tokens_after_a_park(System(preset, says=True), cut_first=cut_first, **up) > 0


def test_a_runner_of_an_earlier_version_counts_as_one_that_has_a_scheduler():
    up = {"to_scheduler": False, "to_supervisor": True, "between": True}
    assert tokens_after_a_park(System("s3", says=False), cut_first=True, **up) == 0
