"""Where an adapter finds room: no live one goes, nobody overlaps, and small ones do not shut a large one out."""

from hypothesis import given, settings
from hypothesis import strategies as st

from motet.domain import Digest
from motet_kernels import RANKS, AdapterSlot, rows_of
from motet_runner.adapters.slot_allocation import DeviceAdapter, SlotAllocation, allocate_slot

EIGHT, SIXTEEN, SIXTY_FOUR = 0, 1, 3


def resident(name: str, place: AdapterSlot, *, live: bool = False) -> DeviceAdapter:
    return DeviceAdapter(Digest(name), place, live)


def test_free_rows_come_first_small_ranks_from_one_end_and_large_ones_from_the_other() -> None:
    there = [resident("old", (SIXTEEN, 0))]
    assert allocate_slot(SIXTEEN, 256, there, evict=True) == SlotAllocation((SIXTEEN, 1))
    assert allocate_slot(SIXTY_FOUR, 256, there, evict=True) == SlotAllocation((SIXTY_FOUR, 3))


def test_of_the_idle_those_used_the_longest_ago_make_room_and_only_where_they_must() -> None:
    there = [resident(name, (SIXTEEN, slot)) for slot, name in enumerate("abcd")]
    assert allocate_slot(SIXTEEN, 64, there, evict=True) == SlotAllocation((SIXTEEN, 0), evicted=(Digest("a"),))
    assert allocate_slot(SIXTEEN, 64, there, evict=False) is None
    assert allocate_slot(EIGHT, 64, [resident("z", there[1].place, live=True)], evict=True) == SlotAllocation(
        (EIGHT, 0)
    )


def test_small_ones_that_are_live_move_out_of_the_way_of_a_large_one() -> None:
    """One in each place that the large one could have: it used to be enough to keep it out for ever."""
    live = [resident(f"live{run}", (SIXTEEN, 4 * run), live=True) for run in range(4)]
    room = allocate_slot(SIXTY_FOUR, 256, [resident("idle", (SIXTEEN, 1)), *live], evict=True)
    assert room == SlotAllocation((SIXTY_FOUR, 0), (Digest("idle"),), ((Digest("live0"), (SIXTEEN, 0), (SIXTEEN, 5)),))


def test_there_is_no_room_where_the_live_leave_too_little() -> None:
    live = [resident(f"live{slot}", (SIXTY_FOUR, slot), live=True) for slot in range(3)]
    small = resident("small", (EIGHT, 31), live=True)
    assert allocate_slot(SIXTY_FOUR, 256, [*live, small], evict=True) is None
    assert allocate_slot(5, 64, [], evict=True) is None, "a rank that the memory cannot hold at all"


@given(data=st.data(), rows=st.integers(1, 40).map(lambda eights: 8 * eights))
@settings(deadline=None, max_examples=300)
def test_whatever_comes_and_goes_nobody_overlaps_and_no_live_one_is_lost(data: st.DataObject, rows: int) -> None:
    there: list[DeviceAdapter] = []
    for step in range(data.draw(st.integers(1, 12))):
        group = data.draw(st.integers(0, len(RANKS) - 1))
        there = [r._replace(live=data.draw(st.booleans())) for r in data.draw(st.permutations(there))]
        evict = data.draw(st.booleans())
        room = allocate_slot(group, rows, there, evict=evict)
        if room is None:
            free = rows - sum(len(rows_of(r.place)) for r in there if r.live or not evict)
            assert there or RANKS[group] > free
            continue
        moves = {who: (old, new) for who, old, new in room.moved}
        assert all(r.digest not in moves or moves[r.digest][0] == r.place for r in there)
        assert not any(r.live and r.digest in room.evicted for r in there)
        assert evict or not (room.evicted or room.moved)
        old = {row for r in there if r.digest not in room.evicted for row in rows_of(r.place)}
        assert not any(set(rows_of(new)) & old for _, new in moves.values()), "it would be written over before it moves"
        there = [
            r._replace(place=moves.get(r.digest, (r.place, r.place))[1]) for r in there if r.digest not in room.evicted
        ]
        there.append(resident(f"new{step}", room.place))
        held = [row for r in there for row in rows_of(r.place)]
        assert len(held) == len(set(held))
        assert max(held) < rows
