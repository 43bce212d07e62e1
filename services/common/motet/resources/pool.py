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
    LabelKey,
    Labels,
    LabelValue,
    ObjectMeta,
    ServedName,
    Shape,
    Uri,
)

Preset = Literal["paged-chunk", "orca", "s3", "oracle", "punica", "ft-max"]


class PoolModel(Shape):
    """The base model."""

    uri: Uri
    """The base model's folder. `file://` today; a relative path counts from the manifest's folder. Immutable."""

    served_name: ServedName | None = None
    """What clients call the base model; absent: the group's name."""

    digest: Digest | None = None
    """What the model's bytes must add up to."""

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


class ServingPoolSpec(Shape):
    """What the platform wants."""

    model: PoolModel
    group: DnsLabel | None = None
    """Pools of one group share base model, adapters and ledger; absent: the pool's own name. Immutable."""

    role: Literal["Mixed"] = "Mixed"
    """Which part of a request's life the runners serve."""

    engine: Engine = Engine()
    replicas: Annotated[int, Field(ge=0, le=MAX_REPLICAS)] = 1
    """Runners; `--runners` overrides it locally."""

    allowed_namespaces: AllowedNamespaces = AllowedNamespaces()
    """Whose adapters may refer to this pool."""

    drain_timeout_seconds: Annotated[int, Field(ge=0, le=86_400)] = 30
    """How long a runner that must go may finish what it has; what is left then is moved."""

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
