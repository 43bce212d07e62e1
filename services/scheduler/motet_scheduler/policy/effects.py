"""What the scheduler wants done. Values; whoever carries them out adds the term."""

from dataclasses import dataclass

from motet.domain import Digest, InstanceName, RequestId, Tenant
from motet.runner_info import NOBODY, Capacity, Failure, RunnerIdentity, Tier
from motet_scheduler.policy.values import AdapterReadiness, AdapterRef, AdapterStage, Catalog, Certificate, Promise

# --------------------------------------------------------------------------------------------------------- to gateways


@dataclass(frozen=True, slots=True, kw_only=True)
class SendPlaced:
    gateway: str
    request: RequestId
    tenant: Tenant
    epoch: int
    instance: InstanceName
    incarnation: str
    address: str
    promise: Promise
    moved_because: str = ""
    """Set when the request runs elsewhere and goes on here (PU-17)."""
    engine_hung: bool = False
    """There, the engine stands still: this request may be why."""


@dataclass(frozen=True, slots=True)
class SendRefused:
    gateway: str
    request: RequestId
    epoch: int
    """The last under which it was placed: a gateway that runs it under this one, or an earlier one, gives it up."""
    failure: Failure
    tenant: Tenant = NOBODY


@dataclass(frozen=True, slots=True)
class SendPosition:
    gateway: str
    request: RequestId
    position: int
    why: str


@dataclass(frozen=True, slots=True)
class PublishCatalog:
    """The catalog, to one gateway or, with an empty name, to all."""

    catalog: Catalog
    gateway: str = ""


# ---------------------------------------------------------------------------------------------------------- to runners


@dataclass(frozen=True, slots=True)
class ExpectRequest:
    instance: InstanceName
    request: RequestId
    epoch: int
    promise: Promise
    digest: Digest


@dataclass(frozen=True, slots=True, kw_only=True)
class EnsureAdapter:
    instance: InstanceName
    ref: AdapterRef
    source: str
    expected_digest: str
    stage: AdapterStage
    source_revision: str = ""
    credentials: str = ""
    max_bytes: int = 0
    volume: str = ""
    folder: str = ""


@dataclass(frozen=True, slots=True)
class DropAdapter:
    instance: InstanceName
    digest: Digest
    ref: AdapterRef


@dataclass(frozen=True, slots=True)
class CancelAtRunner:
    instance: InstanceName
    request: RequestId
    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class DrainRunner:
    instance: InstanceName
    deadline: float


@dataclass(frozen=True, slots=True)
class TakeWork:
    """The operator does not, or no longer, want it empty."""

    instance: InstanceName


# ------------------------------------------------------------------------------------------------- to operators, people


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportAdapter:
    ref: AdapterRef
    serving: Digest
    state: AdapterReadiness
    certificate: Certificate | None
    failure: Failure | None
    replicas: tuple[tuple[InstanceName, Tier, Digest], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportRunner:
    identity: RunnerIdentity
    address: str
    attached: bool
    capacity: Capacity
    running: int
    waiting: int
    pages_free: int
    condemned: str = ""


@dataclass(frozen=True, slots=True)
class ReportDesiredReplicas:
    pool: str
    replicas: int
    reason: str
    code: str = ""
    stale: bool = False
    """Something is not known: nobody may leave on this word."""


@dataclass(frozen=True, slots=True)
class ReportDrained:
    runner: RunnerIdentity
    revision: int
    """Of the set that it is in."""


# ------------------------------------------------------------------------------------------- to the supervisor, to disk


@dataclass(frozen=True, slots=True)
class AllowResume:
    """A parked request may come back: its promise is in the ledger again."""

    instance: InstanceName
    request: RequestId
    epoch: int
    promise: Promise


@dataclass(frozen=True, slots=True)
class SaveCatalog:
    """What a successor must know before anybody has reconnected has changed; write it down."""


GatewayEffect = SendPlaced | SendRefused | SendPosition | PublishCatalog
RunnerEffect = ExpectRequest | EnsureAdapter | DropAdapter | CancelAtRunner | DrainRunner | TakeWork
OperatorEffect = ReportAdapter | ReportRunner | ReportDesiredReplicas | ReportDrained
Effect = GatewayEffect | RunnerEffect | OperatorEffect | AllowResume | SaveCatalog
