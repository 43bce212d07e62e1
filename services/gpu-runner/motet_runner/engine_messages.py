"""The messages between the service's process and the engine's process.

The service sends commands. After each iteration that produced something, the engine loop sends one
`EngineOutputs`. In it, the messages for gateways are already encoded, so the service only passes the bytes on.
"""

from dataclasses import dataclass, field

from motet.domain import Digest, ParkMethod, RequestId
from motet.errors import MotetError
from motet.settings import ProcessSettings
from motet.time_split import PartSeconds
from motet_runner.adapters.layout import AdapterLayout
from motet_runner.adapters.proof import ProofOrder
from motet_runner.interface import EngineConfig, EngineInfo, EngineReport, Event, Finish, NewSequence


@dataclass(frozen=True, slots=True)
class Start:
    """The first message to the engine's process."""

    config: EngineConfig
    parent: int
    process: ProcessSettings
    """How to log."""


# ----------------------------------------------------------------------------------------------------------- commands


@dataclass(frozen=True, slots=True)
class Add:
    sequence: NewSequence
    stream: int
    """The number of the gateway's stream that gets the tokens."""
    received: float
    """When the Submit came, on the clock of `Cancel.sent`. Since then the request may have waited for its adapter."""


@dataclass(frozen=True, slots=True)
class Cancel:
    request: RequestId
    epoch: int
    stream: int
    sent: float
    """Monotonic seconds, on one clock for both processes, to measure how long a cancel takes to free pages."""


@dataclass(frozen=True, slots=True)
class Extend:
    request: RequestId
    epoch: int
    promise: int
    extended: int
    number: int = 0
    """The promise's number; 0: the supervisor is of an older release, which names only the promise's pages."""


@dataclass(frozen=True, slots=True)
class Park:
    request: RequestId
    epoch: int
    promise: int
    wanted: int
    method: ParkMethod
    number: int = 0


@dataclass(frozen=True, slots=True)
class Resume:
    request: RequestId
    epoch: int
    promise: int
    number: int = 0


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
    proof: ProofOrder | None = None
    """See `Engine.load_adapter`."""
    pinned: bool = False
    """The platform wants the adapter resident, also without requests."""


@dataclass(frozen=True, slots=True)
class DropAdapter:
    digest: Digest


@dataclass(frozen=True, slots=True)
class WriteSlab:
    number: int
    """`SlabWritten` has it, too."""
    layout: AdapterLayout


@dataclass(frozen=True, slots=True)
class ReportNow:
    """The next EngineOutputs must have a report."""


Command = (
    Add
    | Cancel
    | Extend
    | Park
    | Resume
    | SetSupervised
    | SetOvercommit
    | LoadAdapter
    | DropAdapter
    | WriteSlab
    | ReportNow
)

# ------------------------------------------------------------------------------------------------------------ answers


@dataclass(frozen=True, slots=True)
class Loading:
    """How much of the weights is read."""

    read_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class SequenceRefused:
    """The engine did not accept a sequence."""

    request: RequestId
    epoch: int
    stream: int
    error: MotetError


@dataclass(frozen=True, slots=True)
class SequenceEnded:
    request: RequestId
    epoch: int
    stream: int
    """A gateway that lost its stream may submit the same placement on a new stream. `stream` says on which of the two
    the sequence ended."""
    output_tokens: int
    finish: Finish
    split: PartSeconds
    """The time since the Submit came"""


@dataclass(slots=True)
class EngineOutputs:
    """All outputs and events up to an iteration boundary."""

    number: int = 0
    steps: dict[int, bytes] = field(default_factory=dict)
    """Stream -> an encoded GenerateDown{step}. The joined bytes of two such messages are one message, with both steps'
    tokens."""
    refused: list[SequenceRefused] = field(default_factory=list)
    ended: list[SequenceEnded] = field(default_factory=list)
    unknown: list[Cancel] = field(default_factory=list)
    """Cancels of requests that had already ended, or never came."""
    events: list[Event] = field(default_factory=list)
    report: EngineReport | None = None
    generated: int = 0
    """How many tokens are in `steps`."""
    report_now: bool = False
    """True if the service must have these outputs before the next iteration begins: they say that a suspect is computed
    alone from now on (see `plan.composer`), or no longer. If the engine then dies, the service knows which sequence it
    was computing."""
    cancel_seconds: list[float] = field(default_factory=list)
    """For each cancel, the seconds from its sending until the pages were free."""


Answer = Loading | EngineInfo | MotetError | EngineOutputs
"""EngineInfo says that the model is loaded, MotetError that it cannot be loaded."""
