"""Sets of tools as clients offer them: names with equal beginnings, nested and shared schemas, odd properties."""

import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

Schema = dict[str, Any]
Tool = dict[str, Any]
NAMES = (
    *("get", "get_tide", "get_tide_table", "get-tide", "get_tide2", "getTide", "g", "send", "send_mail", "sendMail"),
    *("2fa", "_open", "-x", "lookup", "look_up"),
)
PROPERTIES = ("what", "where", "when", "limit", "limit_to", "größe", "港", "a b", "x-y", "$id", "name", "class", "")
TEXTS = ("calm", "rough", "naïve", "東京", "it's", 'a "b"', "a\\b", "[x]", "{y}", "<z>", "a, b", "x=1", "\u2028", "🙂")


def tool_sets(count: int, seed: int) -> Iterator[list[Tool]]:
    chance = random.Random(seed)
    for _ in range(count):
        names = chance.sample(NAMES, chance.randint(1, 5))
        yield [{"type": "function", "function": {"name": name} | _function(chance)} for name in names]


def _function(chance: random.Random) -> Mapping[str, Any]:
    described = {"description": f"It does {chance.choice(TEXTS)}."} if chance.random() < 0.5 else {}
    if (kind := chance.random()) < 0.1:
        return described
    if kind < 0.2:
        return {**described, "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}
    return {**described, "parameters": _parameters(chance)}


def _parameters(chance: random.Random) -> Schema:
    plain = chance.random() < 0.5
    known = PROPERTIES[:5] if plain else PROPERTIES
    properties = {name: _value(chance, 2) for name in chance.sample(known, chance.randint(1, 4))}
    required = [name for name in properties if chance.random() < 0.6]
    definitions = {"Place": _place(chance)} if "#/$defs/Place" in str(properties) else {}
    return {
        "type": "object",
        "properties": properties,
        **({"required": required} if required or chance.random() < 0.5 else {}),
        "additionalProperties": False,
        **({"$defs": definitions} if definitions else {}),
    }


def _place(chance: random.Random) -> Schema:
    """Some know others of their kind."""
    beside = {"beside": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/Place"}]}} if chance.random() < 0.5 else {}
    return {
        "type": "object",
        "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99}, **beside},
        "required": ["x", *beside],
        "additionalProperties": False,
    }


def _value(chance: random.Random, depth: int) -> Schema:
    leaves: tuple[Callable[[], Schema], ...] = (
        lambda: {"type": "string", "maxLength": chance.randint(1, 8)},
        lambda: {"type": "string", "enum": chance.sample(TEXTS, chance.randint(1, 4))},
        lambda: {"enum": [chance.choice(TEXTS), 7, -1.5, None, True]},
        lambda: {"const": chance.choice(TEXTS)},
        lambda: {"type": "integer", "minimum": -5, "maximum": chance.randint(0, 500)},
        lambda: {"type": ["integer", "null"], "minimum": 0, "maximum": 9},
        lambda: {"type": "boolean", "description": chance.choice(TEXTS)},
        lambda: {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{1,3}$"},
        lambda: {"type": "string", "format": "date"},
        lambda: {"$ref": "#/$defs/Place"},
    )
    if depth and chance.random() < 0.25:
        names = chance.sample(PROPERTIES, 2)
        return {
            "type": "object",
            "properties": {name: _value(chance, depth - 1) for name in names},
            "required": names[: chance.randint(0, 2)],
            "additionalProperties": False,
        }
    if depth and chance.random() < 0.2:
        return {"type": "array", "items": _value(chance, depth - 1), "minItems": chance.randint(0, 1), "maxItems": 2}
    return chance.choice(leaves)()
