"""Every field of a JSON schema by its path, as the tables of the pages need it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

Schema = dict[str, Any]
Schemas = dict[str, Schema]


@dataclass(frozen=True, slots=True)
class SchemaField:
    path: str
    """Such as `spec.model.uri`, or `messages[].role` in the entries of a list."""

    stated: Schema
    """The schema of the field as it is written: with its description and default, and perhaps with null."""

    values: tuple[Schema, ...]
    """The schemas of the values that it may have beside null, without references."""

    required: bool


def fields_of(schema: Schema, schemas: Schemas, path: str = "") -> Iterator[SchemaField]:
    """The fields of an object, each followed by the fields inside it."""
    schema = dereferenced(schema, schemas)
    for name, stated in schema.get("properties", {}).items():
        where = f"{path}.{name}" if path else name
        values = tuple(dereferenced(choice, schemas) for choice in choices(stated))
        yield SchemaField(where, stated, values, name in schema.get("required", []))
        for value in values:
            yield from fields_of(value, schemas, where)
            yield from fields_of(value.get("items", {}), schemas, f"{where}[]")


def dereferenced(schema: Schema, schemas: Schemas) -> Schema:
    return schemas[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema


def choices(schema: Schema) -> list[Schema]:
    """The schemas of the values that a field may have beside null."""
    return [one for one in schema.get("anyOf", [schema]) if one != {"type": "null"}]
