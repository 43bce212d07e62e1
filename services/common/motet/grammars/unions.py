"""Whether the branches of every `oneOf` of a JSON schema exclude each other. Then each is served as `anyOf`. Pure.

`oneOf` allows what exactly one branch allows, and no grammar of a token at a time can say that. But most schemas with
it, such as pydantic's unions, have branches of different types, or with a required property that is another constant in
each.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Any

Schema = Mapping[str, Any]
Value = tuple[type, Hashable]
"""With its type: to Python, 1 and true are equal."""
MAX_VALUES = 10_000
"""Of all unions together"""


def told_apart(schema: Schema) -> bool:
    """Also if there is no `oneOf`."""
    left = MAX_VALUES
    for branches in _unions(schema):
        left -= sum(_size(one, schema) for one in branches)
        if left < 0 or not _exclude_each_other([_resolved(one, schema) for one in branches], schema):
            return False
    return True


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


def _exclude_each_other(branches: list[Schema], root: Schema) -> bool:
    """Branches of different types do; those of one type must have different values, or a required property that has."""
    by_type: dict[str, list[Schema]] = defaultdict(list)
    for branch in branches:
        types = _types(branch)
        if not types:
            return _distinct(map(_values, branches)) or _by_a_property(branches, root)
        for one in types:
            by_type[one].append(branch)
    return all(
        len(same) == 1 or _distinct(map(_values, same)) or _by_a_property(same, root) for same in by_type.values()
    )


def _by_a_property(branches: list[Schema], root: Schema) -> bool:
    common = frozenset.intersection(*map(_required, branches))
    return any(_distinct(_values(_property(one, name, root)) for one in branches) for name in common)


def _distinct(values: Iterable[frozenset[Value]]) -> bool:
    """Whether all are known, and none has a value of another one."""
    seen = set[Value]()
    for of_one in values:
        if not of_one or not seen.isdisjoint(of_one):
            return False
        seen |= of_one
    return True


def _size(branch: Any, root: Schema) -> int:
    """About what it takes to look at it."""
    resolved = _resolved(branch, root)
    properties = resolved.get("properties")
    of_properties = (_resolved(one, root) for one in properties.values()) if isinstance(properties, dict) else ()
    return sum(1 + len(one["enum"]) if isinstance(one.get("enum"), list) else 1 for one in (resolved, *of_properties))


def _resolved(schema: Any, root: Schema) -> Schema:
    """A reference is followed once: one to another reference tells nothing. So does one with an escape in it."""
    if not isinstance(schema, dict):
        return {}
    reference = schema.get("$ref")
    if not isinstance(reference, str):
        return schema
    if "~" in reference or "%" in reference:
        return {}
    found: Any = root
    for part in reference.removeprefix("#/").split("/"):
        found = found.get(part) if isinstance(found, dict) else None
    return found if isinstance(found, dict) and "$ref" not in found else {}


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
    """Whole numbers are numbers."""
    said = schema.get("type")
    said = [said] if isinstance(said, str) else said
    names = [one for one in said if isinstance(one, str)] if isinstance(said, list) else []
    return frozenset("number" if one == "integer" else one for one in names)


def _values(schema: Schema) -> frozenset[Value]:
    """Empty: not known."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list) or not all(isinstance(one, str | int | bool) for one in values):
        return frozenset()
    return frozenset((type(one), one) for one in values)
