"""Where in the adapters' memory another one finds room, and who makes way for it. Pure numbers; no bytes.

The memory is so many rows of rank, and a place is a slot of a rank class: it begins at a multiple of the class' rank.
Room is found where nobody is live or, if that is nowhere, by moving the small ones that are in the way of a large one.
Small ranks fill from one end and large ones from the other, so that they seldom are.
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
"""Places that are looked at for what could be moved out of them: those with the least in them."""

_Ages = npt.NDArray[np.int64]


class DeviceAdapter(NamedTuple):
    """An adapter on the device. `live`: it stays."""

    digest: Digest
    place: AdapterSlot
    live: bool


class SlotAllocation(NamedTuple):
    """A place, once those `evicted` have gone and those `moved` have been carried to theirs."""

    place: AdapterSlot
    evicted: tuple[Digest, ...] = ()
    moved: tuple[tuple[Digest, AdapterSlot, AdapterSlot], ...] = ()
    """(who, from, to): no place on either side overlaps with another's."""


def allocate_slot(group: int, rows: int, residents: Sequence[DeviceAdapter], *, evict: bool) -> SlotAllocation | None:
    """Room for an adapter of a class among `residents`, the least recently used first.

    Without `evict` only free rows are taken. Prefers free ones, then those used the longest ago.
    """
    ages = np.full(rows, _FREE, dtype=np.int64)
    for age, resident in enumerate(residents):
        ages[_span(resident.place)] = age if evict and not resident.live else _KEPT
    slot = _best(group, ages)
    if slot is not None:
        return SlotAllocation((group, slot), _idle(residents, [(group, slot)]))
    return _by_moving(group, ages, residents) if evict else None


def _best(group: int, ages: _Ages) -> int | None:
    """The slot whose youngest resident is the oldest; None where each has one that stays."""
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
    """Other places for all who are in the way, the large ones first; None when one finds none."""
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
