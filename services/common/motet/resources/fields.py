"""The types of fields that resources share: their names in YAML, their limits, and a sentence that explains each limit.

The CRD schema has all of this, too. So a rule is a pattern or a number wherever that is possible.
"""

from typing import Annotated, Any, ClassVar, Final, Literal, Self, get_args

from pydantic import (
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    StringConstraints,
    model_validator,
)
from pydantic.alias_generators import to_camel
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from motet.described_model import DescribedModel
from motet.resources.source_uris import SECRET_MEANING, URI_PATTERN, URI_SENTENCE
from motet.resources.validation_rules import (
    VALIDATIONS,
    Rule,
    TransitionRule,
    ValidatedBy,
    at_most,
    quoted,
    validations,
)

INT_OR_STRING = "x-kubernetes-int-or-string"
GROUP = "motet.dev"
VERSION = "v1alpha1"
API_VERSION: Final = "motet.dev/v1alpha1"
CATEGORY = "motet"

MAX_REPLICAS = 1000
ALL_NAMESPACES = "*"
"""In a list of namespaces: all of them."""


class ResourceModel(DescribedModel):
    """A part of a resource. Strict like the API server, which does not accept `"2"` as a number either."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        validate_by_name=True,
        validate_by_alias=True,
        extra="forbid",
        frozen=True,
        strict=True,
    )

    rules: ClassVar[tuple[Rule, ...]] = ()
    transitions: ClassVar[tuple[TransitionRule, ...]] = ()

    @model_validator(mode="after")
    def _rules(self) -> Self:
        for rule in self.rules:
            rule.check(self)
        return self

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        schema = super().__get_pydantic_json_schema__(core, handler)
        if found := validations((*cls.rules, *cls.transitions)):
            handler.resolve_ref_schema(schema)[VALIDATIONS] = found
        return schema


def forbidden_changes(
    before: ResourceModel, after: ResourceModel, path: tuple[str, ...] = ()
) -> list[tuple[tuple[str, ...], str]]:
    """Compare two versions of one object: (field, sentence) for each transition rule that the change breaks."""
    found = [
        ((*path, rule.field) if rule.field else path, rule.message)
        for rule in before.transitions
        if not rule.holds(before, after)
    ]
    for name, field in type(before).model_fields.items():
        old: Any = getattr(before, name)
        new: Any = getattr(after, name)
        if isinstance(old, ResourceModel) and isinstance(new, ResourceModel):
            found += forbidden_changes(old, new, (*path, field.alias or name))
    return found


_DNS_LABEL = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
_TENANT = r"^([*]|[a-z0-9]([-a-z0-9]*[a-z0-9])?)$"
_MODEL_NAME = r"^[A-Za-z0-9]([-._A-Za-z0-9]*[A-Za-z0-9])?$"
_SERVED_NAME = r"^[A-Za-z0-9]([-._A-Za-z0-9]*[A-Za-z0-9])?(/[A-Za-z0-9]([-._A-Za-z0-9]*[A-Za-z0-9])?)?$"
_DIGEST = r"^sha256:[0-9a-f]{64}$"
_LABEL_KEY = r"^([a-z0-9]([-.a-z0-9]*[a-z0-9])?/)?[A-Za-z0-9]([-._A-Za-z0-9]*[A-Za-z0-9])?$"
_LABEL_VALUE = r"^([A-Za-z0-9]([-._A-Za-z0-9]*[A-Za-z0-9])?)?$"
_OBJECT_NAME = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?([.][a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"
_RELATIVE_PATH = r"^[A-Za-z0-9_][-A-Za-z0-9_.]*(/[A-Za-z0-9_][-A-Za-z0-9_.]*)*$"
_PATH_PREFIX_PART = r"([A-Za-z0-9_]|\{namespace\})([-A-Za-z0-9_.]|\{namespace\})*"
_PATH_PREFIX = rf"^({_PATH_PREFIX_PART}(/{_PATH_PREFIX_PART})*)?$"
_REVISION = r"^[A-Za-z0-9_][-A-Za-z0-9_./]*$"
_ENV_NAME = r"^[A-Za-z_][A-Za-z0-9_]*$"
_QUANTITY = r"^([0-9]+([.][0-9]+)?|[.][0-9]+)(m|[kMGTPE]|[KMGTPE]i)?$"

PATTERN_SENTENCES = {
    _DNS_LABEL: "must be a DNS label: lower-case letters, digits and '-', beginning and ending with a letter or digit",
    _TENANT: "must be a namespace, or '*' for all that the pool admits",
    _MODEL_NAME: "must be letters, digits, '-', '_' and '.', beginning and ending with a letter or digit; "
    "in requests '/' and ':' separate it from a tenant or a pool",
    _SERVED_NAME: "must be letters, digits, '-', '_' and '.', with at most one '/' inside",
    _DIGEST: "must be 'sha256:' and 64 lower-case hex digits",
    URI_PATTERN: URI_SENTENCE,
    _LABEL_KEY: "must be a label key: letters, digits, '-', '_' and '.', optionally after a DNS prefix and '/'",
    _LABEL_VALUE: "must be a label value: letters, digits, '-', '_' and '.', or empty",
    _OBJECT_NAME: "must be an object's name: lower-case letters, digits, '-' and '.', beginning and ending with a "
    "letter or digit",
    _RELATIVE_PATH: "must be a path inside the volume, such as team/legal: no '/' at either end, no part that begins "
    "with '.'",
    _PATH_PREFIX: "must be a path inside the volume, such as {namespace} or teams/{namespace}: no '/' at either end, "
    "no part that begins with '.'",
    _REVISION: "must be a branch, tag or commit: letters, digits, '-', '_', '.' and '/'",
    _ENV_NAME: "must be a variable's name: letters, digits and '_', not beginning with a digit",
    _QUANTITY: "must be a quantity such as 2, 500m or 16Gi",
}
"""The sentence for each pattern. People read it in place of the regular expression."""

DnsLabel = Annotated[str, StringConstraints(pattern=_DNS_LABEL, max_length=63)]
TenantOrAll = Annotated[str, StringConstraints(pattern=_TENANT, max_length=63)]
ModelName = Annotated[str, StringConstraints(pattern=_MODEL_NAME, max_length=63)]
ServedName = Annotated[str, StringConstraints(pattern=_SERVED_NAME, max_length=127)]
Digest = Annotated[str, StringConstraints(pattern=_DIGEST, max_length=71)]
ObjectReference = Annotated[str, StringConstraints(pattern=_OBJECT_NAME, max_length=253)]
RelativePath = Annotated[str, StringConstraints(pattern=_RELATIVE_PATH, max_length=512)]
PathPrefix = Annotated[str, StringConstraints(pattern=_PATH_PREFIX, max_length=512)]
SourceRevision = Annotated[str, StringConstraints(pattern=_REVISION, max_length=128)]
EnvName = Annotated[str, StringConstraints(pattern=_ENV_NAME, max_length=128)]
LabelKey = Annotated[str, StringConstraints(pattern=_LABEL_KEY, max_length=317)]
LabelValue = Annotated[str, StringConstraints(pattern=_LABEL_VALUE, max_length=63)]
ResourceName = Annotated[
    str,
    StringConstraints(pattern=_DNS_LABEL),
    Field(json_schema_extra={"maxLength": 63}),
    ValidatedBy(at_most(63, "name must be 63 characters or fewer (it becomes a label value)")),
]
Priority = Literal["Interactive", "Standard", "Batch"]
PRIORITIES: tuple[Priority, ...] = get_args(Priority)
"""From the most urgent down."""

Labels = Annotated[dict[LabelKey, LabelValue], Field(max_length=64)]
Annotations = Annotated[dict[LabelKey, Annotated[str, StringConstraints(max_length=4096)]], Field(max_length=64)]


class _WholeOrText:
    """Accepts `2` and `"500m"`, as Kubernetes does, and stores both as text."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(_as_text, handler(source))

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        rule = Rule(
            cel=f"type(self) == int || self.matches({quoted(_QUANTITY)})",
            message=PATTERN_SENTENCES[_QUANTITY],
            holds=None,
        )
        return {INT_OR_STRING: True, "pattern": _QUANTITY, "maxLength": 32, VALIDATIONS: validations([rule])}


