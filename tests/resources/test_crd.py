"""The CRDs: structural, bounded, and in the words of offline validation."""

import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

import motet_cli
from motet.resources import LoRAAdapter, ServingPool, crd, files_of, forbidden_changes, read_text
from motet.resources.crd import (
    ADAPTER,
    CUSTOM_RESOURCES,
    POOL,
    CustomResource,
    custom_resource_definition,
    structural,
)
from motet.resources.fields import INT_OR_STRING, PATTERN_SENTENCES
from motet.resources.status import (
    ADAPTER_CONDITIONS,
    POOL_CONDITIONS,
    Artifact,
    Condition,
    LoRAAdapterStatus,
    ServingPoolStatus,
)
from motet.resources.validation_rules import VALIDATIONS
from testbed.tree import ROOT, tracked
from tests.resources.invalid_objects import BROKEN, GOOD, InvalidObject

Schema = dict[str, Any]

KEYWORDS = {
    "object": {"required", "properties", "additionalProperties", "maxProperties", "x-kubernetes-map-type"},
    "array": {"items", "minItems", "maxItems", "x-kubernetes-list-type", "x-kubernetes-list-map-keys"},
    "string": {"enum", "pattern", "format", "minLength", "maxLength"},
    "integer": {"enum", "format", "minimum", "maximum"},
    "boolean": set(),
    "number or text": {INT_OR_STRING, "pattern", "maxLength"},
}
OF_ALL = {"type", "description", "default", "nullable", VALIDATIONS}

MERGED = {
    "spec.admission.allowedSchemes": "set",
    "spec.adapterVolumes": "map",
    "spec.template.env": "map",
    "spec.tenants.overrides": "map",
}
LISTS_AND_MAPS = {
    *("values", "matchLabels", "matchExpressions", "resources.limits", "requests", "nodeSelector", "env", "share"),
    *("tolerations", "topologySpreadConstraints", "adapterVolumes", "labels", "annotations", "overrides"),
    "preferredDuringSchedulingIgnoredDuringExecution",
    # Of nodes it is an object.
    *(f"{pods}.requiredDuringSchedulingIgnoredDuringExecution" for pods in ("podAffinity", "podAntiAffinity")),
}

object_schema = cache(crd.object_schema)
"""It takes a fifth of a second, and hundreds of tests read it."""

each_kind = pytest.mark.parametrize("kind", CUSTOM_RESOURCES, ids=lambda kind: kind.name)


def type_of(schema: Schema) -> str:
    return "number or text" if INT_OR_STRING in schema else str(schema["type"])


def walk(schema: Schema, path: str = "") -> Iterator[tuple[str, Schema]]:
    """Every schema in a schema, by the path of what it describes."""
    yield path, schema
    for name, inner in schema.get("properties", {}).items():
        yield from walk(inner, f"{path}.{name}" if path else name)
    if "items" in schema:
        yield from walk(schema["items"], f"{path}[]")
    if "additionalProperties" in schema:
        yield from walk(schema["additionalProperties"], f"{path}{{}}")


def at(schema: Schema, dotted: str) -> Schema:
    return next(inner for path, inner in walk(schema) if path == dotted)


def closed(schema: Schema) -> Schema:
    """As under `kubectl --validate=strict`: what no property names is refused."""
    made = {key: value for key, value in schema.items() if key != "properties"}
    if "properties" in schema:
        made["properties"] = {name: closed(inner) for name, inner in schema["properties"].items()}
        made["additionalProperties"] = False
    if "items" in schema:
        made["items"] = closed(schema["items"])
    if "nullable" in schema:
        made["type"] = [schema["type"], "null"]
    return made


@cache
def strict(kind: CustomResource) -> Draft202012Validator:
    schema = closed(object_schema(kind))  # a copy
    schema["properties"]["metadata"] = {"type": "object"}
    return Draft202012Validator(schema)


def kind_of(data: Schema) -> CustomResource:
    return next(kind for kind in CUSTOM_RESOURCES if kind.name == data["kind"])


# --------------------------------------------------------------------------------------------------------- structural


@each_kind
def test_the_schema_is_structural(kind: CustomResource) -> None:
    for path, schema in walk(object_schema(kind)):
        known = KEYWORDS[type_of(schema)] | OF_ALL
        assert schema.keys() <= known, path
        if type_of(schema) == "object":
            assert ("properties" in schema) != ("additionalProperties" in schema), path
            assert set(schema.get("required", [])) <= schema.get("properties", {}).keys(), path


