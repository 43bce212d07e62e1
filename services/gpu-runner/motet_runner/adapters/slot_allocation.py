"""Decides which slot an adapter gets, and which other adapters are evicted or moved for it. It only computes numbers.

The memory for adapters is a number of rows of rank. A slot of a rank class begins at a multiple of the class's rank. An
adapter gets a slot without live adapters. If no slot is without them, small live adapters are moved out of the slot
that a large one gets. Small ranks fill the memory from one end and large ones from the other, so that this is rare.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from motet.domain import Digest
from motet_kernels import RANKS, AdapterSlot, rows_of

_FREE, _KEPT = -1, 1 << 60

SMALL = 1
"""The largest class that is placed from the low end."""

MAX_ATTEMPTS = 8
"""How many slots are tried when adapters must be moved: those with the fewest live rows."""

_Ages = npt.NDArray[np.int64]


class DeviceAdapter(NamedTuple):
    """An adapter on the device. `live`: it may be moved, but not evicted."""

    digest: Digest
    place: AdapterSlot
    live: bool


class SlotAllocation(NamedTuple):
    """A slot that is free once the adapters in `evicted` are evicted and those in `moved` are moved."""

    place: AdapterSlot
    evicted: tuple[Digest, ...] = ()
    moved: tuple[tuple[Digest, AdapterSlot, AdapterSlot], ...] = ()
    """(adapter, from, to): no two slots in `from` overlap, and no two slots in `to`."""


def allocate_slot(group: int, rows: int, residents: Sequence[DeviceAdapter], *, evict: bool) -> SlotAllocation | None:
    """A slot of rank class `group` beside `residents`, which are ordered by last use, the oldest first.

    Free rows are preferred, then rows whose adapter was not used for longest. Without `evict`, all rows must be free.
    """
    ages = np.full(rows, _FREE, dtype=np.int64)
    for age, resident in enumerate(residents):
        ages[_span(resident.place)] = age if evict and not resident.live else _KEPT
    slot = _best(group, ages)
    if slot is not None:
        return SlotAllocation((group, slot), _idle(residents, [(group, slot)]))
    return _by_moving(group, ages, residents) if evict else None


def _best(group: int, ages: _Ages) -> int | None:
    """The slot whose adapters were all not used for longest. None if each slot has an adapter that must stay."""
    youngest = _by_slot(group, ages).max(axis=1, initial=_FREE)
    if group > SMALL:
        youngest = youngest[::-1]
    if not len(youngest) or youngest.min() == _KEPT:
        return None
    slot = int(youngest.argmin())
    return len(youngest) - 1 - slot if group > SMALL else slot


def _by_moving(group: int, ages: _Ages, residents: Sequence[DeviceAdapter]) -> SlotAllocation | None:
    if not any(resident.live and resident.place[0] < group for resident in residents):
        return None
    kept = (_by_slot(group, ages) == _KEPT).sum(axis=1)
    for slot in kept.argsort(kind="stable")[:MAX_ATTEMPTS]:
        place = group, int(slot)
        in_the_way = [r for r in residents if r.live and _overlap(r.place, place)]
        if all(resident.place[0] < group for resident in in_the_way):
            moved = _moved(place, in_the_way, ages.copy())
            if moved is not None:
                return SlotAllocation(place, _idle(residents, [place, *(to for _, _, to in moved)]), moved)
    return None


def _moved(
    place: AdapterSlot, in_the_way: Sequence[DeviceAdapter], ages: _Ages
) -> tuple[tuple[Digest, AdapterSlot, AdapterSlot], ...] | None:
    """Other slots for all adapters that are in the way, the large ones first. None if there is no slot for one."""
    ages[_span(place)] = _KEPT
    moved = []
    for digest, old, _ in sorted(in_the_way, key=lambda resident: -resident.place[0]):
        slot = _best(old[0], ages)
        if slot is None:
            return None
        new = old[0], slot
        ages[_span(new)] = _KEPT
        moved.append((digest, old, new))
    return tuple(moved)


def _idle(residents: Sequence[DeviceAdapter], places: Sequence[AdapterSlot]) -> tuple[Digest, ...]:
    return tuple(r.digest for r in residents if not r.live and any(_overlap(r.place, place) for place in places))


def _by_slot(group: int, ages: _Ages) -> _Ages:
    slots = len(ages) // RANKS[group]
    return ages[: slots * RANKS[group]].reshape(slots, RANKS[group])


def _span(place: AdapterSlot) -> slice:
    rows = rows_of(place)
    return slice(rows.start, rows.stop)


def _overlap(one: AdapterSlot, other: AdapterSlot) -> bool:
    a, b = rows_of(one), rows_of(other)
    return a.start < b.stop and b.start < a.stop
