"""`LoRAAdapter`: LoRA weights of one tenant, for the base model of a pool."""

from functools import cached_property
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field

from motet.domain import ObjectName
from motet.resources.chat import Chat
from motet.resources.fields import (
    ALL_NAMESPACES,
    API_VERSION,
    MAX_REPLICAS,
    Digest,
    DnsLabel,
    ModelName,
    ObjectMeta,
    ObjectReference,
    Priority,
    RelativePath,
    ResourceModel,
    SecretReference,
    ServedName,
    SourceRevision,
    TenantOrAll,
)
from motet.resources.limits import Limits
from motet.resources.source_uris import (
    ADAPTER_URI_MEANING,
    AdapterUri,
    Image,
    begins_as_one,
    is_of,
    only_with_revisions,
    only_with_secrets,
    revision_meaning,
    with_revisions,
    with_secrets,
)
from motet.resources.validation_rules import Rule, TransitionRule
from motet.sources import ADAPTER_SOURCES, CLAIM, REGISTRY

_WITH_REVISIONS = with_revisions(ADAPTER_SOURCES)
_WITHOUT_SECRETS = with_secrets(ADAPTER_SOURCES, yes=False)


class PoolRef(ResourceModel):
    """The group of pools that serves the adapter. Immutable."""

    name: DnsLabel
    """The name of the group. A pool without `spec.group` is a group with the pool's name."""

    namespace: DnsLabel | None = None
    """The namespace of the group. Absent: the adapter's namespace."""

    model_config = ConfigDict(json_schema_extra={"x-kubernetes-map-type": "atomic"})
    transitions: ClassVar = (
        TransitionRule(cel="self == oldSelf", message="poolRef is immutable", holds=lambda old, new: new == old),
    )


class ClaimSource(ResourceModel):
    """A folder on a volume that the pool mounts."""

    claim_name: ObjectReference
    """A claim in the pool's namespace. The pool's `spec.adapterVolumes` must have it and admit this namespace."""

    path: RelativePath
    """The path of the PEFT folder, from the root of the volume (or from its `subPath`, if the pool sets one)."""


class AdapterSource(ResourceModel):
    """Where the adapter's files are. A change makes a new revision. The old one serves until the new one has a
    certificate."""

    uri: Annotated[AdapterUri | None, Field(description=ADAPTER_URI_MEANING)] = None
    image: Image | None = None
    """The artifact of an OCI registry that has the files of the PEFT folder: `registry/repository:tag`, or with
    `@sha256:…` in place of the tag. It is short for a `uri` with `oci://`."""

    persistent_volume_claim: ClaimSource | None = None
    revision: Annotated[SourceRevision | None, Field(description=revision_meaning(ADAPTER_SOURCES))] = None
    digest: Digest | None = None
    """The digest that the files must have. Absent: any files are accepted, and the status reports their digest."""

    credentials_secret_ref: SecretReference | None = None
    """The Secret with the credentials for the source, if it needs any. The pool's runners must have access to it."""

    rules: ClassVar = (
        Rule(
            cel="[has(self.uri), has(self.image), has(self.persistentVolumeClaim)].exists_one(set, set)",
            message="exactly one of uri, image and persistentVolumeClaim must be set",
            holds=lambda source: (
                sum(one is not None for one in (source.uri, source.image, source.persistent_volume_claim)) == 1
            ),
        ),
        Rule(
            field="revision",
            cel=f"!has(self.revision) || (has(self.uri) && {begins_as_one(_WITH_REVISIONS)})",
            message=only_with_revisions(ADAPTER_SOURCES),
            reason="FieldValueForbidden",
            holds=lambda source: source.revision is None or is_of(source.uri, _WITH_REVISIONS),
        ),
        Rule(
            field="credentialsSecretRef",
            cel="!has(self.credentialsSecretRef) || has(self.image) || "
            f"(has(self.uri) && !{begins_as_one(_WITHOUT_SECRETS)})",
            message=only_with_secrets(ADAPTER_SOURCES),
            reason="FieldValueForbidden",
            holds=lambda source: (
                source.credentials_secret_ref is None
                or (source.address is not None and not is_of(source.address, _WITHOUT_SECRETS))
            ),
        ),
    )
    transitions: ClassVar = (
        TransitionRule(
            field="digest",
            cel="!has(oldSelf.digest) || has(self.digest)",
            message="digest may be changed but not removed",
            holds=lambda old, new: old.digest is None or new.digest is not None,
        ),
    )

    @property
    def address(self) -> str | None:
        """The files' URI. None: they are on a volume."""
        return self.uri if self.image is None else f"{REGISTRY.prefix}{self.image}"

    @property
    def scheme(self) -> str:
        return CLAIM.scheme if self.address is None else self.address.partition(":")[0]


