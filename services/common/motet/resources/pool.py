"""`ServingPool`: runners that share one base model, one configuration and one size."""

from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from motet.domain import MAX_LORA_RANK, ObjectName
from motet.promises import PromiseQuantile
from motet.resources.chat import PoolChat
from motet.resources.fields import (
    ALL_NAMESPACES,
    API_VERSION,
    MAX_REPLICAS,
    Digest,
    DnsLabel,
    ObjectMeta,
    ObjectReference,
    PathPrefix,
    Priority,
    RelativePath,
    ResourceModel,
    SecretReference,
    ServedName,
    SourceRevision,
    UniqueBy,
)
from motet.resources.limits import Limits
from motet.resources.namespaces import AllowedNamespaces
from motet.resources.source_uris import (
    MODEL_URI_MEANING,
    ONLY_ON_NETWORK,
    AdapterScheme,
    ModelUri,
    begins,
    is_of,
    on_network,
    only_with_revisions,
    only_with_secrets,
    revision_meaning,
    with_revisions,
    with_secrets,
)
from motet.resources.template import PodTemplate
from motet.resources.validation_rules import Rule, TransitionRule, quoted
from motet.runner_info import MAX_TPOT_MILLISECONDS, AttentionBackend, KvCacheDtype
from motet.shares import MAX_WEIGHT
from motet.sources import MODEL_SOURCES

_WITH_REVISIONS = with_revisions(MODEL_SOURCES)
_ON_NETWORK = on_network(MODEL_SOURCES)
_WITH_SECRETS = with_secrets(MODEL_SOURCES)

NAMESPACE = "{namespace}"
"""In a `pathPrefix`, this text stands for the namespace of the adapter."""

MAX_ADAPTERS = 1_000_000

GPU_RESOURCES = ("nvidia.com/gpu", "amd.com/gpu")
"""The resources of nodes that are whole GPUs"""

Dtype = Literal["auto", "float32", "bfloat16", "float16"]

Preset = Literal["paged-chunk", "paged-promises", "orca", "s3", "oracle", "punica", "ft-max", "request-level"]


class ModelCache(ResourceModel):
    """Where fetched models are kept when runners end."""

    claim_name: ObjectReference
    """A claim in the pool's namespace that all its runners can write: ReadWriteMany, or all runners on one node."""


class PoolModel(ResourceModel):
    """The base model."""

    uri: Annotated[ModelUri, Field(description=MODEL_URI_MEANING)]
    revision: Annotated[SourceRevision | None, Field(description=revision_meaning(MODEL_SOURCES))] = None
    served_name: ServedName | None = None
    """The name of the base model in requests. Absent: the group's name."""

    digest: Digest | None = None
    """The digest that the model's files must have."""

    credentials_secret_ref: SecretReference | None = None
    """The Secret with the credentials for the source, if it needs any. It must be in the pool's namespace."""

    cache: ModelCache | None = None
    """With a cache, a cluster fetches the model once for all runners. Absent: each pod fetches it."""

    rules: ClassVar = (
        Rule(
            field="revision",
            cel=f"!has(self.revision) || {begins(_WITH_REVISIONS)}",
            message=only_with_revisions(MODEL_SOURCES),
            reason="FieldValueForbidden",
            holds=lambda model: model.revision is None or is_of(model.uri, _WITH_REVISIONS),
        ),
        Rule(
            field="credentialsSecretRef",
            cel=f"!has(self.credentialsSecretRef) || {begins(_WITH_SECRETS)}",
            message=only_with_secrets(MODEL_SOURCES),
            reason="FieldValueForbidden",
            holds=lambda model: model.credentials_secret_ref is None or is_of(model.uri, _WITH_SECRETS),
        ),
        Rule(
            field="cache",
            cel=f"!has(self.cache) || {begins(_ON_NETWORK)}",
            message=f"cache {ONLY_ON_NETWORK}",
            reason="FieldValueForbidden",
            holds=lambda model: model.cache is None or is_of(model.uri, _ON_NETWORK),
        ),
    )
    transitions: ClassVar = (
        TransitionRule(
            field="uri",
            cel="self.uri == oldSelf.uri",
            message="create a new ServingPool to change the base model",
            holds=lambda old, new: new.uri == old.uri,
        ),
    )


class ParallelSpec(ResourceModel):
    """How many GPUs a runner has, and how they share the work."""

    tensor: Annotated[int, Field(ge=1, le=64)] | None = None
    """How many GPUs share each layer. Absent: 1."""

    stages: Annotated[int, Field(ge=1, le=64)] | None = None
    """How many groups of GPUs share the layers, one after the other. Absent: 1."""

    @property
    def gpus(self) -> int:
        return (self.tensor or 1) * (self.stages or 1)


