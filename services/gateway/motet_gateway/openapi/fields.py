"""Schemas of body fields that are checked by hand, and of which a model's annotation says less than is asked for."""

from itertools import islice
from typing import Any

from motet.described_model import field_docstrings
from motet.sampling import IN_BODIES, Sampling
from motet_gateway.parameters import MAX_BAD_WORDS, MAX_PROMPTS, MAX_STOP_LENGTH, MAX_STOPS, TIERS
from motet_gateway.tools.parameters import MAX_TOOLS, MODES, NAME

Json = dict[str, Any]

NULL: Json = {"type": "null"}
STOP: Json = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_LENGTH}
TEXT: Json = {"type": "string", "minLength": 1}
TOKENS: Json = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
PART: Json = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"enum": ["text", "input_text"]}, "text": {"type": "string"}},
}
CALL: Json = {
    "type": "object",
    "required": ["function"],
    "properties": {
        "id": {"type": "string"},
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "required": ["name", "arguments"],
            "properties": {
                "name": {"type": "string"},
                "arguments": {"type": "string", "description": "A JSON object; anything else counts as `{}`."},
            },
        },
    },
}
MESSAGE: Json = {
    "type": "object",
    "required": ["role"],
    "properties": {
        "role": {**TEXT, "description": "`system`, `user`, `assistant`, or what else the model's template knows."},
        "content": {
            "anyOf": [{"type": "string"}, {"type": "array", "items": PART}, NULL],
            "description": "Required unless the role is `assistant`.",
        },
        "tool_calls": {
            "anyOf": [{"type": "array", "items": CALL}, NULL],
            "description": "Only of the role `assistant`: the calls of an earlier answer.",
        },
        "tool_call_id": {
            "anyOf": [{"type": "string"}, NULL],
            "description": "Of the role `tool`: which call the content is the result of.",
        },
    },
}
NOTHING: Json = {"anyOf": [{"type": "array", "maxItems": 0}, NULL]}
NO_CHOICE: Json = {"enum": ["none", "auto", None]}

TOOL: Json = {
    "type": "object",
    "required": ["type", "function"],
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "required": ["name"],
            "properties": {
                "name": {"type": "string", "pattern": NAME},
                "description": {"type": "string"},
                "parameters": {"type": "object", "description": "The JSON schema of its arguments, an object."},
                "strict": {
                    "anyOf": [{"type": "boolean"}, NULL],
                    "description": "Calls of it have to follow the schema.",
                },
            },
        },
    },
}
NAMED: Json = {
    "type": "object",
    "required": ["type", "function"],
    "properties": {
        "type": {"const": "function"},
        "function": {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}},
    },
}
CHOICE: Json = {
    "type": "object",
    "required": ["type"],
    "properties": {
        "type": {"enum": ["function", "allowed_tools"]},
        "function": NAMED["properties"]["function"],
        "allowed_tools": {
            "type": "object",
            "required": ["mode", "tools"],
            "properties": {
                "mode": {"enum": ["auto", "required"]},
                "tools": {"type": "array", "minItems": 1, "maxItems": MAX_TOOLS, "items": NAMED},
            },
        },
    },
}

SCHEMA: Json = {
    "type": "object",
    "required": ["schema"],
    "properties": {"name": TEXT, "schema": {"type": "object", "description": "The JSON schema."}},
}
FORMAT: Json = {
    "type": "object",
    "required": ["type"],
    "properties": {
        "type": {"enum": ["text", "json_object", "json_schema", "structural_tag"]},
        "json_schema": SCHEMA,
        "format": {"type": "object", "description": "Of a structural tag."},
    },
    "if": {"properties": {"type": {"const": "json_schema"}}},
    "then": {"required": ["json_schema"]},
}

OF_BOTH: dict[str, Json] = {
    "stop": {"anyOf": [STOP, {"type": "array", "maxItems": MAX_STOPS, "items": STOP}, NULL]},
    "response_format": {"anyOf": [FORMAT, NULL]},
    "service_tier": {"enum": [*TIERS, None]},
    "bad_words": {"anyOf": [{"type": "array", "maxItems": MAX_BAD_WORDS, "items": STOP}, NULL]},
}
FIELDS: dict[str, dict[str, Json]] = {
    "ChatBody": OF_BOTH
    | {
        "tools": {"anyOf": [{"type": "array", "maxItems": MAX_TOOLS, "items": TOOL}, NULL]},
        "tool_choice": {"anyOf": [{"enum": [*MODES, None]}, CHOICE]},
        "functions": NOTHING,
        "function_call": NO_CHOICE,
        "modalities": {"enum": [["text"], None]},
    },
    "CompletionBody": OF_BOTH
    | {
        "prompt": {
            "anyOf": [
                TEXT,
                TOKENS,
                {"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS, "items": TEXT},
                {"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS, "items": TOKENS},
            ]
        }
    },
}
"""By model and field."""


def complete(schemas: dict[str, Json]) -> None:
    """Put them in the place of what the annotations say, and the options of sampling behind `max_tokens`."""
    options = _options()
    for model, fields in FIELDS.items():
        properties = schemas[model]["properties"]
        for name, schema in fields.items():
            kept = ("title", "description", "default")
            properties[name] = {key: value for key, value in properties[name].items() if key in kept} | schema
        if "messages" in properties:
            properties["messages"]["items"] = MESSAGE
        head = dict(islice(properties.items(), 1 + list(properties).index("max_tokens")))
        schemas[model]["properties"] = head | options | properties


def _options() -> dict[str, Json]:
    meanings = field_docstrings(Sampling)
    return {
        name: {
            "anyOf": [option.schema(), NULL],
            "default": None,
            "title": name.replace("_", " ").title(),
            "description": meanings[name] + " Unset: the model's own default." * option.of_model,
        }
        for name, option in IN_BODIES.items()
    }
