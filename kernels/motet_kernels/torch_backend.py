"""The back end in plain torch, for any device.

Short segments of adapters of one rank share one batched product, which reads copies of their runs (`run_stacks.py`).
A long segment (a prompt, or many rows of one adapter; see LONG_SEGMENT_ROWS) has two products of its own, which read
the adapter in place. A short segment of an adapter that has no copy, or that scales the linears' own results, is
treated in the same way: the stacks have no place for scales. So with many such adapters this back end is slower than
with plain ones. It serves where nothing was compiled.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache

import torch

from motet_kernels.lora_batch import PlacedAdapter, Segment
from motet_kernels.run_layout import LinearGroup, RunLayout, scale
from motet_kernels.run_stacks import Blocks, RunStack, RunStacks

LONG_SEGMENT_ROWS = 16
"""The two matrix products of one segment with this number of rows keep a core busy. Shorter segments are padded to one
length and share one batched product."""


@dataclass(frozen=True, slots=True)
class Together:
    """Linears that are fed the same rows, and whose results are columns of one matrix."""

    linears: tuple[str, ...]
    columns: Sequence[int]
    """The first column of each; the last entry is the number of all columns."""
    group: LinearGroup
    first: int
    """The index of the first linear in the group; the group has the linears in the same order."""


_Views = dict[tuple[str, ...], tuple[torch.Tensor, list[torch.Tensor]]]
"""Linears → one adapter's A [inputs, linears · rank] and each B [rank, outputs]"""


@dataclass(frozen=True, slots=True)
class RowsInPlace:
    """Rows [start, stop) use an adapter that is read in place."""

    start: int
    stop: int
    adapter: PlacedAdapter
    views: _Views


@dataclass(frozen=True, slots=True)
class StackedRows:
    """Short segments of one rank, as one block of `width` rows for each adapter of a stack."""

    stack: RunStack
    linears: frozenset[str]
    """The linears that at least one of the adapters changes."""
    width: int
    row_of_place: torch.Tensor
    """[adapters · width] the row at each place in the blocks"""
    places_used: torch.Tensor | None
    """[rows] the places that hold rows, in the order of `rows`; None if all places do"""
    rows: torch.Tensor | slice
    """[rows] the rows that the products are added to; a slice if they are contiguous"""
    whole: slice | None
    """The rows, if they are contiguous and fill all blocks: then `row_of_place` and `places_used` are not needed"""


@dataclass(slots=True)
class LoraBatch:
    in_place: list[RowsInPlace] = field(default_factory=list)
    stacked: list[StackedRows] = field(default_factory=list)
    scales: bool = False
    """True if an adapter scales the linears' own results: then each y must be such a result and nothing more."""


