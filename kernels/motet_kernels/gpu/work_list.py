"""The work list of add_lora's programs on a GPU: chunks of rows that use one adapter. Pure: it imports neither
torch nor Triton.

One list serves all linears of all layers, because the place of a matrix in a run depends on the rank alone. The list is
made when the rows change, and copied to the GPU as one array. The array also contains the list's length: programs
beyond it end at once. Rows without an adapter are not in the list.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from motet_kernels.gpu.lora_tiles import CHUNK_ROWS, CLASSES, MAX_RANK, RANK_STEP, rank_class
from motet_kernels.lora_batch import PlacedAdapter, Segment

# The header: how many entries there are for shrink, and where the chunks of each class of ranks end.
ENTRIES, CLASS_ENDS = 0, 1
HEADER = 16

# The fields of a chunk. RANK is that of its products. LAYOUT is where the offsets of its run's layout begin in the
# table of all layouts, counted in linears. SCALED is the rank of this layout if the adapter scales, else 0. From
# CHANGED on, each linear has a bit: 1 if the adapter changes the linear.
FIRST_ROW, ROW_COUNT, RANK, RUN, PRODUCTS, LAYOUT, SCALED, CHANGED = range(8)
WORD_BITS = 32

ENTRY_STEPS = 256
"""An entry for shrink is the chunk's number · ENTRY_STEPS + the number of a tile of A (RANK_STEP rows)."""

_ALIGNED = 16
"""Each part of the array begins at a multiple of this number of elements: kernels are compiled again when a pointer's
divisibility by 16 changes."""


@dataclass(frozen=True)
class Room:
    """The capacity of an array, and where its parts begin."""

    rows: int
    chunks: int
    entries: int
    products: int
    """The products of one linear in one split: Σ rows · rank"""
    linears: int

    @property
    def fields(self) -> int:
        """How many fields a chunk has"""
        return CHANGED + -(-self.linears // WORD_BITS)

    @property
    def begin_rows(self) -> int:
        return _aligned(HEADER + self.chunks * self.fields)

    @property
    def begin_entries(self) -> int:
        return _aligned(self.begin_rows + self.rows)

    @property
    def size(self) -> int:
        return _aligned(self.begin_entries + self.entries)


def room_for(rows: int, linears: int, max_rank: int = MAX_RANK) -> Room:
    """Room for `rows` rows with any adapters."""
    return Room(rows, rows, rows * (max_rank // RANK_STEP), rows * max_rank, linears)


@dataclass(frozen=True)
class Chunk:
    adapter: PlacedAdapter
    rows: Sequence[int]

    @property
    def rank(self) -> int:
        """Of its products"""
        return self.adapter.product_rank or self.adapter.rank


def chunks_of(segments: Sequence[Segment]) -> list[Chunk]:
    """A chunk has at most CHUNK_ROWS rows of one adapter, from anywhere in the batch. Chunks of one class of ranks are
    contiguous, the longest first: if the longest came last, most of the GPU would wait for them."""
    rows_of: dict[PlacedAdapter, list[int]] = {}
    for segment in segments:
        rows_of.setdefault(segment.adapter, []).extend(range(segment.start, segment.stop))
    chunks = [
        Chunk(adapter, rows[first : first + CHUNK_ROWS])
        for adapter, rows in rows_of.items()
        for first in range(0, len(rows), CHUNK_ROWS)
    ]
    return sorted(chunks, key=lambda chunk: (rank_class(chunk.rank), -len(chunk.rows)))


def smallest_room(chunks: Sequence[Chunk], linears: int) -> Room:
    return Room(
        rows=sum(len(chunk.rows) for chunk in chunks),
        chunks=len(chunks),
        entries=sum(chunk.rank // RANK_STEP for chunk in chunks),
        products=sum(len(chunk.rows) * chunk.rank for chunk in chunks),
        linears=linears,
    )


def write_list(
    chunks: Sequence[Chunk], room: Room, itemsize: int, changed: Callable[[PlacedAdapter], Sequence[int]]
) -> npt.NDArray[np.int64]:
    """The used part of the array. `changed`: an adapter's words; a word has the bits of WORD_BITS linears."""
    needed = smallest_room(chunks, room.linears)
    if needed.rows > room.rows or needed.chunks > room.chunks or needed.entries > room.entries:
        raise ValueError(f"{needed.rows} rows of {needed.chunks} chunks do not fit a batch of {room.rows} rows")
    first = products = 0
    records: list[int] = []
    rows: list[int] = []
    entries: list[int] = []
    for number, chunk in enumerate(chunks):
        adapter, count = chunk.adapter, len(chunk.rows)
        layout = (adapter.rank // RANK_STEP - 1) * room.linears
        scaled = adapter.rank if adapter.scales else 0
        records += (first, count, chunk.rank, adapter.offset // itemsize, products, layout, scaled, *changed(adapter))
        rows += chunk.rows
        entries += range(number * ENTRY_STEPS, number * ENTRY_STEPS + chunk.rank // RANK_STEP)
        first += count
        products += count * chunk.rank
    array = np.zeros(room.begin_entries + needed.entries, dtype=np.int64)
    array[HEADER : HEADER + len(records)] = records
    array[room.begin_rows : room.begin_rows + len(rows)] = rows
    array[room.begin_entries :] = entries
    classes = [rank_class(chunk.rank) for chunk in chunks]
    array[ENTRIES] = len(entries)
    array[CLASS_ENDS : CLASS_ENDS + CLASSES] = np.searchsorted(classes, np.arange(CLASSES), side="right")
    return array


def words(changed: Sequence[bool]) -> tuple[int, ...]:
    """A bit for each linear, packed as in a chunk"""
    return tuple(
        sum(bit << place for place, bit in enumerate(changed[first : first + WORD_BITS]))
        for first in range(0, len(changed), WORD_BITS)
    )


def _aligned(number: int) -> int:
    return -(-number // _ALIGNED) * _ALIGNED