EDGES = ((min, "minimum"), (max, "maximum"))
"""Of an integer: that of its enum, or the keyword"""


@each_kind
def test_everything_has_a_bound(kind: CustomResource) -> None:
    for path, schema in walk(object_schema(kind)):
        match type_of(schema):
            case "string":
                assert "maxLength" in schema or "enum" in schema or schema.get("format") == "date-time", path
            case "integer":
                least, largest = [edge(schema.get("enum", (schema.get(name),))) for edge, name in EDGES]
                assert least < largest, path
                assert (schema["format"] == "int32") == (largest < 2**31), path
            case "array":
                assert "maxItems" in schema, path
            case "object":
                assert "properties" in schema or "maxProperties" in schema, path


@each_kind
def test_every_field_is_explained(kind: CustomResource) -> None:
    unexplained = {path for path, schema in walk(object_schema(kind)) if "description" not in schema}
    own = {path for path in unexplained if path.startswith(("spec", "status")) and path[-1] not in "]}"}
    assert own == set()


@each_kind
def test_an_optional_field_may_be_null(kind: CustomResource) -> None:
    """Templates write null for what they leave empty. With a default the API server does this by itself; it cannot with
    an enum. Lists and maps have a default offline, which is empty, and none in a schema."""
    for path, schema in walk(object_schema(kind)):
        for name, inner in schema.get("properties", {}).items():
            if path.startswith("spec"):
                optional = name not in schema.get("required", []) and "default" not in inner
                assert inner.get("nullable", False) == (
                    optional
                    and not {name, f"{path.rpartition('.')[2]}.{name}"} & LISTS_AND_MAPS
                    and "enum" not in inner
                ), f"{path}.{name}"
            else:
                assert "nullable" not in inner


@each_kind
def test_lists_say_how_they_are_merged(kind: CustomResource) -> None:
    for path, schema in walk(object_schema(kind)):
        if type_of(schema) != "array":
            continue
        if path == "status.conditions":
            assert (schema["x-kubernetes-list-type"], schema["x-kubernetes-list-map-keys"]) == ("map", ["type"])
            assert "type" in schema["items"]["required"]
        else:
            assert schema["x-kubernetes-list-type"] == MERGED.get(path, "atomic"), path


@each_kind
def test_rules_are_on_the_spec_and_the_name_only(kind: CustomResource) -> None:
    for path, schema in walk(object_schema(kind)):
        for rule in schema.get(VALIDATIONS, []):
            assert path in ("", "spec") or path.startswith("spec."), path
            assert rule.keys() <= {"rule", "message", "reason", "fieldPath"}
            assert "\n" not in rule["rule"] + rule["message"]
            if "fieldPath" in rule:
                assert at(schema, rule["fieldPath"].removeprefix(".")), path


@each_kind
def test_defaults_are_those_of_the_models_and_fit_their_schema(kind: CustomResource) -> None:
    for path, schema in walk(object_schema(kind)):
        if "default" in schema:
            assert path.startswith("spec."), path
            Draft202012Validator(closed(schema)).validate(schema["default"])
    assert "default" not in json.dumps(object_schema(kind)["properties"]["status"])


def test_a_small_object_is_stored_with_its_defaults() -> None:
    pool, adapter = object_schema(POOL), object_schema(ADAPTER)
    assert at(pool, "spec.replicas")["default"] == 1  # so that /scale always answers
    assert at(pool, "spec.engine")["default"] == {}
    assert at(pool, "spec.allowedNamespaces")["default"] == {"from": "Same"}
    assert at(adapter, "spec.placement")["default"] == {"minReplicas": 0, "maxReplicas": 1000}
    assert at(adapter, "spec.suspend")["default"] is False


