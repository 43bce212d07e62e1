"""What reconcile decides, in words that both executors understand: the one with processes and the one with pods."""

from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from motet.model import ObjectName
from motet_operator.reconcile.conditions import Condition
from motet_operator.reconcile.view import Certificate, Residence, RunnerSet


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """Give this runner nothing new, and move what is left on it at the deadline."""

    instance: str
    pool: ObjectName
    revision: str
    deadline: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Replacement:
    """This runner hangs or is silent and will not come back by itself: end its process, and start it again."""

    instance: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterCounts:
    registered: int = 0
    loaded: int = 0
    failed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotCounts:
    total: int = 0
    used: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStatus:
    name: ObjectName
    model: str
    replicas: int
    """Wanted."""

    existing: int
    ready: int
    updated: int
    draining: int
    revision: str
    """The newest."""

    current_revision: str
    """The one that was in full service last."""

    conditions: tuple[Condition, ...]
    observed_generation: int
    adapters: AdapterCounts = AdapterCounts()
    slots: SlotCounts = SlotCounts()


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterStatus:
    name: ObjectName
    model: str
    """What clients of every tenant may call it: tenant/modelName."""

    conditions: tuple[Condition, ...]
    certificate: Certificate | None
    resident: tuple[Residence, ...]
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
class CatalogPool:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogAdapter:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalog:
    pools: tuple[CatalogPool, ...] = ()
    adapters: tuple[CatalogAdapter, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    runner_sets: tuple[RunnerSet, ...] = ()
    drains: tuple[Drain, ...] = ()
    replacements: tuple[Replacement, ...] = ()
    pools: tuple[PoolStatus, ...] = ()
    adapters: tuple[AdapterStatus, ...] = ()
    events: tuple[Event, ...] = ()
    catalog: Catalog = Catalog()
