"""Cosines and sines, which depend on a row's position alone."""

from motet_kernels.cpp.peepholes.matching import TYPES, Found, Uses
from motet_kernels.cpp.steps import ByPosition, Compute, Place, Step, read_by, written_by

_TURNS = ("cos", "sin")
_NOT_IN_TABLES = ("look_up", "unpack", "keep", "write")
_MAX_TABLES = 4
"""Room for the cosines and sines of two ropes. If each layer computes its own, tables would take much memory."""


def by_position(uses: Uses, number: int) -> Found | None:
    """A cosine or a sine, with the steps that alone read its result, such as a conversion."""
    turn = uses.compute(number, *_TURNS)
    if turn is None or sum(uses.compute(one, *_TURNS) is not None for one in range(len(uses.steps))) > _MAX_TABLES:
        return None
    last = number
    while (following := _alone(uses, last)) is not None:
        last = following
    before = _before(uses, last)
    (value,) = written_by(uses.steps[last])
    if before is None or value.dtype not in TYPES:
        return None
    table = ByPosition(uses.positions, before, value)
    places = Place(table), Place(uses.positions)
    return Found(frozenset({last}), Compute("look_up", (1, 1, value.size), Place(value, (0, 0, 1)), places))


def _alone(uses: Uses, number: int) -> int | None:
    """The only step that reads this step's result. None if that step reads other values, too, or writes only a part of
    a value."""
    readers = [reader for value in written_by(uses.steps[number]) for reader in uses.readers(value)]
    if len(readers) != 1:
        return None
    reader = uses.steps[readers[0]]
    if (
        not isinstance(reader, Compute)
        or reader.operation in _NOT_IN_TABLES
        or len(dict.fromkeys(read_by(reader))) != 1
    ):
        return None
    return readers[0] if len(uses.writers(reader.result.of)) == 1 else None


def _before(uses: Uses, last: int) -> list[Step] | None:
    """The step `last`, after all steps that it depends on; None if one of these steps reads more than positions"""
    found: list[Step] = []
    values = {*written_by(uses.steps[last])}
    for step in reversed(uses.steps[: last + 1]):
        if values.isdisjoint(written_by(step)):
            continue
        if not isinstance(step, Compute) or step.operation in _NOT_IN_TABLES:
            return None
        found.append(step)
        values.update(read_by(step))
    computed = {uses.positions, *(value for step in found for value in written_by(step))}
    return found[::-1] if values <= computed else None
