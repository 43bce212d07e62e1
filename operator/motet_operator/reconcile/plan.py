"""What reconcile decides, in words that both executors understand: the one with processes and the one with pods."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal

from motet.domain import ObjectName
from motet.resources.status import AdapterCounts, Artifact, Condition, Slots
from motet_operator.reconcile.view import AdapterReplica, RunnerSet


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerDrain:
    """Give this runner nothing new, and move what is left on it at the deadline."""

    instance: str
    pool: ObjectName
    revision: str
    deadline: datetime
    begun: bool = False
    """It is written down, with this deadline. Before that nobody is told: a drain that could not be written down would
    have no end, and nothing could take its runner away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerReplacement:
    """This runner hangs or is silent and will not come back by itself: end its process, and start it again."""

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
    """Of those: neither leaving nor beyond what is wanted."""

    ready: int
    updated: int
    draining: int
    revision: str
    """The newest."""

    target_revision: str
    """The one that its runners are brought to now: another than the newest while the pool waits for its turn."""

    current_revision: str
    """The one that was in full service last."""

    conditions: tuple[Condition, ...]
    observed_generation: int
    adapters: AdapterCounts = field(default_factory=AdapterCounts)
    slots: Slots = field(default_factory=Slots)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterStatus:
    name: ObjectName
    model: str
    """What clients of every tenant may call it: tenant/modelName."""

    conditions: tuple[Condition, ...]
    artifact: Artifact | None
    replicas: tuple[AdapterReplica, ...]
    observed_generation: int
    base_model: str = ""
    desired: int = 0
    """Runners that should hold it whether or not anybody asks."""

    loaded: int = 0
    last_load: datetime | None = None

    @property
    def ready(self) -> bool:
        return any(condition.type == "Ready" and condition.holds for condition in self.conditions)


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
    """Namespaces that its group admits, or "*": who may use the base model."""


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
    """What the pool admits; 0: the runner's own bound."""

    volume: str = ""
    folder: str = ""
    """The volume that the source lies on, and the folder of it that nothing of the adapter may lie outside of, whatever
    links there are; empty: on no volume, and anywhere on it."""

    share: tuple[str, ...] = ()
    """Namespaces that may use it beside its own, or "*". What the pool admits bounds them at the gateway."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogSnapshot:
    pools: tuple[PoolEntry, ...] = ()
    adapters: tuple[AdapterEntry, ...] = ()


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
    """When something happens by itself: a deadline passes, or a condemned runner has had its chance."""

    @property
    def leaving(self) -> frozenset[str]:
        """Instances that go now."""
        return frozenset(name for each in self.runner_sets for name in each.leaving)

    @property
    def deadlines(self) -> Mapping[str, datetime]:
        """To be written on each runner that drains. One that goes now and has not begun serves nobody: nothing is left
        to drain."""
        leaving = self.leaving
        return {one.instance: one.deadline for one in self.drains if one.begun or one.instance not in leaving}
