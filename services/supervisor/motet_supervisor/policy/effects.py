"""The supervisor's outputs. Orders name the epoch and the promise for which they were decided."""

from dataclasses import dataclass

from motet.domain import InstanceName, ParkMethod, RequestId
from motet.runner_info import RunnerIdentity

# ---------------------------------------------------------------------------------------------------------- to runners


@dataclass(frozen=True, slots=True)
class Extend:
    instance: InstanceName
    request: RequestId
    epoch: int
    pages: int
    extended: int
    number: int = 0
    """Of the promise, by the runner; 0: the runner numbers none."""


@dataclass(frozen=True, slots=True)
class Park:
    instance: InstanceName
    request: RequestId
    epoch: int
    pages: int
    doubled: int
    method: ParkMethod
    number: int = 0


@dataclass(frozen=True, slots=True)
class Resume:
    instance: InstanceName
    request: RequestId
    epoch: int
    pages: int
    number: int = 0


@dataclass(frozen=True, slots=True)
class SetOvercommit:
    """Admit promises up to the runner's pages times `factor`."""

    instance: InstanceName
    pool: str
    factor: float


# -------------------------------------------------------------------------------------------------------- to schedulers


@dataclass(frozen=True, slots=True)
class ReportPromise:
    instance: InstanceName
    request: RequestId
    epoch: int
    pages: int


@dataclass(frozen=True, slots=True)
class ReportParked:
    instance: InstanceName
    request: RequestId
    epoch: int
    wanted: int
    method: ParkMethod
    number: int = 0


@dataclass(frozen=True, slots=True)
class ReportAllParked:
    """All parked requests, for a scheduler that has just connected."""

    requests: tuple[ReportParked, ...]


@dataclass(frozen=True, slots=True)
class ReportResumed:
    instance: InstanceName
    request: RequestId
    epoch: int
    pages: int


@dataclass(frozen=True, slots=True)
class ReportRunnerLost:
    identity: RunnerIdentity
    why: str
    hung: bool
    silent_seconds: float
    """How long it has sent nothing; 0 if it does send."""
    again: bool
    """A repetition, for a scheduler that was away, or did not know this runner or another one yet."""


@dataclass(frozen=True, slots=True)
class ReportOvercommit:
    pool: str
    factor: float


RunnerOrder = Extend | Park | Resume | SetOvercommit
SchedulerMessage = ReportPromise | ReportParked | ReportAllParked | ReportResumed | ReportRunnerLost | ReportOvercommit
Effect = RunnerOrder | SchedulerMessage
