"""Simulated runners under the real scheduler and the real supervisor, and a gateway that plays a workload.

Nothing fails here: no message is lost, no process dies. Messages take as long as the profile says.
"""

import gc
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from hashlib import sha256
from typing import Any, Literal

from motet.domain import BASE, Digest, InstanceName, RequestId, Tenant
from motet.length_statistics import LengthStatistics
from motet.prefix_hints import prefix_salt, prompt_hints
from motet.runner_info import RequestClass
from motet_scheduler.policy import effects as scheduler_effects
from motet_scheduler.policy import events as scheduler_events
from motet_scheduler.policy.adapters import Revision
from motet_scheduler.policy.catalog import SavedAdapter, SavedCatalog
from motet_scheduler.policy.scheduler import Scheduler
from motet_scheduler.policy.values import (
    AdapterRef,
    AdapterSpec,
    Certificate,
    Estimate,
    GroupName,
    PoolSpec,
    Promise,
    RevisionKey,
    SchedulerConfig,
)
from motet_simulator.plan.answer import Answer
from motet_simulator.plan.clock import VirtualClock
from motet_simulator.plan.outcome import Outcome
from motet_simulator.plan.runner import GATEWAY, REPORT_SECONDS, SimulatedRunner
from motet_simulator.profiles.profile import Profile
from motet_simulator.workloads.request import WorkloadRequest
from motet_supervisor.policy import effects as supervisor_effects
from motet_supervisor.policy import events as supervisor_events
from motet_supervisor.policy.supervisor import Supervisor
from motet_supervisor.policy.values import SupervisorConfig

GROUP = GroupName("default/plan")

Lengths = Literal["answers", "exact", "max_tokens"]
"""How the gateway estimates the length of an answer: by the answers that it has seen of the same tenant and adapter, as
without a predictor; as if it knew; or by `max_tokens` alone."""

SCHEDULER_TICK_SECONDS, SUPERVISOR_TICK_SECONDS = 0.5, 0.5
"""Ticks end waits of seconds. Nothing here needs one sooner."""

MESSAGE_SECONDS = 0.0005
"""Between scheduler, supervisor and runners."""

GIVE_UP_CHECK_SECONDS = 10.0

MIN_ANSWERS = 5
"""Of a tenant's adapter, before they estimate better than `max_tokens`."""