def _as_text(value: Any) -> Any:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


Quantity = Annotated[str, StringConstraints(pattern=_QUANTITY, max_length=32), _WholeOrText()]
Quantities = Annotated[dict[LabelKey, Quantity], Field(max_length=16)]


class UniqueBy:
    """For a list whose entries differ in one field, the key. Kubernetes refuses a list with the same key twice."""

    def __init__(self, key: str) -> None:
        self._key = key

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return handler(core) | {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [self._key]}

    def _check(self, entries: list[Any]) -> list[Any]:
        seen = set()
        for entry in entries:
            value = entry.model_dump(by_alias=True)[self._key]
            if value in seen:
                sentence = f"two entries have the same {self._key}: {value}; remove one or rename it"
                raise PydanticCustomError("rule", "{sentence}", {"field": "", "sentence": sentence})
            seen.add(value)
        return entries


class SecretReference(ResourceModel):
    """The name of a Secret in the namespace of the object."""

    name: Annotated[ObjectReference, Field(description=SECRET_MEANING)]


class ObjectMeta(ResourceModel):
    """The part of Kubernetes' metadata that Motet reads."""

    name: ResourceName
    """The name; at most 63 characters, because it becomes the value of a label."""

    namespace: DnsLabel = "default"
    """The tenant."""

    labels: Labels = Field(default_factory=dict)
    """Your labels. `allowedNamespaces.selector` reads those of a Namespace."""

    annotations: Annotated[dict[str, str], Field(max_length=64)] = Field(default_factory=dict)
    """Your annotations. On a pool, `motet.dev/example-question` is the question in the examples of `motet up`."""
