"""The lifecycle of one process, as a state machine: events in, effects out. Pure: no clock, no signals, no random
numbers.

WAITING ──due──▶ STARTING ──probe──▶ READY
   ▲                 │ died            │ died
   └──── back-off ───┴─────────────────┘
stop: any ──SIGTERM──▶ STOPPING ──grace over──▶ SIGKILL ──died──▶ GONE
hangs: STARTING or READY ──too many liveness probes fail──▶ SIGKILL ──died──▶ WAITING
stopped by SIGSTOP: STARTING or READY ──readiness probes fail for seconds──▶ SIGKILL ──died──▶ WAITING
"""

from dataclasses import dataclass, field, replace
from enum import StrEnum

from motet.errors import SETUP_FAILED
from motet.processes.restart_backoff import RestartBackoff

LIVENESS_FAILURE_THRESHOLD = 5
"""After this many failed liveness probes in a row, a process counts as hanging. One failed probe says nothing."""

STARTUP_FAILURE_THRESHOLD = 30
"""The same for a process that has not answered any probe yet: on a busy machine its imports may take minutes."""


class Phase(StrEnum):
    WAITING = "waiting"
    STARTING = "starting"
    READY = "ready"
    STOPPING = "stopping"
    GONE = "gone"

    @property
    def runs(self) -> bool:
        return self in (Phase.STARTING, Phase.READY, Phase.STOPPING)


