"""Write docs/reference from the code (`make generate`): API, settings, metrics, errors, manifest fields, CRDs.

It fails for everything that is defined without a docstring or a description. The results are committed; tests/repo
compares them with what this tool writes now. `--out DIR` writes elsewhere.
"""

import argparse
import ast
import importlib
import importlib.util
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from pydantic_settings import BaseSettings

import motet_gateway.errors
from motet.errors import TABLE, MotetError

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = ROOT / "docs" / "reference"

PACKAGES = {
    "motet": "Every process",
    "motet_gateway": "Gateway",
    "motet_scheduler": "Scheduler",
    "motet_supervisor": "Supervisor",
    "motet_predictor": "Predictor",
    "motet_runner": "Runner",
    "motet_operator": "Operator",
    "motet_cli": "Command line",
}

Schema = dict[str, Any]
Schemas = dict[str, Schema]


def module_of(package: str, name: str) -> ModuleType | None:
    if importlib.util.find_spec(f"{package}.{name}") is None:
        return None
    return importlib.import_module(f"{package}.{name}")


def table(head: list[str], rows: list[list[str]]) -> str:
    cells = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in cells) + "\n"


def code(text: object) -> str:
    return f"`{text}`" if str(text) else ""


def note(origin: str) -> str:
    return f"<!-- Generated from {origin}: change that, not this file, and run `make generate`. -->\n"


def flat(text: str) -> str:
    return " ".join(text.split())


# Settings ------------------------------------------------------------------------------------------------------------


def settings_of(module: ModuleType) -> list[type[BaseSettings]]:
    return [
        kind
        for _, kind in sorted(vars(module).items())
        if inspect.isclass(kind) and issubclass(kind, BaseSettings) and kind.__module__ == module.__name__
    ]


