"""A simulated runner: the real engine loop around a simulated engine, and the reports and answers of its service."""

from collections import OrderedDict
from collections.abc import Callable
from functools import lru_cache

from motet.domain import BASE, Digest, InstanceName, RequestId, Tenant
from motet.runner_info import (
    Capacity,
    Failure,
    RequestClass,
    ResidentAdapter,
    RunnerIdentity,
    RunnerRequest,
    SequenceState,
    Tier,
)
from motet_runner.engine_loop import EngineLoop
from motet_runner.engine_messages import (
    Add,
    Cancel,
    Command,
    DropAdapter,
    EngineOutputs,
    Extend,
    LoadAdapter,
    Park,
    ReportNow,
    Resume,
    SetOvercommit,
    SetSupervised,
)
from motet_runner.interface import (
    AdapterEvicted,
    AdapterFailed,
    AdapterLoaded,
    EngineReport,
    EngineSequenceReport,
    Event,
    NewSequence,
    OverflowAhead,
    ParkedNow,
    ResumedNow,
    Sampling,
    State,
    StateChanged,
)
from motet_runner.plan import preset_named
from motet_scheduler.policy import effects as scheduler_effects
from motet_scheduler.policy import events as scheduler_events
from motet_scheduler.policy.values import AdapterRef, AdapterStage
from motet_simulator.plan.answer import Answer
from motet_simulator.plan.clock import Alarm, VirtualClock
from motet_simulator.plan.engine import SimulatedEngine, completed, layout_of
from motet_simulator.plan.gaps import Gaps
from motet_simulator.profiles.profile import EngineSize, Profile
from motet_supervisor.policy import effects as supervisor_effects
from motet_supervisor.policy import events as supervisor_events

GATEWAY = "gateway"
REPORT_SECONDS = 1.0
_STREAM = 1
_INCARNATION = "1"

_STATES = {state: SequenceState(state.value) for state in State}

_LEAST_LEAP = 2
"""Iterations: to find out about a leap costs about as much as one of them."""


