"""api.md: every path of the gateway, from its OpenAPI description."""

import inspect
import json
import re
from collections.abc import Iterator

from motet_gateway.openapi import document
from motet_gateway.openapi.document import OPERATIONS
from motet_gateway.parameters import Body
from motet_gateway.settings import Settings
from motet_gateway.unsupported_parameters import UNSUPPORTED
from tools.reference.markdown import anchor, code, flat, note, table
from tools.reference.schema_fields import Schema, Schemas, choices, dereferenced, fields_of


def api_page() -> str:
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
            address with `/v1` as the base URL. So do Anthropic's, with the address alone.
            `/openapi.json` has the same description, for generators of clients.""")
            + "\n",
            table(["path", "what it does", "scope of the key"], overview),
            "## What holds for every path\n",
            inspect.cleandoc(f"""
            - A gateway with keys asks for `authorization: Bearer <key>` or `x-api-key: <key>`
              ([API keys](../guides/keys.md)). A gateway without keys ignores the headers.
            - A body is JSON with `content-type: application/json`. It may have {body_mib} MiB
              (`MOTET_GATEWAY_MAX_BODY_BYTES`), for `/tokenize`, `/detokenize` and
              `/v1/messages/count_tokens` {counted_mib} MiB (`MOTET_GATEWAY_MAX_COUNTED_BYTES`).
            - A field without a default may be null, which is the same as leaving it out.
            - Every answer has the header `x-request-id`. Send your own to find the request in the gateway's log: 1 to
              128 letters, digits, `.`, `_`, `:` or `-`. Below `/v1/messages`, `request-id` has it, too.
            - Every error has the body and the headers shown [below](#an-error), and a code from [errors](errors.md).
              Below `/v1/messages` the body is [another one](#an-error-of-v1messages), and so it is of
              [LoRAX's paths](#an-error-of-loraxs-paths).
            - Another path answers 404 with `not_found`, another method 405 with `method_not_allowed`.
            """)
            + "\n",
            *sections,
            "## An error\n",
            table(["field", "value", "meaning"], answer_rows(schemas["ErrorBody"], schemas)),
            header_table(failed),
            "### An error of /v1/messages\n",
            table(["field", "value", "meaning"], answer_rows(schemas["MessagesErrorBody"], schemas)),
            "### An error of LoRAX's paths\n",
            table(["field", "value", "meaning"], answer_rows(schemas["LoraxErrorBody"], schemas)),
            "## Parameters of other servers\n",
            flat("""Motet refuses these parameters of requests for an answer with `unsupported_parameter`: it does
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


def operation_section(said: Schema, schemas: Schemas) -> Iterator[str]:
    end = "" if said["summary"].endswith("?") else "."
    yield f"{said['summary']}{end} {said['description']}\n"
    if "requestBody" in said:
        rows = list(field_rows(said["requestBody"]["content"]["application/json"]["schema"], schemas))
        if rows:  # else it is that of another path, as the description says
            yield "Body:\n"
            yield table(["field", "value", "default", "meaning"], rows)
    answer = said["responses"]["200"]
    for media, content in answer.get("content", {"nothing": {}}).items():
        if "schema" in content:
            rows = answer_rows(content["schema"], schemas)
            if not rows:
                continue
            yield "Each event of a stream:\n" if media == "text/event-stream" else "Answer:\n"
            yield table(["field", "value", "meaning"], rows)
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
    return [[where, value, meaning] for where, value, _, meaning in field_rows(schema, schemas)]


def field_rows(schema: Schema, schemas: Schemas) -> Iterator[list[str]]:
    """One row for each field of an object."""
    for field in fields_of(schema, schemas):
        default = field.stated.get("default")
        shown = "required" if field.required else code(json.dumps(default)) if default is not None else ""
        meaning = flat(field.stated.get("description", ""))
        yield [code(field.path), value_of(field.stated, schemas), shown, meaning]


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