class VllmSpec(ResourceModel):
    """What only vLLM can choose."""

    kv_cache_dtype: KvCacheDtype | None = None
    """The dtype of keys and values. With `fp8` a page takes half of the memory of bfloat16, and answers may change.
    Absent: `auto`, the dtype of the model."""

    enforce_eager: bool | None = None
    """Whether vLLM compiles nothing and records no graphs: it starts sooner, and is slower. Absent: false."""

    attention_backend: AttentionBackend | None = None
    """What computes attention on a GPU. Absent: vLLM's choice."""


def _only_with_vllm(field: str) -> Rule:
    return Rule(
        field=field,
        cel=f"!has(self.{field}) || (has(self.backend) && self.backend == 'vllm')",
        message=f"{field} may only be set when backend is vllm",
        reason="FieldValueForbidden",
        holds=lambda engine: getattr(engine, field) is None or engine.backend == "vllm",
    )


class EngineSpec(ResourceModel):
    """How a runner works. For an absent field the runner takes its default, which depends on its device."""

    backend: Literal["motet", "vllm"] | None = None
    """The engine of the runners: `motet`, or `vllm`. vLLM is not part of Motet: it must be installed in an environment
    of its own, which MOTET_RUNNER_ENGINE_PYTHON names. Absent: `motet`."""

    preset: Preset | None = None
    """The rules by which the engine composes batches and the scheduler promises pages. Absent: `paged-chunk`. It starts
    a request while the largest need of memory that is forecast fits. By `paged-promises` the promises of all requests
    must fit together: fewer run at once, and fewer are paused. The others are of published systems."""

    contiguous: bool | None = None
    """Whether a request takes pages for its whole promise when it begins, as one run of memory, as FasterTransformer
    and S3 do. Otherwise it takes each page when it needs it. Such a pool has no prefix cache, and its preset cannot be
    `paged-chunk`. Absent: false."""

    promise_quantile: PromiseQuantile | None = None
    """The quantile of the estimated length of an answer, in percent, that a request is promised pages for. Presets that
    promise without an estimate ignore it. Absent: 80."""

    dtype: Dtype | None = None
    """The dtype of weights, keys and values. `auto`: the model's own dtype on a GPU; on a CPU bfloat16 for a model in
    bfloat16 if the CPU multiplies it fast, else float32."""

    device: Literal["auto", "cpu", "cuda"] | None = None
    """The device. `auto`: a GPU if there is one, otherwise the CPU."""

    max_lora_rank: Annotated[int, Field(ge=1, le=MAX_LORA_RANK)] | None = None
    """Adapters of a higher rank are refused."""

    max_resident_adapters: Annotated[int, Field(ge=1, le=4096)] | None = None
    """The largest number of adapters in device memory at once."""

    max_cached_adapters: Annotated[int, Field(ge=1, le=65536)] | None = None
    """The largest number of adapters in the disk cache of a runner at once."""

    adapter_disk_mib: Annotated[int, Field(ge=1, le=1_073_741_824)] | None = Field(default=None, alias="adapterDiskMiB")
    """The most MiB that adapters may take on the disk of a runner, with unfinished fetches and with their slabs, which
    are only written where there is room. A larger adapter is refused. Absent: any number."""

    host_adapters_mib: Annotated[int, Field(ge=0, le=1_073_741_824)] | None = Field(
        default=None, alias="hostAdaptersMiB"
    )
    """Memory of a runner's host, in MiB, that keeps adapters for their next load, which then reads no disk. It also
    holds those that are on the device now. Not with the backend `vllm`. Absent, or 0: none."""

    max_model_length: Annotated[int, Field(ge=16, le=4_194_304)] | None = None
    """The largest number of tokens of prompt and output together. Absent: the limit of the model."""

    max_concurrent_sequences: Annotated[int, Field(ge=1, le=4096)] | None = None
    """The largest number of sequences in one iteration."""

    memory_utilization_percent: Annotated[int, Field(ge=1, le=99)] | None = None
    """The share of device memory that the runner may take."""

    kv_cache_mib: Annotated[int, Field(ge=1, le=1_048_576)] | None = Field(default=None, alias="kvCacheMiB")
    """Memory for pages: keys, values and adapters. Overrides `memoryUtilizationPercent`."""

    prefill_chunk_tokens: Annotated[int, Field(ge=16, le=65536)] | None = None
    """The largest number of prompt tokens in one iteration."""

    prefix_cache: bool | None = None
    """Whether a request uses the KV that earlier requests of its tenant have computed for the same first tokens under
    the same adapter. Absent: true."""

    # Without defaults here: an operator of the version before does not know these fields.
    parallel: ParallelSpec | None = None
    """How a runner uses several GPUs. Only with the backend `vllm`. Absent: it uses one."""

    vllm: VllmSpec | None = None
    """Only with the backend `vllm`."""

    rules: ClassVar = (
        _only_with_vllm("parallel"),
        _only_with_vllm("vllm"),
        Rule(
            field="hostAdaptersMiB",
            cel="!has(self.hostAdaptersMiB) || self.hostAdaptersMiB == 0 "
            "|| !has(self.backend) || self.backend != 'vllm'",
            message="hostAdaptersMiB may not be set when backend is vllm",
            reason="FieldValueForbidden",
            holds=lambda engine: not engine.host_adapters_mib or engine.backend != "vllm",
        ),
        Rule(
            field="maxResidentAdapters",
            cel="!has(self.maxResidentAdapters) || !has(self.maxCachedAdapters) "
            "|| self.maxResidentAdapters <= self.maxCachedAdapters",
            message="maxResidentAdapters must be less than or equal to maxCachedAdapters",
            holds=lambda engine: (
                engine.max_resident_adapters is None
                or engine.max_cached_adapters is None
                or engine.max_resident_adapters <= engine.max_cached_adapters
            ),
        ),
        Rule(
            field="contiguous",
            cel="!has(self.contiguous) || !self.contiguous || (has(self.preset) && self.preset != 'paged-chunk')",
            message="contiguous needs a preset that admits by promises, not paged-chunk, the default",
            holds=lambda engine: not engine.contiguous or engine.preset not in (None, "paged-chunk"),
        ),
    )


