"""What the fields of a resource have in common: how they are spelt, what bounds them, and the sentence for each bound.

Everything here ends up in the CRD schema as well, so a rule is a pattern or a number wherever it can be.
"""

from typing import Annotated, Any, ClassVar, Final, Self

from pydantic import BaseModel, ConfigDict, Field, GetJsonSchemaHandler, StringConstraints, model_validator
from pydantic.alias_generators import to_camel
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from motet.resources.coming import COMING_SCHEMES
from motet.resources.rules import VALIDATIONS, Checked, Rule, Transition, at_most, uri_rules, validations

GROUP = "motet.dev"
VERSION = "v1alpha1"
API_VERSION: Final = "motet.dev/v1alpha1"
CATEGORY = "motet"

MAX_REPLICAS = 1000
SCHEMES = ("file",)


class Shape(BaseModel):
    """A part of a resource. Strict, because the API server is: `"2"` is no number there either."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        validate_by_name=True,
        validate_by_alias=True,
        extra="forbid",
        frozen=True,
        strict=True,
        use_attribute_docstrings=True,
    )

    rules: ClassVar[tuple[Rule, ...]] = ()
    transitions: ClassVar[tuple[Transition, ...]] = ()

    @model_validator(mode="after")
    def _rules(self) -> Self:
        for rule in self.rules:
            rule.check(self)
        return self

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        schema = handler(core)
        if said := validations((*cls.rules, *cls.transitions)):
            handler.resolve_ref_schema(schema)[VALIDATIONS] = said
        return schema


def changes(before: Shape, after: Shape, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], str]]:
    """What may not change between two versions of one object: (field, sentence) for each rule that is broken."""
    found = [
        ((*path, rule.field) if rule.field else path, rule.message)
        for rule in before.transitions
        if not rule.holds(before, after)
    ]
    for name, field in type(before).model_fields.items():
        old: Any = getattr(before, name)
        new: Any = getattr(after, name)
        if isinstance(old, Shape) and isinstance(new, Shape):
            found += changes(old, new, (*path, field.alias or name))
    return found


_DNS_LABEL = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
_MODEL_NAME = r"^[A-Za-z0-9]([-._A-Za-z0-9]*[A-Za-z0-9])?$"
_SERVED_NAME = r"^[A-Za-z0-9]([-._A-Za-z0-9]*[A-Za-z0-9])?(/[A-Za-z0-9]([-._A-Za-z0-9]*[A-Za-z0-9])?)?$"
_DIGEST = r"^sha256:[0-9a-f]{64}$"
_URI = r"^[a-z][a-z0-9+.-]*://\S+$"
_LABEL_KEY = r"^([a-z0-9]([-.a-z0-9]*[a-z0-9])?/)?[A-Za-z0-9]([-._A-Za-z0-9]*[A-Za-z0-9])?$"
_LABEL_VALUE = r"^([A-Za-z0-9]([-._A-Za-z0-9]*[A-Za-z0-9])?)?$"

PATTERN_SENTENCES = {
    _DNS_LABEL: "must be a DNS label: lower-case letters, digits and '-', beginning and ending with a letter or digit",
    _MODEL_NAME: "must be letters, digits, '-', '_' and '.', beginning and ending with a letter or digit; "
    "'/' and ':' separate tenant and pool in what clients say",
    _SERVED_NAME: "must be letters, digits, '-', '_' and '.', with at most one '/' inside",
    _DIGEST: "must be 'sha256:' and 64 lower-case hex digits",
    _URI: "must be a URI such as file:///models/base or file://adapters/legal, without spaces",
    _LABEL_KEY: "must be a label key: letters, digits, '-', '_' and '.', optionally after a DNS prefix and '/'",
    _LABEL_VALUE: "must be a label value: letters, digits, '-', '_' and '.', or empty",
}
"""What to say instead of quoting a regular expression at a person."""

DnsLabel = Annotated[str, StringConstraints(pattern=_DNS_LABEL, max_length=63)]
ModelName = Annotated[str, StringConstraints(pattern=_MODEL_NAME, max_length=63)]
ServedName = Annotated[str, StringConstraints(pattern=_SERVED_NAME, max_length=127)]
Digest = Annotated[str, StringConstraints(pattern=_DIGEST, max_length=71)]
Uri = Annotated[str, StringConstraints(pattern=_URI, max_length=1024), Checked(*uri_rules(SCHEMES, COMING_SCHEMES))]
LabelKey = Annotated[str, StringConstraints(pattern=_LABEL_KEY, max_length=317)]
LabelValue = Annotated[str, StringConstraints(pattern=_LABEL_VALUE, max_length=63)]
ResourceName = Annotated[
    str,
    StringConstraints(pattern=_DNS_LABEL),
    Field(json_schema_extra={"maxLength": 63}),
    Checked(at_most(63, "name must be 63 characters or fewer (it becomes a label value)")),
]
Labels = Annotated[dict[LabelKey, LabelValue], Field(max_length=64)]


class ObjectMeta(Shape):
    """The part of Kubernetes' metadata that Motet reads."""

    name: ResourceName
    """At most 63 characters, since it becomes a label value."""

    namespace: DnsLabel = "default"
    """The tenant."""

    labels: Labels = Field(default_factory=dict)
    """Yours; a Namespace's are what `allowedNamespaces.selector` looks at."""

    annotations: Annotated[dict[str, str], Field(max_length=64)] = Field(default_factory=dict)
    """Yours. Of a pool `motet up` reads one: `motet.dev/example-question` is what its example commands ask."""
