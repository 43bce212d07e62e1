"""What the service and the loop around the engine say to each other across the process border.

Down goes a list of commands, up comes one Batch per iteration boundary that had something to say. Token messages for
gateways are already encoded in it, so that the parent only carries bytes.
"""

from dataclasses import dataclass, field

from motet.domain import Digest, ParkMethod, RequestId
from motet.errors import MotetError
from motet.settings import ProcessSettings
from motet_runner.adapters.layout import AdapterLayout
from motet_runner.interface import EngineConfig, EngineInfo, EngineReport, Event, Finish, NewSequence

# ----------------------------------------------------------------------------------------------------------- commands


@dataclass(frozen=True, slots=True)
class Add:
    sequence: NewSequence
    stream: int
    """Which gateway's stream its tokens go to."""


@dataclass(frozen=True, slots=True)
class Cancel:
    request: RequestId
    epoch: int
    sent: float
    """Monotonic seconds, the same clock on both sides: tells how long a cancel takes to free pages."""


@dataclass(frozen=True, slots=True)
class Extend:
    request: RequestId
    epoch: int
    promise: int
    extended: int


@dataclass(frozen=True, slots=True)
class Park:
    request: RequestId
    epoch: int
    promise: int
    wanted: int
    method: ParkMethod


@dataclass(frozen=True, slots=True)
class Resume:
    request: RequestId
    epoch: int
    promise: int


@dataclass(frozen=True, slots=True)
class SetSupervised:
    supervised: bool


@dataclass(frozen=True, slots=True)
class SetOvercommit:
    factor: float


@dataclass(frozen=True, slots=True)
class LoadAdapter:
    digest: Digest
    layout: AdapterLayout


@dataclass(frozen=True, slots=True)
class DropAdapter:
    digest: Digest


@dataclass(frozen=True, slots=True)
class ReportNow:
    """The next batch shall carry a report."""


Command = Add | Cancel | Extend | Park | Resume | SetSupervised | SetOvercommit | LoadAdapter | DropAdapter | ReportNow

# ------------------------------------------------------------------------------------------------------------ answers


@dataclass(frozen=True, slots=True)
class Start:
    """The first message to a child."""

    config: EngineConfig
    parent: int
    process: ProcessSettings
    """How to log."""


@dataclass(frozen=True, slots=True)
class Loaded:
    info: EngineInfo


@dataclass(frozen=True, slots=True)
class LoadFailed:
    error: MotetError


@dataclass(frozen=True, slots=True)
class SequenceRefused:
    """The engine did not take a sequence in."""

    request: RequestId
    epoch: int
    stream: int
    error: MotetError


@dataclass(frozen=True, slots=True)
class SequenceEnded:
    request: RequestId
    epoch: int
    stream: int
    """Of two lives of one placement, the first lost its stream: its end is not the second one's."""
    output_tokens: int
    finish: Finish


@dataclass(slots=True)
class EngineOutputs:
    """What happened up to one iteration boundary."""

    number: int = 0
    steps: dict[int, bytes] = field(default_factory=dict)
    """Stream -> an encoded GenerateDown{step}. Two of them laid end to end are one message with both steps' tokens."""
    refused: list[SequenceRefused] = field(default_factory=list)
    ended: list[SequenceEnded] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    report: EngineReport | None = None
    generated: int = 0
    """Tokens in `steps`."""
    report_now: bool = False
    """The service must have it before the next iteration begins: it says who is computed alone, or no longer."""
    cancel_seconds: list[float] = field(default_factory=list)
    """Seconds from each cancel's sending until its pages were free."""


Answer = Loaded | LoadFailed | EngineOutputs
