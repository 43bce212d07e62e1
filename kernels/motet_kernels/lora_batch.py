"""Which rows of an iteration belong to which adapter, laid out once and used by every projection of every layer."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

LONG_SEGMENT_ROWS = 16
"""Rows from which a segment is multiplied by itself: its own two matrix products keep a core busy. Shorter ones are
padded to each other's length and share one batched product."""


@dataclass(frozen=True, slots=True, order=True)
class Segment:
    """Rows [start, stop) of the batch go through `slot` of rank class `group`."""

    rank_class: int
    slot: int
    start: int
    stop: int


@dataclass(slots=True)
class PaddedSegments:
    """Short segments of one rank class as `slots` blocks of `width` rows each."""

    group: int
    slots: tuple[int, ...]
    width: int
    row_of_place: torch.Tensor
    """[slots · width] the row that each place of the blocks is filled with"""
    mask: torch.Tensor | None
    """[slots, width, 1] zero where a block is longer than its segment; None when all are full"""
    places_used: torch.Tensor | None
    """[rows] the places that are rows, in the order of `rows`; None when that is all of them in order"""
    rows: torch.Tensor | slice
    """[rows] where they are added, or a slice when the rows lie together"""
    whole: slice | None
    """The rows, when they lie together in full blocks: then neither `source` nor `take` is needed"""


@dataclass(slots=True)
class LoraBatch:
    long: list[Segment] = field(default_factory=list)
    short: list[PaddedSegments] = field(default_factory=list)


def make_batch(segments: Sequence[Segment], device: torch.device | str = "cpu") -> LoraBatch:
    """Group rows by adapter. Segments may come in any order; those of one slot are joined where they touch.

    Rows that no segment names take part in nothing.
    """
    batch = LoraBatch()
    by_group: dict[int, dict[int, list[range]]] = {}
    for segment in _joined(segments):
        if segment.stop - segment.start >= LONG_SEGMENT_ROWS:
            batch.long.append(segment)
        else:
            of_slot = by_group.setdefault(segment.rank_class, {}).setdefault(segment.slot, [])
            of_slot.append(range(segment.start, segment.stop))
    for group, of_slots in sorted(by_group.items()):
        ((slot, ranges), *others) = of_slots.items()
        if not others and len(ranges) == 1:  # alone in its class: nothing to share a product with
            batch.long.append(Segment(group, slot, ranges[0].start, ranges[0].stop))
        else:
            batch.short.append(_blocks(group, of_slots, device))
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


def _blocks(group: int, of_slots: dict[int, list[range]], device: torch.device | str) -> PaddedSegments:
    rows_of = {slot: [row for rows in ranges for row in rows] for slot, ranges in sorted(of_slots.items())}
    width = max(map(len, rows_of.values()))
    # Places beyond a segment repeat its own first row, never a neighbour's, and are masked.
    source = [row for rows in rows_of.values() for row in rows + rows[:1] * (width - len(rows))]
    rows = [row for rows in rows_of.values() for row in rows]
    take = [block * width + i for block, rows in enumerate(rows_of.values()) for i in range(len(rows))]
    full = len(take) == len(source)
    mask = None
    if not full:
        mask = torch.zeros((len(rows_of), width, 1), device=device)
        for block, of_slot in enumerate(rows_of.values()):
            mask[block, : len(of_slot)] = 1
    span = slice(rows[0], rows[0] + len(rows))
    together = rows == list(range(span.start, span.stop))
    return PaddedSegments(
        group=group,
        slots=tuple(rows_of),
        width=width,
        row_of_place=torch.tensor(source, device=device),
        mask=mask,
        places_used=None if full else torch.tensor(take, device=device),
        rows=span if together else torch.tensor(rows, device=device),
        whole=span if together and full else None,
    )