@dataclass(frozen=True, slots=True, kw_only=True)
class LifecycleConfig:
    """Times in seconds. Tests make them shorter with `scaled`."""

    stop_grace: float = 10.0
    """The time between SIGTERM and SIGKILL."""

    backoff: RestartBackoff = field(default_factory=RestartBackoff)

    liveness_seconds: float = 30.0
    """A process that answers no liveness probe for this long is paused, or its event loop hangs: it is killed and
    started again. 0: never. `scaled` does not change it, because on a busy machine a healthy process may need seconds
    to answer."""

    stopped_seconds: float = 3.0
    """A process that SIGSTOP has stopped is replaced when its readiness probes have failed for this long. Others may be
    slow on a busy machine, but this one cannot answer until somebody continues it. `scaled` does not change it: who
    continues it needs as long as before."""

    @property
    def liveness_period(self) -> float:
        """The timeout of one liveness probe, and the time between two of them."""
        return self.liveness_seconds / LIVENESS_FAILURE_THRESHOLD

    def scaled(self, factor: float) -> "LifecycleConfig":
        return LifecycleConfig(
            stop_grace=self.stop_grace,  # a process needs as long to stop as before
            backoff=self.backoff.scaled(factor),
            liveness_seconds=self.liveness_seconds,
            stopped_seconds=self.stopped_seconds,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Lifecycle:
    phase: Phase = Phase.WAITING
    due: float | None = None
    """When the next step is due: the start of a waiting process, or the kill of a stopping one."""

    began: float = 0.0
    restarts: int = 0
    failures: int = 0
    """Deaths in a row, without a stable run between them."""

    was_ready: bool = False
    was_alive: bool = False
    """Whether a liveness probe has succeeded in this run."""

    failed_probes: int = 0
    """How many liveness probes in a row have failed."""

    last_probe_at: float = 0.0
    """When the last liveness probe began."""

    stopped_since: float | None = None
    """When the first of the readiness probes ended that have failed in a row because the process was stopped."""

    stopped_at: float = 0.0
    """When the last of them ended."""

    exit_status: int | None = None
    """Of the last run. Negative for a signal; None for an adopted process, whose exit status we cannot know."""

    reason: str = ""
    """Why it last died: the last line of its log, if there is one."""


@dataclass(frozen=True, slots=True)
class Started:
    """The process runs. `adopted`: it was already running."""

    adopted: bool = False


@dataclass(frozen=True, slots=True)
class CouldNotStart:
    reason: str


@dataclass(frozen=True, slots=True)
class ReadinessProbed:
    healthy: bool
    stopped: bool = False
    """SIGSTOP has stopped the process, and it is to be replaced then."""


@dataclass(frozen=True, slots=True)
class LivenessProbed:
    """The result of a liveness probe."""

    alive: bool
    at: float
    """When the probe began."""


@dataclass(frozen=True, slots=True)
class Died:
    exit_status: int | None
    reason: str
    jitter: float = 0.5
    wait: float = 0.0
    """The least seconds until it is started again."""


@dataclass(frozen=True, slots=True)
class StopRequested:
    pass


@dataclass(frozen=True, slots=True)
class TimePassed:
    pass


Event = Started | CouldNotStart | ReadinessProbed | LivenessProbed | Died | StopRequested | TimePassed


class Effect(StrEnum):
    START = "start"
    TERMINATE = "terminate"
    KILL = "kill"
    REPLACE = "replace"
    """Kill it because it hangs. SIGTERM would not help, because a paused process does not handle it."""
    REPLACE_STOPPED = "replace stopped"
    """The same because it is stopped."""


def new_lifecycle(now: float) -> Lifecycle:
    return Lifecycle(due=now)


def step(life: Lifecycle, event: Event, now: float, config: LifecycleConfig) -> tuple[Lifecycle, tuple[Effect, ...]]:
    match event:
        case TimePassed():
            return _time_passed(life, now, config)
        case Started(adopted=adopted):
            # An adopted process that was ready counts as ready until a probe fails.
            ready = adopted and life.was_ready
            phase = Phase.READY if ready else Phase.STARTING
            return replace(
                life,
                phase=phase,
                due=None,
                began=now,
                was_ready=ready,
                was_alive=ready,
                failed_probes=0,
                last_probe_at=now,
                stopped_since=None,
            ), ()
        case ReadinessProbed() if life.phase in (Phase.STARTING, Phase.READY):
            return _readiness_probed(life, event, now, config)
        case LivenessProbed() if life.phase in (Phase.STARTING, Phase.READY):
            return _liveness_probed(life, event, now, config)
        case CouldNotStart(reason=reason):
            return _died(life, Died(None, reason), now, config), ()
        case Died() if life.phase is Phase.STOPPING:
            return replace(life, phase=Phase.GONE, due=None, exit_status=event.exit_status), ()
        case Died() if life.phase.runs:
            return _died(life, event, now, config), ()
        case StopRequested() if life.phase is Phase.WAITING:
            return replace(life, phase=Phase.GONE, due=None), ()
        case StopRequested() if life.phase in (Phase.STARTING, Phase.READY):
            return replace(life, phase=Phase.STOPPING, due=now + config.stop_grace), (Effect.TERMINATE,)
        case _:
            return life, ()


def _time_passed(life: Lifecycle, now: float, config: LifecycleConfig) -> tuple[Lifecycle, tuple[Effect, ...]]:
    if life.due is None or now < life.due:
        return life, ()
    if life.phase is Phase.WAITING:
        return replace(life, due=None), (Effect.START,)
    if life.phase is Phase.STOPPING:
        # Kill it again after another grace period: a process in an uninterruptible wait does not die at once.
        return replace(life, due=now + config.stop_grace), (Effect.KILL,)
    return life, ()


def _readiness_probed(
    life: Lifecycle, probe: ReadinessProbed, now: float, config: LifecycleConfig
) -> tuple[Lifecycle, tuple[Effect, ...]]:
    if probe.healthy:
        return replace(life, phase=Phase.READY, was_ready=True, stopped_since=None), ()
    life = replace(life, phase=Phase.STARTING)
    if not probe.stopped:
        return replace(life, stopped_since=None), ()
    # After a long pause between two probes, the process manager may have been stopped, too, with the whole machine.
    if life.stopped_since is None or now - life.stopped_at > config.stopped_seconds:
        return replace(life, stopped_since=now, stopped_at=now), ()
    if now - life.stopped_since < config.stopped_seconds:
        return replace(life, stopped_at=now), ()
    return replace(life, stopped_since=None), (Effect.REPLACE_STOPPED,)


def _liveness_probed(
    life: Lifecycle, probe: LivenessProbed, now: float, config: LifecycleConfig
) -> tuple[Lifecycle, tuple[Effect, ...]]:
    if probe.alive:
        return replace(life, was_alive=True, failed_probes=0, last_probe_at=probe.at), ()
    # The process manager may have been paused, too, with the whole machine. Probes from that time prove nothing, so
    # the count starts again.
    late = 2 * config.liveness_period
    if probe.at - life.last_probe_at > late or now - probe.at > late:
        return replace(life, failed_probes=0, last_probe_at=now), ()
    failed_probes = life.failed_probes + 1
    if failed_probes < (LIVENESS_FAILURE_THRESHOLD if life.was_alive else STARTUP_FAILURE_THRESHOLD):
        return replace(life, failed_probes=failed_probes, last_probe_at=probe.at), ()
    return replace(life, failed_probes=0, last_probe_at=now), (Effect.REPLACE,)


def _died(life: Lifecycle, death: Died, now: float, config: LifecycleConfig) -> Lifecycle:
    stable = life.was_ready and now - life.began >= config.backoff.stable_after
    failures = 1 if stable else life.failures + 1
    wait = config.backoff.delay(failures, needs_a_person=death.exit_status == SETUP_FAILED, jitter=death.jitter)
    return replace(
        life,
        phase=Phase.WAITING,
        due=now + max(wait, death.wait),
        restarts=life.restarts + 1,
        failures=failures,
        was_ready=False,
        exit_status=death.exit_status,
        reason=death.reason,
    )
