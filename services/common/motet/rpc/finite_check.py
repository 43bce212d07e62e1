"""Refuses messages with numbers that are infinite or NaN: one NaN in a list makes sorting the list wrong."""

from collections.abc import Callable
from functools import cache
from math import isfinite
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from motet.errors import InvalidRequest

Check = Callable[[Any], None]

_FLOATS = (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT)
_NOT_CHECKED = ("SequenceStep",)
"""Not checked here: there is one for each token, so this would be slow. The code that reads it checks the numbers."""


@cache
def check_of(descriptor: Descriptor) -> Check | None:
    """A function that raises InvalidRequest, with the field's name, for a message of this kind with such a number.
    None if messages of this kind have no floating-point numbers."""
    checks: list[tuple[FieldDescriptor, Check | None]] = []
    for field in descriptor.fields:
        if field.type in _FLOATS:
            checks.append((field, None))
        elif field.message_type is not None and field.name != "more" and field.message_type.name not in _NOT_CHECKED:
            of_map = field.message_type.GetOptions().map_entry
            if of_map and field.message_type.fields_by_name["value"].type in _FLOATS:
                checks.append((field, None))
            elif not of_map and (inner := check_of(field.message_type)) is not None:
                checks.append((field, inner))
    if not checks:
        return None

    def check(message: Any) -> None:
        for field, inner in checks:
            if inner is not None and not field.is_repeated and not message.HasField(field.name):
                continue
            value = getattr(message, field.name)
            for one in _each(field, value):
                if inner is not None:
                    inner(one)
                elif not isfinite(one):
                    raise InvalidRequest(f"{field.full_name} is {one}: it must be a finite number", param=field.name)

    return check


def _each(field: FieldDescriptor, value: Any) -> Any:
    if not field.is_repeated:
        return (value,)
    return value.values() if hasattr(value, "values") else value
