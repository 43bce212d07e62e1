"""The supervisor's inputs. Each says what happened; `Supervisor.handle` decides what follows."""

from dataclasses import dataclass

from motet.domain import InstanceName, ParkMethod, RequestId
from motet.runner_info import Capacity, RunnerIdentity, RunnerRequest

# ------------------------------------------------------------------------------------------------------------- runners


@dataclass(frozen=True, slots=True)
class RunnerConnected:
    identity: RunnerIdentity
    capacity: Capacity
    live: tuple[RunnerRequest, ...] = ()
    heartbeats: bool = True
    """Whether it sends more than its reports. Runners of earlier versions do not."""
    overcommit: float = 0.0
    """The factor that it was told last. 0: none, or it does not say."""


@dataclass(frozen=True, slots=True)
class RunnerDisconnected:
    instance: InstanceName
    incarnation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReported:
    instance: InstanceName
    pages: int
    """That KV can have now. 0: the runner does not say."""
    host_bytes_free: int
    steps: int
    work_pending: bool
    prefill_seconds_per_token: float
    swap_seconds_per_page: float
    live: tuple[RunnerRequest, ...]
    pages_free: int | None = None
    """Now. Only the runner knows: requests may share pages. None: a record of an earlier version does not say."""
    has_scheduler: bool | None = None
    """Whether a scheduler has welcomed it on their present stream. None: runners of earlier versions do not say."""
    sequence: int = 0
    """The same again: the engine has not reported since. 0: not known"""
    load_parts: int = 0
    """How often more of an adapter had been read: progress, too, but no steps"""


@dataclass(frozen=True, slots=True)
class HeartbeatReceived:
    instance: InstanceName


@dataclass(frozen=True, slots=True)
class OverflowAnnounced:
    """A sequence will reach its promise within a page (S3-10)."""

    instance: InstanceName
    entry: RunnerRequest


@dataclass(frozen=True, slots=True)
class RequestParked:
    instance: InstanceName
    request: RequestId
    epoch: int
    wanted: int
    method: ParkMethod
    number: int = 0
    """Of the promise, by the runner; 0: it numbers none."""


@dataclass(frozen=True, slots=True)
class RequestResumed:
    instance: InstanceName
    request: RequestId
    epoch: int
    pages: int
    number: int = 0


@dataclass(frozen=True, slots=True)
class OrderRefused:
    """An order about this promise changed nothing. The runner's next report says what is true."""

    instance: InstanceName
    request: RequestId
    epoch: int
    number: int


@dataclass(frozen=True, slots=True)
class RequestEnded:
    instance: InstanceName
    request: RequestId
    epoch: int


# ----------------------------------------------------------------------------------------------------------- scheduler


@dataclass(frozen=True, slots=True)
class SchedulerConnected:
    """From now on parked requests resume only through its ledger, unless another scheduler leads in a higher term."""

    scheduler: int
    """The number of its stream: the old and the new scheduler may be connected at the same time."""
    term: int


@dataclass(frozen=True, slots=True)
class TermRaised:
    """The same scheduler leads in a higher term."""

    scheduler: int
    term: int


@dataclass(frozen=True, slots=True)
class SchedulerDisconnected:
    scheduler: int


@dataclass(frozen=True, slots=True)
class Resumable:
    """A scheduler's ledger has enough free pages for a parked request."""

    term: int
    instance: InstanceName
    request: RequestId
    epoch: int
    pages: int
    number: int = 0
    """Of the promise for which it was decided; 0: the scheduler does not know it."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed."""

    late: float = 0.0
    """By how many seconds: so long this process did not run, or was busy."""


Event = (
    RunnerConnected
    | RunnerDisconnected
    | MemoryReported
    | HeartbeatReceived
    | OverflowAnnounced
    | RequestParked
    | RequestResumed
    | OrderRefused
    | RequestEnded
    | SchedulerConnected
    | TermRaised
    | SchedulerDisconnected
    | Resumable
    | Tick
)
