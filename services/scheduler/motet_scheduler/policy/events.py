"""The scheduler's inputs. Each says what happened; `Scheduler.handle` decides what follows."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from motet.domain import Digest, InstanceName, RequestId, Tenant
from motet.runner_info import (
    BatchCap,
    Capacity,
    Failure,
    KernelState,
    RequestClass,
    RunnerIdentity,
    RunnerRequest,
    Tier,
)
from motet.value import value
from motet_scheduler.policy.quotas.accounts import AccountLevel, ToldClaim
from motet_scheduler.policy.values import (
    AdapterRef,
    AdapterSpec,
    AdapterStage,
    BaseModel,
    Certificate,
    Estimate,
    GroupName,
    KeyAccount,
    NamespaceUids,
    PoolSpec,
    Promise,
)

# ----------------------------------------------------------------------------------------------------------- gateways


@value(kw_only=True)
class Enqueued:
    gateway: str
    request: RequestId
    tenant: Tenant
    group: GroupName
    digest: Digest
    adapter: str = ""
    """The adapter that its client names, as namespace/name. Others may have the same bytes."""
    base: str = ""
    """The digest of the base model that it was tokenised for. Empty: a gateway of an earlier version does not say."""
    request_class: RequestClass = RequestClass.STANDARD
    prompt_tokens: int
    max_tokens: int
    delivered: int = 0
    epoch: int = 0
    estimate: Estimate = field(default_factory=Estimate)
    deadline: float = 0.0
    """Seconds from now, of this wait; 0: none."""
    whole_deadline: float = 0.0
    """Seconds of each later wait; 0: as of this one."""
    age: float = 0.0
    avoid: tuple[str, ...] = ()
    parent: RequestId | None = None
    """The first choice of the same call; None: this is it."""
    choices: int = 1
    """How many choices the call has, with this one."""
    prefix_hints: tuple[int, ...] = ()
    """Of the first blocks of its prompt (`motet.prefix_hints`)."""
    api_key: KeyAccount | None = None
    """The API key that it came with, if that has limits."""
    admitted: bool = False
    """A scheduler has let it in before: its quota refuses it no more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRequest:
    """A request that a gateway says is running, when it connects."""

    request: RequestId
    epoch: int
    instance: InstanceName
    incarnation: str
    promise: Promise
    tenant: Tenant
    group: GroupName
    digest: Digest
    adapter: str = ""
    """The adapter that its client names, as namespace/name. Others may have the same bytes."""
    base: str = ""
    """The digest of the base model that it was tokenised for. Empty: a gateway of an earlier version does not say."""
    request_class: RequestClass = RequestClass.STANDARD
    prompt_tokens: int
    max_tokens: int
    delivered: int = 0
    age: float = 0.0
    deadline: float = 0.0
    estimate: Estimate = field(default_factory=Estimate)
    parent: RequestId | None = None
    api_key: KeyAccount | None = None


@dataclass(frozen=True, slots=True)
class GatewayConnected:
    gateway: str
    live: tuple[LiveRequest, ...] = ()
    more: bool = False
    """Others come next, in `GatewayTold`."""


@dataclass(frozen=True, slots=True)
class GatewayTold:
    """A part of what runs, after its hello."""

    gateway: str
    live: tuple[LiveRequest, ...]
    more: bool = False


@dataclass(frozen=True, slots=True)
class GatewayDisconnected:
    gateway: str


@dataclass(frozen=True, slots=True)
class CancelRequested:
    """The client of a waiting request disconnected."""

    gateway: str
    request: RequestId


@value()
class RequestFinished:
    gateway: str
    request: RequestId
    epoch: int
    output_tokens: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class RequestLost:
    gateway: str
    request: RequestId
    epoch: int
    why: str = ""
    delivered: int = 0


