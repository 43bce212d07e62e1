"""Schemas of body fields that are checked by hand, and of which a model's annotation says less than is asked for."""

from itertools import islice
from typing import Any

from motet.described_model import field_docstrings
from motet.sampling import IN_BODIES, Sampling
from motet_gateway.answers.lorax.body import BESIDE, OPTIONS_OF_LORAX
from motet_gateway.answers.messages.body import SERVICE_TIER, THINKING, TOOL_CHOICES, CountedMessages
from motet_gateway.answers.responses.body import ResponsesBody
from motet_gateway.answers.responses.conversation import ROLES
from motet_gateway.answers.responses.tools import KINDS
from motet_gateway.parameters import MAX_BAD_WORDS, MAX_MESSAGES, MAX_PROMPTS, MAX_STOP_LENGTH, MAX_STOPS, TIERS
from motet_gateway.reasoning import EFFORTS
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
        "reasoning_content": {
            "anyOf": [{"type": "string"}, NULL],
            "description": "The reasoning of an earlier answer, for templates that read it; also as `reasoning`.",
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

# Of /v1/messages.
ONE_TEXT: Json = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
}
TEXT_OR_BLOCKS: Json = {"anyOf": [{"type": "string"}, {"type": "array", "items": ONE_TEXT}, NULL]}
BLOCK: Json = {
    "type": "object",
    "required": ["type"],
    "properties": {
        "type": {"enum": ["text", "tool_use", "tool_result", "thinking", "redacted_thinking"]},
        "text": {"type": "string"},
        "id": {**TEXT, "description": "Of a `tool_use`."},
        "name": {**TEXT, "description": "Of a `tool_use`."},
        "input": {"type": "object", "description": "Of a `tool_use`."},
        "tool_use_id": {**TEXT, "description": "Of a `tool_result`: the call that it is the result of."},
        "content": {**TEXT_OR_BLOCKS, "description": "Of a `tool_result`."},
    },
}
MESSAGES: Json = {
    "type": "array",
    "minItems": 1,
    "maxItems": MAX_MESSAGES,
    "items": {
        "type": "object",
        "required": ["role", "content"],
        "properties": {
            "role": {"enum": ["user", "assistant", "system"]},
            "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": BLOCK}]},
        },
    },
}
OWN_TOOL: Json = {
    "type": "object",
    "required": ["name"],
    "properties": {
        "type": {"enum": ["custom", None]},
        "name": {"type": "string", "pattern": NAME},
        "description": {"type": "string"},
        "input_schema": {"type": "object", "description": "The JSON schema of its arguments, an object."},
        "strict": {"anyOf": [{"type": "boolean"}, NULL], "description": "Calls of it have to follow the schema."},
    },
}
OWN_CHOICE: Json = {
    "type": "object",
    "properties": {
        "type": {"enum": [*TOOL_CHOICES]},
        "name": TEXT,
        "disable_parallel_tool_use": {"anyOf": [{"type": "boolean"}, NULL]},
    },
}
OWN_FORMAT: Json = {
    "type": "object",
    "required": ["type", "schema"],
    "properties": {"type": {"const": "json_schema"}, "schema": {"type": "object"}},
}
OF_MESSAGES: dict[str, Json] = {
    "messages": MESSAGES,
    "system": TEXT_OR_BLOCKS,
    "tools": {"anyOf": [{"type": "array", "maxItems": MAX_TOOLS, "items": OWN_TOOL}, NULL]},
    "tool_choice": {"anyOf": [OWN_CHOICE, NULL]},
    "thinking": {"anyOf": [{"type": "object", "properties": {"type": {"enum": [*THINKING]}}}, NULL]},
    "output_config": {
        "anyOf": [{"type": "object", "properties": {"format": {"anyOf": [OWN_FORMAT, NULL]}, "effort": {}}}, NULL]
    },
}