class TorchBackend:
    tile = 8
    copies = True

    def __init__(
        self, groups: Sequence[LinearGroup], memory: torch.Tensor, dtype: torch.dtype, *, copy_bytes: int
    ) -> None:
        self._memory = memory
        self._groups = groups = tuple(groups)
        self._alone = {
            linear: Together((linear,), (0, outputs), group, place)
            for group in groups
            for place, (linear, outputs) in enumerate(group.outputs.items())
        }
        self._layout = cache(lambda rank: RunLayout(rank, groups, dtype))
        self._stacks = RunStacks(memory, copy_bytes, self.layout)
        self._views: dict[PlacedAdapter, _Views] = {}

    def layout(self, rank: int) -> RunLayout:
        return self._layout(-(-rank // self.tile) * self.tile)

    def order(self, adapter: PlacedAdapter) -> tuple[int, int]:
        """Rows in the order of their stack need no gather."""
        stack = self._stacks.of(adapter.rank)
        place = None if stack is None else stack.position.get(adapter.name)
        return adapter.rank, adapter.offset if place is None else place - len(self._memory)

    def make_batch(self, segments: Sequence[Segment]) -> LoraBatch:
        long, short = _by_length(segments)
        self._stacks.hold(adapter for of_rank in short.values() if len(of_rank) > 1 for adapter in of_rank)
        batch = LoraBatch(scales=any(one.adapter.scales for one in long))
        for rank, of_rank in sorted(short.items()):
            stack = self._stacks.of(rank)
            held = {} if stack is None else {one: rows for one, rows in of_rank.items() if one.name in stack.position}
            if stack is not None and held:
                batch.stacked.append(_blocks(stack, held, self._memory.device))
            long += [
                Segment(first, last, adapter)
                for adapter, rows in of_rank.items()
                if adapter not in held
                for first, last in _spans(rows)
            ]
        self._views = {one.adapter: self._views.get(one.adapter, {}) for one in long}
        batch.in_place = [RowsInPlace(*one, self._views[one.adapter]) for one in long]
        return batch

    def add_lora(self, y: torch.Tensor, x: torch.Tensor, linear: str, batch: LoraBatch) -> None:
        self._add(y, x, self._alone[linear], batch)

    def together(self, linears: Sequence[str], columns: Sequence[int]) -> list[tuple[slice, Together]]:
        """How `add_lora_together` treats these linears, whose columns lie side by side: a whole group at once, other
        linears alone. Linears that no adapter may change are left out."""
        names = tuple(linears)
        for group in self._groups:
            if names == tuple(group.outputs):
                self._stacks.join(group)
                return [(slice(None), Together(names, tuple(columns), group, 0))]
        spans = zip(names, columns, columns[1:], strict=False)
        return [(slice(first, last), self._alone[linear]) for linear, first, last in spans if linear in self._alone]

    def add_lora_together(
        self, y: torch.Tensor, x: torch.Tensor, linears: Sequence[tuple[slice, Together]], batch: LoraBatch
    ) -> None:
        """Like `add_lora`, with the results of several linears as columns of y."""
        for columns, of_some in linears:
            self._add(y if columns == slice(None) else y[:, columns], x, of_some, batch)

    def _add(self, y: torch.Tensor, x: torch.Tensor, some: Together, batch: LoraBatch) -> None:
        for rows in batch.in_place:
            changed = rows.adapter.linears
            if not changed.isdisjoint(some.linears):
                a, several_b = rows.views.get(some.linears) or self._view(rows, some)
                v = x[rows.start : rows.stop] @ a
                into = y[rows.start : rows.stop]
                rank = rows.adapter.rank
                for place, linear in enumerate(some.linears):
                    if linear in changed:
                        columns = into[:, some.columns[place] : some.columns[place + 1]]
                        if rows.adapter.scales:
                            scale(columns, *several_b[place][-2:])
                        columns.addmm_(v[:, place * rank : (place + 1) * rank], several_b[place])
        for stacked in batch.stacked:
            if not stacked.linears.isdisjoint(some.linears):  # where an adapter changes nothing, its run holds zeros
                _add_stacked(y, x, some, stacked)

    def _view(self, rows: RowsInPlace, some: Together) -> tuple[torch.Tensor, list[torch.Tensor]]:
        layout, begin, rank = self._layout(rows.adapter.rank), rows.adapter.offset, rows.adapter.rank
        run = self._memory[begin : begin + layout.bytes]
        a = layout.group_a(run, some.group)[some.first * rank : (some.first + len(some.linears)) * rank]
        view = rows.views[some.linears] = a.t(), [layout.matrices(run, linear)[1] for linear in some.linears]
        return view


_ShortRows = dict[int, dict[PlacedAdapter, list[int]]]
"""Rank → adapter → its rows in short segments."""


def _by_length(segments: Sequence[Segment]) -> tuple[list[Segment], _ShortRows]:
    """Segments that read the adapter in place, and the rows of short segments.

    Adjacent short segments of one adapter are merged first. A short segment is not merged with a long one: so its rows
    use the stack whether a prompt stands beside them or not.
    """
    long: list[Segment] = []
    short: _ShortRows = {}
    joined: list[Segment] = []
    for segment in sorted(segments):
        if segment.adapter.scales or segment.stop - segment.start >= LONG_SEGMENT_ROWS:
            long.append(segment)
        elif joined and (joined[-1].adapter, joined[-1].stop) == (segment.adapter, segment.start):
            joined[-1] = joined[-1]._replace(stop=segment.stop)
        else:
            joined.append(segment)
    for segment in joined:
        if segment.stop - segment.start >= LONG_SEGMENT_ROWS:
            long.append(segment)
        else:
            of_rank = short.setdefault(segment.adapter.rank, {})
            of_rank.setdefault(segment.adapter, []).extend(range(segment.start, segment.stop))
    return long, short


def _spans(rows: Sequence[int]) -> Iterable[tuple[int, int]]:
    """Ascending rows as [first, last)."""
    first = 0
    for end in range(1, len(rows) + 1):
        if end == len(rows) or rows[end] != rows[end - 1] + 1:
            yield rows[first], rows[end - 1] + 1
            first = end


def _blocks(stack: RunStack, of_adapters: dict[PlacedAdapter, list[int]], device: torch.device) -> StackedRows:
    in_order = sorted(of_adapters, key=lambda adapter: stack.position[adapter.name])
    rows_of = [of_adapters[adapter] for adapter in in_order]
    width = max(map(len, rows_of))
    # Places beyond the end of a segment repeat its first row; their results are dropped.
    row_of_place = [row for rows in rows_of for row in rows + rows[:1] * (width - len(rows))]
    rows = [row for of_adapter in rows_of for row in of_adapter]
    places_used = [block * width + i for block, of_adapter in enumerate(rows_of) for i in range(len(of_adapter))]
    full = len(places_used) == len(row_of_place)
    span = slice(rows[0], rows[0] + len(rows))
    together = rows == list(range(span.start, span.stop))
    return StackedRows(
        stack=stack,
        linears=frozenset().union(*(adapter.linears for adapter in in_order)),
        width=width,
        row_of_place=torch.tensor(row_of_place, device=device),
        places_used=None if full else torch.tensor(places_used, device=device),
        rows=span if together else torch.tensor(rows, device=device),
        whole=span if together and full else None,
    )


def _add_stacked(y: torch.Tensor, x: torch.Tensor, some: Together, stacked: StackedRows) -> None:
    stack, rank, blocks = stacked.stack, stacked.stack.layout.rank, (-1, stacked.width)
    a = stack.group_a(some.group)
    if len(some.linears) < len(some.group.outputs):
        a = a[:, some.first * rank : (some.first + len(some.linears)) * rank]
    whole = stacked.whole
    rows = x.index_select(0, stacked.row_of_place) if whole is None else x[whole]
    v = _shrunk(rows.unflatten(0, blocks), a)
    joined = stack.joined.get(some.linears[0])
    if joined is not None and len(some.linears) == len(some.group.outputs):
        _add_joined(y, v, joined, stacked)
        return
    into = y[stacked.rows].unflatten(0, blocks) if whole is not None else y
    for place, linear in enumerate(some.linears):
        if linear not in stacked.linears:
            continue
        of_linear = v[..., place * rank : (place + 1) * rank] if len(some.linears) > 1 else v
        columns = into[..., some.columns[place] : some.columns[place + 1]]
        if whole is not None:
            columns.baddbmm_(of_linear, stack.b(linear))
            continue
        _add_rows(columns, torch.bmm(of_linear, stack.b(linear)).flatten(0, 1), stacked)


def _add_joined(y: torch.Tensor, v: torch.Tensor, joined: Blocks, stacked: StackedRows) -> None:
    """v [adapters, rows, linears · rank] times the Bs of all linears of a group, in one batched product. Where an
    adapter does not change a linear, B is zeros: multiplying by zeros takes less time than one more operator."""
    rank, count = stacked.stack.layout.rank, joined.count
    by_linear = v.unflatten(2, (-1, rank)).transpose(1, 2)
    if count > by_linear.shape[1]:
        by_linear = by_linear.index_select(1, joined.linear_of)
    factors, b = by_linear.flatten(0, 1), stacked.stack.blocks(joined)
    if stacked.whole is not None:
        into = y[stacked.whole].unflatten(0, (-1, stacked.width)).unflatten(2, (count, -1)).transpose(1, 2)
        if stacked.width == 1 and into.is_contiguous():
            into.flatten(0, 1).baddbmm_(factors, b)
        else:
            into.add_(torch.bmm(factors, b).view(into.shape))
        return
    added = torch.bmm(factors, b).unflatten(0, (-1, count)).transpose(1, 2)
    _add_rows(y, added.flatten(2).flatten(0, 1), stacked)


def _add_rows(y: torch.Tensor, added: torch.Tensor, stacked: StackedRows) -> None:
    """`added` [adapters · width, columns]: one product per place in the blocks"""
    if stacked.places_used is not None:
        added = added.index_select(0, stacked.places_used)
    if isinstance(stacked.rows, slice):
        y[stacked.rows] += added
    else:
        y.index_add_(0, stacked.rows, added)


def _shrunk(x: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    """x [adapters, rows, inputs] · Aᵀ [adapters, ranks, inputs] → [adapters, rows, ranks]

    If the matrices of A are not contiguous, torch would copy them as the second factor: then A is the first factor.
    """
    if a.is_contiguous():
        return torch.bmm(x, a.transpose(1, 2))
    return torch.bmm(a, x.transpose(1, 2)).transpose(1, 2)
