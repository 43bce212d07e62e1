"""Words that events and effects share."""

from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import NewType, Self

from motet.domain import Digest, ObjectName
from motet.runner_info import Failure, RequestClass

GroupName = NewType("GroupName", str)
"""namespace/name of the pool group whose base model and adapters a runner serves."""


class AdapterStage(IntEnum):
    """How far a runner has taken an adapter; the numbers are the messages' own."""

    NONE = 0
    FETCHED = 1
    CERTIFIED = 2
    HOST = 3
    DEVICE = 4

    @classmethod
    def from_proto(cls, value: int) -> Self:
        """One of a newer runner has shown nothing: what the adapter's check found must be known before it serves."""
        return cls(value) if value in _STAGES else cls(cls.NONE)


_STAGES = frozenset(AdapterStage)


class AdapterReadiness(StrEnum):
    COLD = "cold"  # checked and known; loads at its first request
    READY = "ready"  # resident somewhere
    LOADING = "loading"  # bytes or checks under way
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Output length in tokens, as quantiles; zeros when nobody guessed."""

    q50: int = 0
    q80: int = 0
    q90: int = 0
    q95: int = 0
    rank: float = 0.0
    source: str = ""


@dataclass(frozen=True, slots=True)
class Promise:
    """What is set aside for a request; `pages` is what is compared."""

    pages: int
    tokens: int = 0
    adapter_bytes: int = 0


@dataclass(frozen=True, slots=True, order=True)
class AdapterRef:
    namespace: str
    name: str
    generation: int = 0

    @property
    def object(self) -> ObjectName:
        return ObjectName(self.namespace, self.name)


class ScalingMode(StrEnum):
    DISABLED = "disabled"  # a person decides
    BUILTIN = "builtin"  # the operator carries our advice out
    EXTERNAL = "external"  # an autoscaler that reads our figures decides


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSpec:
    """One ServingPool as the operator states it."""

    pool: str
    group: GroupName
    served_name: str = ""
    model_uri: str = ""
    replicas: int = 1
    """Wanted now, whoever decided that."""

    max_sequences: int = 0
    """0: what each runner says it can take."""

    scaling: ScalingMode = ScalingMode.DISABLED
    min_replicas: int = 0
    max_replicas: int | None = None
    stabilization: float = 300.0
    """Seconds for which fewer runners must have been enough before some leave."""

    tenants: tuple[str, ...] = ()
    """Who may use the base model: for gateways alone. So is an adapter's `share`: what is asked of the scheduler has
    been allowed, and goes on when that is taken back."""

    @property
    def scalable(self) -> bool:
        return self.scaling is not ScalingMode.DISABLED


@dataclass(frozen=True, slots=True, kw_only=True)
class RevisionKey:
    """What makes a revision of an adapter: other bytes, another place to take them from, another key to it, or other
    bounds of where they may lie."""

    source: str
    source_revision: str = ""
    """Of a hub's repository: a branch, a tag or a commit."""

    expected_digest: str = ""
    content_stamp: str = ""
    credentials: str = ""
    """namespace/name of the Secret that opens the source."""

    volume: str = ""
    """URI of the volume that the source lies on; empty: on none."""

    folder: str = ""
    """Of the volume: nothing outside of it is read; empty: all of it may be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSpec:
    """One LoRAAdapter as the operator states it."""

    ref: AdapterRef
    group: GroupName
    model_name: str
    revision: RevisionKey
    max_class: RequestClass = RequestClass.INTERACTIVE
    min_replicas: int = 0
    max_replicas: int = 0
    max_bytes: int = 0
    """What its pool admits; 0: the runner's own bound."""

    share: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """What checking an adapter found."""

    digest: Digest
    size_bytes: int = 0
    rank: int = 0
    alpha: float = 0.0
    target_modules: tuple[str, ...] = ()
    mapped: int = 0
    unmapped: tuple[str, ...] = ()
    base_digest: str = ""
    method: str = ""
    max_delta_to_base: float = 0.0
    max_delta_to_reference: float = 0.0
    checker: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseModel:
    digest: str = ""
    asset_digest: str = ""
    architecture: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """The numbers that decide. Times are seconds, already scaled by the process that hands them in."""

    queue_limit: int = 10_000
    max_passed_over: int = 64
    tenants_examined: int = 32
    """How many tenants' oldest requests are tried, per class, when the first does not fit."""
    startup_wait: float = 0.5
    unsubmitted_timeout: float = 2.0
    """A placement that its runner does not list is given up after this, and two reports."""
    unlisted_timeout: float = 10.0
    """A placement that its runner does not list for so long, and of which its gateway says nothing, is taken back."""
    avoid_after_decline: float = 0.1
    """How long a runner that declined is not asked again by the same request; doubles with each decline."""
    avoid_longest: float = 2.0
    forget_runner: float = 30.0
    load_retry: float = 10.0
    """How long an order to load or check an adapter may go unanswered before it is given again."""
    revision_pause: float = 10.0
    """An adapter that keeps changing is checked once in so long, after the first few times."""
    force_promise_pages: int = 0
    capacity_every: float = 1.0
    """How often it is worked out how many runners each pool should have."""
    queue_patience: float = 5.0
    """A request that has waited so long for a place asks for another runner, whatever the sums say."""
    report_patience: float = 10.0
    """A runner that has not reported for so long is not known well enough to take another one away."""
    growth_window: float = 30.0
    """A pool at most doubles in so long."""
    timelines: int = 2_000


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogAdapter:
    ref: AdapterRef
    group: GroupName
    model_name: str
    state: AdapterReadiness
    digest: Digest
    source: str = ""
    rank: int = 0
    max_class: RequestClass = RequestClass.INTERACTIVE
    failure: Failure | None = None
    share: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogGroup:
    group: GroupName
    served_name: str
    model_uri: str
    pools: tuple[str, ...]
    base_digest: str = ""
    asset_digest: str = ""
    max_model_length: int = 0
    runners: tuple[tuple[str, str], ...] = ()
    """(instance, address) of those that take work."""

    tenants: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalog:
    """What gateways may offer: compared as a value, sent when it has changed."""

    groups: tuple[CatalogGroup, ...] = ()
    adapters: tuple[CatalogAdapter, ...] = field(default=())