@dataclass(frozen=True, slots=True)
class RequestsHeld:
    """By group: how many requests a gateway holds because it doesn't have their model's tokenizer yet."""

    gateway: str
    groups: tuple[tuple[GroupName, int], ...]
    templates: tuple[tuple[GroupName, Digest], ...] = ()
    """Adapters whose own chat template no runner has"""


@dataclass(frozen=True, slots=True)
class LevelsTold:
    """What is left of accounts, as a scheduler has told this gateway, and how many seconds ago. And whom it has told to
    come again."""

    gateway: str
    levels: tuple[tuple[AccountLevel, float], ...]
    claims: tuple[ToldClaim, ...] = ()


# ------------------------------------------------------------------------------------------------------------ runners


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerAttached:
    identity: RunnerIdentity
    address: str
    capacity: Capacity
    base: BaseModel = field(default_factory=BaseModel)
    kernels: KernelState | None = None
    resident: Mapping[Digest, Tier] = field(default_factory=dict)
    """The adapters that it holds."""
    live: tuple[RunnerRequest, ...] = ()
    more: bool = False
    """Others come next, in `RunnerListed`."""
    refused: Mapping[Digest, Failure] = field(default_factory=dict)
    """What its proofs have found wrong: all that it knows, also of what no other scheduler has told."""
    refused_is_all: bool = True
    """The rest it has proved. False: it has forgotten some, or is of a version that tells nothing of it."""


@dataclass(frozen=True, slots=True)
class RunnerDetached:
    instance: InstanceName
    incarnation: str


@dataclass(frozen=True, slots=True)
class ResidencyChanged:
    """What a runner holds differs from what it has told before."""

    instance: InstanceName
    incarnation: str
    gone: tuple[Digest, ...]
    resident: Mapping[Digest, Tier]
    """These are there too, or at another tier now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerReported:
    instance: InstanceName
    incarnation: str
    pages: int = 0
    """That KV can have now. 0: the runner does not say."""
    pages_free: int = 0
    running: int = 0
    waiting: int = 0
    steps: int = 0
    resident: Mapping[Digest, Tier] | None = None
    """The adapters that it holds. None: the runner tells only of changes, see `ResidencyChanged`."""
    live: tuple[RunnerRequest, ...] = ()
    more: bool = False
    """Others come next, in `RunnerListed`."""
    cached_prefixes: frozenset[int] = frozenset()
    """Hints of the pages in its prefix cache."""
    kernels: KernelState | None = None
    batch_cap: BatchCap | None = None
    step_seconds: float = 0.0
    """Of its last iterations. 0: the runner does not say."""
    prompt_token_seconds: float = 0.0
    """To compute one token of a prompt. 0: the runner does not say."""
    fixed_seconds: float = 0.0
    """Of an iteration without prompts: this, and"""
    sequence_seconds: float = 0.0
    """this for each sequence. Both 0: the runner does not say."""
    pending_prompt_tokens: int = 0
    """Of the prompts that it has, those that are still to be computed."""


@dataclass(frozen=True, slots=True)
class RunnerListed:
    """A part of what a runner has, after its hello or a report."""

    instance: InstanceName
    incarnation: str
    live: tuple[RunnerRequest, ...]
    more: bool = False


@dataclass(frozen=True, slots=True)
class RunnerDeclined:
    instance: InstanceName
    request: RequestId
    epoch: int
    failure: Failure


@dataclass(frozen=True, slots=True)
class SequencesEnded:
    """Their pages are free. Their gateways say later what came of them."""

    instance: InstanceName
    incarnation: str
    ended: tuple[tuple[RequestId, int], ...]
    """Requests, each with its epoch"""


@dataclass(frozen=True, slots=True)
class RunnerShuttingDown:
    """The runner's process is stopping: it takes nothing new, and its remaining requests move at the deadline."""

    instance: InstanceName
    incarnation: str
    deadline: float
    """Seconds from now."""