class PoolSlo(ResourceModel):
    """How fast answers must be."""

    tpot_milliseconds: Annotated[int, Field(ge=1, le=MAX_TPOT_MILLISECONDS)] | None = None
    """The longest time per token, as the mean of an answer. Each runner learns how long its iterations take, and runs
    as many requests at once as keep this time, at least one; the others wait. The condition `SloKept` says whether one
    request alone keeps it. Absent: memory and `maxConcurrentSequences` alone bound the requests."""


class Autoscaling(ResourceModel):
    """Who decides how many runners there are."""

    mode: Literal["Disabled", "Builtin", "External"] = "Disabled"
    """`Disabled`: the number is `replicas`. `Builtin`: the scheduler decides by demand, between `minReplicas` and
    `maxReplicas`. `External`: another client, such as a HorizontalPodAutoscaler, writes `replicas` through the scale
    subresource."""

    min_replicas: Annotated[int, Field(ge=0, le=MAX_REPLICAS)] | None = None
    """The smallest number of runners. 0: none without requests; the first request then waits until a runner has
    started."""

    max_replicas: Annotated[int, Field(ge=1, le=MAX_REPLICAS)] | None = None
    """The largest number of runners."""

    scale_down_stabilization_seconds: Annotated[int, Field(ge=0, le=3600)] = 300
    """How long demand must be lower before a runner is removed."""

    rules: ClassVar = (
        Rule(
            cel="self.mode == 'Disabled' || (has(self.minReplicas) && has(self.maxReplicas))",
            message="minReplicas and maxReplicas must be set unless mode is Disabled",
            reason="FieldValueRequired",
            holds=lambda scaling: (
                scaling.mode == "Disabled" or (scaling.min_replicas is not None and scaling.max_replicas is not None)
            ),
        ),
        Rule(
            field="minReplicas",
            cel="!has(self.minReplicas) || !has(self.maxReplicas) || self.minReplicas <= self.maxReplicas",
            message="minReplicas must be less than or equal to maxReplicas",
            holds=lambda scaling: (
                scaling.min_replicas is None
                or scaling.max_replicas is None
                or scaling.min_replicas <= scaling.max_replicas
            ),
        ),
    )


class Admission(ResourceModel):
    """Which adapters the pool accepts, in addition to `allowedNamespaces`."""

    require_digest: bool = False
    """Whether the pool accepts only adapters with a digest in `spec.source.digest`."""

    allowed_schemes: (
        Annotated[
            list[AdapterScheme],
            Field(max_length=8, json_schema_extra={"x-kubernetes-list-type": "set"}),
        ]
        | None
    ) = None
    """The schemes of sources that adapters may have, in addition to the pool's volumes. Absent: all schemes."""

    max_adapter_size_bytes: Annotated[int, Field(ge=1, le=2**40)] | None = None
    """The largest size of an adapter. Larger ones are refused."""

    max_adapters: Annotated[int, Field(ge=1, le=MAX_ADAPTERS)] | None = None
    """The largest number of adapters. If there are more, those that were served before stay, then the oldest."""

    # Without a default here: the API server would write it into each pool, and an operator of the version before does
    # not know the field.
    cold_wait_seconds: Annotated[int, Field(ge=1, le=3600)] | None = None
    """How long a request waits while its adapter loads and is on no runner's device. Then the answer is status 503,
    `adapter_loading`, with the expected time in `retry-after`, and the adapter goes on loading. Of a group, the
    deciding pool's value counts. Absent: 20."""