@each_kind
def test_every_bound_of_the_spec_is_that_of_the_model(kind: CustomResource) -> None:
    """Read from pydantic's own schema, by another way than the generator's."""
    whole = kind.resource.model_json_schema()
    bounds = ("minimum", "maximum", "maxLength", "maxItems", "maxProperties", "pattern", "enum")

    def follow(schema: Schema) -> Schema:
        for choice in schema.get("anyOf", []):
            schema = schema | (choice if choice.get("type") != "null" else {})
        return follow(whole["$defs"][schema["$ref"].rsplit("/", 1)[1]]) if "$ref" in schema else schema

    def compare(ours: Schema, theirs: Schema, path: str) -> None:
        theirs = follow(theirs)
        wanted = {key: theirs[key] for key in bounds if key in theirs}
        if "const" in theirs:
            wanted["enum"] = [theirs["const"]]
        assert {key: ours[key] for key in bounds if key in ours} == wanted, path
        assert set(ours.get("required", [])) == set(theirs.get("required", [])), path
        assert ours.get("properties", {}).keys() == theirs.get("properties", {}).keys(), path
        for name, inner in ours.get("properties", {}).items():
            compare(inner, theirs["properties"][name], f"{path}.{name}")
        if "items" in ours:
            compare(ours["items"], theirs["items"], f"{path}[]")

    compare(object_schema(kind)["properties"]["spec"], whole["properties"]["spec"], "spec")


@pytest.mark.parametrize(
    "field",
    [
        {"anyOf": [{"type": "string", "maxLength": 1}, {"type": "integer", "minimum": 0, "maximum": 1}]},
        {"type": "string", "maxLength": 1, "not": {"enum": ["a"]}},
    ],
)
def test_a_schema_that_is_not_structural_is_refused(field: Schema) -> None:
    with pytest.raises(ValueError, match="a structural schema"):
        structural({"type": "object", "properties": {"field": field}})


# -------------------------------------------------------------------------------------------------------------- names


def test_names_columns_and_subresources() -> None:
    adapter, pool = (custom_resource_definition(kind)["spec"] for kind in CUSTOM_RESOURCES)
    assert (adapter["names"]["shortNames"], pool["names"]["shortNames"]) == (["lora"], ["spool"])
    assert adapter["names"]["categories"] == pool["names"]["categories"] == ["motet"]
    assert adapter["scope"] == pool["scope"] == "Namespaced"
    (adapter_version,), (pool_version,) = adapter["versions"], pool["versions"]
    assert adapter_version["subresources"] == {"status": {}}
    assert pool_version["subresources"]["status"] == {}
    assert pool_version["subresources"]["scale"] == {
        "specReplicasPath": ".spec.replicas",
        "statusReplicasPath": ".status.stayingReplicas",
        "labelSelectorPath": ".status.selector",
    }


@each_kind
def test_columns_show_what_exists(kind: CustomResource) -> None:
    schema = object_schema(kind)
    for column in kind.columns:
        path = re.sub(r"\[\?.*?\]", "[]", column.path).removeprefix(".")
        if path != "metadata.creationTimestamp":
            assert at(schema, path)["type"] == column.type, column.name


def test_a_pool_can_be_scaled() -> None:
    schema = object_schema(POOL)
    assert at(schema, "spec.replicas")["format"] == at(schema, "status.stayingReplicas")["format"] == "int32"
    assert at(schema, "status.selector")["type"] == "string"


# ---------------------------------------------------------------------------------------------------------- the rules


def said_offline(broken: InvalidObject) -> list[tuple[str, str]]:
    """(field, sentence) of each complaint."""
    reading = read_text(yaml.safe_dump(broken.object))
    if not broken.change:
        return [(problem.field, problem.message) for problem in reading.problems]
    (before,) = read_text(yaml.safe_dump(broken.before)).manifests
    (after,) = reading.manifests
    assert isinstance(before.resource, LoRAAdapter | ServingPool)
    assert isinstance(after.resource, LoRAAdapter | ServingPool)
    return [(".".join(path), sentence) for path, sentence in forbidden_changes(before.resource, after.resource)]


@pytest.mark.parametrize("good", GOOD.values(), ids=GOOD)
def test_a_valid_object_is_accepted(good: Schema) -> None:
    assert read_text(yaml.safe_dump(good)).problems == ()
    strict(kind_of(good)).validate(good)


@pytest.mark.parametrize("broken", [each for each in BROKEN if not each.only_in_a_cluster], ids=str)
def test_offline_validation_gives_the_clusters_message(broken: InvalidObject) -> None:
    ((field, sentence),) = said_offline(broken)
    # Offline quotes the value as well; the API server does so in front of the sentence.
    assert (field, sentence.split("; not '")[0]) == (broken.field, broken.message)


