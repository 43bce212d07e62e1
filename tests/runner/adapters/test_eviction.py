"""Which adapters are evicted or moved for another one. No live adapter is evicted, and no two slots overlap."""

from hypothesis import given, settings
from hypothesis import strategies as st

from motet.domain import Digest
from motet_kernels import RANKS, AdapterSlot, rows_of
from motet_runner.adapters.eviction import DeviceAdapter, SlotAllocation, allocate_slot

EIGHT, SIXTEEN, SIXTY_FOUR = 0, 1, 3


def resident(name: str, slot: AdapterSlot, *, live: bool = False) -> DeviceAdapter:
    return DeviceAdapter(Digest(name), slot, live)


def allocate(
    rank_class: int, rows: int, residents: list[DeviceAdapter], *, evict: bool = True, max_adapters: int = 100
) -> SlotAllocation | None:
    return allocate_slot(rank_class, residents, rows=rows, max_adapters=max_adapters, evict=evict)


def test_free_rows_come_first_small_ranks_from_one_end_and_large_ones_from_the_other() -> None:
    residents = [resident("old", (SIXTEEN, 0))]
    assert allocate(SIXTEEN, 256, residents) == SlotAllocation((SIXTEEN, 1))
    assert allocate(SIXTY_FOUR, 256, residents) == SlotAllocation((SIXTY_FOUR, 3))


def test_the_least_recently_used_idle_adapter_is_evicted_and_only_if_it_must_be() -> None:
    residents = [resident(name, (SIXTEEN, index)) for index, name in enumerate("abcd")]
    assert allocate(SIXTEEN, 64, residents) == SlotAllocation((SIXTEEN, 0), evicted=(Digest("a"),))
    assert allocate(SIXTEEN, 64, residents, evict=False) is None
    assert allocate(EIGHT, 64, [resident("z", (SIXTEEN, 1), live=True)]) == SlotAllocation((EIGHT, 0))


def test_beyond_the_most_adapters_one_is_evicted_although_rows_are_free() -> None:
    residents = [
        resident("live", (SIXTEEN, 0), live=True),
        resident("old", (SIXTEEN, 1)),
        resident("new", (SIXTEEN, 2)),
    ]
    assert allocate(SIXTEEN, 256, residents, max_adapters=4) == SlotAllocation((SIXTEEN, 3))
    assert allocate(SIXTEEN, 256, residents, max_adapters=3) == SlotAllocation((SIXTEEN, 3), evicted=(Digest("old"),))
    assert allocate(SIXTEEN, 256, residents, max_adapters=3, evict=False) is None
    assert allocate(SIXTEEN, 256, [one._replace(live=True) for one in residents], max_adapters=3) is None


def test_small_live_adapters_are_moved_so_that_a_large_one_gets_a_slot() -> None:
    """One in each slot that the large one could have. Without moves they would keep it waiting for ever."""
    live = [resident(f"live{run}", (SIXTEEN, 4 * run), live=True) for run in range(4)]
    allocation = allocate(SIXTY_FOUR, 256, [resident("idle", (SIXTEEN, 1)), *live])
    assert allocation == SlotAllocation(
        (SIXTY_FOUR, 0), (Digest("idle"),), ((Digest("live0"), (SIXTEEN, 0), (SIXTEEN, 5)),)
    )


def test_there_is_no_slot_if_live_adapters_leave_too_few_rows() -> None:
    live = [resident(f"live{index}", (SIXTY_FOUR, index), live=True) for index in range(3)]
    small = resident("small", (EIGHT, 31), live=True)
    assert allocate(SIXTY_FOUR, 256, [*live, small]) is None
    assert allocate(5, 64, []) is None, "a rank that the memory cannot hold at all"


@given(data=st.data(), rows=st.integers(1, 40).map(lambda eights: 8 * eights))
@settings(deadline=None, max_examples=300)
def test_whatever_is_loaded_and_evicted_no_slots_overlap_and_no_live_adapter_is_lost(
    data: st.DataObject, rows: int
) -> None:
    residents: list[DeviceAdapter] = []
    for step in range(data.draw(st.integers(1, 12))):
        rank_class = data.draw(st.integers(0, len(RANKS) - 1))
        residents = [r._replace(live=data.draw(st.booleans())) for r in data.draw(st.permutations(residents))]
        evict = data.draw(st.booleans())
        max_adapters = data.draw(st.integers(1, 12))
        allocation = allocate(rank_class, rows, residents, evict=evict, max_adapters=max_adapters)
        if allocation is None:
            free = rows - sum(len(rows_of(r.slot)) for r in residents if r.live or not evict)
            assert residents or RANKS[rank_class] > free
            continue
        moves = {digest: (old, new) for digest, old, new in allocation.moved}
        assert all(r.digest not in moves or moves[r.digest][0] == r.slot for r in residents)
        assert not any(r.live and r.digest in allocation.evicted for r in residents)
        assert evict or not (allocation.evicted or allocation.moved)
        kept = [r for r in residents if r.digest not in allocation.evicted]
        old = {row for r in kept for row in rows_of(r.slot)}
        assert not any(set(rows_of(new)) & old for _, new in moves.values()), "it would be written over before it moves"
        assert len(kept) < max(len(residents), max_adapters), "one is evicted if as many are resident as allowed"
        residents = [r._replace(slot=moves.get(r.digest, (r.slot, r.slot))[1]) for r in kept]
        residents.append(resident(f"new{step}", allocation.slot))
        held = [row for r in residents for row in rows_of(r.slot)]
        assert len(held) == len(set(held))
        assert max(held) < rows
