"""What the supervisor wants done. Orders name the epoch and the promise they were decided on."""

from dataclasses import dataclass

from motet.fleet import RunnerIdentity
from motet.model import InstanceName, ParkMethod, RequestId

# ---------------------------------------------------------------------------------------------------------- to runners


@dataclass(frozen=True, slots=True)
class Extend:
    instance: InstanceName
    request: RequestId
    epoch: int
    pages: int
    extended: int


@dataclass(frozen=True, slots=True)
class Park:
    instance: InstanceName
    request: RequestId
    epoch: int
    pages: int
    doubled: int
    method: ParkMethod


@dataclass(frozen=True, slots=True)
class Resume:
    instance: InstanceName
    request: RequestId
    epoch: int
    pages: int


@dataclass(frozen=True, slots=True)
class SetOvercommit:
    """Admit promises up to the runner's pages times `factor`."""

    instance: InstanceName
    pool: str
    factor: float


# -------------------------------------------------------------------------------------------------------- to schedulers


@dataclass(frozen=True, slots=True)
class TellPromise:
    instance: InstanceName
    request: RequestId
    epoch: int
    pages: int


@dataclass(frozen=True, slots=True)
class TellParked:
    instance: InstanceName
    request: RequestId
    epoch: int
    wanted: int
    method: ParkMethod


@dataclass(frozen=True, slots=True)
class TellAllParked:
    """All that is parked now: what a scheduler that has just connected needs."""

    requests: tuple[TellParked, ...]


@dataclass(frozen=True, slots=True)
class TellResumed:
    instance: InstanceName
    request: RequestId
    epoch: int
    pages: int


@dataclass(frozen=True, slots=True)
class TellLost:
    identity: RunnerIdentity
    why: str
    hung: bool
    again: bool = False
    """Said before: for a scheduler that was away, or did not know the runner yet."""


@dataclass(frozen=True, slots=True)
class TellOvercommit:
    pool: str
    factor: float


RunnerOrder = Extend | Park | Resume | SetOvercommit
Advice = TellPromise | TellParked | TellAllParked | TellResumed | TellLost | TellOvercommit
Effect = RunnerOrder | Advice
