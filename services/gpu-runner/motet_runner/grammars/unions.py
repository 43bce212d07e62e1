"""Whether the branches of every `oneOf` of a JSON schema exclude each other. Then each is served as `anyOf`. Pure.

`oneOf` allows what exactly one branch allows, and no grammar of a token at a time can say that. But most schemas with
it, such as pydantic's unions, have branches of different types, or with a required property that is another constant in
each.
"""

from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any

Schema = Mapping[str, Any]
MAX_BRANCHES = 100
_NUMBERS = frozenset({"integer", "number"})


def told_apart(schema: Schema) -> bool:
    """Also if there is no `oneOf`."""
    return all(_exclude_each_other(branches, schema) for branches in _unions(schema))


def _unions(schema: Schema) -> Iterator[list[Any]]:
    waiting: list[Any] = [schema]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            if isinstance(one.get("oneOf"), list):
                yield one["oneOf"]
            waiting += one.values()
        elif isinstance(one, list):
            waiting += one


def _exclude_each_other(branches: list[Any], root: Schema) -> bool:
    if len(branches) > MAX_BRANCHES:
        return False
    resolved = [_resolved(one, root) for one in branches]
    return all(_exclude(a, b, root) for a, b in combinations(resolved, 2))


def _exclude(a: Schema, b: Schema, root: Schema) -> bool:
    types = _types(a), _types(b)
    if types[0] and types[1] and types[0].isdisjoint(types[1]) and not (_NUMBERS & types[0] and _NUMBERS & types[1]):
        return True
    if _values(a) and _values(b):
        return _values(a).isdisjoint(_values(b))
    common = _required(a) & _required(b)
    return any(
        (of_a := _values(_property(a, name, root)))
        and (of_b := _values(_property(b, name, root)))
        and of_a.isdisjoint(of_b)
        for name in common
    )


def _resolved(schema: Any, root: Schema) -> Schema:
    """A reference is followed once: one to another reference tells nothing."""
    if not isinstance(schema, dict):
        return {}
    reference = schema.get("$ref")
    if not isinstance(reference, str):
        return schema
    found: Any = root
    for part in reference.removeprefix("#/").split("/"):
        found = found.get(part) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else {}


def _property(schema: Schema, name: str, root: Schema) -> Schema:
    properties = schema.get("properties")
    return _resolved(properties.get(name), root) if isinstance(properties, dict) else {}


def _required(schema: Schema) -> frozenset[str]:
    """Of an object: what is no object has no properties, and then these tell nothing."""
    required = schema.get("required")
    if schema.get("type") != "object" or not isinstance(required, list):
        return frozenset()
    return frozenset(one for one in required if isinstance(one, str))


def _types(schema: Schema) -> frozenset[str]:
    said = schema.get("type")
    said = [said] if isinstance(said, str) else said
    return frozenset(one for one in said if isinstance(one, str)) if isinstance(said, list) else frozenset()


def _values(schema: Schema) -> frozenset[tuple[type, Any]]:
    """With their types: to Python, 1 and true are equal. Empty: not known."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list) or not all(isinstance(one, str | int | bool) for one in values):
        return frozenset()
    return frozenset((type(one), one) for one in values)
