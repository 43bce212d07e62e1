"""Builds the CustomResourceDefinitions from the models.

Pydantic's JSON schema becomes a *structural* schema: without references, with all properties written out. What a
structural schema cannot express becomes a CEL rule (for keys of maps) or an error here. The API server prunes fields
that a model does not have; `kubectl --validate=strict` refuses them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from motet.resources.adapter import LoRAAdapter
from motet.resources.fields import CATEGORY, GROUP, INT_OR_STRING, PATTERN_SENTENCES, VERSION, ResourceModel
from motet.resources.pool import ServingPool
from motet.resources.status import LoRAAdapterStatus, ServingPoolStatus
from motet.resources.validation_rules import VALIDATIONS, Rule, quoted, validations

Schema = dict[str, Any]


@dataclass(frozen=True, slots=True)
class PrinterColumn:
    """A column of `kubectl get`."""

    name: str
    path: str
    meaning: str
    type: str = "string"
    wide: bool = False
    """Shown only with `-o wide`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomResource:
    resource: type[ResourceModel]
    status: type[ResourceModel]
    plural: str
    short: str
    meaning: str
    columns: tuple[PrinterColumn, ...]
    scale: bool = False

    @property
    def name(self) -> str:
        return self.resource.__name__

    @property
    def crd_name(self) -> str:
        return f"{self.plural}.{GROUP}"

    @property
    def file_name(self) -> str:
        return f"{GROUP}_{self.plural}.yaml"


READY = PrinterColumn("Ready", '.status.conditions[?(@.type=="Ready")].status', "whether it serves")
REASON = PrinterColumn("Reason", '.status.conditions[?(@.type=="Ready")].reason', "why, or why not")
AGE = PrinterColumn("Age", ".metadata.creationTimestamp", "since when it exists", "date")

ADAPTER = CustomResource(
    resource=LoRAAdapter,
    status=LoRAAdapterStatus,
    plural="loraadapters",
    short="lora",
    meaning="LoRA weights of one tenant, for the base model of a pool. The namespace is the tenant.",
    columns=(
        READY,
        REASON,
        PrinterColumn("Pool", ".spec.poolRef.name", "the group of pools that serves it"),
        PrinterColumn("Base Model", ".status.baseModel", "the base model that the pool serves"),
        PrinterColumn("Rank", ".status.artifact.rank", "the largest rank of its matrices", "integer"),
        PrinterColumn(
            "Loaded", ".status.placementSummary", "how many runners have the adapter in memory, and how many should"
        ),
        PrinterColumn("Model", ".status.modelName", "its name in requests"),
        AGE,
        PrinterColumn("Digest", ".status.artifact.shortDigest", "the digest of the files that serve", wide=True),
        PrinterColumn("Size", ".status.artifact.sizeBytes", "the size of these files in bytes", "integer", wide=True),
        PrinterColumn("Suspended", ".spec.suspend", "whether it is suspended", "boolean", wide=True),
    ),
)
POOL = CustomResource(
    resource=ServingPool,
    status=ServingPoolStatus,
    plural="servingpools",
    short="spool",
    meaning="Runners that share one base model, one configuration and one size.",
    columns=(
        READY,
        PrinterColumn("Replicas", ".status.replicaSummary", "how many runners serve, and how many are wanted"),
        PrinterColumn("Desired", ".status.desiredReplicas", "how many runners are wanted", "integer"),
        PrinterColumn("Mode", ".spec.autoscaling.mode", "who decides how many"),
        PrinterColumn("Adapters", ".status.adapters.summary", "how many adapters are loaded, and how many accepted"),
        PrinterColumn("Base Model", ".status.servedName", "the name of the base model in requests"),
        AGE,
        PrinterColumn("Reason", REASON.path, REASON.meaning, wide=True),
        PrinterColumn("Revision", ".status.currentRevision", "the revision that serves", wide=True),
    ),
    scale=True,
)
CUSTOM_RESOURCES = (ADAPTER, POOL)


def custom_resource_definition(kind: CustomResource) -> Schema:
    subresources: Schema = {"status": {}}
    if kind.scale:
        subresources["scale"] = {
            "specReplicasPath": ".spec.replicas",
            "statusReplicasPath": ".status.stayingReplicas",
            "labelSelectorPath": ".status.selector",
        }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": kind.crd_name},
        "spec": {
            "group": GROUP,
            "names": {
                "kind": kind.name,
                "listKind": f"{kind.name}List",
                "plural": kind.plural,
                "singular": kind.name.lower(),
                "shortNames": [kind.short],
                "categories": [CATEGORY],
            },
            "scope": "Namespaced",
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": object_schema(kind)},
                    "subresources": subresources,
                    "additionalPrinterColumns": [_column(column) for column in kind.columns],
                }
            ],
        },
    }


def _column(column: PrinterColumn) -> Schema:
    written: Schema = {"name": column.name, "type": column.type, "jsonPath": column.path, "description": column.meaning}
    return written | ({"priority": 1} if column.wide else {})


def object_schema(kind: CustomResource) -> Schema:
    whole = structural(kind.resource.model_json_schema())
    properties = whole["properties"]
    return {
        "description": kind.meaning,
        "type": "object",
        "required": ["spec"],
        "properties": {
            "apiVersion": _only(properties["apiVersion"], "type", "enum"),
            "kind": _only(properties["kind"], "type", "enum"),
            # Kubernetes defines metadata: a schema may only restrict the name. 253 is the limit of any object's name.
            "metadata": {"type": "object", "properties": {"name": {"type": "string", "maxLength": 253}}},
            "spec": properties["spec"],
            "status": without_rules(structural(kind.status.model_json_schema(mode="serialization"))),
        },
        VALIDATIONS: [_of_the_name(rule) for rule in properties["metadata"]["properties"]["name"][VALIDATIONS]],
    }


