"""Which rows of an iteration belong to which adapter: computed once, used by every projection of every layer."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

LONG_SEGMENT_ROWS = 16
"""A segment of at least so many rows gets two matrix products for itself, which keep a core busy. Shorter segments are
padded to one length and share one batched product."""


@dataclass(frozen=True, slots=True, order=True)
class Segment:
    """Rows [start, stop) of the batch use the adapter in `slot` of `rank_class`."""

    rank_class: int
    slot: int
    start: int
    stop: int


@dataclass(slots=True)
class PaddedSegments:
    """Short segments of one rank class, as one block of `width` rows for each of `slots`."""

    rank_class: int
    slots: tuple[int, ...]
    width: int
    row_of_place: torch.Tensor
    """[slots · width] for each place in the blocks, the row that fills it"""
    mask: torch.Tensor | None
    """[slots, width, 1] zero where a block is longer than its segment; None if all blocks are full"""
    places_used: torch.Tensor | None
    """[rows] the places that hold rows, in the order of `rows`; None if all places do"""
    rows: torch.Tensor | slice
    """[rows] the rows that the products are added to; a slice if they are contiguous"""
    whole: slice | None
    """The rows, if they are contiguous and fill all blocks: then `row_of_place` and `places_used` are not needed"""


@dataclass(slots=True)
class LoraBatch:
    long: list[Segment] = field(default_factory=list)
    short: list[PaddedSegments] = field(default_factory=list)


def make_batch(segments: Sequence[Segment], device: torch.device | str = "cpu") -> LoraBatch:
    """Group rows by adapter. Segments may come in any order; adjacent segments of one slot are joined.

    Rows in no segment stay as they are.
    """
    batch = LoraBatch()
    by_class: dict[int, dict[int, list[range]]] = {}
    for segment in _joined(segments):
        if segment.stop - segment.start >= LONG_SEGMENT_ROWS:
            batch.long.append(segment)
        else:
            of_slot = by_class.setdefault(segment.rank_class, {}).setdefault(segment.slot, [])
            of_slot.append(range(segment.start, segment.stop))
    for rank_class, of_slots in sorted(by_class.items()):
        ((slot, ranges), *others) = of_slots.items()
        if not others and len(ranges) == 1:  # it shares its class with no other
            batch.long.append(Segment(rank_class, slot, ranges[0].start, ranges[0].stop))
        else:
            batch.short.append(_blocks(rank_class, of_slots, device))
    return batch


def _joined(segments: Sequence[Segment]) -> list[Segment]:
    joined: list[Segment] = []
    for segment in sorted(segments):
        last = joined[-1] if joined else None
        if last and (last.rank_class, last.slot, last.stop) == (segment.rank_class, segment.slot, segment.start):
            joined[-1] = Segment(segment.rank_class, segment.slot, last.start, segment.stop)
        else:
            joined.append(segment)
    return joined


def _blocks(rank_class: int, of_slots: dict[int, list[range]], device: torch.device | str) -> PaddedSegments:
    rows_of = {slot: [row for rows in ranges for row in rows] for slot, ranges in sorted(of_slots.items())}
    width = max(map(len, rows_of.values()))
    # Places beyond the end of a segment repeat its first row, never a row of another segment, and are masked.
    row_of_place = [row for rows in rows_of.values() for row in rows + rows[:1] * (width - len(rows))]
    rows = [row for rows in rows_of.values() for row in rows]
    places_used = [block * width + i for block, rows in enumerate(rows_of.values()) for i in range(len(rows))]
    full = len(places_used) == len(row_of_place)
    mask = None
    if not full:
        mask = torch.zeros((len(rows_of), width, 1), device=device)
        for block, of_slot in enumerate(rows_of.values()):
            mask[block, : len(of_slot)] = 1
    span = slice(rows[0], rows[0] + len(rows))
    together = rows == list(range(span.start, span.stop))
    return PaddedSegments(
        rank_class=rank_class,
        slots=tuple(rows_of),
        width=width,
        row_of_place=torch.tensor(row_of_place, device=device),
        mask=mask,
        places_used=None if full else torch.tensor(places_used, device=device),
        rows=span if together else torch.tensor(rows, device=device),
        whole=span if together and full else None,
    )
