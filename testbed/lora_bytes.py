"""The bytes that add_lora's launches move, from their list of work, and the least that any could. Pure.

Memory is what is slow, so `moved` counts what has to come from it or go there, by these rules:

- each load of a tile of A or B, whoever has read it before;
- each row of x once, and each row of y once in and once out;
- the sums between the two launches once out and once in, and the list of work once for each launch.

A row of x is loaded by several programs of a launch, each RANK_STEP of A by another one, and so are the sums, by each
tile of B. Both are small beside a GPU's cache, from which the later loads come, so `moved` leaves them out. `loaded`
has them, too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from motet_kernels.gpu.lora_tiles import HELD_RANKS, RANK_STEP, ROWS, rank_class, splits, tile_columns
from motet_kernels.gpu.work_list import Chunk, chunks_of, smallest_room
from motet_kernels.int8_layout import SCALE_BYTES
from motet_kernels.lora_batch import Segment

SUM_BYTES = 4
LIST_BYTES = 8


@dataclass(frozen=True)
class LaunchBytes:
    """Of one launch"""

    moved: int
    loaded: int
    """With the loads that a cache answers"""


def shrink_bytes(
    segments: Sequence[Segment],
    inputs: int,
    outputs: Mapping[str, int],
    linears: int,
    itemsize: int,
    *,
    int8: bool = False,
) -> LaunchBytes:
    """`outputs`: linear → its outputs, of those that are computed together; `linears`: how many the model has;
    `itemsize`: of rows, and of adapters unless they are `int8`."""
    chunks = chunks_of(segments)
    moved = loaded = _list_bytes(chunks, linears)
    for chunk, changed in _changed(chunks, outputs):
        rows, rank = len(chunk.rows), chunk.rank
        read = len(changed) * rank * (inputs + SCALE_BYTES if int8 else inputs * itemsize)
        written = len(changed) * splits(inputs) * rows * rank * SUM_BYTES
        of_rows = rows * inputs * itemsize
        moved += read + written + of_rows
        loaded += read + written + of_rows * len(changed) * (rank // RANK_STEP)
    return LaunchBytes(moved, loaded)


def expand_bytes(
    segments: Sequence[Segment],
    inputs: int,
    outputs: Mapping[str, int],
    linears: int,
    itemsize: int,
    *,
    int8: bool = False,
) -> LaunchBytes:
    chunks = chunks_of(segments)
    moved = loaded = _list_bytes(chunks, linears)
    widest = max(outputs.values())
    for chunk, changed in _changed(chunks, outputs):
        rows, rank = len(chunk.rows), chunk.rank
        columns = tile_columns(rank_class(rank), widest, itemsize)
        # Of a rank above the last of HELD_RANKS only the first tile stays, and the others are read for each ROWS.
        held = min(rank, HELD_RANKS[-1])
        ranks_read = held + (rank - held) * -(-rows // ROWS)
        for linear in changed:
            tile_reads = ranks_read * outputs[linear] * (1 if int8 else itemsize)
            of_y = 2 * rows * outputs[linear] * itemsize
            sums = splits(inputs) * rows * rank * SUM_BYTES
            moved += tile_reads + of_y + sums
            loaded += tile_reads + of_y + sums * -(-outputs[linear] // columns)
    return LaunchBytes(moved, loaded)


def floor_bytes(
    segments: Sequence[Segment],
    ranks: Mapping[str, int],
    inputs: int,
    outputs: Mapping[str, int],
    itemsize: int,
    *,
    int8: bool = False,
) -> int:
    """The matrices of each adapter that computes once, at its own rank, `ranks` by its name; x read once; y read and
    written once."""
    total = 0
    for adapter in {segment.adapter for segment in segments}:
        rows = sum(segment.stop - segment.start for segment in segments if segment.adapter == adapter)
        changed = [width for linear, width in outputs.items() if linear in adapter.linears]
        total += sum(ranks[adapter.name] * (inputs + width) for width in changed) * (1 if int8 else itemsize)
        total += sum(2 * rows * width for width in changed) * itemsize
        total += rows * inputs * itemsize * bool(changed)
    return total


def _changed(chunks: Sequence[Chunk], outputs: Mapping[str, int]) -> list[tuple[Chunk, list[str]]]:
    """Chunks with those of the linears that their adapter changes"""
    found = [(chunk, [linear for linear in outputs if linear in chunk.adapter.linears]) for chunk in chunks]
    return [(chunk, changed) for chunk, changed in found if changed]


def _list_bytes(chunks: Sequence[Chunk], linears: int) -> int:
    return smallest_room(chunks, linears).size * LIST_BYTES
