"""`ServingPool`: runners that share one base model, one configuration and one size."""

from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field

from motet.model import ObjectName
from motet.resources.rules import Rule, Transition
from motet.resources.shapes import (
    API_VERSION,
    MAX_REPLICAS,
    Digest,
    DnsLabel,
    EntriesDiffer,
    EnvName,
    LabelKey,
    Labels,
    LabelValue,
    ModelUri,
    ObjectMeta,
    ObjectReference,
    Quantities,
    RelativePath,
    SecretReference,
    ServedName,
    Shape,
    SourceRevision,
)

Preset = Literal["paged-chunk", "orca", "s3", "oracle", "punica", "ft-max"]


class PoolModel(Shape):
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
    )
    transitions: ClassVar = (
        Transition(
            field="uri",
            cel="self.uri == oldSelf.uri",
            message="create a new ServingPool to change the base model",
            holds=lambda old, new: new.uri == old.uri,
        ),
    )


class Engine(Shape):
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
    """Adapters in host memory at once."""

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


class LabelRequirement(Shape):
    """One thing asked of the labels."""

    key: LabelKey
    """Which label."""

    operator: Literal["In", "NotIn", "Exists", "DoesNotExist"]
    """How the label is judged."""

    values: Annotated[list[LabelValue], Field(max_length=64)] = Field(default_factory=list)
    """For `In` and `NotIn`: the values compared with."""

    rules: ClassVar = (
        Rule(
            field="values",
            cel="self.operator in ['Exists', 'DoesNotExist'] || (has(self.values) && self.values.size() > 0)",
            message="values must be set when operator is In or NotIn",
            reason="FieldValueRequired",
            holds=lambda asked: asked.operator in ("Exists", "DoesNotExist") or bool(asked.values),
        ),
        Rule(
            field="values",
            cel="self.operator in ['In', 'NotIn'] || !has(self.values) || self.values.size() == 0",
            message="values must not be set when operator is Exists or DoesNotExist",
            reason="FieldValueForbidden",
            holds=lambda asked: asked.operator in ("In", "NotIn") or not asked.values,
        ),
    )

    def matches(self, labels: dict[str, str]) -> bool:
        match self.operator:
            case "In":
                return labels.get(self.key) in self.values
            case "NotIn":
                return labels.get(self.key) not in self.values
            case "Exists":
                return self.key in labels
            case "DoesNotExist":
                return self.key not in labels


class LabelSelector(Shape):
    """Which namespaces, by their labels."""

    match_labels: Labels = Field(default_factory=dict)
    """Labels that must all be there with these values."""

    match_expressions: Annotated[list[LabelRequirement], Field(max_length=16)] = Field(default_factory=list)
    """Requirements that must all hold."""

    model_config = ConfigDict(json_schema_extra={"x-kubernetes-map-type": "atomic"})

    def matches(self, labels: dict[str, str]) -> bool:
        return self.match_labels.items() <= labels.items() and all(
            requirement.matches(labels) for requirement in self.match_expressions
        )


class AllowedNamespaces(Shape):
    """Whose adapters may refer to the pool."""

    from_: Literal["Same", "All", "Selector"] = Field(default="Same", alias="from")
    """The pool's own namespace, every one, or those the selector picks by their labels."""

    selector: LabelSelector | None = None

    rules: ClassVar = (
        Rule(
            field="selector",
            cel="self.from != 'Selector' || has(self.selector)",
            message="selector must be set when from is Selector",
            reason="FieldValueRequired",
            holds=lambda allowed: allowed.from_ != "Selector" or allowed.selector is not None,
        ),
        Rule(
            field="selector",
            cel="self.from == 'Selector' || !has(self.selector)",
            message="selector must not be set unless from is Selector",
            reason="FieldValueForbidden",
            holds=lambda allowed: allowed.from_ == "Selector" or allowed.selector is None,
        ),
    )

    def admits(self, namespace: str, *, own: str, labels: dict[str, str]) -> bool:
        match self.from_:
            case "All":
                return True
            case "Same":
                return namespace == own
            case "Selector":
                assert self.selector is not None
                # Kubernetes puts this label on every namespace; without it a selector by name would differ locally.
                return self.selector.matches({"kubernetes.io/metadata.name": namespace} | labels)


class Autoscaling(Shape):
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


class Admission(Shape):
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


class AdapterVolume(Shape):
    """A claim that adapters may be read from. Pods cannot gain volumes while they run, so the pool lists them."""

    claim_name: ObjectReference
    """A claim of the pool's namespace."""

    allowed_namespaces: AllowedNamespaces = AllowedNamespaces()
    """Whose adapters may name it."""

    sub_path: RelativePath | None = None
    """Only this folder of the volume is mounted."""


class UpdateStrategy(Shape):
    """How runners of an old revision are replaced."""

    max_surge: Annotated[int, Field(ge=0, le=MAX_REPLICAS)] = 1
    """Runners beyond the wanted number while old ones are replaced."""

    max_unavailable: Annotated[int, Field(ge=0, le=MAX_REPLICAS)] = 0
    """Runners that may be missing meanwhile."""

    rules: ClassVar = (
        Rule(
            field="maxUnavailable",
            cel="self.maxSurge > 0 || self.maxUnavailable > 0",
            message="maxUnavailable must be greater than 0 when maxSurge is 0",
            holds=lambda strategy: strategy.max_surge > 0 or strategy.max_unavailable > 0,
        ),
    )


