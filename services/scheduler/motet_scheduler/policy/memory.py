"""What a successor must know before anybody has told it: enough to place a request at once."""

from dataclasses import dataclass

from motet.domain import InstanceName
from motet_scheduler.policy.adapters import Revision
from motet_scheduler.policy.values import AdapterSpec, BaseModel, GroupName, PoolSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedAdapter:
    spec: AdapterSpec
    serving: Revision | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedGroup:
    group: GroupName
    base: BaseModel
    max_model_length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedCatalog:
    pools: tuple[PoolSpec, ...] = ()
    adapters: tuple[SavedAdapter, ...] = ()
    groups: tuple[SavedGroup, ...] = ()
    runners: tuple[InstanceName, ...] = ()
    """Those that were attached: a successor waits a moment for them before it places anything."""
