"""Fuses steps of a program into one step (PU-21, OR-17).

Each kind matches one pattern of steps, whatever the model's family. A fused step gives the same bits as the steps that
it replaces, because it rounds at the same places. Steps that match no pattern stay as they are.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from motet_kernels.cpp.peepholes.activation import silu_times
from motet_kernels.cpp.peepholes.matching import Found, Uses
from motet_kernels.cpp.peepholes.norms import modules_norm, sum_and_norm
from motet_kernels.cpp.peepholes.positions import by_position
from motet_kernels.cpp.peepholes.rotation import norm_and_rotate, rotate, write_rotated
from motet_kernels.cpp.steps import Step, Value, needed, read_by, written_by

Find = Callable[[Uses, int], Found | None]
"""Gets the steps, and the number of one of them."""

PEEPHOLES: dict[str, Find] = {
    "by_position": by_position,
    "modules_norm": modules_norm,
    "sum_and_norm": sum_and_norm,
    "rotate": rotate,
    "norm_and_rotate": norm_and_rotate,
    "write_rotated": write_rotated,
    "silu_times": silu_times,
}
"""The kinds in the order of their search: some match steps that earlier kinds have fused."""


@dataclass(frozen=True)
class Together:
    steps: list[Step]
    """The steps whose results are used"""
    counts: dict[str, int]
    """Kind → how often it was found"""
    failed: dict[str, Exception]
    """Kinds whose search raised an error: their steps are not fused."""


def brought_together(
    steps: Sequence[Step], *, positions: Value, logits: Value, kinds: Collection[str] = PEEPHOLES.keys()
) -> Together:
    """`positions`, `logits`: the values that hold the rows' positions and logits"""
    together = Together(needed(steps, logits), {}, {})
    for kind, find in PEEPHOLES.items():
        if kind not in kinds:
            continue
        try:
            found = _found(find, Uses(together.steps, positions), logits)
        except Exception as error:  # fusion only adds speed
            found, together.failed[kind] = [], error
        together.counts[kind] = len(found)
        instead = {number: None for one in found for number in one.steps} | {max(one.steps): one.by for one in found}
        left = [instead.get(number, step) for number, step in enumerate(together.steps)]
        together.steps[:] = needed([step for step in left if step is not None], logits)
    return together


def _found(find: Find, uses: Uses, logits: Value) -> list[Found]:
    """Matches without overlaps: the first match keeps its steps."""
    taken, all_found = set[int](), list[Found]()
    for number in range(len(uses.steps)):
        found = find(uses, number)
        if found is not None and taken.isdisjoint(found.steps) and not _leaves_others(found, uses, logits):
            taken |= found.steps
            all_found.append(found)
    return all_found


def _leaves_others(found: Found, uses: Uses, logits: Value) -> bool:
    """True if another step uses a value that is no longer written, or reads a result before the new step writes it"""
    place, writes = max(found.steps), written_by(found.by)
    gone = {value for number in found.steps for value in written_by(uses.steps[number])}.difference(writes)
    read = {*read_by(found.by), logits}
    others = {number for value in gone for number in (*uses.readers(value), *uses.writers(value))} - found.steps
    early = (number for value in writes for number in uses.readers(value))
    return not gone.isdisjoint(read) or bool(others) or any(number < place for number in early)