class TenantGrant(Limits):
    """What a namespace gets."""

    weight: Annotated[int, Field(ge=1, le=MAX_WEIGHT)] | None = None
    """Its share: where several namespaces want more than there is, each gets its part by its weight, and what one
    leaves goes to the others. Absent: 1."""

    max_priority: Priority = "Standard"
    """The highest class of its requests, to adapters and to the base model."""

    pinned_replicas: Annotated[int, Field(ge=0, le=MAX_REPLICAS)] = 1
    """On how many runners each of its adapters may stay resident without requests (`placement.minReplicas`)."""

    max_adapters: Annotated[int, Field(ge=1, le=MAX_ADAPTERS)] | None = None
    """How many adapters it may have. If there are more, those that were served before stay, then the oldest. Absent:
    any number."""


class TenantOverride(Limits):
    """What one namespace gets. An absent field is as in `default`."""

    namespace: DnsLabel
    """The namespace."""

    weight: Annotated[int, Field(ge=1, le=MAX_WEIGHT)] | None = None
    """Its share: twice the weight is twice the part."""

    max_priority: Priority | None = None
    """The highest class of its requests."""

    pinned_replicas: Annotated[int, Field(ge=0, le=MAX_REPLICAS)] | None = None
    """On how many runners each of its adapters may stay resident without requests."""

    max_adapters: Annotated[int, Field(ge=1, le=MAX_ADAPTERS)] | None = None
    """How many adapters it may have."""


class Tenants(ResourceModel):
    """What the platform team grants to namespaces. Tenants can only ask for less."""

    default: TenantGrant = TenantGrant()
    """For each namespace, where its override says nothing. A limit that is absent limits nothing."""

    overrides: Annotated[list[TenantOverride], Field(max_length=1024), UniqueBy("namespace")] = Field(
        default_factory=list
    )
    """For single namespaces. What an entry leaves out is as in `default`."""

    @cached_property
    def grants(self) -> Mapping[str, TenantGrant]:
        """By namespace; `*` is every other one."""
        own = {one.namespace: one.model_dump(exclude={"namespace"}, exclude_none=True) for one in self.overrides}
        return {ALL_NAMESPACES: self.default} | {
            namespace: self.default.model_copy(update=said) for namespace, said in own.items()
        }

    def grant_to(self, namespace: str) -> TenantGrant:
        return self.grants.get(namespace, self.default)


class AdapterVolume(ResourceModel):
    """A claim from which adapters may be read. A running pod cannot get another volume, so the pool lists all claims
    in advance."""

    claim_name: ObjectReference
    """A claim in the pool's namespace."""

    allowed_namespaces: AllowedNamespaces = AllowedNamespaces()
    """The namespaces whose adapters may use this claim."""

    sub_path: RelativePath | None = None
    """Only this folder of the volume is mounted."""

    path_prefix: PathPrefix | None = None
    """The folder of the mounted volume in which the adapters of a namespace must be, also after symbolic links are
    followed. `{namespace}` stands for the namespace. Absent: `{namespace}`, or the whole volume if only one namespace
    is admitted. `""`: the whole volume, for every admitted namespace."""

    def folder_of(self, namespace: str) -> str:
        """The folder for adapters of `namespace`. Empty: they may be anywhere on the volume."""
        prefix = self.path_prefix
        if prefix is None:
            prefix = "" if self.allowed_namespaces.admits_one_only else NAMESPACE
        return prefix.replace(NAMESPACE, namespace)


class UpdateStrategy(ResourceModel):
    """How runners are replaced: those of an old revision, and those on nodes that are to become empty."""

    max_surge: Annotated[int, Field(ge=0, le=MAX_REPLICAS)] = 1
    """How many runners may exist beyond the wanted number while others are replaced."""

    max_unavailable: Annotated[int, Field(ge=0, le=MAX_REPLICAS)] = 0
    """How many runners may be missing meanwhile, and how many a node's drain may remove at once."""

    rules: ClassVar = (
        Rule(
            field="maxUnavailable",
            cel="self.maxSurge > 0 || self.maxUnavailable > 0",
            message="maxUnavailable must be greater than 0 when maxSurge is 0",
            holds=lambda strategy: strategy.max_surge > 0 or strategy.max_unavailable > 0,
        ),
    )