@dataclass(frozen=True, slots=True)
class TermRaised:
    """The scheduler's term was raised; its streams stay open. Runners have been welcomed again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterStateChanged:
    instance: InstanceName
    ref: AdapterRef
    digest: Digest
    stage: AdapterStage
    certificate: Certificate | None = None
    failure: Failure | None = None
    bytes: int = 0
    progress: float = 0.0
    order: int = 0
    """The order that it answers. 0: nobody asked for it, or the runner is of an earlier version."""
    ordered_stage: AdapterStage = AdapterStage.NONE
    """The stage that the order asked for; NONE if nobody asked."""


# ----------------------------------------------------------------------------------------------------------- operator


@dataclass(frozen=True, slots=True)
class OperatorConnected:
    """A new operator stream needs the whole state."""


@dataclass(frozen=True, slots=True)
class CatalogReplaced:
    """All pools and adapters that should exist."""

    pools: tuple[PoolSpec, ...]
    adapters: tuple[AdapterSpec, ...]
    namespaces: NamespaceUids = ()


@dataclass(frozen=True, slots=True)
class CatalogUpdated:
    """What changed in the catalog."""

    pools: tuple[PoolSpec, ...] = ()
    adapters: tuple[AdapterSpec, ...] = ()
    removed_pools: tuple[str, ...] = ()
    removed_adapters: tuple[AdapterRef, ...] = ()


@dataclass(frozen=True, slots=True)
class DrainRequested:
    runner: RunnerIdentity
    deadline: float
    """Seconds from now."""


@dataclass(frozen=True, slots=True)
class DrainsDeclared:
    """All runners that the operator wants empty. All other runners take work."""

    drains: tuple[DrainRequested, ...] = ()
    revision: int = 0


# --------------------------------------------------------------------------------------------------------- supervisor


@dataclass(frozen=True, slots=True)
class SupervisorConnected:
    """From now on parked requests resume through the scheduler's ledger."""


@dataclass(frozen=True, slots=True)
class SupervisorDisconnected:
    """From now on runners resume their parked requests by themselves."""


@dataclass(frozen=True, slots=True)
class PromiseChanged:
    instance: InstanceName
    request: RequestId
    epoch: int
    promise: Promise


@dataclass(frozen=True, slots=True)
class RequestParked:
    instance: InstanceName
    request: RequestId
    epoch: int
    wanted: Promise


@dataclass(frozen=True, slots=True)
class RequestResumed:
    instance: InstanceName
    request: RequestId
    epoch: int
    promise: Promise


@dataclass(frozen=True, slots=True)
class RunnerUnhealthy:
    """The supervisor found a runner unhealthy. A `hung` runner may still keep its streams open."""

    runner: RunnerIdentity
    why: str
    hung: bool
    silent_seconds: float = 0.0
    """How long the supervisor has heard nothing of it; 0 if it hears it."""


@dataclass(frozen=True, slots=True)
class OvercommitSet:
    pool: str
    factor: float


# --------------------------------------------------------------------------------------------------------------- time


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed: deadlines, timeouts, retries."""


@dataclass(frozen=True, slots=True)
class TryMore:
    """The event before left requests untried. This one follows it at once, after what came in the meantime."""


Event = (
    Enqueued
    | GatewayConnected
    | GatewayTold
    | GatewayDisconnected
    | CancelRequested
    | RequestFinished
    | RequestLost
    | RequestsHeld
    | LevelsTold
    | RunnerAttached
    | RunnerDetached
    | RunnerReported
    | RunnerListed
    | RunnerDeclined
    | SequencesEnded
    | ResidencyChanged
    | RunnerShuttingDown
    | TermRaised
    | AdapterStateChanged
    | OperatorConnected
    | CatalogReplaced
    | CatalogUpdated
    | DrainsDeclared
    | SupervisorConnected
    | SupervisorDisconnected
    | PromiseChanged
    | RequestParked
    | RequestResumed
    | RunnerUnhealthy
    | OvercommitSet
    | Tick
    | TryMore
)
