"""Types that events and effects share."""

from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import NewType, Self

from motet.chat_formats import UNDECLARED, ChatFormats
from motet.domain import Digest, ObjectName
from motet.promises import PROMISE_QUANTILES
from motet.runner_info import Failure, RequestClass
from motet.value import value

GroupName = NewType("GroupName", str)
"""namespace/name of the pool group whose base model and adapters a runner serves."""


USUAL_COLD_WAIT = 20.0
"""Of pools whose operator does not say."""

EVERYBODY = "*"
"""Every tenant that is not named."""

MaxClasses = tuple[tuple[str, RequestClass], ...]
"""The most urgent class of each tenant's requests; `*` is every other tenant. Gateways apply it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a tenant, an adapter or a key may use at most. 0: as much as it wants."""

    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    concurrency: int = 0

    def __bool__(self) -> bool:
        return bool(self.requests_per_minute or self.tokens_per_minute or self.concurrency)


@dataclass(frozen=True, slots=True)
class KeyAccount:
    """An API key that has limits of its own."""

    id: str
    limits: Limits


Grants = tuple[tuple[str, Limits], ...]
"""The limits of each tenant; `*` is every other tenant. The scheduler applies them."""

Weights = tuple[tuple[str, int], ...]
"""The weight of each tenant; `*` is every other tenant. Nobody said one: 1."""


class AdapterStage(IntEnum):
    """How far a runner has loaded an adapter. The numbers are those of the messages."""

    NONE = 0
    FETCHED = 1
    CERTIFIED = 2
    HOST = 3
    DEVICE = 4

    @classmethod
    def from_proto(cls, value: int) -> Self:
        """NONE for an unknown stage of a newer runner: an adapter must be certified before it serves."""
        return cls(value) if value in _STAGES else cls(cls.NONE)


_STAGES = frozenset(AdapterStage)


class AdapterReadiness(StrEnum):
    COLD = "cold"  # certified; loads at its first request
    READY = "ready"  # in a runner's memory
    LOADING = "loading"  # is being fetched or checked
    FAILED = "failed"


@value(kw_only=True)
class Estimate:
    """Output length in tokens, as quantiles; zeros if there is no estimate."""

    q50: int = 0
    q80: int = 0
    q90: int = 0
    q95: int = 0
    mean: float = 0.0
    """Where a few long answers count, too."""
    source: str = ""

    @property
    def quantiles(self) -> tuple[int, int, int, int]:
        return self.q50, self.q80, self.q90, self.q95

    def quantile(self, percent: int) -> int:
        """One of `PROMISE_QUANTILES`."""
        return self.quantiles[PROMISE_QUANTILES.index(percent)]


@value()
class Promise:
    """What is reserved for a request. The ledger compares `pages`."""

    pages: int
    tokens: int = 0
    adapter_bytes: int = 0
    number: int = 0
    """By the runner, which counts the promises of a request; 0: it has not said."""


@dataclass(frozen=True, slots=True, order=True)
class AdapterRef:
    namespace: str
    name: str
    generation: int = 0

    @property
    def object(self) -> ObjectName:
        return ObjectName(self.namespace, self.name)


class ScalingMode(StrEnum):
    DISABLED = "disabled"  # spec.replicas decides
    BUILTIN = "builtin"  # the operator follows the scheduler's advice
    EXTERNAL = "external"  # an external autoscaler reads our metrics and decides


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSpec:
    """One ServingPool as the operator states it."""

    pool: str
    group: GroupName
    served_name: str = ""
    model_uri: str = ""
    replicas: int = 1
    """The number of runners wanted now, whatever decided it."""

    max_sequences: int = 0
    """0: the bound that each runner reports."""

    scaling: ScalingMode = ScalingMode.DISABLED
    min_replicas: int = 0
    max_replicas: int | None = None
    stabilization: float = 300.0
    """Seconds for which fewer runners must have been enough before the pool shrinks."""

    tenants: tuple[str, ...] = ()
    """Who may use the base model. Only gateways check this, and an adapter's `share`: requests that reach the scheduler
    have been allowed, and continue when the permission is taken back."""

    max_classes: MaxClasses = ()
    limits: Grants = ()
    weights: Weights = ()
    chat: ChatFormats = UNDECLARED
    cold_wait: float = USUAL_COLD_WAIT
    """Seconds that a request of its group waits for an adapter that is on no runner's device."""

    @property
    def scalable(self) -> bool:
        return self.scaling is not ScalingMode.DISABLED


@value(kw_only=True)
class RevisionKey:
    """What identifies a revision of an adapter. Other bytes, another source, another Secret, another volume, other
    words about recorded answers, another group or another base model make a new revision."""

    source: str
    source_revision: str = ""
    """A branch, tag or commit of a hub's repository."""

    expected_digest: str = ""
    content_stamp: str = ""
    credentials: str = ""
    """namespace/name of the Secret that opens the source."""

    volume: str = ""
    """URI of the volume with the source; empty: no volume."""

    folder: str = ""
    """The only folder of the volume that may be read; empty: the whole volume."""

    requires_record: bool = False
    """It must have recorded answers."""

    refuses_mismatch: bool = False
    """Its recorded answers must be those of this base model; else a difference is only a warning."""

    group: GroupName = GroupName("")
    """Whose runners serve it. The operator leaves this and `base` empty."""

    base: str = ""
    """The digest of the base model that it is checked for. Empty: its group has had no runner yet."""


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
    """The largest size that its pool admits; 0: the runner's own bound."""

    share: tuple[str, ...] = ()
    limits: Limits = Limits()
    chat: ChatFormats = UNDECLARED


