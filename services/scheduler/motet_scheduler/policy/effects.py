"""The scheduler's outputs. Values only: the service sends them, and adds the term."""

from dataclasses import dataclass

from motet.domain import NO_TENANT, Digest, InstanceName, RequestId, Tenant
from motet.runner_info import BatchCap, Capacity, Failure, KernelState, RunnerIdentity, Tier
from motet.shares import DEFAULT_WEIGHT
from motet.value import value
from motet_scheduler.policy.quotas.accounts import AccountLevel, ToldClaim
from motet_scheduler.policy.values import (
    AdapterReadiness,
    AdapterRef,
    AdapterStage,
    Catalog,
    CatalogChanges,
    Certificate,
    GroupName,
    Promise,
)

# --------------------------------------------------------------------------------------------------------- to gateways


@value(kw_only=True)
class SendPlaced:
    gateway: str
    request: RequestId
    tenant: Tenant
    epoch: int
    instance: InstanceName
    incarnation: str
    address: str
    promise: Promise
    base: str = ""
    """The digest of the runner's base model."""
    moved_reason: str = ""
    """Why the request moves here from another runner (PU-17); empty if it does not."""
    engine_hung: bool = False
    """The engine of the runner that it leaves hangs; this request may be the cause."""
    accounts: tuple[AccountLevel, ...] = ()
    """That it draws from."""
    weight: int = DEFAULT_WEIGHT
    """Of its tenant."""
    claims: tuple[int, ...] = ()
    """That it has used up."""


@dataclass(frozen=True, slots=True)
class SendRefused:
    gateway: str
    request: RequestId
    epoch: int
    """Its last epoch: a gateway that runs the request under this or an earlier epoch ends it."""
    failure: Failure
    tenant: Tenant = NO_TENANT
    accounts: tuple[AccountLevel, ...] = ()
    """That it may not draw from."""
    claim: ToldClaim | None = None
    """If others leave it what it wants."""


@value()
class SendPosition:
    gateway: str
    request: RequestId
    position: int
    why: str
    admitted: bool = True
    """False: it waits until its quota lets it in."""


@dataclass(frozen=True, slots=True)
class PublishCatalog:
    """Send the catalog to one gateway, or to all if `gateway` is empty."""

    catalog: Catalog
    gateway: str = ""
    changes: CatalogChanges | None = None
    """Since the last one. Gateways that have that one need no more than this."""


# ---------------------------------------------------------------------------------------------------------- to runners


@value()
class ExpectRequest:
    instance: InstanceName
    request: RequestId
    epoch: int
    promise: Promise
    digest: Digest
    gateway: str


@value(kw_only=True)
class EnsureAdapter:
    order: int
    """Its number, which every answer repeats."""
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
    requires_record: bool = False
    refuses_mismatch: bool = False
    proved_builds: tuple[str, ...] = ()
    """Builds of runners that have proved these bytes, if no runner of the group has refused them"""
    cached_only: bool = False
    """Not from the source, which another runner has asked in vain"""


@dataclass(frozen=True, slots=True)
class PinAdapters:
    """All adapters that the runner keeps resident, also without requests: they leave its device and its disk last."""

    instance: InstanceName
    digests: tuple[Digest, ...]


@dataclass(frozen=True, slots=True)
class DropAdapter:
    instance: InstanceName
    digest: Digest
    ref: AdapterRef
    """Of which it is an earlier revision, whose bytes the runner keeps while it has room; empty: of none"""


@dataclass(frozen=True, slots=True)
class ForgetManifest:
    """A manifest has gone: the runner needs nothing that it keeps for it."""

    instance: InstanceName
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
    """The operator does not want the runner empty (any more)."""

    instance: InstanceName


# ------------------------------------------------------------------------------------------------- to operators, people


@value(kw_only=True)
class ReportAdapter:
    ref: AdapterRef
    serving: Digest
    state: AdapterReadiness
    certificate: Certificate | None
    failure: Failure | None
    replicas: tuple[tuple[InstanceName, Tier, Digest], ...]
    """Also of a replaced revision, as long as requests use it."""
    source: str = ""
    """Where the bytes of `serving` came from."""
    source_revision: str = ""
    checking: bool = False
    """A newer revision is being fetched or checked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportRunner:
    identity: RunnerIdentity
    address: str
    attached: bool
    capacity: Capacity
    running: int
    waiting: int
    pages_free: int
    unhealthy: str = ""
    kernels: KernelState | None = None
    batch_cap: BatchCap | None = None


@dataclass(frozen=True, slots=True)
class ReportDesiredReplicas:
    pool: str
    replicas: int
    reason: str
    code: str = ""
    stale: bool = False
    """Some input is missing: do not scale down because of this."""


@dataclass(frozen=True, slots=True)
class ReportDrained:
    runner: RunnerIdentity
    revision: int
    """Of the declared set."""


@dataclass(frozen=True, slots=True)
class ReportedAll:
    """The operator that connected last has heard all that there is to report of these groups."""

    groups: tuple[GroupName, ...]


# ------------------------------------------------------------------------------- to the supervisor, to disk, to the log


@dataclass(frozen=True, slots=True)
class AllowResume:
    """A parked request may resume: its promise is in the ledger again."""

    instance: InstanceName
    request: RequestId
    epoch: int
    promise: Promise


@dataclass(frozen=True, slots=True)
class SaveCatalog:
    """The catalog that a successor needs at its start has changed: save it."""

    outdates: bool = False
    """Gateways hear of another revision of an adapter, of its deletion, or of another base model: with the catalog that
    was saved before, a successor would serve the former ones."""


@dataclass(frozen=True, slots=True)
class IgnoreAnswer:
    """A runner answered an order that is not known: another one has replaced it, or a predecessor gave it."""

    instance: InstanceName
    ref: AdapterRef
    order: int


@dataclass(frozen=True, slots=True)
class EndRunnerStream:
    """A runner has not told all that it has. It is forgotten, and may begin anew."""

    instance: InstanceName


GatewayEffect = SendPlaced | SendRefused | SendPosition | PublishCatalog
RunnerEffect = (
    ExpectRequest | EnsureAdapter | PinAdapters | DropAdapter | ForgetManifest | CancelAtRunner | DrainRunner | TakeWork
)
OperatorEffect = ReportAdapter | ReportRunner | ReportDesiredReplicas | ReportDrained | ReportedAll
Effect = GatewayEffect | RunnerEffect | OperatorEffect | AllowResume | SaveCatalog | IgnoreAnswer | EndRunnerStream
