"""`LoRAAdapter`: one tenant's variation of a pool's base model."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from motet.model import ObjectName
from motet.resources.rules import broken, check_uri
from motet.resources.shapes import (
    API_VERSION,
    MAX_REPLICAS,
    Digest,
    DnsLabel,
    ModelName,
    ObjectMeta,
    ServedName,
    Shape,
    Uri,
)

Priority = Literal["Interactive", "Standard", "Batch"]


class PoolRef(Shape):
    name: DnsLabel
    """The group of pools that serves the adapter; a pool that names no group is its own."""

    namespace: DnsLabel | None = None
    """Absent: the adapter's own."""


class AdapterSource(Shape):
    uri: Uri
    """Where the PEFT folder lies. `file://` today; a relative path counts from the manifest's folder."""

    digest: Digest | None = None
    """What the bytes must add up to. Absent: whatever is there, and its digest is reported."""

    @model_validator(mode="after")
    def _uri(self) -> "AdapterSource":
        check_uri(self.uri)
        return self


class Placement(Shape):
    min_replicas: Annotated[int, Field(ge=0, le=MAX_REPLICAS)] = 0
    """Runners that keep it resident even when nobody asks; 0 loads it at the first request."""

    max_replicas: Annotated[int, Field(ge=1, le=MAX_REPLICAS)] = MAX_REPLICAS
    """Runners that may hold it at most."""

    @model_validator(mode="after")
    def _order(self) -> "Placement":
        if self.min_replicas > self.max_replicas:
            raise broken("minReplicas", "must be less than or equal to maxReplicas")
        return self


class LoRAAdapterSpec(Shape):
    pool_ref: PoolRef
    model_name: ModelName | None = None
    """What clients say; absent: the object's name."""

    source: AdapterSource
    base_model: ServedName | None = None
    """A claim, checked against the pool's served name."""

    placement: Placement = Placement()
    priority: Priority = "Standard"
    """The highest class that a request to this adapter may have."""

    suspend: bool = False
    """Unload it everywhere and keep the object."""


class LoRAAdapter(Shape):
    api_version: Literal["motet.dev/v1alpha1"] = API_VERSION
    kind: Literal["LoRAAdapter"] = "LoRAAdapter"
    metadata: ObjectMeta
    spec: LoRAAdapterSpec

    @property
    def object_name(self) -> ObjectName:
        return ObjectName(self.metadata.namespace, self.metadata.name)

    @property
    def model_name(self) -> str:
        return self.spec.model_name or self.metadata.name

    @property
    def group(self) -> ObjectName:
        reference = self.spec.pool_ref
        return ObjectName(reference.namespace or self.metadata.namespace, reference.name)