def field_docstrings(kind: type) -> dict[str, str]:
    """The string under each annotated field, of the class and its base classes."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if base.__module__.split(".")[0] not in PACKAGES:
            continue
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(definition, ast.ClassDef)
        for pair in pairwise(definition.body):
            match pair:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    found[name] = inspect.cleandoc(text)
    return found


def default_of(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True, validated_data={})
    if value is PydanticUndefined:
        return "required"
    if isinstance(value, list | tuple | set | frozenset):
        value = json.dumps(list(value))
    return "" if value is None or value == "" else code(value)


def variable(kind: type[BaseSettings], name: str) -> str:
    alias = kind.model_fields[name].validation_alias
    return alias if isinstance(alias, str) else f"{kind.model_config.get('env_prefix', '')}{name}".upper()


def settings_page() -> str:
    from motet.settings import RENAMED

    parts = [
        note("each package's settings.py"),
        "# Settings\n",
        flat("""Every process reads its settings from the environment, once, when it starts. Lists are written as JSON.
        If a value is wrong, the process ends with exit status 2 and names the variable. `motet up` sets what connects
        the processes; they inherit the rest from its environment.""")
        + "\n",
    ]
    for package, title in PACKAGES.items():
        module = module_of(package, "settings")
        kinds = settings_of(module) if module is not None else []
        if not kinds:
            continue
        parts.append(f"## {title}\n")
        for kind in kinds:
            docstrings = field_docstrings(kind)
            if len(kinds) > 1:
                parts.append(f"{inspect.cleandoc(kind.__doc__ or '')}\n")
            rows = []
            for name, field in kind.model_fields.items():
                if name not in docstrings:
                    sys.exit(f"{kind.__module__}.{kind.__name__}.{name} has no docstring under it: say what it changes")
                rows.append([code(variable(kind, name)), default_of(field), flat(docstrings[name])])
            parts.append(table(["variable", "default", "meaning"], rows))
    renamed = [[code(new), code(old)] for old, new in sorted(RENAMED.items(), key=lambda pair: pair[1])]
    parts += [
        "## Renamed\n",
        "If an old name is still set, the process ends with exit status 2 and says the new name.\n",
        table(["variable", "old name"], renamed),
    ]
    return "\n".join(parts)


# Metrics -------------------------------------------------------------------------------------------------------------


def metrics_classes(package: str) -> Iterator[type]:
    """The metrics classes of every module `metrics` in the package and its subpackages."""
    (folder,) = importlib.import_module(package).__path__
    for path in sorted(Path(folder).rglob("metrics.py")):
        name = ".".join((package, *path.relative_to(folder).with_suffix("").parts))
        for value in vars(importlib.import_module(name)).values():
            if isinstance(value, type) and value.__module__ == name and value.__name__.endswith("Metrics"):
                yield value


def metrics_of(package: str) -> list[list[str]]:
    rows: dict[str, list[str]] = {}
    for kind in metrics_classes(package):
        # Each class has its own registry: two classes of one package may have metrics in common.
        registry = CollectorRegistry(auto_describe=True)
        kind(registry)
        for collector in list(registry._collector_to_names):
            labels = getattr(collector, "_labelnames", ()) if isinstance(collector, MetricWrapperBase) else ()
            for metric in collector.describe() if hasattr(collector, "describe") else collector.collect():
                if not metric.documentation:
                    sys.exit(f"{kind.__module__}: the metric {metric.name} has no explanation")
                name = metric.name + ("_total" if metric.type == "counter" else "")
                rows[name] = [code(name), metric.type, ", ".join(map(code, labels)), flat(metric.documentation)]
    return [rows[name] for name in sorted(rows)]


def metrics_page() -> str:
    parts = [
        note("each package's metrics.py"),
        "# Metrics\n",
        flat("""In the Prometheus text format. Locally each process serves its own on a Unix socket, and the gateway's
        `/metrics` appends all of them with a label `service`. Every process also has the usual metrics
        `process_`, `python_info` and `python_gc_`. Histograms appear as `_bucket`, `_sum` and `_count`. Counters begin
        at 0 when a process starts; look at their rate. The labels `tenant`, `adapter` and those that list adapters are
        empty unless MOTET_METRICS_NAMES says how many may be named.""")
        + "\n",
    ]
    for package, title in PACKAGES.items():
        if rows := metrics_of(package):
            parts += [f"## {title}\n", table(["metric", "type", "labels", "meaning"], rows)]
    return "\n".join(parts)


# Errors --------------------------------------------------------------------------------------------------------------


def errors_by_code() -> dict[str, type[MotetError]]:
    """The errors of every process, and those that only the gateway answers with."""
    own = [kind for kind in vars(motet_gateway.errors).values() if inspect.isclass(kind)]
    return TABLE | {
        kind.mapping.code: kind
        for kind in own
        if kind.__module__ == motet_gateway.errors.__name__ and issubclass(kind, MotetError)
    }


def errors_page() -> str:
    parts = [
        note("services/common/motet/errors.py and services/gateway/motet_gateway/errors.py"),
        "# Errors\n",
        flat("""All errors of Motet: the code and the type that HTTP clients read as `error.code` and `error.type`, the
        gRPC status between processes, and whether trying again makes sense. Every message says what is wrong and what
        to do.""")
        + "\n",
    ]
    for name, kind in sorted(errors_by_code().items()):
        row = kind.mapping
        meaning = vars(kind).get("__doc__")
        if not meaning:
            sys.exit(f"{kind.__module__}.{kind.__name__} has no docstring: say what happened and what to do")
        wait = f"try again after {row.retry_after:g} s, unless the answer says otherwise"
        retry = wait if row.retry_after else "do not send it again unchanged"
        parts += [
            f"## {name}\n",
            flat(meaning) + "\n",
            f"HTTP {row.http} · type `{row.type}` · gRPC `{row.grpc.name}` · {retry}\n",
        ]
    return "\n".join(parts)


# API -----------------------------------------------------------------------------------------------------------------


def api_page() -> str:
    from motet_gateway.openapi import document
    from motet_gateway.openapi.document import OPERATIONS
    from motet_gateway.parameters import Body
    from motet_gateway.settings import Settings
    from motet_gateway.unsupported_parameters import UNSUPPORTED

    described = document(metrics=True)
    schemas = described["components"]["schemas"]
    body_mib, counted_mib = (
        Settings.model_fields[name].default // 2**20 for name in ("max_body_bytes", "max_counted_bytes")
    )
    overview, sections = [], []
    for one in OPERATIONS:
        heading, said = f"{one.method.upper()} {one.path}", described["paths"][one.path][one.method]
        scope = "no key" if one.keyless else code(one.scope) if one.scope else "any"
        overview.append([f"[{heading}](#{anchor(heading)})", one.summary, scope])
        sections += [f"## {heading}\n", *operation_section(said, schemas)]
    failed = described["paths"]["/v1/models"]["get"]["responses"]["503"]["headers"]
    without_effect = ", ".join(map(code, sorted(Body.hints - Body.model_fields.keys() - {"best_of", "suffix"})))
    return "\n".join(
        [
            note("services/gateway/motet_gateway/openapi"),
            "# API\n",
            flat("""What the gateway takes and answers over HTTP. OpenAI's clients work with it: give them the gateway's
            address with `/v1` as the base URL. `/openapi.json` has the same description, for generators of clients.""")
            + "\n",
            table(["path", "what it does", "scope of the key"], overview),
            "## What holds for every path\n",
            inspect.cleandoc(f"""
            - A gateway with keys asks for `authorization: Bearer <key>` ([API keys](../guides/keys.md)). A gateway
              without keys ignores the header.
            - A body is JSON with `content-type: application/json`. It may have {body_mib} MiB
              (`MOTET_GATEWAY_MAX_BODY_BYTES`), for `/tokenize` and `/detokenize` {counted_mib} MiB
              (`MOTET_GATEWAY_MAX_COUNTED_BYTES`).
            - A field without a default may be null, which is the same as leaving it out.
            - Every answer has the header `x-request-id`. Send your own to find the request in the gateway's log: 1 to
              128 letters, digits, `.`, `_`, `:` or `-`.
            - Every error has the body and the headers shown [below](#an-error), and a code from [errors](errors.md).
            - Another path answers 404 with `not_found`, another method 405 with `method_not_allowed`.
            """)
            + "\n",
            *sections,
            "## An error\n",
            table(["field", "value", "meaning"], answer_rows(schemas["ErrorBody"], schemas)),
            header_table(failed),
            "## Parameters of other servers\n",
            flat("""Motet refuses these parameters of chat and plain completions with `unsupported_parameter`: it does
            not have them, and without them the answer would not be what they ask for. It takes a value that asks for
            nothing, such as null.""")
            + "\n",
            table(["parameter", "why"], [[code(name), why] for name, (why, _) in UNSUPPORTED.items()]),
            f"Motet takes these, and they change nothing: {without_effect}.\n",
            flat("""It ignores every other field that it does not know, and counts it in the metric
            `motet_unknown_request_fields_total`.""")
            + "\n",
        ]
    )


def anchor(heading: str) -> str:
    """The anchor that GitHub makes of a heading."""
    return re.sub(r"[^a-z0-9_ -]", "", heading.lower()).replace(" ", "-")


def operation_section(said: Schema, schemas: Schemas) -> Iterator[str]:
    end = "" if said["summary"].endswith("?") else "."
    yield f"{said['summary']}{end} {said['description']}\n"
    if "requestBody" in said:
        yield "Body:\n"
        rows = schema_rows(said["requestBody"]["content"]["application/json"]["schema"], schemas)
        yield table(["field", "value", "default", "meaning"], list(rows))
    answer = said["responses"]["200"]
    for media, content in answer.get("content", {"nothing": {}}).items():
        if "schema" in content:
            yield "Each event of a stream:\n" if media == "text/event-stream" else "Answer:\n"
            yield table(["field", "value", "meaning"], answer_rows(content["schema"], schemas))
        else:
            yield "Answer: 200 without a body.\n" if media == "nothing" else f"Answer: `{media}`.\n"
    if own := {name: one for name, one in answer["headers"].items() if name != "x-request-id"}:
        yield "Headers of the answer:\n"
        yield header_table(own)
    yield "Errors:\n"
    refusals = ((status, one) for status, one in said["responses"].items() if status != "200")
    yield table(["status", "code"], [[status, linked(one)] for status, one in refusals])


def linked(response: Schema) -> str:
    """The codes, each as a link to the page on errors."""
    said: str = response["description"]
    return re.sub(r"`(\w+)`", r"[`\1`](errors.md#\1)", said) if "content" in response else said


def header_table(headers: Schemas) -> str:
    return table(["header", "meaning"], [[code(name), one["description"]] for name, one in headers.items()])


def answer_rows(schema: Schema, schemas: Schemas) -> list[list[str]]:
    """Remove the column of defaults: an answer has none."""
    return [[where, value, meaning] for where, value, _, meaning in schema_rows(schema, schemas)]


def schema_rows(schema: Schema, schemas: Schemas, path: str = "") -> Iterator[list[str]]:
    """One row per field of an object, depth first."""
    schema = dereferenced(schema, schemas)
    for name, one in schema.get("properties", {}).items():
        where = f"{path}.{name}" if path else name
        default = code(json.dumps(one["default"])) if one.get("default") is not None else ""
        default = "required" if name in schema.get("required", []) else default
        yield [code(where), value_of(one, schemas), default, flat(one.get("description", ""))]
        for choice in choices(one):
            inner = dereferenced(choice, schemas)
            yield from schema_rows(inner, schemas, where)
            yield from schema_rows(inner.get("items", {}), schemas, f"{where}[]")


def dereferenced(schema: Schema, schemas: Schemas) -> Schema:
    return schemas[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema


def choices(schema: Schema) -> list[Schema]:
    """The schema of a field without null."""
    return [one for one in schema.get("anyOf", [schema]) if one != {"type": "null"}]


def value_of(schema: Schema, schemas: Schemas) -> str:
    """The type with its bounds, as text."""
    if "anyOf" in schema:
        said = " or ".join(value_of(one, schemas) for one in choices(schema))
        # The page says once that null is the same as leaving a field out.
        return said + (" or null" if {"type": "null"} in schema["anyOf"] and "default" not in schema else "")
    schema = dereferenced(schema, schemas)
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        return ", ".join(code(json.dumps(one)) for one in values if one is not None)
    match schema.get("type", "anything"):
        case "array":
            of = value_of(schema["items"], schemas) if schema.get("items") else "anything"
            return f"list of {of}{sizes(schema.get('minItems'), schema.get('maxItems'))}"
        case "string":
            return f"string{sizes(schema.get('minLength'), schema.get('maxLength'), ' characters')}"
        case "null":
            return code("null")
        case str(kind):
            return kind + numbers(schema)
    raise TypeError(schema)


def numbers(schema: Schema) -> str:
    low, above, high = (schema.get(name) for name in ("minimum", "exclusiveMinimum", "maximum"))
    least = f" from {low:g}" if low is not None else f" above {above:g}" if above is not None else ""
    return least + (f" to {high}" if high is not None else "")


def sizes(least: int | None, most: int | None, what: str = "") -> str:
    if most is not None:
        return f" ({least} to {most}{what})" if least else f" (at most {most}{what})"
    return " (not empty)" if least else ""


# Manifests -----------------------------------------------------------------------------------------------------------


def bounds(schema: dict[str, Any]) -> str:
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


def fields(schema: dict[str, Any], definitions: dict[str, Any], path: str) -> Iterator[list[str]]:
    """One row per field below `path`, depth first."""
    required = schema.get("required", [])
    for name, stated in schema.get("properties", {}).items():
        where = f"{path}.{name}" if path else name
        value = dict(stated)
        choices = [choice for choice in value.pop("anyOf", []) if choice.get("type") != "null"]
        if len(choices) == 1:
            value |= choices[0]
        inner = value
        if "$ref" in inner:
            inner = definitions[inner["$ref"].rsplit("/", 1)[1]]
        default = stated.get("default")
        if name in required:
            said = "required"
        else:
            said = "" if default is None or isinstance(default, dict | list) else code(str(default).replace("'", '"'))
        if isinstance(default, bool):
            said = code(str(default).lower())
        nested = inner.get("properties")
        meaning = flat(stated.get("description", ""))
        if not meaning and not nested and name not in ("apiVersion", "kind"):
            sys.exit(f"the manifest field {where} has no docstring under it: say what it changes")
        yield [code(where), "" if nested else bounds(inner), said, meaning]
        if nested:
            yield from fields(inner, definitions, where)
        items = inner.get("items", {})
        if "$ref" in items:
            yield from fields(definitions[items["$ref"].rsplit("/", 1)[1]], definitions, f"{where}[]")


def manifests_page() -> str:
    from motet.resources import LoRAAdapter, ServingPool
    from motet.resources.planned_fields import PLANNED_FIELDS, PLANNED_VALUES
    from motet.resources.source_uris import PLANNED_SCHEMES

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
        rows = list(fields(schema, schema.get("$defs", {}), ""))
        parts += [f"## {name}\n", table(["field", "value", "default", "meaning"], rows)]
        coming = [[code(path), what] for path, what in PLANNED_FIELDS[name].items()]
        for path, values in PLANNED_VALUES.get(name, {}).items():
            coming += [[code(f"{path}: {value}"), what] for value, what in values.items()]
        parts += [
            "Motet does not have these fields and values yet; validation refuses them:\n",
            table(["field", "comes with"], coming),
        ]
    schemes = [[code(f"{scheme}://"), what] for scheme, what in PLANNED_SCHEMES.items()]
    parts += ["## Sources to come\n", table(["URI", "comes with"], schemes)]
    return "\n".join(parts)


# CRDs ----------------------------------------------------------------------------------------------------------------


def described(schema: dict[str, Any], path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every field below a structural schema, with its path."""
    for name, inner in schema.get("properties", {}).items():
        where = f"{path}.{name}" if path else name
        yield where, inner
        yield from described(inner, where)
        yield from described(inner.get("items", {}), f"{where}[]")


def rules_of(schema: dict[str, Any]) -> list[list[str]]:
    """What the API server checks, field by field."""
    rows = []
    for path, inner in [("", schema), *described(schema, "")]:
        for rule in inner.get("x-kubernetes-validations", []):
            where = f"{path}{rule.get('fieldPath', '')}".removeprefix(".")
            rows.append([code(where), flat(rule["message"])])
    return rows


def crds_page() -> str:
    from motet.resources.crd import ADAPTER, CUSTOM_RESOURCES, POOL, object_schema
    from motet.resources.status import ADAPTER_CONDITIONS, POOL_CONDITIONS

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
            [code(path), "" if "properties" in inner else bounds(inner), flat(inner["description"])]
            for path, inner in described(schema["properties"]["status"], "")
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
            table(["field", "message"], rules_of(schema)),
        ]
    return "\n".join(parts)


def conditions_page() -> str:
    from motet.resources.crd import ADAPTER, POOL
    from motet.resources.reasons import ADAPTER_REASONS, POOL_REASONS
    from motet.resources.status import ADAPTER_CONDITIONS, POOL_CONDITIONS

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


PAGES = {
    "api.md": api_page,
    "settings.md": settings_page,
    "metrics.md": metrics_page,
    "errors.md": errors_page,
    "manifests.md": manifests_page,
    "crds.md": crds_page,
    "conditions.md": conditions_page,
}


def generate(out: Path) -> list[Path]:
    """Write every page into `out`. Returns the files."""
    out.mkdir(parents=True, exist_ok=True)
    written = []
    for name, page in PAGES.items():
        path = out / name
        path.write_text(page(), encoding="utf-8")
        written.append(path)
    return written


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=REFERENCE)
    for written in generate(parser.parse_args().out):
        print(written.name)  # noqa: T201