class Resources(Shape):
    """What a runner's container asks for and may use."""

    limits: Quantities = Field(default_factory=dict)
    """At most so much, such as `nvidia.com/gpu: 1`."""

    requests: Quantities = Field(default_factory=dict)
    """At least so much; a node must have it."""


class Toleration(Shape):
    """A taint that keeps no runner away."""

    key: LabelKey | None = None
    """Of the taint; absent: every one."""

    operator: Literal["Equal", "Exists"] = "Equal"
    """How the taint's value is compared."""

    value: LabelValue | None = None
    """Of the taint."""

    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Of the taint; absent: every one."""

    toleration_seconds: Annotated[int, Field(ge=0, le=86_400)] | None = None
    """How long a taint that evicts is borne."""


class TopologySpread(Shape):
    """How runners are spread. The pool's own runners are counted."""

    max_skew: Annotated[int, Field(ge=1, le=MAX_REPLICAS)] = 1
    """By how much places may differ."""

    topology_key: LabelKey
    """The node label that makes a place, such as topology.kubernetes.io/zone."""

    when_unsatisfiable: Literal["DoNotSchedule", "ScheduleAnyway"] = "ScheduleAnyway"
    """What happens to a runner that would make it worse."""


class EnvironmentVariable(Shape):
    """One variable of the runner's process."""

    name: EnvName
    """What the process reads."""

    value: Annotated[str, Field(max_length=4096)] = ""
    """What it says; no secrets, since everybody who may read the pool may read it."""

    rules: ClassVar = (
        Rule(
            field="name",
            cel="!self.name.startsWith('MOTET_')",
            message="must not begin with MOTET_: those are set from the pool's other fields and by the chart",
            reason="FieldValueForbidden",
            holds=lambda variable: not variable.name.startswith("MOTET_"),
        ),
    )


class PodTemplate(Shape):
    """What of a runner's pod a pool may choose. What is not here (host paths, privileges) cannot be abused."""

    resources: Resources = Resources()
    node_selector: Labels = Field(default_factory=dict)
    """Labels that a runner's node must have."""

    tolerations: Annotated[list[Toleration], Field(max_length=32)] = Field(default_factory=list)
    """Taints that keep no runner away."""

    topology_spread_constraints: Annotated[list[TopologySpread], Field(max_length=8)] = Field(default_factory=list)
    """How runners are spread over zones and machines."""

    priority_class_name: ObjectReference | None = None
    """Who goes first when room is short."""

    runtime_class_name: ObjectReference | None = None
    """The container runtime's configuration, such as `nvidia`."""

    service_account_name: ObjectReference | None = None
    """Instead of the chart's. Tenants grant their Secrets to the one that is used."""

    env: Annotated[
        list[EnvironmentVariable],
        Field(max_length=64),
        EntriesDiffer("name"),
    ] = Field(default_factory=list)
    """Variables of the runner's process, locally too."""


class ServingPoolSpec(Shape):
    """What the platform wants."""

    model: PoolModel
    group: DnsLabel | None = None
    """Pools of one group share base model, adapters and ledger; absent: the pool's own name. Immutable."""

    role: Literal["Mixed"] = "Mixed"
    """Which part of a request's life the runners serve."""

    engine: Engine = Engine()
    replicas: Annotated[int, Field(ge=0, le=MAX_REPLICAS)] = 1
    """Runners, where nothing else decides; `--runners` overrides it locally."""

    autoscaling: Autoscaling = Autoscaling()

    allowed_namespaces: AllowedNamespaces = AllowedNamespaces()
    """Whose adapters may refer to this pool."""

    admission: Admission = Admission()
    adapter_volumes: Annotated[
        list[AdapterVolume],
        Field(max_length=16),
        EntriesDiffer("claimName"),
    ] = Field(default_factory=list)
    """The only claims that an adapter's source may name. A change replaces the runners."""

    drain_timeout_seconds: Annotated[int, Field(ge=0, le=86_400)] = 30
    """How long a runner that must go may finish what it has; what is left then is moved. In a cluster a change replaces
    the runners, since their pods' grace period depends on it."""

    update_strategy: UpdateStrategy = UpdateStrategy()
    template: PodTemplate = PodTemplate()

    transitions: ClassVar = (
        Transition(
            field="group",
            cel="has(self.group) == has(oldSelf.group) && (!has(self.group) || self.group == oldSelf.group)",
            message="group is immutable",
            holds=lambda old, new: new.group == old.group,
        ),
    )


class ServingPool(Shape):
    api_version: Literal["motet.dev/v1alpha1"] = API_VERSION
    kind: Literal["ServingPool"] = "ServingPool"
    metadata: ObjectMeta
    spec: ServingPoolSpec

    @property
    def object_name(self) -> ObjectName:
        return ObjectName(self.metadata.namespace, self.metadata.name)

    @property
    def group(self) -> ObjectName:
        return ObjectName(self.metadata.namespace, self.spec.group or self.metadata.name)

    @property
    def served_name(self) -> str:
        return self.spec.model.served_name or self.group.name
