"""The list of work of add_lora on a GPU: every row once, at its adapter's own rank, and nothing else."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet_kernels import PlacedAdapter, Segment
from motet_kernels.gpu.lora_tiles import CHUNK_ROWS, CLASSES, HELD_RANKS, MAX_RANK, RANK_STEP, rank_class
from motet_kernels.gpu.work_list import (
    CHANGED,
    CLASS_ENDS,
    ENTRIES,
    ENTRY_STEPS,
    HEADER,
    Chunk,
    chunks_of,
    room_for,
    smallest_room,
    words,
    write_list,
)

LINEARS = 40
ITEMSIZE = 2
ADAPTERS = [
    PlacedAdapter(str(number), number * 4096, rank, frozenset({f"linear {number % LINEARS}"}))
    for number, rank in enumerate([16, 64, 16, 128, 32, 512, 48, 80])
] + [
    PlacedAdapter(str(rank), rank * 4096, rank, frozenset({"linear 7"}), products)
    for rank, products in ((32, 16), (48, 48), (528, 512))
]
OWNERS = st.lists(
    st.tuples(st.one_of(st.none(), st.sampled_from(ADAPTERS)), st.integers(1, 2 * CHUNK_ROWS + 9)), max_size=9
).map(lambda runs: [owner for owner, rows in runs for _ in range(rows)])
"""Whose each row is"""


def segments_of(owners: list[PlacedAdapter | None]) -> list[Segment]:
    return [Segment(row, row + 1, owner) for row, owner in enumerate(owners) if owner is not None]


def rank_of(chunk: Chunk) -> int:
    """Of its products: what scales has none"""
    return chunk.adapter.product_rank or chunk.adapter.rank


def written(chunks: list[Chunk]) -> np.ndarray:
    room = smallest_room(chunks, LINEARS)
    return write_list(
        chunks, room, ITEMSIZE, lambda adapter: words([f"linear {n}" in adapter.linears for n in range(LINEARS)])
    )


@given(OWNERS)
def test_each_row_with_an_adapter_is_in_one_chunk_of_it(owners: list[PlacedAdapter | None]) -> None:
    chunks = chunks_of(segments_of(owners))
    found = [(row, chunk.adapter) for chunk in chunks for row in chunk.rows]
    assert sorted(found) == [(row, owner) for row, owner in enumerate(owners) if owner is not None]
    assert all(0 < len(chunk.rows) <= CHUNK_ROWS for chunk in chunks)


@given(OWNERS)
def test_an_adapter_is_read_as_rarely_as_can_be(owners: list[PlacedAdapter | None]) -> None:
    rows = Counter(owner for owner in owners if owner is not None)
    chunks = Counter(chunk.adapter for chunk in chunks_of(segments_of(owners)))
    assert chunks == {adapter: -(-count // CHUNK_ROWS) for adapter, count in rows.items()}


@given(OWNERS)
def test_mixed_ranks_cost_their_sum(owners: list[PlacedAdapter | None]) -> None:
    chunks = chunks_of(segments_of(owners))
    array, room = written(chunks), smallest_room(chunks, LINEARS)
    entries = array[room.begin_entries :]
    assert array[ENTRIES] == len(entries) == sum(map(rank_of, chunks)) // RANK_STEP
    assert [divmod(int(entry), ENTRY_STEPS) for entry in entries] == [
        (number, step) for number, chunk in enumerate(chunks) for step in range(rank_of(chunk) // RANK_STEP)
    ]


@given(OWNERS)
def test_a_chunk_tells_what_a_program_needs(owners: list[PlacedAdapter | None]) -> None:
    chunks = chunks_of(segments_of(owners))
    array, room = written(chunks), smallest_room(chunks, LINEARS)
    records = array[HEADER:][: len(chunks) * room.fields].reshape(len(chunks), room.fields)
    taken = 0
    for chunk, (first, count, rank, run, products, layout, scaled, *bits) in zip(chunks, records.tolist(), strict=True):
        assert array[room.begin_rows + first :][:count].tolist() == chunk.rows
        assert (rank, run * ITEMSIZE) == (rank_of(chunk), chunk.adapter.offset)
        assert layout == (chunk.adapter.rank // RANK_STEP - 1) * LINEARS
        assert scaled == (chunk.adapter.rank if chunk.adapter.scales else 0)
        assert products == taken, "chunks share no products"
        taken += rank * count
        changed = [n for n in range(LINEARS) if bits[n // 32] >> n % 32 & 1]
        assert {f"linear {n}" for n in changed} == chunk.adapter.linears
    assert taken == room.products
    assert room.fields - CHANGED == 2


@given(OWNERS)
def test_classes_of_ranks_follow_each_other(owners: list[PlacedAdapter | None]) -> None:
    chunks = chunks_of(segments_of(owners))
    ends = written(chunks)[CLASS_ENDS:][:CLASSES].tolist()
    found = [place for place, end in enumerate(ends) for _ in range(end - ([0, *ends])[place])]
    assert found == [rank_class(rank_of(chunk)) for chunk in chunks]
    assert ends[-1] == len(chunks)


def test_the_class_of_a_rank_is_the_narrowest_that_holds_it() -> None:
    for rank in range(RANK_STEP, MAX_RANK + 1, RANK_STEP):
        fits = [held for held in HELD_RANKS if held >= rank]
        assert rank_class(rank) == (HELD_RANKS.index(fits[0]) if fits else CLASSES - 1)


@given(OWNERS)
def test_a_room_for_rows_fits_whatever_they_use(owners: list[PlacedAdapter | None]) -> None:
    chunks = chunks_of(segments_of(owners))
    room, needed = room_for(len(owners), LINEARS), smallest_room(chunks, LINEARS)
    assert needed.products <= room.products
    array = write_list(chunks, room, ITEMSIZE, lambda _: words([True] * LINEARS))
    assert len(array) <= room.size
    assert array[room.begin_entries :][: needed.entries].tolist() == written(chunks)[needed.begin_entries :].tolist()


def test_parts_begin_where_pointers_are_divisible_alike() -> None:
    for rows in range(1, 40):
        room = room_for(rows, LINEARS)
        assert [begin % 16 for begin in (HEADER, room.begin_rows, room.begin_entries)] == [0, 0, 0]


def test_too_many_rows_are_refused() -> None:
    chunks = chunks_of(segments_of([ADAPTERS[0]] * 3))
    with pytest.raises(ValueError, match="3 rows of 1 chunks do not fit a batch of 2 rows"):
        write_list(chunks, room_for(2, LINEARS), ITEMSIZE, lambda _: words([True] * LINEARS))
