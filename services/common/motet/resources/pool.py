"""`ServingPool`: runners that share one base model, one configuration and one size."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from motet.model import ObjectName
from motet.resources.rules import broken, check_uri
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
    uri: Uri
    """The base model's folder. `file://` today; a relative path counts from the manifest's folder. Immutable."""

    served_name: ServedName | None = None
    """What clients call the base model; absent: the group's name."""

    digest: Digest | None = None
    """What the model's bytes must add up to."""

    @model_validator(mode="after")
    def _uri(self) -> "PoolModel":
        check_uri(self.uri)
        return self


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

    @model_validator(mode="after")
    def _order(self) -> "Engine":
        resident, cached = self.max_resident_adapters, self.max_cached_adapters
        if resident is not None and cached is not None and resident > cached:
            raise broken("maxResidentAdapters", "must be less than or equal to maxCachedAdapters")
        return self


class LabelRequirement(Shape):
    key: LabelKey
    """Which label."""

    operator: Literal["In", "NotIn", "Exists", "DoesNotExist"]
    """How the label is judged."""

    values: Annotated[list[LabelValue], Field(max_length=64)] = Field(default_factory=list)
    """For `In` and `NotIn`: the values compared with."""

    @model_validator(mode="after")
    def _values(self) -> "LabelRequirement":
        if self.operator in ("In", "NotIn") and not self.values:
            raise broken("values", f"must be set when operator is {self.operator}")
        if self.operator in ("Exists", "DoesNotExist") and self.values:
            raise broken("values", f"must not be set when operator is {self.operator}")
        return self

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
    match_labels: Labels = Field(default_factory=dict)
    """Labels that must all be there with these values."""

    match_expressions: Annotated[list[LabelRequirement], Field(max_length=16)] = Field(default_factory=list)
    """Requirements that must all hold."""

    def matches(self, labels: dict[str, str]) -> bool:
        return self.match_labels.items() <= labels.items() and all(
            requirement.matches(labels) for requirement in self.match_expressions
        )


class AllowedNamespaces(Shape):
    from_: Literal["Same", "All", "Selector"] = Field(default="Same", alias="from")
    """The pool's own namespace, every one, or those the selector picks by their labels."""

    selector: LabelSelector | None = None

    @model_validator(mode="after")
    def _selector(self) -> "AllowedNamespaces":
        if self.from_ == "Selector" and self.selector is None:
            raise broken("selector", "must be set when from is Selector")
        if self.from_ != "Selector" and self.selector is not None:
            raise broken("selector", f"must not be set when from is {self.from_}")
        return self

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
