"""Decides which adapters are evicted from the device so that another one gets a slot. Pure: it only computes numbers.

An adapter with live sequences is never evicted. Of the others, the least recently used one is evicted first, and only
for an adapter that a sequence waits for. (`registry.py` evicts from the disk cache.)

The device holds at most a number of adapters, in a number of rows of rank. A slot of a rank class begins at a multiple
of the class's rank. If each slot that a large adapter could get has a live adapter, small live adapters are moved to
other slots. Small ranks fill the memory from one end and large ones from the other, so that this is rare.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from motet.domain import Digest
from motet_kernels import RANKS, AdapterSlot, rows_of

_FREE, _KEPT = -1, 1 << 60

MAX_SMALL_CLASS = 1
"""The largest rank class that is placed from the low end."""

MAX_ATTEMPTS = 8
"""How many slots are tried when adapters must be moved: those with the fewest live rows."""

_Ages = npt.NDArray[np.int64]


class DeviceAdapter(NamedTuple):
    """An adapter on the device. `live`: it may be moved, but not evicted."""

    digest: Digest
    slot: AdapterSlot
    live: bool


class SlotAllocation(NamedTuple):
    """A slot that is free once the adapters in `evicted` are evicted and those in `moved` are moved."""

    slot: AdapterSlot
    evicted: tuple[Digest, ...] = ()
    moved: tuple[tuple[Digest, AdapterSlot, AdapterSlot], ...] = ()
    """(adapter, from, to): no two slots in `from` overlap, and no two slots in `to`."""


def allocate_slot(
    rank_class: int, residents: Sequence[DeviceAdapter], *, rows: int, max_adapters: int, evict: bool
) -> SlotAllocation | None:
    """A slot of a rank class beside `residents`, which are ordered by last use, the oldest first. None if there is none
    now.

    Free rows are preferred, then rows whose adapter was not used for longest. Without `evict`, all rows must be free.
    """
    full = len(residents) >= max_adapters
    idle = [resident.digest for resident in residents if not resident.live]
    if full and not (evict and idle):
        return None
    allocation = _in_rows(rank_class, rows, residents, evict=evict)
    if allocation is not None and full and not allocation.evicted:
        return allocation._replace(evicted=(idle[0],))
    return allocation


def _in_rows(rank_class: int, rows: int, residents: Sequence[DeviceAdapter], *, evict: bool) -> SlotAllocation | None:
    ages = np.full(rows, _FREE, dtype=np.int64)
    for age, resident in enumerate(residents):
        ages[_span(resident.slot)] = age if evict and not resident.live else _KEPT
    index = _best(rank_class, ages)
    if index is not None:
        slot = rank_class, index
        return SlotAllocation(slot, _idle(residents, [slot]))
    return _by_moving(rank_class, ages, residents) if evict else None


def _best(rank_class: int, ages: _Ages) -> int | None:
    """The slot whose adapters were all not used for longest. None if each slot has an adapter that must stay."""
    youngest = _by_slot(rank_class, ages).max(axis=1, initial=_FREE)
    if rank_class > MAX_SMALL_CLASS:
        youngest = youngest[::-1]
    if not len(youngest) or youngest.min() == _KEPT:
        return None
    index = int(youngest.argmin())
    return len(youngest) - 1 - index if rank_class > MAX_SMALL_CLASS else index


def _by_moving(rank_class: int, ages: _Ages, residents: Sequence[DeviceAdapter]) -> SlotAllocation | None:
    if not any(resident.live and resident.slot[0] < rank_class for resident in residents):
        return None
    kept = (_by_slot(rank_class, ages) == _KEPT).sum(axis=1)
    for index in kept.argsort(kind="stable")[:MAX_ATTEMPTS]:
        slot = rank_class, int(index)
        in_the_way = [r for r in residents if r.live and _overlap(r.slot, slot)]
        if all(resident.slot[0] < rank_class for resident in in_the_way):
            moved = _moved(slot, in_the_way, ages.copy())
            if moved is not None:
                return SlotAllocation(slot, _idle(residents, [slot, *(to for _, _, to in moved)]), moved)
    return None


def _moved(
    slot: AdapterSlot, in_the_way: Sequence[DeviceAdapter], ages: _Ages
) -> tuple[tuple[Digest, AdapterSlot, AdapterSlot], ...] | None:
    """Other slots for all adapters that are in the way, the large ones first. None if there is no slot for one."""
    ages[_span(slot)] = _KEPT
    moved = []
    for digest, old, _ in sorted(in_the_way, key=lambda resident: -resident.slot[0]):
        index = _best(old[0], ages)
        if index is None:
            return None
        new = old[0], index
        ages[_span(new)] = _KEPT
        moved.append((digest, old, new))
    return tuple(moved)


def _idle(residents: Sequence[DeviceAdapter], slots: Sequence[AdapterSlot]) -> tuple[Digest, ...]:
    return tuple(r.digest for r in residents if not r.live and any(_overlap(r.slot, slot) for slot in slots))


def _by_slot(rank_class: int, ages: _Ages) -> _Ages:
    slots = len(ages) // RANKS[rank_class]
    return ages[: slots * RANKS[rank_class]].reshape(slots, RANKS[rank_class])


def _span(slot: AdapterSlot) -> slice:
    rows = rows_of(slot)
    return slice(rows.start, rows.stop)


def _overlap(one: AdapterSlot, other: AdapterSlot) -> bool:
    a, b = rows_of(one), rows_of(other)
    return a.start < b.stop and b.start < a.stop
