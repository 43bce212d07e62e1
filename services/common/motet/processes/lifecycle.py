"""What to do about one process, as a state machine: events in, effects out. No clock, no signals, no luck inside.

WAITING ──due──▶ STARTING ──probe──▶ READY
   ▲                 │ died            │ died
   └──── back-off ───┴─────────────────┘
stop: any ──SIGTERM──▶ STOPPING ──grace over──▶ SIGKILL ──died──▶ GONE
silent: STARTING or READY ──QUESTIONS without an answer──▶ SIGKILL ──died──▶ WAITING
"""

from dataclasses import dataclass, replace
from enum import StrEnum

SETUP_FAILED = 2
"""The exit status by which a service says that a person has to act (motet.service_main)."""


LIVENESS_FAILURE_THRESHOLD = 5
"""Whether it is alive is asked so often, anew each time, before the answer is taken for a no: one lost is no sign."""

STARTUP_FAILURE_THRESHOLD = 30
"""The same before its first answer: imports on a loaded machine may take minutes."""


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
    """How patient to be. Seconds; scale them together for tests."""

    stop_grace: float = 10.0
    """Between SIGTERM and SIGKILL."""

    first_delay: float = 0.5
    """The wait before the second restart in a row; it doubles from there. The first comes at once, because a process
    that ran well and was killed should be missed as briefly as possible."""

    last_delay: float = 30.0
    """Where the doubling ends."""

    stable_after: float = 10.0
    """A process that was ready and ran this long has earned a clean slate."""

    liveness_seconds: float = 30.0
    """A process that answers no question for so long is stopped, or its loop hangs: it is killed and started again.
    0: never. An honest one is silent for seconds on a loaded machine, whose answers do not shrink with the timers."""

    @property
    def liveness_period(self) -> float:
        """How long one question waits for its answer, and the time between two of them."""
        return self.liveness_seconds / LIVENESS_FAILURE_THRESHOLD

    def scaled(self, factor: float) -> "LifecycleConfig":
        return LifecycleConfig(
            stop_grace=self.stop_grace,  # how long work takes to end does not shrink with the timers
            first_delay=self.first_delay * factor,
            last_delay=self.last_delay * factor,
            stable_after=self.stable_after * factor,
            liveness_seconds=self.liveness_seconds,
        )

    def delay(self, failures: int, *, needs_a_person: bool, jitter: float) -> float:
        """Seconds to wait after the `failures`-th death in a row; `jitter` is 0 to 1 and moves it by a quarter."""
        doublings = failures - (1 if needs_a_person else 2)
        if doublings < 0:
            return 0.0
        return min(self.first_delay * 2.0 ** min(doublings, 32), self.last_delay) * (0.75 + 0.5 * jitter)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lifecycle:
    phase: Phase = Phase.WAITING
    due: float | None = None
    """When something happens by itself: the start of a waiting one, the kill of a stopping one."""

    began: float = 0.0
    restarts: int = 0
    failures: int = 0
    """Deaths in a row, without a stable run between them."""

    was_ready: bool = False
    answered: bool = False
    """It has said once in this run that it is alive."""

    unanswered: int = 0
    """Questions in a row."""

    asked: float = 0.0
    """When the last question was asked."""

    exit_status: int | None = None
    """Of the last run: negative for a signal, None when nobody could know (an adopted process)."""

    reason: str = ""
    """Why it last died, in its own last words if it had any."""


@dataclass(frozen=True, slots=True)
class Started:
    """It runs now; `adopted` if it already did."""

    adopted: bool = False


@dataclass(frozen=True, slots=True)
class CouldNotStart:
    reason: str


@dataclass(frozen=True, slots=True)
class ReadinessProbed:
    healthy: bool


@dataclass(frozen=True, slots=True)
class LivenessProbed:
    """Whether it is alive; this is how the question came out."""

    alive: bool
    at: float
    """When it was asked."""