@pytest.mark.parametrize("broken", BROKEN, ids=str)
def test_a_message_is_that_of_a_rule_of_its_field(broken: InvalidObject) -> None:
    found = set()
    for path, schema in walk(object_schema(next(kind for kind in CUSTOM_RESOURCES if kind.name == broken.kind))):
        for rule in schema.get(VALIDATIONS, []):
            found.add((f"{path}{rule.get('fieldPath', '')}".removeprefix("."), rule["message"]))
    field = (
        re.sub(r"\[\d+\]", "[]", broken.field)
        .replace("matchLabels.team", "matchLabels{}")
        .replace("limits.cpu", "limits{}")
    )
    assert (field, broken.message) in found


@each_kind
def test_every_rule_is_broken_once(kind: CustomResource) -> None:
    rules = {rule["message"] for _, schema in walk(object_schema(kind)) for rule in schema.get(VALIDATIONS, [])}
    assert rules == {broken.message for broken in BROKEN if broken.kind == kind.name}


@each_kind
def test_the_page_has_every_rule(kind: CustomResource) -> None:
    page = (ROOT / "docs/reference/crds.md").read_text()
    for path, schema in walk(object_schema(kind)):
        for rule in schema.get(VALIDATIONS, []):
            where = f"{path}{rule.get('fieldPath', '')}".removeprefix(".").replace("{}", "")
            assert f"| `{where}` | {rule['message']} |" in page, path


# --------------------------------------------------------------------------------------------------------- round trips


def examples() -> list[Any]:
    """Every manifest of ours that the repository shows: bundled, or in a page."""
    found = []
    for path in files_of(Path(motet_cli.__file__).parent / "bundled"):
        found += [pytest.param(data, id=path.name) for data in yaml.safe_load_all(path.read_text())]
    for path in tracked():
        if path.suffix == ".md":
            for block in re.findall(r"```ya?ml\n(.*?)```", path.read_text(), re.DOTALL):
                found += [
                    pytest.param(data, id=str(path.relative_to(ROOT)))
                    for data in yaml.safe_load_all(block)
                    if isinstance(data, dict) and data.get("apiVersion") == "motet.dev/v1alpha1"
                ]
    return found


@pytest.mark.parametrize("data", examples())
def test_our_own_manifests_fit_the_schema(data: Schema) -> None:
    strict(kind_of(data)).validate(data)


@pytest.mark.parametrize("broken", [each for each in BROKEN if each.message in PATTERN_SENTENCES.values()], ids=str)
def test_patterns_are_in_the_schema_for_tools_without_cel(broken: InvalidObject) -> None:
    if broken.field != "metadata.name":  # Kubernetes' own, of which a schema may say little
        assert not strict(kind_of(broken.object)).is_valid(broken.object)


def test_the_operators_status_fits_the_schema() -> None:
    condition = Condition(
        type="Ready",
        status="True",
        reason="Serving",
        message="",
        last_transition_time=datetime(2026, 11, 20, tzinfo=UTC),
        observed_generation=3,
    )
    adapter = LoRAAdapterStatus(
        observed_generation=3,
        conditions=(condition,),
        model_name="acme/legal",
        base_model="motet-demo",
        artifact=Artifact(digest=f"sha256:{'0' * 64}", size_bytes=1, rank=8, alpha="16", target_modules=("q_proj",)),
        placement_summary="1/1",
    )
    pool = ServingPoolStatus(conditions=(condition,), replicas=1, replica_summary="1/1", selector="motet.dev/pool=demo")
    for kind, status in ((ADAPTER, adapter), (POOL, pool)):
        written = json.loads(status.model_dump_json(by_alias=True, exclude_none=True))
        strict(kind).validate(GOOD[kind.name] | {"status": written})
        assert kind.status.model_validate(written) == status
        assert kind.status.model_validate(written | {"added": "by a newer operator"}) == status


@each_kind
def test_conditions_fit_where_they_are_written(kind: CustomResource) -> None:
    conditions = at(object_schema(kind), "status.conditions")
    names = {ADAPTER.name: ADAPTER_CONDITIONS, POOL.name: POOL_CONDITIONS}[kind.name]
    assert len(names) <= conditions["maxItems"]
    assert all(re.fullmatch(conditions["items"]["properties"]["type"]["pattern"], name) for name in names)
