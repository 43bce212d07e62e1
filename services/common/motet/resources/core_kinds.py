"""Two kinds of Kubernetes that may be in the same folder of manifests, with the fields that Motet reads."""

from typing import Annotated, Literal

from pydantic import Field

from motet.domain import ObjectName
from motet.resources.fields import DnsLabel, Labels, ObjectMeta, ResourceModel


class NamespaceMeta(ResourceModel):
    name: DnsLabel
    labels: Labels = Field(default_factory=dict)
    annotations: Annotated[dict[str, str], Field(max_length=64)] = Field(default_factory=dict)


class Namespace(ResourceModel):
    """A tenant. The selector of a pool reads its labels."""

    api_version: Literal["v1"] = "v1"
    kind: Literal["Namespace"] = "Namespace"
    metadata: NamespaceMeta
    spec: dict[str, object] = Field(default_factory=dict)

    @property
    def object_name(self) -> ObjectName:
        return ObjectName("", self.metadata.name)


class Secret(ResourceModel):
    """The credentials for a source. Only the fetch process reads it."""

    api_version: Literal["v1"] = "v1"
    kind: Literal["Secret"] = "Secret"
    metadata: ObjectMeta
    type: str = "Opaque"
    immutable: bool = False
    data: Annotated[dict[str, str], Field(repr=False)] = Field(default_factory=dict)
    string_data: Annotated[dict[str, str], Field(repr=False)] = Field(default_factory=dict)

    @property
    def object_name(self) -> ObjectName:
        return ObjectName(self.metadata.namespace, self.metadata.name)
