"""manifests.md, crds.md and conditions.md: the custom resources, from the models in `motet.resources`."""

import sys
from collections.abc import Iterator

from motet.resources import LoRAAdapter, ServingPool
from motet.resources.crd import ADAPTER, CUSTOM_RESOURCES, POOL, object_schema
from motet.resources.planned_fields import PLANNED_FIELDS, PLANNED_VALUES
from motet.resources.reasons import ADAPTER_REASONS, POOL_REASONS
from motet.resources.source_uris import told
from motet.resources.status import ADAPTER_CONDITIONS, POOL_CONDITIONS
from motet.sources import SOURCES
from tools.reference.markdown import code, flat, note, table
from tools.reference.schema_fields import Schema, SchemaField, fields_of


def bounds(schema: Schema) -> str:
    if "enum" in schema:
        return " ".join(code(value) for value in schema["enum"])
    if "const" in schema:
        return code(schema["const"])
    said = str(schema.get("type", "object"))
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is not None or high is not None:
        said += f", {low} to {high}"
    if "maxLength" in schema:
        said += f", at most {schema['maxLength']} characters"
    return said


def manifest_rows(schema: Schema) -> Iterator[list[str]]:
    """One row for each field of a manifest."""
    for field in fields_of(schema, schema.get("$defs", {})):
        (value,) = field.values
        has_fields = "properties" in value
        meaning = flat(field.stated.get("description", ""))
        if not meaning and not has_fields and field.path not in ("apiVersion", "kind"):
            sys.exit(f"the manifest field {field.path} has no docstring under it: say what it changes")
        yield [code(field.path), "" if has_fields else bounds(value), default_of(field), meaning]


def default_of(field: SchemaField) -> str:
    if field.required:
        return "required"
    match field.stated.get("default"):
        case None | dict() | list():
            return ""
        case bool(value):
            return code(str(value).lower())
        case value:
            return code(value)


def source_rows() -> Iterator[list[str]]:
    """One row for each source of `motet.sources`."""
    for one in SOURCES.values():
        of = {"adapters": one.of_adapters, "models": one.of_models}
        whose = ", ".join(name for name, named in of.items() if named)
        yield [
            code(one.example),
            one.what,
            whose,
            "yes" if one.revisions else "",
            told(one.secrets, one.secret_options),
        ]


def manifests_page() -> str:
    parts = [
        note("services/common/motet/resources"),
        "# Manifest fields\n",
        flat("""`motet up -f FOLDER` reads every `*.yaml` in the folder: objects of these two kinds and `v1` objects
        `Namespace` and `Secret`. The namespace of an object is its tenant.""")
        + "\n",
    ]
    for kind in (ServingPool, LoRAAdapter):
        name = kind.__name__
        schema = kind.model_json_schema(by_alias=True)
        rows = list(manifest_rows(schema))
        parts += [f"## {name}\n", table(["field", "value", "default", "meaning"], rows)]
        coming = [[code(path), what] for path, what in PLANNED_FIELDS[name].items()]
        for path, values in PLANNED_VALUES.get(name, {}).items():
            coming += [[code(f"{path}: {value}"), what] for value, what in values.items()]
        parts += [
            "Motet does not have these fields and values yet; validation refuses them:\n",
            table(["field", "comes with"], coming),
        ]
    parts += [
        "## Sources\n",
        table(["URI", "what it names", "for", "`revision`", "keys of its Secret"], list(source_rows())),
        "An adapter on a volume has no URI: `spec.source.persistentVolumeClaim` names its claim.\n",
    ]
    return "\n".join(parts)


def rules_of(schema: Schema, path: str = "") -> Iterator[list[str]]:
    """What the API server checks, field by field. A rule of the keys or values of a map is beside the map."""
    for rule in schema.get("x-kubernetes-validations", []):
        where = f"{path}{rule.get('fieldPath', '')}".removeprefix(".")
        yield [code(where), flat(rule["message"])]
    for name, inner in schema.get("properties", {}).items():
        yield from rules_of(inner, f"{path}.{name}" if path else name)
    for key, suffix in (("items", "[]"), ("additionalProperties", "")):
        if key in schema:
            yield from rules_of(schema[key], f"{path}{suffix}")


def crds_page() -> str:
    conditions = {ADAPTER.name: ADAPTER_CONDITIONS, POOL.name: POOL_CONDITIONS}
    parts = [
        note("services/common/motet/resources"),
        "# Custom resources in a cluster\n",
        flat("""The fields of `spec` are those of [manifests](manifests.md), with the same bounds. This page has what is
        only in a cluster: short names, columns, rules with their messages, and what the operator reports. The
        definitions are in `crds/`; `kubectl get motet -A` shows objects of both kinds.""")
        + "\n",
    ]
    for kind in CUSTOM_RESOURCES:
        schema = object_schema(kind)
        status = [
            [
                code(field.path),
                "" if "properties" in field.stated else bounds(field.stated),
                flat(field.stated["description"]),
            ]
            for field in fields_of(schema["properties"]["status"], {})
        ]
        columns = [
            [column.name, code(column.path), "wide" if column.wide else "", column.meaning] for column in kind.columns
        ]
        parts += [
            f"## {kind.name}\n",
            f"{kind.meaning} `kubectl get {kind.short}`.\n",
            "Columns:\n",
            table(["column", "from", "shown", "meaning"], columns),
            "Conditions; an absent condition is Unknown:\n",
            table(["type", "True when"], [[code(name), what] for name, what in conditions[kind.name].items()]),
            "Status:\n",
            table(["field", "value", "meaning"], status),
            "Rules. Offline validation checks most of them, too, with the same messages:\n",
            table(["field", "message"], list(rules_of(schema))),
        ]
    return "\n".join(parts)


def conditions_page() -> str:
    parts = [
        note("services/common/motet/resources"),
        "# Conditions and their reasons\n",
        flat("""What `kubectl describe`, `kubectl wait --for=condition=…` and `motet status` show. Reasons are stable;
        messages are for people and may change. If a condition is absent, read it as Unknown. `Reconciling` is present
        while work is in progress. `Stalled` is present while nothing will happen until somebody changes something. Both
        repeat the reason of the condition that causes them.""")
        + "\n",
    ]
    for kind, conditions, reasons in (
        (ADAPTER, ADAPTER_CONDITIONS, ADAPTER_REASONS),
        (POOL, POOL_CONDITIONS, POOL_REASONS),
    ):
        parts.append(f"## {kind.name}\n")
        for condition, why in reasons.items():
            parts += [
                f"### {condition} of a {kind.name}\n",
                f"True when {conditions[condition]}.\n",
                table(["reason", "what it means and what to do"], [[code(word), what] for word, what in why.items()]),
            ]
    return "\n".join(parts)
