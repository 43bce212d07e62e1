"""What reconcile decides. The local operator carries it out with processes, the cluster operator with pods."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal

from motet.chat_formats import UNDECLARED, ChatFormats
from motet.domain import ObjectName
from motet.resources.fields import Priority
from motet.resources.limits import Limits
from motet.resources.status import AdapterCounts, AdapterRevision, Artifact, Condition, Slots
from motet_operator.reconcile.view import AdapterReplica, RunnerTemplate


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerSet:
    """The runners that one pool should have at one revision of its template."""

    pool: ObjectName
    revision: str
    template: RunnerTemplate | None
    """What it is made of. None: such a set exists, and is only scaled."""

    replicas: int
    drain_seconds: float = 0
    leaving: tuple[str, ...] = ()
    """Instances that leave, if there are more than `replicas`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerDrain:
    """Give this runner nothing new, and move what is left on it at the deadline."""

    instance: str
    pool: ObjectName
    revision: str
    deadline: datetime
    begun: bool = False
    """The drain is stored with this deadline. Only then is the scheduler told: a drain that could not be stored would
    never end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerReplacement:
    """This runner hangs or is silent and has not recovered: end its process and start it again."""

    instance: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStatus:
    name: ObjectName
    model: str
    replicas: int
    """Wanted."""

    existing: int
    staying: int
    """Existing runners that neither leave nor exceed the wanted number."""

    ready: int
    updated: int
    draining: int
    revision: str
    """The newest."""

    target_revision: str
    """The revision that the runners get now; not the newest while the pool waits for its rollout."""

    current_revision: str
    """The last revision that was fully rolled out."""

    decides: bool
    """Its spec decides for its group: the base model, and who may use it and its adapters."""

    conditions: tuple[Condition, ...]
    observed_generation: int
    adapters: AdapterCounts = field(default_factory=AdapterCounts)
    slots: Slots = field(default_factory=Slots)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterStatus:
    name: ObjectName
    model: str
    """The name that clients use: namespace/modelName."""

    conditions: tuple[Condition, ...]
    artifact: Artifact | None
    replicas: tuple[AdapterReplica, ...]
    observed_generation: int
    base_model: str = ""
    desired: int = 0
    """`spec.placement.minReplicas`: runners that should hold it without any request."""

    loaded: int = 0
    last_load: datetime | None = None
    revisions: tuple[AdapterRevision, ...] = ()

    @property
    def serves(self) -> bool:
        """Whether a request would be served now. A suspended adapter is Ready, and is not served."""
        return any(condition.type == "Ready" and condition.reason == "Serving" for condition in self.conditions)


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    kind: str
    name: ObjectName
    type: Literal["Normal", "Warning"]
    reason: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolEntry:
    pool: ObjectName
    group: ObjectName
    served_name: str
    model_uri: str
    replicas: int
    """Wanted now, whoever decided that."""

    max_sequences: int
    scaling: Literal["Disabled", "Builtin", "External"] = "Disabled"
    min_replicas: int = 0
    max_replicas: int | None = None
    scale_down_stabilization_seconds: int = 300
    tenants: tuple[str, ...] = ()
    """Namespaces that its group admits, or "*": they may use the base model."""

    max_priorities: Mapping[str, Priority] = field(default_factory=dict)
    """The highest class that its group grants to each namespace; "*" is every other one."""

    limits: Mapping[str, Limits] = field(default_factory=dict)
    """What its group grants to each namespace, likewise."""

    weights: Mapping[str, int] = field(default_factory=dict)
    """The weight that its group gives to each namespace, likewise; without one: 1."""

    chat: ChatFormats = UNDECLARED
    """What its group declares."""

    cold_wait_seconds: int = 0
    """How long its group lets a request wait for an adapter that is on no runner's device; 0: as the scheduler does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterEntry:
    name: ObjectName
    generation: int
    group: ObjectName
    model_name: str
    source: str
    expected_digest: str
    max_class: str
    min_replicas: int
    max_replicas: int
    content_stamp: str
    source_revision: str = ""
    credentials: str = ""
    """namespace/name of the Secret that opens the source."""

    max_bytes: int = 0
    """The pool's limit; 0: only the runner's own limit."""

    volume: str = ""
    folder: str = ""
    """The volume of the source, and the folder of it that all files of the adapter must lie in, also after links are
    followed. Empty: no volume; the whole volume."""

    share: tuple[str, ...] = ()
    """Other namespaces that may use it, or "*". The gateway also checks that the pool admits them."""

    limits: Limits | None = None
    chat: ChatFormats = UNDECLARED
    requires_record: bool = False
    refuses_mismatch: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogSnapshot:
    pools: tuple[PoolEntry, ...] = ()
    adapters: tuple[AdapterEntry, ...] = ()
    namespaces: tuple[tuple[str, str], ...] = ()
    """Name and uid of all that exist; empty outside of a cluster. Each may have API keys: a pool may admit all, and
    a key with the scope `monitor` needs no pool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    runner_sets: tuple[RunnerSet, ...] = ()
    drains: tuple[RunnerDrain, ...] = ()
    replacements: tuple[RunnerReplacement, ...] = ()
    pools: tuple[PoolStatus, ...] = ()
    adapters: tuple[AdapterStatus, ...] = ()
    events: tuple[Event, ...] = ()
    catalog: CatalogSnapshot = CatalogSnapshot()
    due: datetime | None = None
    """When the next decision is due without any change: a drain's deadline, or the grace of an unhealthy runner."""

    @property
    def leaving(self) -> frozenset[str]:
        """Instances that go now."""
        return frozenset(name for each in self.runner_sets for name in each.leaving)

    @property
    def deadlines(self) -> Mapping[str, datetime]:
        """The deadline to store on each draining runner. One that leaves now without having begun to drain serves
        nobody, so it has nothing to drain."""
        leaving = self.leaving
        return {one.instance: one.deadline for one in self.drains if one.begun or one.instance not in leaving}
