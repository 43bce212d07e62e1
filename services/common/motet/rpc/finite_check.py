"""Refuses messages with floating-point numbers that nobody can compute with.

One NaN in a list makes sorting the list wrong, and a factor of 1e308 makes a product infinite, which is no number of
pages. So every number must be finite, and those of which the range is known must be in it.
"""

from collections.abc import Callable
from functools import cache
from sys import float_info
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from motet.errors import InvalidRequest
from motet.ledger import MAX_OVERCOMMIT, MIN_OVERCOMMIT

Check = Callable[[Any], None]

_FLOATS = (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT)
_FINITE = (-float_info.max, float_info.max)
_SECONDS = (0.0, 2.0**36)
"""Of fields with `seconds` in their names: a time that is left, that something took, or a date until the year 4147"""
_RANGES = {
    "motet.api.v1.Overcommit.factor": (MIN_OVERCOMMIT, MAX_OVERCOMMIT),
    "motet.api.v1.WatchHello.overcommit": (0.0, MAX_OVERCOMMIT),
}
_NOT_CHECKED = ("SequenceStep", "TimeSplit")
"""Not checked here: the code that reads them checks the numbers. There is a SequenceStep for each token, so this would
be slow, and the tokens of a step do not depend on a TimeSplit."""


_ONEOF = "message"  # the name of the oneof in every message of a stream


def check_numbers(message: Any) -> None:
    """Raise InvalidRequest, with the field's name, if a number in a message of a stream is wrong."""
    if (descriptor := getattr(message, "DESCRIPTOR", None)) is None:
        return
    member = message.WhichOneof(_ONEOF)
    if member is not None and (check := _checks_of(descriptor)[member]) is not None:
        check(getattr(message, member))


@cache
def _checks_of(descriptor: Descriptor) -> dict[str, Check | None]:
    """For each member of the oneof: the function that checks its numbers, or None."""
    return {field.name: check_of(field.message_type) for field in descriptor.oneofs_by_name[_ONEOF].fields}


@cache
def check_of(descriptor: Descriptor) -> Check | None:
    """A function that raises InvalidRequest, with the field's name, for a message of this kind with such a number.
    None if messages of this kind have no floating-point numbers."""
    checks: list[tuple[FieldDescriptor, Check]] = []
    for field in descriptor.fields:
        if field.type in _FLOATS:
            checks.append((field, _number_check(field)))
        elif field.message_type is not None and field.name != "more" and field.message_type.name not in _NOT_CHECKED:
            of_map = field.message_type.GetOptions().map_entry
            if of_map and field.message_type.fields_by_name["value"].type in _FLOATS:
                checks.append((field, _number_check(field)))
            elif not of_map and (inner := check_of(field.message_type)) is not None:
                checks.append((field, inner))
    if not checks:
        return None

    def check(message: Any) -> None:
        for field, check_one in checks:
            if field.message_type is not None and not field.is_repeated and not message.HasField(field.name):
                continue
            for one in _each(field, getattr(message, field.name)):
                check_one(one)

    return check


def _number_check(field: FieldDescriptor) -> Check:
    low, high = _RANGES.get(field.full_name) or (_SECONDS if "seconds" in field.name else _FINITE)
    wanted = "a finite number" if (low, high) == _FINITE else f"a finite number from {low:g} to {high:g}"

    def check(number: float) -> None:
        if not low <= number <= high:  # also NaN
            raise InvalidRequest(f"{field.full_name} is {number}: it must be {wanted}", param=field.name)

    return check


def _each(field: FieldDescriptor, value: Any) -> Any:
    if not field.is_repeated:
        return (value,)
    return value.values() if hasattr(value, "values") else value