# Of /v1/responses.
INPUT_TEXTS: Json = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["type", "text"],
                "properties": {"type": {"enum": ["input_text", "output_text", "text"]}, "text": {"type": "string"}},
            },
        },
    ]
}
ITEM: Json = {
    "type": "object",
    "properties": {
        "type": {
            "enum": [
                "message",
                "function_call",
                "function_call_output",
                "custom_tool_call",
                "custom_tool_call_output",
                "reasoning",
            ],
            "description": "May be left out of a message.",
        },
        "role": {"enum": [*ROLES], "description": "Of a message."},
        "content": {**INPUT_TEXTS, "description": "Of a message."},
        "call_id": {**TEXT, "description": "Of a call and of its output."},
        "name": {**TEXT, "description": "Of a call: its tool."},
        "arguments": {"type": "string", "description": "Of a `function_call`: JSON."},
        "input": {"type": "string", "description": "Of a `custom_tool_call`."},
        "output": {**INPUT_TEXTS, "description": "Of a call."},
    },
}
CUSTOM_FORMAT: Json = {
    "type": "object",
    "required": ["type"],
    "properties": {
        "type": {"enum": ["text", "grammar"]},
        "syntax": {"const": "regex"},
        "definition": {**TEXT, "description": "The regular expression that the whole input has to match."},
    },
    "if": {"properties": {"type": {"const": "grammar"}}},
    "then": {"required": ["syntax", "definition"]},
}
FLAT_TOOL: Json = {
    "type": "object",
    "required": ["type", "name"],
    "properties": {
        "type": {"enum": [*KINDS]},
        "name": {"type": "string", "pattern": NAME},
        "description": {"anyOf": [{"type": "string"}, NULL]},
        "parameters": {
            "anyOf": [{"type": "object"}, NULL],
            "description": "Of a function: the JSON schema of its arguments, an object.",
        },
        "strict": {"anyOf": [{"type": "boolean"}, NULL], "description": "Calls of it have to follow the schema."},
        "format": {
            "anyOf": [CUSTOM_FORMAT, NULL],
            "description": "Of a custom tool.",
        },
    },
}
FLAT_NAMED: Json = {
    "type": "object",
    "required": ["type", "name"],
    "properties": {"type": {"enum": [*KINDS]}, "name": {"type": "string"}},
}
FLAT_CHOICE: Json = {
    "type": "object",
    "required": ["type"],
    "properties": {
        "type": {"enum": [*KINDS, "allowed_tools"]},
        "name": {"type": "string"},
        "mode": {"enum": ["auto", "required"]},
        "tools": {"type": "array", "minItems": 1, "maxItems": MAX_TOOLS, "items": FLAT_NAMED},
    },
}
FLAT_FORMAT: Json = {
    "type": "object",
    "required": ["type"],
    "properties": {
        "type": {"enum": ["text", "json_object", "json_schema"]},
        "name": {"type": "string"},
        "schema": {"type": "object", "description": "The JSON schema."},
    },
    "if": {"properties": {"type": {"const": "json_schema"}}},
    "then": {"required": ["schema"]},
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
        "messages": {"type": "array", "minItems": 1, "maxItems": MAX_MESSAGES, "items": MESSAGE},
        "tools": {"anyOf": [{"type": "array", "maxItems": MAX_TOOLS, "items": TOOL}, NULL]},
        "tool_choice": {"anyOf": [{"enum": [*MODES, None]}, CHOICE]},
        "functions": NOTHING,
        "function_call": NO_CHOICE,
        "modalities": {"enum": [["text"], None]},
        "reasoning_effort": {"enum": [*EFFORTS, None]},
    },
    "GenerateParameters": {
        "stop": {"anyOf": [{"type": "array", "maxItems": MAX_STOPS, "items": STOP}, NULL]},
        "response_format": {"anyOf": [{"type": "object"}, NULL]},
        "grammar": {"anyOf": [{"type": "object"}, NULL]},
    },
    "CountedMessages": OF_MESSAGES,
    "MessagesBody": OF_MESSAGES
    | {
        "stop_sequences": {"anyOf": [{"type": "array", "maxItems": MAX_STOPS, "items": STOP}, NULL]},
        "service_tier": {"enum": [*TIERS, SERVICE_TIER, None]},
    },
    "ResponsesBody": {
        "input": {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "minItems": 1, "maxItems": MAX_MESSAGES, "items": ITEM},
            ]
        },
        "tools": {"anyOf": [{"type": "array", "maxItems": MAX_TOOLS, "items": FLAT_TOOL}, NULL]},
        "tool_choice": {"anyOf": [{"enum": [*MODES, None]}, FLAT_CHOICE]},
        "text": {"anyOf": [{"type": "object", "properties": {"format": {"anyOf": [FLAT_FORMAT, NULL]}}}, NULL]},
        "truncation": {"enum": ["disabled", None]},
        "background": {"enum": [False, None]},
        "previous_response_id": NULL,
        "conversation": NULL,
        "prompt": NULL,
        "service_tier": {"enum": [*TIERS, None]},
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
BEFORE_OPTIONS = {
    "ChatBody": "max_tokens",
    "CompletionBody": "max_tokens",
    "MessagesBody": "max_tokens",
    "ResponsesBody": "max_output_tokens",
}
"""The field behind which the options of sampling come, of bodies that have them."""


OF_LORAX = {
    "GenerateBody": BESIDE,
    "WholeBody": (*BESIDE, "stream"),
    "StreamedBody": (*BESIDE, "stream"),
}
"""Fields of all bodies that have no place in these, or no effect"""


def complete(schemas: dict[str, Json]) -> None:
    """Put them in the place of what the annotations say, and the options of sampling behind `max_tokens`."""
    options = _options()
    for model, fields in FIELDS.items():
        properties = schemas[model]["properties"]
        for name, schema in fields.items():
            kept = ("title", "description", "default")
            properties[name] = {key: value for key, value in properties[name].items() if key in kept} | schema
        if (limit := BEFORE_OPTIONS.get(model)) is not None:
            head = dict(islice(properties.items(), 1 + list(properties).index(limit)))
            schemas[model]["properties"] = head | options | properties
    of_lorax = _options(of_model=False)
    schemas["GenerateParameters"]["properties"] |= {name: of_lorax[one] for name, one in OPTIONS_OF_LORAX.items()}
    for body in (CountedMessages, ResponsesBody):
        for name in body.without:
            schemas[body.__name__]["properties"].pop(name, None)  # options of sampling are in none that has no answer
    for model, names in OF_LORAX.items():
        for name in names:
            del schemas[model]["properties"][name]
        schemas[model]["properties"]["include_stop_str_in_output"]["description"] += " Unset: true."


def _options(*, of_model: bool = True) -> dict[str, Json]:
    """`of_model`: what a model's files say counts."""
    meanings = field_docstrings(Sampling)
    return {
        name: {
            "anyOf": [option.schema(), NULL],
            "default": None,
            "title": name.replace("_", " ").title(),
            "description": meanings[name] + " Unset: the model's own default." * (of_model and option.of_model),
        }
        for name, option in IN_BODIES.items()
    }