class ServingPoolSpec(ResourceModel):
    """What the platform team declares."""

    model: PoolModel
    group: DnsLabel | None = None
    """Pools of one group share base model, adapters and queue. Absent: the pool's own name. Immutable."""

    role: Literal["Mixed"] = "Mixed"
    """Which part of a request the runners compute. `Mixed`: prompt and output."""

    engine: EngineSpec = EngineSpec()
    slo: PoolSlo | None = None
    """How fast answers must be. Absent: as fast as they come."""

    chat: PoolChat | None = None
    """For the base model, and for adapters that say nothing else. In a group with several pools, what its deciding pool
    says counts."""

    replicas: Annotated[int, Field(ge=0, le=MAX_REPLICAS)] = 1
    """How many runners the pool has, unless `autoscaling` decides. On one machine `motet up --runners` overrides it."""

    autoscaling: Autoscaling = Autoscaling()

    allowed_namespaces: AllowedNamespaces = AllowedNamespaces()
    """The namespaces whose adapters may refer to this pool. Only these namespaces may use its base model and the
    adapters that are shared with them."""

    tenants: Tenants | None = None
    """What namespaces may take. In a group with several pools, what its deciding pool says counts
    (`status.decidesForGroup`)."""

    admission: Admission = Admission()
    adapter_volumes: Annotated[
        list[AdapterVolume],
        Field(max_length=16),
        UniqueBy("claimName"),
    ] = Field(default_factory=list)
    """The only claims that the sources of adapters may use. A change of a claim or `subPath` replaces the runners."""

    drain_timeout_seconds: Annotated[int, Field(ge=0, le=86_400)] = 30
    """How long a runner that is to end may finish its requests. Those that still run then are moved. In a cluster a
    change replaces the runners, because the grace period of their pods depends on it."""

    update_strategy: UpdateStrategy = UpdateStrategy()
    template: PodTemplate = PodTemplate()

    rules: ClassVar = (
        Rule(
            field="template.resources",
            cel="!has(self.engine) || !has(self.engine.backend) || self.engine.backend != 'vllm' "
            "|| !has(self.template) || !has(self.template.resources) || !has(self.template.resources.limits) "
            f"|| [{', '.join(map(quoted, GPU_RESOURCES))}].all(name, !(name in self.template.resources.limits) "
            "|| string(self.template.resources.limits[name]) == string((has(self.engine.parallel) "
            "&& has(self.engine.parallel.tensor) ? self.engine.parallel.tensor : 1) * (has(self.engine.parallel) "
            "&& has(self.engine.parallel.stages) ? self.engine.parallel.stages : 1)))",
            message="the GPUs in template.resources.limits must be engine.parallel.tensor × engine.parallel.stages; "
            "without engine.parallel, one",
            holds=lambda spec: spec.has_its_gpus,
        ),
    )
    transitions: ClassVar = (
        TransitionRule(
            field="group",
            cel="has(self.group) == has(oldSelf.group) && (!has(self.group) || self.group == oldSelf.group)",
            message="group is immutable",
            holds=lambda old, new: new.group == old.group,
        ),
    )

    @property
    def has_its_gpus(self) -> bool:
        """True also if the limits name no GPUs: what a runner finds then decides."""
        limits, parallel = self.template.resources.limits, self.engine.parallel or ParallelSpec()
        named = [limits[name] for name in GPU_RESOURCES if name in limits]
        return self.engine.backend != "vllm" or all(one == str(parallel.gpus) for one in named)

    @property
    def tpot_milliseconds(self) -> int | None:
        return self.slo.tpot_milliseconds if self.slo is not None else None

    @cached_property  # each adapter of the pool asks for it
    def granted(self) -> Tenants:
        """The API server stores no default of `tenants`: an operator of the version before does not know the field, and
        would refuse the pool."""
        return self.tenants or Tenants()


class ServingPool(ResourceModel):
    api_version: Literal["motet.dev/v1alpha1"] = API_VERSION
    kind: Literal["ServingPool"] = "ServingPool"
    metadata: ObjectMeta
    spec: ServingPoolSpec

    @cached_property
    def object_name(self) -> ObjectName:
        return ObjectName(self.metadata.namespace, self.metadata.name)

    @cached_property
    def group(self) -> ObjectName:
        return ObjectName(self.metadata.namespace, self.spec.group or self.metadata.name)

    @property
    def served_name(self) -> str:
        return self.spec.model.served_name or self.group.name
