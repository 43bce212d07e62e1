"""A simulated runner, as scheduler, supervisor and gateway see it: it takes orders, and tells what becomes of them."""

from collections.abc import Callable, Mapping
from functools import lru_cache

from motet.domain import BASE, Digest, InstanceName, RequestId
from motet.promises import LENGTH_OF_MAX_TOKENS
from motet.runner_info import Failure, RequestClass, RunnerIdentity
from motet_runner.engine_messages import (
    Add,
    Cancel,
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
    AdapterLeftHost,
    AdapterLoaded,
    Event,
    Finish,
    NewSequence,
    OrderRefused,
    OverflowAhead,
    ParkedNow,
    ProofEnded,
    ResumedNow,
    Sampling,
    StateChanged,
)
from motet_runner.plan import preset_named
from motet_scheduler.policy import effects as scheduler_effects
from motet_scheduler.policy import events as scheduler_events
from motet_scheduler.policy.values import AdapterRef, AdapterStage
from motet_simulator.plan.answer import Answer
from motet_simulator.plan.clock import VirtualClock
from motet_simulator.plan.disk_cache import DiskCache
from motet_simulator.plan.engine import SimulatedEngine, layout_of
from motet_simulator.plan.gaps import Gaps
from motet_simulator.plan.iterations import Iterations
from motet_simulator.plan.reports import Reports
from motet_simulator.plan.setup import GROUP, INCARNATION
from motet_simulator.profiles.profile import Profile
from motet_supervisor.policy import effects as supervisor_effects
from motet_supervisor.policy import events as supervisor_events

_STREAM = 1


