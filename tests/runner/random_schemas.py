"""JSON schemas as clients send them: those of pydantic's models, of OpenAPI documents, recursive ones and unions."""

import enum
import random
from collections.abc import Callable, Iterator
from datetime import date, datetime
from typing import Annotated, Any, Literal, Optional
from uuid import UUID

from pydantic import BaseModel, Field, create_model

Schema = dict[str, Any]
WORDS = ("name", "kind", "age", "notes", "sea", "port", "depth", "keeper", "light", "tide", "cargo", "crew")


class Colour(enum.Enum):
    RED = "red"
    GREEN = "green"


def schemas(count: int, seed: int) -> Iterator[Schema]:
    chance = random.Random(seed)
    kinds: tuple[Callable[[random.Random], Schema], ...] = (_pydantic, _pydantic, _open_api, _recursive, _union)
    for _ in range(count):
        schema = chance.choice(kinds)(chance)
        if chance.random() < 0.06:
            schema = _rare(chance, schema)
        yield schema


def _pydantic(chance: random.Random) -> Schema:
    return _model(chance, "Answer", depth=2).model_json_schema()


def _model(chance: random.Random, name: str, depth: int) -> type[BaseModel]:
    fields: dict[str, Any] = {}
    for word in chance.sample(WORDS, chance.randint(1, 5)):
        kind = _type(chance, f"{name}{word.title()}", depth)
        fields[word] = (Optional[kind], None) if chance.random() < 0.25 else (kind, ...)  # noqa: UP045 - of a value
    return create_model(name, **fields)


def _type(chance: random.Random, name: str, depth: int) -> Any:
    simple: list[Any] = [
        str,
        int,
        float,
        bool,
        date,
        datetime,
        UUID,
        Colour,
        Literal["calm", "rough"],
        Annotated[str, Field(min_length=1, max_length=chance.randint(4, 30))],
        Annotated[str, Field(pattern=r"^[A-Z]{2}-[0-9]{1,4}$")],
        Annotated[int, Field(ge=0, le=chance.randint(1, 500))],
        Annotated[float, Field(gt=-1.5, lt=1.5)],
        dict[str, int],
    ]
    if depth == 0 or chance.random() < 0.6:
        return chance.choice(simple)
    if chance.random() < 0.5:
        return _model(chance, name, depth - 1)
    return Annotated[list[_type(chance, name, depth - 1)], Field(min_length=chance.randint(0, 1), max_length=3)]


def _open_api(chance: random.Random) -> Schema:
    def of(depth: int) -> Schema:
        made: list[Schema] = [
            {"type": "string", "format": chance.choice(("date-time", "date", "email", "uuid", "ipv4"))},
            {"type": "string", "maxLength": 20, "description": "free text", "example": "x"},
            {"type": "integer", "format": "int32", "minimum": 1, "default": 1},
            {"type": ["number", "null"], "title": "Depth"},
            {"type": "boolean", "deprecated": True},
            {"enum": ["a", 1, None, True]},
            {"$ref": "#/$defs/Point"},
        ]
        if depth and chance.random() < 0.5:
            properties = {word: of(depth - 1) for word in chance.sample(WORDS, 3)}
            closed = {} if chance.random() < 0.4 else {"additionalProperties": False}
            return {"type": "object", "properties": properties, "required": list(properties)[:2], **closed}
        if depth and chance.random() < 0.4:
            return {"type": "array", "items": of(depth - 1), "maxItems": 3}
        return chance.choice(made)

    point = {
        "type": "object",
        "properties": {"x": {"type": "number", "minimum": -90, "maximum": 90}, "y": {"type": "integer"}},
        "required": ["x", "y"],
        "additionalProperties": False,
    }
    properties = {word: of(2) for word in chance.sample(WORDS, chance.randint(1, 4))}
    return {"$defs": {"Point": point}, "type": "object", "properties": properties, "required": list(properties)}


def _recursive(chance: random.Random) -> Schema:
    leaf = chance.choice(({"type": "integer"}, {"type": "boolean"}, {"enum": ["fish", "crab"]}))
    node = {
        "type": "object",
        "properties": {"value": leaf, "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/Node"}]}},
        "required": ["value", "next"],
        "additionalProperties": False,
    }
    tree = {
        "type": "object",
        "properties": {"value": leaf, "children": {"type": "array", "items": {"$ref": "#/$defs/Node"}, "maxItems": 2}},
        "required": ["value", "children"],
        "additionalProperties": False,
    }
    return {"$defs": {"Node": chance.choice((node, tree))}, "$ref": "#/$defs/Node"}


def _union(chance: random.Random) -> Schema:
    def branch(tag: str) -> Schema:
        return {
            "type": "object",
            "properties": {"kind": {"const": tag, "type": "string"}, "size": {"type": "integer", "maximum": 9}},
            "required": ["kind", "size"],
        }

    word = chance.choice(("anyOf", "oneOf"))
    simple = [{"type": "integer"}, {"type": "string", "maxLength": 8}, {"type": "null"}]
    branches = [branch(tag) for tag in ("cat", "dog", "eel")] if chance.random() < 0.6 else simple
    return {"type": "object", "properties": {"it": {word: branches}}, "required": ["it"], "additionalProperties": False}


def _rare(chance: random.Random, schema: Schema) -> Schema:
    """With a keyword that few schemas have."""
    more: Schema = chance.choice(
        (
            {"type": "array", "uniqueItems": True},
            {"not": {"type": "string"}},
            {"type": "object", "minProperties": 1},
            {"type": "object", "patternProperties": {"^x-": {"type": "integer"}}},
            {"if": {"type": "integer"}, "then": {"minimum": 3}},
            {"type": "array", "contains": {"type": "integer"}},
        )
    )
    defs = {"$defs": schema["$defs"]} if "$defs" in schema else {}
    rest = {key: value for key, value in schema.items() if key != "$defs"}
    return {**defs, "type": "object", "properties": {"first": rest, "second": more}, "required": ["first", "second"]}
