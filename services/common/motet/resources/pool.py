"""`ServingPool`: runners that share one base model, one configuration and one size."""

from functools import cached_property
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from motet.domain import ObjectName
from motet.resources.fields import (
    API_VERSION,
    MAX_REPLICAS,
    Digest,
    DnsLabel,
    ObjectMeta,
    ObjectReference,
    PathPrefix,
    RelativePath,
    ResourceModel,
    SecretReference,
    ServedName,
    SourceRevision,
    UniqueBy,
)
from motet.resources.namespaces import AllowedNamespaces
from motet.resources.source_uris import ModelUri
from motet.resources.template import PodTemplate
from motet.resources.validation_rules import Rule, TransitionRule

NAMESPACE = "{namespace}"
"""In a `pathPrefix`, this text stands for the namespace of the adapter."""

Preset = Literal["paged-chunk", "orca", "s3", "oracle", "punica", "ft-max"]


class ModelCache(ResourceModel):
    """Where fetched models stay when runners go."""

    claim_name: ObjectReference
    """A claim of the pool's namespace that all of its runners may write: ReadWriteMany, or one node's."""


class PoolModel(ResourceModel):
    """The base model."""

    uri: ModelUri
    """Where the base model lies: `hf://organisation/name`, `pvc://claim/folder` (a claim of the pool's namespace),
    `https://…/` of a folder, or `file://`: inside the runner's image, and where `motet up` runs relative to the
    manifest's folder. Immutable."""

    revision: SourceRevision | None = None
    """Of `hf://`: a branch, tag or commit; absent: the main branch."""

    served_name: ServedName | None = None
    """What clients call the base model; absent: the group's name."""

    digest: Digest | None = None
    """What the model's bytes must add up to."""

    credentials_secret_ref: SecretReference | None = None
    """What the source asks for, if it does; a Secret of the pool's namespace."""

    cache: ModelCache | None = None
    """In a cluster the model is then fetched once for all runners, and no more when one starts. Absent: once a pod."""

    rules: ClassVar = (
        Rule(
            field="revision",
            cel="!has(self.revision) || self.uri.startsWith('hf://')",
            message="revision may only be set for an hf:// source",
            reason="FieldValueForbidden",
            holds=lambda model: model.revision is None or model.uri.startswith("hf://"),
        ),
        Rule(
            field="credentialsSecretRef",
            cel="!has(self.credentialsSecretRef) || self.uri.startsWith('hf://') || self.uri.startsWith('https://')",
            message="credentialsSecretRef may only be set for a source that is reached over the network",
            reason="FieldValueForbidden",
            holds=lambda model: model.credentials_secret_ref is None or model.uri.startswith(("hf://", "https://")),
        ),
        Rule(
            field="cache",
            cel="!has(self.cache) || self.uri.startsWith('hf://') || self.uri.startsWith('https://')",
            message="cache may only be set for a source that is reached over the network",
            reason="FieldValueForbidden",
            holds=lambda model: model.cache is None or model.uri.startswith(("hf://", "https://")),
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


class EngineSpec(ResourceModel):
    """How a runner works. What is absent is the runner's own default, which depends on its device."""

    preset: Preset | None = None
    """Which published system's policies to run; `paged-chunk` unless said otherwise."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] | None = None
    """Of weights and KV. `auto`: float32 on a CPU, the model's own on a GPU."""

    device: Literal["auto", "cpu", "cuda"] | None = None
    """`auto`: a GPU when there is one."""

    max_lora_rank: Annotated[int, Field(ge=1, le=512)] | None = None
    """Adapters of a higher rank are refused."""

    max_resident_adapters: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Adapters in device memory at once."""

    max_cached_adapters: Annotated[int, Field(ge=1, le=65536)] | None = None
    """Adapters in the disk cache of a runner at once."""

    max_model_length: Annotated[int, Field(ge=16, le=4_194_304)] | None = None
    """Tokens of prompt and output together; absent: what the model was made for."""

    max_concurrent_sequences: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Sequences in one iteration at most."""

    memory_utilization_percent: Annotated[int, Field(ge=1, le=99)] | None = None
    """The share of device memory that the runner may take."""

    kv_cache_mib: Annotated[int, Field(ge=1, le=1_048_576)] | None = Field(default=None, alias="kvCacheMiB")
    """Memory for KV pages; overrides the percentage."""

    prefill_chunk_tokens: Annotated[int, Field(ge=16, le=65536)] | None = None
    """Prompt tokens taken into one iteration at most."""

    rules: ClassVar = (
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
    )


class Autoscaling(ResourceModel):
    """Who decides how many runners there are."""

    mode: Literal["Disabled", "Builtin", "External"] = "Disabled"
    """`Disabled`: `replicas` says it. `Builtin`: the scheduler's demand does, between the bounds. `External`: somebody
    who writes `replicas` through the scale subresource, such as a HorizontalPodAutoscaler."""

    min_replicas: Annotated[int, Field(ge=0, le=MAX_REPLICAS)] | None = None
    """Never fewer. 0: none while nobody asks; the first request then waits for a runner to start."""

    max_replicas: Annotated[int, Field(ge=1, le=MAX_REPLICAS)] | None = None
    """Never more."""

    scale_down_stabilization_seconds: Annotated[int, Field(ge=0, le=3600)] = 300
    """How long demand must have been lower before runners go."""

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
    """Which adapters the pool takes, beside who may refer to it."""

    require_digest: bool = False
    """Only adapters that say what their bytes add up to."""

    allowed_schemes: (
        Annotated[
            list[Literal["file", "hf", "https"]],
            Field(max_length=8, json_schema_extra={"x-kubernetes-list-type": "set"}),
        ]
        | None
    ) = None
    """Where adapters may come from, beside the pool's volumes; absent: from everywhere."""

    max_adapter_size_bytes: Annotated[int, Field(ge=1, le=2**40)] | None = None
    """Larger ones are refused."""

    max_adapters: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """The oldest so many are served."""


class AdapterVolume(ResourceModel):
    """A claim that adapters may be read from. Pods cannot gain volumes while they run, so the pool lists them."""

    claim_name: ObjectReference
    """A claim of the pool's namespace."""

    allowed_namespaces: AllowedNamespaces = AllowedNamespaces()
    """Whose adapters may name it."""

    sub_path: RelativePath | None = None
    """Only this folder of the volume is mounted."""

    path_prefix: PathPrefix | None = None
    """The folder (of what is mounted) that a namespace's adapters must lie in, links followed; `{namespace}` stands for
    the namespace. Absent: `{namespace}`, and the whole volume where only one namespace is admitted. `""`: the whole
    volume, for every namespace that is admitted."""

    def folder_of(self, namespace: str) -> str:
        """The folder for adapters of `namespace`. Empty: they may be anywhere on the volume."""
        prefix = self.path_prefix
        if prefix is None:
            prefix = "" if self.allowed_namespaces.admits_one_only else NAMESPACE
        return prefix.replace(NAMESPACE, namespace)


class UpdateStrategy(ResourceModel):
    """How runners of an old revision, and those on nodes to be emptied, are replaced."""

    max_surge: Annotated[int, Field(ge=0, le=MAX_REPLICAS)] = 1
    """Runners beyond the wanted number while others are replaced."""

    max_unavailable: Annotated[int, Field(ge=0, le=MAX_REPLICAS)] = 0
    """Runners that may be missing meanwhile, and that the drain of a node may take at once."""

    rules: ClassVar = (
        Rule(
            field="maxUnavailable",
            cel="self.maxSurge > 0 || self.maxUnavailable > 0",
            message="maxUnavailable must be greater than 0 when maxSurge is 0",
            holds=lambda strategy: strategy.max_surge > 0 or strategy.max_unavailable > 0,
        ),
    )


class ServingPoolSpec(ResourceModel):
    """What the platform wants."""

    model: PoolModel
    group: DnsLabel | None = None
    """Pools of one group share base model, adapters and ledger; absent: the pool's own name. Immutable."""

    role: Literal["Mixed"] = "Mixed"
    """Which part of a request's life the runners serve."""

    engine: EngineSpec = EngineSpec()
    replicas: Annotated[int, Field(ge=0, le=MAX_REPLICAS)] = 1
    """Runners, where nothing else decides; `--runners` overrides it locally."""

    autoscaling: Autoscaling = Autoscaling()

    allowed_namespaces: AllowedNamespaces = AllowedNamespaces()
    """Whose adapters may refer to this pool, and who may use its base model and what is shared with them."""

    admission: Admission = Admission()
    adapter_volumes: Annotated[
        list[AdapterVolume],
        Field(max_length=16),
        UniqueBy("claimName"),
    ] = Field(default_factory=list)
    """The only claims that an adapter's source may name. Another claim or `subPath` replaces the runners."""

    drain_timeout_seconds: Annotated[int, Field(ge=0, le=86_400)] = 30
    """How long a runner that must go may finish what it has; what is left then is moved. In a cluster a change replaces
    the runners, since their pods' grace period depends on it."""

    update_strategy: UpdateStrategy = UpdateStrategy()
    template: PodTemplate = PodTemplate()

    transitions: ClassVar = (
        TransitionRule(
            field="group",
            cel="has(self.group) == has(oldSelf.group) && (!has(self.group) || self.group == oldSelf.group)",
            message="group is immutable",
            holds=lambda old, new: new.group == old.group,
        ),
    )


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