class SimulatedRunner:
    def __init__(
        self,
        instance: str,
        profile: Profile,
        clock: VirtualClock,
        *,
        seed: int,
        gaps: Gaps,
        rank: int,
        refs: Mapping[Digest, AdapterRef],
        to_scheduler: Callable[[scheduler_events.Event], None],
        to_supervisor: Callable[[supervisor_events.Event], None],
        ended: Callable[[Answer], None],
        declined: Callable[[Answer, str], None],
        leaps: bool = True,
    ) -> None:
        size = profile.engine
        self.instance = InstanceName(instance)
        self.identity = RunnerIdentity(instance=instance, incarnation=INCARNATION, pool=GROUP, group=GROUP)
        self._accepted: dict[RequestId, Answer] = {}
        """Each under the epoch that it has here: an answer that has moved goes on elsewhere as another object."""
        self.engine = SimulatedEngine(profile, seed=seed, answers=self._accepted, gaps=gaps)
        self.capacity = self.engine.info.capacity(preset_named(size.preset).promise)
        self._clock = clock
        self._adapter_bytes = size.page_bytes * size.adapter_pages(rank)
        self._layout = layout_of(rank, self._adapter_bytes)
        self._to_scheduler = to_scheduler
        self._to_supervisor = to_supervisor
        self._ended = ended
        self._declined = declined
        self._refs = refs
        self._cache = DiskCache(size.cached_adapters)
        self._reports = Reports(self.instance, self._accepted, self._cache)
        self._iterations = Iterations(self.engine, clock, self._tell, leaps=leaps)
        self._post = self._iterations.post

    @property
    def busy_seconds(self) -> float:
        return self._iterations.busy_seconds

    # -- commands ----------------------------------------------------------------------------------------------------

    def attach(self) -> None:
        self._to_scheduler(
            scheduler_events.RunnerAttached(identity=self.identity, address=self.instance, capacity=self.capacity)
        )
        self._to_supervisor(supervisor_events.RunnerConnected(self.identity, self.capacity, heartbeats=False))
        self._post(SetSupervised(supervised=True))

    def submit(self, answer: Answer) -> None:
        """What its gateway does with a placement here."""
        asked, promise, estimate = answer.asked, answer.promise, answer.estimate
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
                    quantiles=estimate.quantiles if estimate.source != LENGTH_OF_MAX_TOKENS else None,
                    sampling=_sampling(answer.max_tokens),
                    priority=RequestClass[asked.request_class.upper()],
                    tenant=asked.tenant,
                    weight=answer.weight,
                    prefix_salt=answer.salt,
                ),
                _STREAM,
                self._clock.now,
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
                self._cache.drop(effect.digest)
            case scheduler_effects.CancelAtRunner():
                self._post(Cancel(effect.request, effect.epoch, _STREAM, self._clock.now))
            case supervisor_effects.Extend():
                self._post(Extend(effect.request, effect.epoch, effect.pages, effect.extended, effect.number))
            case supervisor_effects.Park():
                self._post(
                    Park(effect.request, effect.epoch, effect.pages, effect.doubled, effect.method, effect.number)
                )
            case supervisor_effects.Resume():
                self._post(Resume(effect.request, effect.epoch, effect.pages, effect.number))
            case supervisor_effects.SetOvercommit():
                self._post(SetOvercommit(effect.factor))
            case _:
                pass  # hints, and words about drains

    def ask_report(self) -> None:
        self._post(ReportNow())

    def _use_adapter(self, digest: Digest) -> None:
        if self._cache.use(digest):
            self._post(LoadAdapter(digest, self._layout))
            idle = self._cache.make_room({answer.digest for answer in self._accepted.values()})
            if idle is not None:
                self._post(DropAdapter(idle))

    # -- what it tells -----------------------------------------------------------------------------------------------

    def _tell(self, outputs: EngineOutputs) -> None:
        for event in outputs.events:
            self._tell_event(event)
        for refused in outputs.refused:
            answer = self._leaves(refused.request, refused.epoch)
            failure = Failure.of(refused.error)
            self._to_scheduler(scheduler_events.RunnerDeclined(self.instance, refused.request, refused.epoch, failure))
            if answer is not None:
                self._declined(answer, failure.message)
        if outputs.ended:
            keys = tuple((one.request, one.epoch) for one in outputs.ended)
            self._to_scheduler(scheduler_events.SequencesEnded(self.instance, INCARNATION, keys))
        for ended in outputs.ended:
            answer = self._leaves(ended.request, ended.epoch)
            self._to_supervisor(supervisor_events.RequestEnded(self.instance, ended.request, ended.epoch))
            if answer is not None and ended.finish is not Finish.CANCELLED:
                self._ended(answer)
        if outputs.report is not None:
            to_scheduler, to_supervisor = self._reports.of(outputs.report)
            self._to_scheduler(to_scheduler)
            self._to_supervisor(to_supervisor)

    def _leaves(self, request: RequestId, epoch: int) -> Answer | None:
        """None: it is not here under this epoch, but perhaps under a later one."""
        answer = self._accepted.get(request)
        return self._accepted.pop(request) if answer is not None and answer.epoch == epoch else None

    def _tell_event(self, event: Event) -> None:
        match event:
            case OverflowAhead():
                if self.engine.planner.sequences.get(event.request) is not None:  # else it has ended since
                    entry = self._reports.entry(event.entry)
                    self._to_supervisor(supervisor_events.OverflowAnnounced(self.instance, entry))
            case ParkedNow():
                self._to_supervisor(
                    supervisor_events.RequestParked(
                        self.instance, event.request, event.epoch, event.wanted, event.method, event.number
                    )
                )
            case ResumedNow():
                self._to_supervisor(
                    supervisor_events.RequestResumed(
                        self.instance, event.request, event.epoch, event.promise, event.number
                    )
                )
            case OrderRefused():
                self._to_supervisor(
                    supervisor_events.OrderRefused(self.instance, event.request, event.epoch, event.number)
                )
            case AdapterLoaded():
                self._report_adapter(self._refs[event.digest], event.digest, AdapterStage.DEVICE)
            case AdapterEvicted():
                if event.digest in self._cache:
                    self._report_adapter(self._refs[event.digest], event.digest, AdapterStage.CERTIFIED)
                else:
                    self._clock.at(self._clock.now, self.ask_report)  # only a report tells that it is gone altogether
            case AdapterFailed() | AdapterLeftHost() | ProofEnded() | StateChanged():
                pass

    def _report_adapter(
        self,
        ref: AdapterRef,
        digest: Digest,
        stage: AdapterStage,
        order: int = 0,
        ordered: AdapterStage = AdapterStage.NONE,
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


@lru_cache(maxsize=4096)
def _sampling(max_tokens: int) -> Sampling:
    return Sampling(max_tokens=max_tokens)
