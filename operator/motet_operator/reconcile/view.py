"""Everything that reconcile may look at: what should exist, what does, and what the scheduler knows about it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from motet.domain import ObjectName
from motet.resources import AdapterVolume, EngineSpec, LoRAAdapter, PodTemplate, ServingPool
from motet.resources.status import Artifact, Condition
from motet_operator.reconcile.scaling import ScalingAdvice


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolObject:
    resource: ServingPool
    model_uri: str
    """`spec.model.uri` as its runners find it."""

    generation: int = 1
    age: int = 0
    """Orders objects by creation, the oldest having the smallest: of two that contradict each other the older holds."""

    conditions: tuple[Condition, ...] = ()
    """Of the status written last."""

    wanted: int | None = None
    """Runners that were wanted last; None of a new pool."""

    current_revision: str = ""
    """The revision that was in full service last."""

    namespace_prepared: bool = True
    """The operator may keep runners in the pool's namespace."""

    pod_digest: str = ""
    """Of the whole pod that its runners would be, but for their revision; empty where runners are processes."""

    scale_writers: tuple[str, ...] = ()
    """Who has written `spec.replicas` through the scale subresource."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterObject:
    resource: LoRAAdapter
    source: str
    """`spec.source` as one URI that runners understand."""

    volume: str = ""
    """Likewise the volume that it lies on; empty: on none."""

    generation: int = 1
    content_stamp: str = ""
    """Changes when the bytes behind a local source may have changed."""

    age: int = 0
    """Orders objects by creation, the oldest having the smallest: of two with one name the older keeps it."""

    conditions: tuple[Condition, ...] = ()
    last_load: datetime | None = None
    loaded: int = 0
    """Runners that held it. It and the two before are of the status written last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerTemplate:
    """What makes two runners interchangeable."""

    group: ObjectName
    model_uri: str
    model_digest: str = ""
    engine: EngineSpec = field(default_factory=EngineSpec)
    model_revision: str = ""
    model_credentials: str = ""
    """namespace/name of the Secret that opens the model's source."""

    volumes: tuple[AdapterVolume, ...] = ()
    pod: PodTemplate = field(default_factory=PodTemplate)
    pod_digest: str = ""
    """Of the whole pod, where runners are pods: it holds all of the above, and what the platform adds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerSet:
    """Runners of one pool at one revision of its template."""

    pool: ObjectName
    revision: str
    template: RunnerTemplate
    replicas: int
    drain_seconds: float = 0
    leaving: tuple[str, ...] = ()
    """Instances that go, when there are more than `replicas`."""

    trouble: str = ""
    """Why no more of them can be made, in the words of whoever makes them; of one that exists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerInstance:
    """One runner that exists."""

    name: str
    pool: ObjectName
    revision: str
    ordinal: int
    """Grows with each start of a new instance."""

    ready: bool = False
    attached: bool = False
    """The scheduler hears it, and may have work there although it is not ready (yet, or because it drains)."""

    node: str = ""
    """Where it runs; empty: nowhere yet, or where there are no nodes."""

    node_is_leaving: bool = False
    """Its node is about to be emptied: another is to serve elsewhere before it goes."""

    draining_until: datetime | None = None
    drained: bool = False
    """The scheduler has nothing left on it."""

    unhealthy: str = ""
    """Why the scheduler takes it for dead although its process lives; empty: it does not."""

    replace_at: datetime | None = None
    """When a condemned one has had its chance to come back by itself."""

    started_at: datetime | None = None
    """When its process was started, where that is known."""

    failures: int = 0
    """Deaths in a row: it has not been ready since the first of them."""

    reason: str = ""
    """What keeps it from serving, as far as that is known: why it last died, or what it waits for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterReplica:
    runner: str
    tier: str
    """disk, host or device."""

    digest: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterReport:
    """What the scheduler reports about one adapter."""

    generation: int = 0
    serving_digest: str = ""
    artifact: Artifact | None = None
    failure_code: str = ""
    """Of the newest revision; the one before it may be serving."""

    failure_reason: str = ""
    failure_message: str = ""
    failure_passes: bool = False
    """It is tried again by itself."""

    replicas: tuple[AdapterReplica, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    now: datetime
    pools: tuple[PoolObject, ...] = ()
    adapters: tuple[AdapterObject, ...] = ()
    namespaces: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Labels by namespace; one that nobody declared has none."""

    runner_sets: tuple[RunnerSet, ...] = ()
    instances: tuple[RunnerInstance, ...] = ()
    adapter_reports: Mapping[ObjectName, AdapterReport] = field(default_factory=dict)
    scaling_advice: Mapping[ObjectName, ScalingAdvice] = field(default_factory=dict)
    slots: Mapping[str, int] = field(default_factory=dict)
    """Places for adapters in device memory, by instance."""

    rolling_pools: int | None = None
    """Pools that may be on their way to another revision at once; None: all."""

    refused_schemes: Mapping[str, str] = field(default_factory=dict)
    """Kinds of source that adapters may not have here, and what to use instead."""

    runners_override: int | None = None
    """`--runners`: replaces every pool's replicas."""