KEPT_STATISTICS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What is simulated."""

    profile: Profile
    runners: int
    seed: int = 0
    lengths: Lengths = "answers"
    max_tokens: int = 1024
    """Of requests that do not say."""
    rank: int = 16
    """Of all adapters."""
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    supervisor: SupervisorConfig = field(default_factory=SupervisorConfig)
    leaps: bool = True


Record = Callable[[float, scheduler_events.Event | supervisor_events.Event], None]


class Cluster:
    def __init__(self, setup: Setup, adapters: Iterable[str] = (), *, record: Record | None = None) -> None:
        """`adapters`: the names of all that the workload asks for, as tenant/name or name. `record` is told each event
        of scheduler and supervisor, before they handle it."""
        self.setup = setup
        self._record = record
        self.clock = VirtualClock()
        self.outcome = Outcome()
        self.answers: dict[RequestId, Answer] = {}
        """Of requests that have not ended."""
        self._requests: Iterator[WorkloadRequest] = iter(())
        self._number = 0
        self._all_asked = False
        self.gave_up = False
        self._statistics: OrderedDict[tuple[str, str], LengthStatistics] = OrderedDict()
        self.adapters = {name: digest_of(name) for name in adapters}
        self.saved = _catalog(self.adapters, setup)
        self.scheduler = Scheduler(setup.scheduler, now=0.0, saved=self.saved)
        self.supervisor = Supervisor(setup.supervisor)
        self._trying_more = False
        self.runners: dict[InstanceName, SimulatedRunner] = {}
        for number in range(setup.runners):
            runner = SimulatedRunner(
                f"r{number:04}",
                setup.profile,
                self.clock,
                seed=setup.seed * 100_003 + number,
                answers=self.answers,
                gaps=self.outcome.gaps,
                group=GROUP,
                rank=setup.rank,
                to_scheduler=partial(self._after, MESSAGE_SECONDS, self._tell_scheduler),
                to_supervisor=partial(self._after, MESSAGE_SECONDS, self._tell_supervisor),
                ended=partial(self._after, setup.profile.overheads.delivery, self._answer_ended),
                declined=partial(self._after, setup.profile.overheads.delivery, self._declined),
                leaps=setup.leaps,
            )
            self.runners[runner.instance] = runner

    def run(self, requests: Iterator[WorkloadRequest], *, give_up: Callable[[], bool] | None = None) -> Outcome:
        """Play a workload until all of its requests have ended, or `give_up`, which is asked now and then."""
        self._requests = requests
        if give_up is not None:
            self._every(GIVE_UP_CHECK_SECONDS, partial(self._check, give_up), first=GIVE_UP_CHECK_SECONDS)
        for runner in self.runners.values():
            runner.attach()
        self._tell_scheduler(scheduler_events.SupervisorConnected())
        self._tell_supervisor(supervisor_events.SchedulerConnected(1, 1))
        spread = REPORT_SECONDS / max(1, len(self.runners))
        for number, runner in enumerate(self.runners.values()):
            self._every(REPORT_SECONDS, runner.ask_report, first=number * spread)
        self._every(SCHEDULER_TICK_SECONDS, partial(self._tell_scheduler, scheduler_events.Tick()))
        self._every(SUPERVISOR_TICK_SECONDS, partial(self._tell_supervisor, supervisor_events.Tick()))
        self._ask_next()
        with _without_collections():
            self.clock.run(until=lambda: self.gave_up or (self._all_asked and not self.answers))
        self.outcome.seconds = self.clock.now
        self.outcome.busy_seconds = tuple(runner.busy_seconds for runner in self.runners.values())
        return self.outcome

    def _check(self, give_up: Callable[[], bool]) -> None:
        self.gave_up = give_up()

    # -- time --------------------------------------------------------------------------------------------------------

    def _after(self, seconds: float, call: Callable[..., None], *given: Any) -> None:
        self.clock.at(self.clock.now + seconds, call, *given)

    def _every(self, seconds: float, call: Callable[[], None], *, first: float = 0.0) -> None:
        def again() -> None:
            call()
            self.clock.at(self.clock.now + seconds, again)

        self.clock.at(first, again)

    # -- the gateway -------------------------------------------------------------------------------------------------

    def _ask_next(self) -> None:
        asked = next(self._requests, None)
        if asked is None:
            self._all_asked = True
            return
        self.clock.at(max(self.clock.now, asked.at), self._ask, asked)

    def _ask(self, asked: WorkloadRequest) -> None:
        self._ask_next()
        self._number += 1
        setup = self.setup
        request = RequestId(f"q{self._number}")
        most = asked.max_tokens or max(setup.max_tokens, asked.output_tokens)
        room = setup.profile.context_tokens - asked.prompt_tokens
        if not asked.max_tokens:
            most = max(asked.output_tokens, min(most, room))
        digest = self.adapters[asked.adapter] if asked.adapter else BASE
        answer = Answer(
            request,
            asked,
            name=(2 * self._number + 1) % (1 << 31),
            max_tokens=most,
            end_length=asked.prompt_tokens + min(asked.output_tokens, most),
            length=asked.prompt_tokens,
            digest=digest,
        )
        answer.prompt = asked.prompt(self._number)
        hints: tuple[int, ...] = ()
        if asked.blocks and setup.profile.engine.prefix_cache:
            answer.salt = prefix_salt(Digest(""), digest, asked.tenant)
            hints = tuple(prompt_hints(answer.salt, answer.prompt))
        self.answers[request] = answer
        enqueued = scheduler_events.Enqueued(
            gateway=GATEWAY,
            request=request,
            tenant=Tenant(asked.tenant),
            group=GROUP,
            digest=digest,
            adapter=_object_name(asked.adapter),
            request_class=RequestClass[asked.request_class.upper()],
            prompt_tokens=asked.prompt_tokens,
            max_tokens=most,
            estimate=self._estimate(asked, most),
            prefix_hints=hints,
        )
        self._after(setup.profile.overheads.arrival, self._tell_scheduler, enqueued)

    def _estimate(self, asked: WorkloadRequest, most: int) -> Estimate:
        lengths = self.setup.lengths
        if lengths == "exact":
            length = min(asked.output_tokens, most)
            return Estimate(q50=length, q80=length, q90=length, q95=length, rank=length, source="exact")
        statistics = self._statistics.get((asked.tenant, asked.adapter)) if lengths == "answers" else None
        if statistics is None or statistics.count < MIN_ANSWERS:
            return Estimate(q50=most, q80=most, q90=most, q95=most, rank=most, source="max_tokens")
        q80 = min(statistics.quantile(0.8) or most, most)
        return Estimate(q50=q80, q80=q80, q90=q80, q95=q80, rank=q80, source="tenant")  # placement reads q80 alone

    def _placed(self, placed: scheduler_effects.SendPlaced) -> None:
        answer = self.answers.get(placed.request)
        if answer is None or placed.epoch <= answer.epoch:
            return
        answer.epoch, answer.promise = placed.epoch, placed.promise
        if answer.placed_at < 0:
            answer.placed_at = self.clock.now
        self.runners[placed.instance].submit(answer)

    def _answer_ended(self, answer: Answer) -> None:
        if self.answers.pop(answer.request, None) is None:
            return
        output = answer.delivered
        asked = answer.asked
        if self.setup.lengths == "answers":
            key = (asked.tenant, asked.adapter)
            statistics = self._statistics.setdefault(key, LengthStatistics())
            self._statistics.move_to_end(key)
            statistics.observe(output, censored=output >= answer.max_tokens)
            if len(self._statistics) > KEPT_STATISTICS:
                self._statistics.popitem(last=False)
        self.outcome.ended(answer, self.setup.profile.overheads.delivery)
        self._after(
            MESSAGE_SECONDS,
            self._tell_scheduler,
            scheduler_events.RequestFinished(GATEWAY, answer.request, answer.epoch, output, "stop"),
        )

    def _declined(self, answer: Answer, why: str) -> None:
        if answer.request in self.answers:
            lost = scheduler_events.RequestLost(GATEWAY, answer.request, answer.epoch, why, answer.delivered)
            self._after(MESSAGE_SECONDS, self._tell_scheduler, lost)

    def _refused(self, refused: scheduler_effects.SendRefused) -> None:
        answer = self.answers.pop(refused.request, None)
        if answer is not None:
            answer.refusal = refused.failure.code
            self.outcome.refused(answer)

    # -- scheduler and supervisor ------------------------------------------------------------------------------------

    def _tell_scheduler(self, event: scheduler_events.Event) -> None:
        if self._record is not None:
            self._record(self.clock.now, event)
        for effect in self.scheduler.handle(event, self.clock.now):
            match effect:
                case scheduler_effects.SendPlaced():
                    self._after(self.setup.profile.overheads.submit, self._placed, effect)
                case scheduler_effects.SendRefused():
                    self._after(MESSAGE_SECONDS, self._refused, effect)
                case (
                    scheduler_effects.EnsureAdapter()
                    | scheduler_effects.DropAdapter()
                    | scheduler_effects.CancelAtRunner()
                ):
                    self._after(MESSAGE_SECONDS, self.runners[effect.instance].order, effect)
                case scheduler_effects.AllowResume():
                    allowed = supervisor_events.Resumable(
                        1, effect.instance, effect.request, effect.epoch, effect.promise.pages
                    )
                    self._after(MESSAGE_SECONDS, self._tell_supervisor, allowed)
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
                    self._after(MESSAGE_SECONDS, self.runners[effect.instance].order, effect)
                case _:
                    for told in _for_scheduler(effect):
                        self._after(MESSAGE_SECONDS, self._tell_scheduler, told)


def _for_scheduler(effect: supervisor_effects.SchedulerMessage) -> list[scheduler_events.Event]:
    match effect:
        case supervisor_effects.ReportPromise():
            promise = Promise(effect.pages)
            return [scheduler_events.PromiseChanged(effect.instance, effect.request, effect.epoch, promise)]
        case supervisor_effects.ReportParked():
            wanted = Promise(effect.wanted)
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


@lru_cache(maxsize=100_000)
def digest_of(name: str) -> Digest:
    return Digest("sha256:" + sha256(name.encode()).hexdigest())


def _object_name(adapter: str) -> str:
    return adapter if not adapter or "/" in adapter else f"default/{adapter}"


def _catalog(digests: dict[str, Digest], setup: Setup) -> SavedCatalog:
    pool = PoolSpec(pool=GROUP, group=GROUP, served_name="plan", replicas=setup.runners)
    return SavedCatalog(
        pools=(pool,), adapters=tuple(_saved(name, digest, setup.rank) for name, digest in digests.items())
    )


@lru_cache(maxsize=100_000)
def _saved(name: str, digest: Digest, rank: int) -> SavedAdapter:
    """As certified. The same in each simulation of a plan."""
    namespace, _, own = _object_name(name).partition("/")
    source = f"file:///{name}"
    spec = AdapterSpec(
        ref=AdapterRef(namespace, own, 1), group=GROUP, model_name=own, revision=RevisionKey(source=source)
    )
    serving = Revision(
        key=RevisionKey(source=source, group=GROUP),
        digest=digest,
        certificate=Certificate(digest=digest, rank=rank),
    )
    return SavedAdapter(spec=spec, serving=serving)