class SimulatedRunner:
    def __init__(
        self,
        instance: str,
        profile: Profile,
        clock: VirtualClock,
        *,
        seed: int,
        answers: dict[RequestId, Answer],
        gaps: Gaps,
        group: str,
        rank: int,
        to_scheduler: Callable[[scheduler_events.Event], None],
        to_supervisor: Callable[[supervisor_events.Event], None],
        ended: Callable[[Answer], None],
        declined: Callable[[Answer, str], None],
        leaps: bool = True,
    ) -> None:
        size = profile.engine
        self.instance = InstanceName(instance)
        self.identity = RunnerIdentity(instance=instance, incarnation=_INCARNATION, pool=group, group=group)
        self.capacity = capacity_of(size)
        self.engine = SimulatedEngine(profile, seed=seed, answers=answers, gaps=gaps)
        self.busy_seconds = 0.0
        self._loop = EngineLoop(self.engine, clock=lambda: self.engine.now)
        self._clock = clock
        self._answers = answers
        self._adapter_bytes = size.page_bytes * size.adapter_pages(rank)
        self._layout = layout_of(rank, self._adapter_bytes)
        self._cached: OrderedDict[Digest, ResidentAdapter] = OrderedDict()
        """The adapters of its disk cache, the least recently used one first, as reports show one that is only there."""
        self._most_cached = size.cached_adapters
        self._to_scheduler = to_scheduler
        self._to_supervisor = to_supervisor
        self._ended = ended
        self._declined = declined
        self._leaps = leaps
        self._commands: list[Command] = []
        self._accepted: dict[RequestId, Answer] = {}
        self._iterating = False
        self._leap: tuple[float, list[float], Alarm] | None = None
        """When a leap began, when its iterations end, and what happens after it."""
        self._wait: Alarm | None = None
        """The next look at an engine whose sequences all wait."""

    # -- commands ----------------------------------------------------------------------------------------------------

    def attach(self) -> None:
        self._to_scheduler(
            scheduler_events.RunnerAttached(identity=self.identity, address=self.instance, capacity=self.capacity)
        )
        self._to_supervisor(supervisor_events.RunnerConnected(self.identity, self.capacity, heartbeats=False))
        self._post(SetSupervised(supervised=True))

    def submit(self, answer: Answer) -> None:
        """What its gateway does with a placement here."""
        asked, promise = answer.asked, answer.promise
        assert promise is not None
        if answer.digest != BASE:
            self._use_adapter(answer.digest)
        self._accepted[answer.request] = answer
        delivered = answer.delivered
        self._post(
            Add(
                NewSequence(
                    request=answer.request,
                    epoch=answer.epoch,
                    prompt=answer.prompt,
                    delivered=(answer.name,) * delivered,
                    adapter=answer.digest,
                    promise=promise.pages,
                    sampling=_sampling(answer.max_tokens),
                    priority=RequestClass[asked.request_class.upper()],
                    tenant=asked.tenant,
                    prefix_salt=answer.salt,
                ),
                _STREAM,
            )
        )

    def order(self, effect: scheduler_effects.RunnerEffect | supervisor_effects.RunnerOrder) -> None:
        match effect:
            case scheduler_effects.EnsureAdapter():
                digest = Digest(effect.expected_digest)
                self._use_adapter(digest)
                self._report_adapter(effect.ref, digest, AdapterStage.CERTIFIED, effect.order, effect.stage)
            case scheduler_effects.DropAdapter():
                self._post(DropAdapter(effect.digest))
                self._cached.pop(effect.digest, None)
            case scheduler_effects.CancelAtRunner():
                self._post(Cancel(effect.request, effect.epoch, _STREAM, self._clock.now))
            case supervisor_effects.Extend():
                self._post(Extend(effect.request, effect.epoch, effect.pages, effect.extended))
            case supervisor_effects.Park():
                self._post(Park(effect.request, effect.epoch, effect.pages, effect.doubled, effect.method))
            case supervisor_effects.Resume():
                self._post(Resume(effect.request, effect.epoch, effect.pages))
            case supervisor_effects.SetOvercommit():
                self._post(SetOvercommit(effect.factor))
            case _:
                pass  # hints, and words about drains

    def ask_report(self) -> None:
        self._post(ReportNow())

    def _use_adapter(self, digest: Digest) -> None:
        if digest in self._cached:
            self._cached.move_to_end(digest)
        else:
            self._cached[digest] = ResidentAdapter(digest=digest, tier=Tier.DISK, bytes=self._adapter_bytes)
            self._post(LoadAdapter(digest, self._layout))
            if len(self._cached) > self._most_cached:
                self._drop_one_cached()

    def _drop_one_cached(self) -> None:
        used = {answer.digest for answer in self._accepted.values()}
        idle = next((digest for digest in self._cached if digest not in used), None)
        if idle is not None:
            del self._cached[idle]
            self._post(DropAdapter(idle))

    # -- iterations --------------------------------------------------------------------------------------------------

    def _post(self, command: Command) -> None:
        self._commands.append(command)
        now = self._clock.now
        if self._leap is not None:
            self._end_leap_early(now)
        elif not self._iterating:
            if self._wait is not None:
                self._wait.off = True
                self._wait = None
            self._iterating = True
            self._clock.iteration_at(now, self._turn)

    def _turn(self) -> None:
        """Begin an iteration. What it brings is known now, and told when it ends."""
        now = self._clock.now
        self._iterating, self._wait = True, None
        commands, self._commands = self._commands, []
        self._loop.apply(commands)
        if self._leaps and self._loop.may_leap and self._begin_leap(now):
            return
        self._iterate(now)

    def _iterate(self, began: float) -> None:
        self.engine.now = began
        outputs = self._loop.turn()
        end = max(self.engine.now, self._clock.now)
        self.busy_seconds += end - began
        self._clock.iteration_at(end, self._iterated, outputs)

    def _iterated(self, outputs: EngineOutputs | None) -> None:
        self._iterating = False
        if outputs is not None:
            self._tell(outputs)
        if self._commands or (self.engine.has_work() and self.engine.computed):
            self._turn()
        elif self.engine.has_work():
            self._wait = self._clock.iteration_at(self._clock.now, self._turn)

    def _begin_leap(self, now: float) -> bool:
        ends = self.engine.foresee(now, self._loop.quiet_at)
        if len(ends) < _LEAST_LEAP:
            return False
        self._leap = (now, ends, self._clock.iteration_at(ends[-1], self._end_leap))
        return True

    def _end_leap(self) -> None:
        assert self._leap is not None
        began, ends, _ = self._leap
        self._take_leap(began, ends)
        self._turn()

    def _end_leap_early(self, now: float) -> None:
        """A command waits for the end of the iteration that is under way."""
        assert self._leap is not None
        began, ends, alarm = self._leap
        alarm.off = True
        count = completed(ends, now)
        self._take_leap(began, ends[:count])
        self._iterate(ends[count - 1] if count else began)

    def _take_leap(self, began: float, ends: list[float]) -> None:
        self._leap = None
        if ends:
            self.engine.leap(began, ends)
            self._loop.leapt(ends)
            self.busy_seconds += ends[-1] - began

    # -- what it tells -----------------------------------------------------------------------------------------------

    def _tell(self, outputs: EngineOutputs) -> None:
        for event in outputs.events:
            self._tell_event(event)
        for refused in outputs.refused:
            answer = self._accepted.pop(refused.request, None)
            failure = Failure.of(refused.error)
            self._to_scheduler(scheduler_events.RunnerDeclined(self.instance, refused.request, refused.epoch, failure))
            if answer is not None:
                self._declined(answer, failure.message)
        for ended in outputs.ended:
            answer = self._accepted.pop(ended.request, None)
            self._to_supervisor(supervisor_events.RequestEnded(self.instance, ended.request, ended.epoch))
            if answer is not None:
                self._ended(answer)
        if outputs.report is not None:
            self._report(outputs.report)

    def _tell_event(self, event: Event) -> None:
        match event:
            case OverflowAhead():
                sequence = self.engine.planner.sequences.get(event.request)
                if sequence is not None:
                    entry = self._entry(sequence.entry())
                    self._to_supervisor(supervisor_events.OverflowAnnounced(self.instance, entry))
            case ParkedNow():
                self._to_supervisor(
                    supervisor_events.RequestParked(
                        self.instance, event.request, event.epoch, event.wanted, event.method
                    )
                )
            case ResumedNow():
                self._to_supervisor(
                    supervisor_events.RequestResumed(self.instance, event.request, event.epoch, event.promise)
                )
            case AdapterLoaded() | AdapterEvicted() | AdapterFailed() | StateChanged():
                pass  # the report that comes with it names the adapters

    def _report_adapter(
        self, ref: AdapterRef, digest: Digest, stage: AdapterStage, order: int, ordered: AdapterStage
    ) -> None:
        self._to_scheduler(
            scheduler_events.AdapterStateChanged(
                instance=self.instance,
                ref=ref,
                digest=digest,
                stage=stage,
                bytes=self._adapter_bytes,
                progress=1.0,
                order=order,
                ordered_stage=ordered,
            )
        )

    def _report(self, report: EngineReport) -> None:
        live = tuple(self._live(report))
        self._to_scheduler(
            scheduler_events.RunnerReported(
                instance=self.instance,
                incarnation=_INCARNATION,
                pages=max(1, report.pages),
                pages_free=report.pages_free,
                running=report.running,
                waiting=report.waiting,
                steps=report.steps,
                resident=tuple(self._resident(report)),
                live=live,
                cached_prefixes=frozenset(report.cached_prefixes),
            )
        )
        self._to_supervisor(
            supervisor_events.MemoryReported(
                instance=self.instance,
                pages=max(1, report.pages),
                host_bytes_free=report.host_bytes_free,
                steps=report.steps,
                work_pending=report.running + report.waiting > 0,
                prefill_seconds_per_token=report.prefill_seconds_per_token,
                swap_seconds_per_page=report.swap_seconds_per_page,
                live=live,
            )
        )

    def _live(self, report: EngineReport) -> list[RunnerRequest]:
        reported = {entry.request: entry for entry in report.sequences}
        live = []
        for request, answer in self._accepted.items():
            entry = reported.get(request)
            if entry is not None and entry.epoch == answer.epoch:
                live.append(self._entry(entry))
                continue
            assert answer.promise is not None
            live.append(
                RunnerRequest(
                    request=request,
                    epoch=answer.epoch,
                    pages=answer.promise.pages,
                    state=SequenceState.LOADING,
                    prompt_tokens=answer.asked.prompt_tokens,
                    output_tokens=answer.delivered,
                    max_tokens=answer.max_tokens,
                    tenant=Tenant(answer.asked.tenant),
                    digest=answer.digest,
                    gateway=GATEWAY,
                )
            )
        return live

    def _entry(self, entry: EngineSequenceReport) -> RunnerRequest:
        answer = self._answers[entry.request]
        return RunnerRequest(
            request=entry.request,
            epoch=entry.epoch,
            pages=entry.promise,
            pages_used=entry.pages_used,
            state=_STATES[entry.state],
            prompt_tokens=entry.prompt_tokens,
            output_tokens=entry.output_tokens,
            max_tokens=answer.max_tokens,
            tenant=Tenant(entry.tenant),
            digest=entry.adapter,
            request_class=RequestClass(entry.priority),
            parked_times=entry.parked_times,
            gateway=GATEWAY,
            charged_pages=0 if entry.charged_pages is None else max(1, entry.charged_pages),
        )

    def _resident(self, report: EngineReport) -> list[ResidentAdapter]:
        of_bytes = self._adapter_bytes
        on_device = {
            entry.digest: ResidentAdapter(
                digest=entry.digest, tier=Tier.DEVICE, bytes=of_bytes, live_sequences=entry.live
            )
            for entry in report.adapters
            if entry.on_device
        }
        return [on_device.get(digest, on_disk) for digest, on_disk in self._cached.items()]


def capacity_of(size: EngineSize) -> Capacity:
    return Capacity(
        pages=size.pages,
        page_bytes=size.page_bytes,
        max_sequences=size.max_sequences,
        max_model_length=size.max_model_length,
        adapter_slots=size.adapter_slots,
        max_lora_rank=512,
        host_bytes=size.host_pages * size.page_bytes,
        promise_rule=preset_named(size.preset).promise,
        adapter_rank_bytes=size.adapter_rank_bytes,
        adapter_rank_tile=size.adapter_rank_tile,
    )


@lru_cache(maxsize=4096)
def _sampling(max_tokens: int) -> Sampling:
    return Sampling(max_tokens=max_tokens)
