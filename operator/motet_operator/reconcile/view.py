"""The input of reconcile: what is declared, what exists, and what the scheduler reports about it."""

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import datetime

from motet.domain import ObjectName
from motet.resources import AdapterVolume, EngineSpec, LoRAAdapter, PodTemplate, ServingPool
from motet.resources.status import AdapterRevision, Artifact, Condition
from motet.runner_info import BatchCap
from motet_operator.reconcile.scaling import ScalingAdvice


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolObject:
    resource: ServingPool
    model_uri: str
    """`spec.model.uri` as the runners see it."""

    generation: int = 1
    age: int = 0
    """When it was created, in a unit that all pools have: the smaller, the older (`seniority`)."""

    decided: bool = False
    """It decided for its group. This field and the next three come from the last written status."""

    conditions: tuple[Condition, ...] = ()

    wanted: int | None = None
    """The wanted number of runners in the last round; None for a new pool."""

    current_revision: str = ""
    """The last revision that was fully rolled out."""

    namespace_prepared: bool = True
    """The operator may run pods in the pool's namespace (`pools.namespaces` of the chart)."""

    backend_installed: bool = True
    """There is an image for the pool's engine."""

    pod_digest: str = ""
    """Digest of the pod template without its revision; empty if runners are processes."""

    scale_writers: tuple[str, ...] = ()
    """Field managers that wrote `spec.replicas` through the scale subresource."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterObject:
    resource: LoRAAdapter
    source: str
    """`spec.source` as a URI that runners can open."""

    volume: str = ""
    """The volume of the source, as a URI; empty if it is on no volume."""

    generation: int = 1
    content_stamp: str = ""
    """Changes when the files of a local source may have changed."""

    age: int = 0
    """When it was created, in a unit that all adapters have: the smaller, the older (`seniority`)."""

    decided: bool = False
    """It was accepted under the model name that it has now. This field and the next three come from the last written
    status."""

    conditions: tuple[Condition, ...] = ()
    last_load: datetime | None = None
    loaded: int = 0
    """Runners that held it."""

    revisions: tuple[AdapterRevision, ...] = ()
    """Also from there, as are the ones before."""

    @property
    def model(self) -> str:
        """The name that clients use: namespace/modelName."""
        return f"{self.resource.metadata.namespace}/{self.resource.model_name}"


def base_name(uri: str, digest: str, revision: str) -> str:
    """A name for a base model: equal for two runners that load the same files."""
    return hashlib.sha256(f"{uri}\n{digest}\n{revision}".encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerTemplate:
    """Everything that must be equal for two runners to be interchangeable."""

    group: ObjectName
    model_uri: str
    model_digest: str = ""
    engine: EngineSpec = field(default_factory=EngineSpec)
    model_revision: str = ""
    model_credentials: str = ""
    """namespace/name of the Secret with the credentials for the model's source."""

    tpot_milliseconds: int | None = None
    volumes: tuple[AdapterVolume, ...] = ()
    pod: PodTemplate = field(default_factory=PodTemplate)
    pod_digest: str = ""
    """Digest of the whole pod, if runners are pods: all of the above and what the platform adds."""

    @property
    def base(self) -> str:
        return base_name(self.model_uri, self.model_digest, self.model_revision)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExistingSet:
    """The runners that one pool has at one revision of its template."""

    pool: ObjectName
    revision: str
    replicas: int
    base: str = ""
    """Its base model (`RunnerTemplate.base`)."""

    template: RunnerTemplate | None = None
    """What it is made of; known only where runners are processes."""

    drain_seconds: float = 0
    trouble: str = ""
    """Why no more runners of it can be created, in the words of the Deployment controller."""


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
    """It is connected to the scheduler, and may have work although it is not ready (it starts or drains)."""

    node: str = ""
    """Its node; empty if it has none yet, or if there are no nodes."""

    node_is_leaving: bool = False
    """Its node is about to be emptied: a replacement on another node must serve before it leaves."""

    draining_until: datetime | None = None
    drained: bool = False
    """The scheduler has nothing left on it."""

    unhealthy: str = ""
    """Why the scheduler considers it dead although its process runs; empty if it does not."""

    replace_at: datetime | None = None
    """When the operator replaces it if it is still unhealthy."""

    started_at: datetime | None = None
    """When its process was started, where that is known."""

    starting_until: datetime | None = None
    """If it is not ready then, nobody waits for it any longer; None: no such time is known."""

    failures: int = 0
    """Failures in a row: it has not been ready since the first of them."""

    reason: str = ""
    """Why it does not serve, if known: why it last failed, or what it waits for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedRunner:
    """One that Kubernetes ended for good, such as an evicted pod. It counts as gone."""

    name: str
    pool: ObjectName
    reason: str
    at: int
    """When, in the unit of `RunnerInstance.ordinal`."""


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
    """Of the newest revision; the previous one may be serving."""

    failure_reason: str = ""
    failure_message: str = ""
    failure_passes: bool = False
    """The runner tries again by itself."""

    replicas: tuple[AdapterReplica, ...] = ()
    source: str = ""
    """Where the files of `serving_digest` came from. Empty: a scheduler of an earlier version does not say."""

    source_revision: str = ""
    checking: bool = False
    """A newer revision is being fetched or checked."""


NONE_REFUSED: Mapping[str, str] = {}
"""One object: results are kept from round to round as long as what they depend on is the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    now: datetime
    pools: tuple[PoolObject, ...] = ()
    adapters: tuple[AdapterObject, ...] = ()
    namespaces: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Labels by namespace; an undeclared namespace has none."""

    namespace_uids: Mapping[str, str] = field(default_factory=dict)
    """Of all namespaces that exist, by name. Empty outside of a cluster."""

    runner_sets: tuple[ExistingSet, ...] = ()
    instances: tuple[RunnerInstance, ...] = ()
    failed: tuple[FailedRunner, ...] = ()
    adapter_reports: Mapping[ObjectName, AdapterReport] = field(default_factory=dict)
    scaling_advice: Mapping[ObjectName, ScalingAdvice] = field(default_factory=dict)
    requests: Mapping[str, int] = field(default_factory=dict)
    """How many each runner has, by instance: of several that may leave, the emptiest does."""
    leaving: Collection[str] = ()
    """Whose drain the last round has asked for. It may not be stored yet, and numbers of requests change: nobody else
    is chosen instead."""
    slots: Mapping[str, int] = field(default_factory=dict)
    """Adapter slots in device memory, by instance."""
    batch_caps: Mapping[str, BatchCap] = field(default_factory=dict)
    """By instance, of pools with an SLO for the time of a token."""

    rolling_pools: int | None = None
    """How many pools may roll out at the same time; None: all."""

    replaced_at_once: int = 1
    """How many unhealthy runners of a pool may be replaced at the same time."""

    refused_schemes: Mapping[str, str] = field(default_factory=lambda: NONE_REFUSED)
    """Source schemes that adapters may not use here, each with what to use instead."""

    runners_override: int | None = None
    """`--runners`: replaces every pool's replicas."""