MAX_KERNELS = 8
"""The number of kernels that a certificate names"""

MAX_BUILDS = 16
"""The number of builds that a certificate names"""

AGREE, DIFFER = "Agree", "Differ"
AGREEMENTS = (AGREE, DIFFER)
"""What a certificate says of recorded answers"""


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
    warnings: tuple[str, ...] = ()
    device_rank: int = 0
    """What counts in device memory: more than `rank` if the adapter scales results; 0 means `rank`"""
    proved_by: tuple[str, ...] = ()
    """Kernels that have proved it"""
    proved_builds: tuple[str, ...] = ()
    """Of the runners that have proved it, with kernels and model of device: the newest ones"""
    recorded_answers: str = ""
    """One of `AGREEMENTS`; empty: they were not compared, or there are none."""
    template_digest: str = ""
    """Of its own chat template; empty: it is rendered with the base model's."""

    @property
    def is_proof(self) -> bool:
        """Whether what an engine computes with it was compared with anything"""
        return bool(self.proved_by) or self.recorded_answers == AGREE


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseModel:
    digest: str = ""
    asset_digest: str = ""
    architecture: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """The parameters of the policy. Times are seconds, with the time scale applied."""

    queue_limit: int = 10_000
    max_passed_over: int = 64
    tenants_examined: int = 32
    """How many requests are looked at in one scan, per class, of those that were not tried yet, or that may have last
    places."""
    output_token_cost: float = 2.0
    """Of a token of an answer in the shares of tenants, where one of a prompt costs 1, as long as no runner of the
    group has measured it."""
    standard_floor: float = 0.1
    """The part of all placements that class Standard gets at least while it waits."""
    batch_floor: float = 0.03
    headroom_one_in: int = 32
    """Each runner keeps one place in this number for tenants that were given less than others. 0: none."""
    startup_wait: float = 0.5
    unsubmitted_timeout: float = 2.0
    """When reports have not listed a placement for this long, it is released. When they have listed for as long what
    its gateway does not know, that is cancelled."""
    unlisted_timeout: float = 10.0
    """A request is placed again if its runner has not listed it for this long and its gateway has not reported it
    lost."""
    avoid_after_decline: float = 0.1
    """How long a request avoids a runner that declined it. Doubles with each decline, up to `max_avoid`."""
    max_avoid: float = 2.0
    forget_runner: float = 30.0
    load_retry: float = 10.0
    """An order to load or check an adapter is repeated if it is unanswered for this long."""
    check_patience: float = 300.0
    """How long a check may go on without more bytes: then another runner is asked, too."""
    revision_pause: float = 10.0
    """After the first few changes, an adapter that keeps changing is checked at most this often."""
    residency_pause: float = 1.0
    """The operator and gateways are told at most this often which runners hold which adapters."""
    force_promise_pages: int = 0
    force_promise_each: int = 1
    capacity_every: float = 1.0
    """How often the desired number of runners of each pool is computed."""
    queue_patience: float = 5.0
    """If a request has waited this long, another runner is wanted, even if the load does not need it."""
    report_patience: float = 10.0
    """A pool does not shrink while one of its runners has not reported for this long."""
    repeat_advice: float = 10.0
    """A new reason for the same number of runners is reported this often: reasons change with every request."""
    growth_window: float = 30.0
    """A pool at most doubles within this time."""
    positions_every: float = 1.0
    """How often gateways hear the positions of what waits."""
    look_again: float = 0.1
    """What waits for something that has no time of its own is looked at this often."""
    timelines: int = 2_000


@value(kw_only=True)
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
    base: BaseModel | None = None
    """Set while its revision is for another base model than the group has now."""

    template_digest: str = ""
    """Of the chat template of its revision; empty: the base model's"""
    chat: ChatFormats = UNDECLARED


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
    """(instance, address) of the runners that take work."""

    tenants: tuple[str, ...] = ()
    max_classes: MaxClasses = ()
    chat: ChatFormats = UNDECLARED


NamespaceUids = tuple[tuple[str, str], ...]
"""Name and uid of all namespaces that exist. Empty: the operator has not said which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalog:
    """What gateways may serve."""

    groups: tuple[CatalogGroup, ...] = ()
    adapters: tuple[CatalogAdapter, ...] = field(default=())
    namespaces: NamespaceUids = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogChanges:
    """What is different in a catalog, besides its groups."""

    adapters: tuple[CatalogAdapter, ...] = ()
    """New ones, and those that have changed."""
    removed: tuple[AdapterRef, ...] = ()