class AdapterPlacement(ResourceModel):
    """How many runners hold the adapter."""

    min_replicas: Annotated[int, Field(ge=0, le=MAX_REPLICAS)] = 0
    """How many runners keep the adapter resident, also without requests; at most the pool's `pinnedReplicas` for this
    namespace. Such adapters leave a runner's memory last. 0: its first request loads it."""

    max_replicas: Annotated[int, Field(ge=1, le=MAX_REPLICAS)] = MAX_REPLICAS
    """The largest number of runners that serve the adapter. If these are full, its next request waits for one of
    them."""

    rules: ClassVar = (
        Rule(
            field="minReplicas",
            cel="self.minReplicas <= self.maxReplicas",
            message="minReplicas must be less than or equal to maxReplicas",
            holds=lambda placement: placement.min_replicas <= placement.max_replicas,
        ),
    )


class AdapterVerify(ResourceModel):
    """What the answers must show that were recorded where the adapter was trained (`motet_proof.json`). If the adapter
    has the file, a runner compares it with what it computes."""

    require: Literal["Record", "None"] | None = None
    """`Record`: without the file, a revision is refused. Absent: `None`."""

    on_failure: Literal["Refuse", "Warn"] | None = None
    """What becomes of a revision whose recorded answers are those of another model. `Refuse`: it is refused. `Warn`:
    it serves, with a warning in the status. Absent: `Warn`. Answers that were recorded on a quantized base model differ
    in any case, and are only warned about."""


class LoRAAdapterSpec(ResourceModel):
    """What the tenant declares."""

    pool_ref: PoolRef
    model_name: ModelName | None = None
    """The name in requests. Absent: the object's name."""

    source: AdapterSource
    base_model: ServedName | None = None
    """The base model that the adapter was made for. If set, it must be the pool's served name."""

    placement: AdapterPlacement = AdapterPlacement()
    priority: Priority = "Standard"
    """The highest class that a request to this adapter may have; never above the pool's `maxPriority` for the namespace
    that asks."""

    limits: Limits | None = None
    """What all requests to this adapter may use at most, of all namespaces together. They stay limited by what the pool
    grants to their namespaces."""

    share: Annotated[list[TenantOrAll], Field(max_length=64)] = Field(default_factory=list)
    """Namespaces that may use the adapter as `namespace/modelName`. `["*"]`: all that the pool admits. Their requests
    count as theirs. If you remove a namespace, its running requests go on to their end."""

    chat: Chat | None = None
    verify: AdapterVerify | None = None
    suspend: bool = False
    """True: no runner holds or serves the adapter. The object stays."""

    rules: ClassVar = (
        Rule(
            field="share",
            cel=f"!has(self.share) || !('{ALL_NAMESPACES}' in self.share) || self.share.size() == 1",
            message=f"'{ALL_NAMESPACES}' must be the only entry",
            holds=lambda spec: ALL_NAMESPACES not in spec.share or len(spec.share) == 1,
        ),
    )
    transitions: ClassVar = (
        # CEL could compare the two optional values directly, but that costs more than the API server allows.
        TransitionRule(
            field="modelName",
            cel="!has(oldSelf.modelName) || (has(self.modelName) && self.modelName == oldSelf.modelName)",
            message="modelName may be set once",
            holds=lambda old, new: old.model_name is None or new.model_name == old.model_name,
        ),
        TransitionRule(
            field="baseModel",
            cel="!has(oldSelf.baseModel) || (has(self.baseModel) && self.baseModel == oldSelf.baseModel)",
            message="baseModel is immutable; create a new LoRAAdapter",
            holds=lambda old, new: old.base_model is None or new.base_model == old.base_model,
        ),
    )


class LoRAAdapter(ResourceModel):
    api_version: Literal["motet.dev/v1alpha1"] = API_VERSION
    kind: Literal["LoRAAdapter"] = "LoRAAdapter"
    metadata: ObjectMeta
    spec: LoRAAdapterSpec

    @cached_property
    def object_name(self) -> ObjectName:
        return ObjectName(self.metadata.namespace, self.metadata.name)

    @cached_property
    def model_name(self) -> str:
        return self.spec.model_name or self.metadata.name

    @cached_property
    def group(self) -> ObjectName:
        reference = self.spec.pool_ref
        return ObjectName(reference.namespace or self.metadata.namespace, reference.name)