@dataclass(frozen=True, slots=True)
class Died:
    exit_status: int | None
    reason: str
    jitter: float = 0.5


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
    """Kill it for its silence: SIGTERM means nothing to a process that is stopped."""


def first(now: float) -> Lifecycle:
    return Lifecycle(due=now)


def step(life: Lifecycle, event: Event, now: float, policy: LifecycleConfig) -> tuple[Lifecycle, tuple[Effect, ...]]:
    match event:
        case TimePassed():
            return _time_passed(life, now, policy)
        case Started(adopted=adopted):
            # One that was ready before its keeper was replaced is so until its probe says otherwise.
            ready = adopted and life.was_ready
            phase = Phase.READY if ready else Phase.STARTING
            return replace(
                life, phase=phase, due=None, began=now, was_ready=ready, answered=ready, unanswered=0, asked=now
            ), ()
        case ReadinessProbed(healthy=True) if life.phase is Phase.STARTING:
            return replace(life, phase=Phase.READY, was_ready=True), ()
        case ReadinessProbed(healthy=False) if life.phase is Phase.READY:
            return replace(life, phase=Phase.STARTING), ()
        case ReadinessProbed():
            return life, ()
        case LivenessProbed() if life.phase in (Phase.STARTING, Phase.READY):
            return _asked(life, event, now, policy)
        case CouldNotStart(reason=reason):
            return _died(life, Died(None, reason), now, policy), ()
        case Died() if life.phase is Phase.STOPPING:
            return replace(life, phase=Phase.GONE, due=None, exit_status=event.exit_status), ()
        case Died() if life.phase.runs:
            return _died(life, event, now, policy), ()
        case StopRequested() if life.phase is Phase.WAITING:
            return replace(life, phase=Phase.GONE, due=None), ()
        case StopRequested() if life.phase in (Phase.STARTING, Phase.READY):
            return replace(life, phase=Phase.STOPPING, due=now + policy.stop_grace), (Effect.TERMINATE,)
        case _:
            return life, ()


def _time_passed(life: Lifecycle, now: float, policy: LifecycleConfig) -> tuple[Lifecycle, tuple[Effect, ...]]:
    if life.due is None or now < life.due:
        return life, ()
    if life.phase is Phase.WAITING:
        return replace(life, due=None), (Effect.START,)
    if life.phase is Phase.STOPPING:
        # Asked again after another grace: a process in an uninterruptible wait dies when it can.
        return replace(life, due=now + policy.stop_grace), (Effect.KILL,)
    return life, ()


def _asked(
    life: Lifecycle, question: LivenessProbed, now: float, policy: LifecycleConfig
) -> tuple[Lifecycle, tuple[Effect, ...]]:
    if question.alive:
        return replace(life, answered=True, unanswered=0, asked=question.at), ()
    # Whoever asks may have been away as well, with a machine that slept or was paused: what it missed proves nothing,
    # and what counts is asked anew from here.
    late = 2 * policy.liveness_period
    if question.at - life.asked > late or now - question.at > late:
        return replace(life, unanswered=0, asked=now), ()
    unanswered = life.unanswered + 1
    if unanswered < (LIVENESS_FAILURE_THRESHOLD if life.answered else STARTUP_FAILURE_THRESHOLD):
        return replace(life, unanswered=unanswered, asked=question.at), ()
    return replace(life, unanswered=0, asked=now), (Effect.REPLACE,)


def _died(life: Lifecycle, death: Died, now: float, policy: LifecycleConfig) -> Lifecycle:
    stable = life.was_ready and now - life.began >= policy.stable_after
    failures = 1 if stable else life.failures + 1
    wait = policy.delay(failures, needs_a_person=death.exit_status == SETUP_FAILED, jitter=death.jitter)
    return replace(
        life,
        phase=Phase.WAITING,
        due=now + wait,
        restarts=life.restarts + 1,
        failures=failures,
        was_ready=False,
        exit_status=death.exit_status,
        reason=death.reason,
    )