def _only(schema: Schema, *keys: str) -> Schema:
    return {key: schema[key] for key in keys}


def _of_the_name(rule: Schema) -> Schema:
    """The API server does not evaluate rules inside metadata, but a rule of the whole object may read the name."""
    return rule | {"rule": rule["rule"].replace("self", "self.metadata.name"), "fieldPath": ".metadata.name"}


# ------------------------------------------------------------------------------------------------- structural schemas

_BOUNDS = ("enum", "pattern", "format", "minLength", "maxLength", "minimum", "maximum", "minItems", "maxItems")
_EXTENSIONS = ("x-kubernetes-list-type", "x-kubernetes-list-map-keys", "x-kubernetes-map-type")
_RULE = ("rule", "message", "reason", "fieldPath")
_GONE = frozenset(("title", "$defs", "additionalProperties"))
"""Keys that a structural schema does not have, or has in another form."""


def structural(schema: Schema, definitions: Mapping[str, Schema] | None = None) -> Schema:
    """A structural schema, as the API server requires it, from a schema of pydantic."""
    definitions = schema.get("$defs", {}) if definitions is None else definitions
    given = _inlined(schema, definitions)
    # A template that leaves a field empty writes null. Offline it means that the field is absent, and so it must in a
    # cluster.
    empty = {"nullable": True} if {"type": "null"} in schema.get("anyOf", []) else {}
    made: Schema = {}
    if "description" in given:
        made["description"] = " ".join(given.pop("description").split())
    if INT_OR_STRING in given:
        return made | _only(given, INT_OR_STRING, "pattern", "maxLength", VALIDATIONS)
    made["type"] = given.pop("type")
    if "const" in given:
        given["enum"] = [given.pop("const")]
    if (default := given.pop("default", None)) is not None:
        made["default"] = _without_what_is_empty(default)
    rules: list[Schema] = given.pop(VALIDATIONS, [])
    match made["type"]:
        case "object" if "properties" in given:
            made |= {"required": given.pop("required")} if "required" in given else {}
            made["properties"] = {
                name: structural(inner, definitions) for name, inner in given.pop("properties").items()
            }
        case "object":
            keys = given.pop("propertyNames", {})
            values = given.pop("patternProperties", None)
            value = next(iter(values.values())) if values else given["additionalProperties"]
            made |= {
                "maxProperties": given.pop("maxProperties"),
                "additionalProperties": structural(value, definitions),
            }
            if "maxLength" in keys:
                rules = [*rules, _keys_at_most(keys["maxLength"])]
        case "array":
            made["items"] = structural(given.pop("items"), definitions)
            given.setdefault("x-kubernetes-list-type", "atomic")
        case "integer":
            largest = max(given["enum"]) if "enum" in given else given["maximum"]
            given["format"] = "int32" if largest < 2**31 else "int64"
        case "string":
            rules = [*_with_description(given), *rules]
    if "enum" not in given:  # the API server ignores null in an enum, so such a field cannot be null
        made |= empty
    made |= {key: given.pop(key) for key in (*_BOUNDS, *_EXTENSIONS) if key in given}
    if rules:
        # Pydantic sorts the keys. We write the rule first, for people who read the file.
        made[VALIDATIONS] = [_only(rule, *(key for key in _RULE if key in rule)) for rule in rules]
    if left := given.keys() - _GONE:
        raise ValueError(f"a structural schema cannot have {', '.join(sorted(left))}")
    return made


def _inlined(schema: Schema, definitions: Mapping[str, Schema]) -> Schema:
    """The schema without `$ref`, and with one type: that of the value if it is not null."""
    given = dict(schema)
    choices = [choice for choice in given.pop("anyOf", []) if choice.get("type") != "null"]
    if len(choices) > 1:
        raise ValueError("a structural schema cannot have a field of several types")
    for choice in choices:
        given = _inlined(choice, definitions) | given
    if "$ref" in given:
        referred = definitions[given.pop("$ref").rsplit("/", 1)[1]]
        given = _inlined(referred, definitions) | given
    return given


def _without_what_is_empty(value: Any) -> Any:
    """Remove empty values inside a default. The fields in it have their own defaults."""
    if not isinstance(value, dict):
        return value
    shorter = {key: _without_what_is_empty(inner) for key, inner in value.items()}
    return {key: inner for key, inner in shorter.items() if inner is not None and inner not in ({}, [])}


def _with_description(schema: Schema) -> list[Schema]:
    """A rule with a sentence for people. The schema also has the pattern itself, which tools can read."""
    sentence = PATTERN_SENTENCES.get(schema.get("pattern", ""))
    if sentence is None:
        return []
    return validations([Rule(cel=f"self.matches({quoted(schema['pattern'])})", message=sentence, holds=None)])


def _keys_at_most(size: int) -> Schema:
    rule = Rule(
        cel=f"self.all(key, key.size() <= {size})", message=f"keys must be {size} characters or fewer", holds=None
    )
    return validations([rule])[0]


def without_rules(schema: Schema) -> Schema:
    """The schema of a status, without rules. Only the operator writes it, so rules would only cost time."""
    made = {key: value for key, value in schema.items() if key not in (VALIDATIONS, "default", "nullable")}
    if "properties" in made:
        made["properties"] = {name: without_rules(inner) for name, inner in made["properties"].items()}
    if "items" in made:
        made["items"] = without_rules(made["items"])
    return made
