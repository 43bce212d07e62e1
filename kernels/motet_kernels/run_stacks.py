"""Copies of the runs of adapters in use, side by side, so that one batched product serves many adapters.

A run is copied when its adapter joins a stack, not in each iteration. The memory of all copies is allocated once. The
runs of one rank make a stack. Matrices that are multiplied together are contiguous there: otherwise torch would copy
them in each product, and the copy takes several times as long as the product.

Linears whose LoRA is always added in one call, such as q, k and v, have their Bs in blocks of one width: q of 512
columns, and k and v of 256 each, make four blocks. So one batched product computes the columns of all these linears.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import gcd

import torch

from motet_kernels.lora_batch import PlacedAdapter
from motet_kernels.run_layout import LinearGroup, RunLayout

MAX_BLOCKS = 16
"""Each block is one matrix of the batched product. With more blocks, one batched product per linear is as fast."""


@dataclass(frozen=True, eq=False)
class Blocks:
    """How the columns of several linears are cut into blocks of one width."""

    group: LinearGroup
    width: int
    spans: dict[str, tuple[int, int]]
    """Linear → its blocks [first, last)"""
    linear_of: torch.Tensor
    """[blocks] the index of each block's linear in the group"""

    @property
    def count(self) -> int:
        return len(self.linear_of)


def blocks_of(group: LinearGroup, device: torch.device) -> Blocks | None:
    """None if the group has only one linear, or too many blocks: then each linear is multiplied alone."""
    width = gcd(*group.outputs.values())
    counts = [outputs // width for outputs in group.outputs.values()]
    if len(counts) == 1 or sum(counts) > MAX_BLOCKS:
        return None
    ends = list(accumulate(counts))
    spans = {linear: (end - count, end) for linear, end, count in zip(group.outputs, ends, counts, strict=True)}
    linear_of = [place for place, count in enumerate(counts) for _ in range(count)]
    return Blocks(group, width, spans, torch.tensor(linear_of, device=device))


class RunStack:
    """Copies of runs of one rank, one at each place."""

    def __init__(self, layout: RunLayout, room: torch.Tensor, joined: Mapping[str, Blocks]) -> None:
        """`room`: [places · bytes of a run]. `joined`: linear → its blocks."""
        self.layout = layout
        self.joined = dict(joined)
        self.places = places = len(room) // layout.bytes
        self.position: dict[str, int] = {}
        """Adapter → its place. There are no empty places between used ones."""
        whole: dict[int, int] = {}
        self._blocks: dict[int, Blocks] = {}
        """The offset of a group's Bs in a run → their blocks"""
        for begin, size, linear in layout.parts:
            blocks = self.joined.get(linear)
            if blocks is None:
                whole[begin] = size
            elif linear == next(iter(blocks.group.outputs)):
                whole[begin] = sum(blocks.group.outputs.values()) * layout.rank * layout.dtype.itemsize
                self._blocks[begin] = blocks
        self._parts = {
            begin: room[begin * places : (begin + size) * places].view(places, size) for begin, size in whole.items()
        }
        """The offset of a part in a run → the copies of this part [places, bytes]"""
        self._matrices: dict[int, torch.Tensor] = {}

    def group_a(self, group: LinearGroup) -> torch.Tensor:
        """Aᵀ [adapters, linears · rank, inputs] of all linears of a group"""
        return self._of(self.layout.begin(group), len(group.outputs) * self.layout.rank)

    def b(self, linear: str) -> torch.Tensor:
        """B [adapters, rank, outputs] of a linear: a new copy if the linear is cut into blocks."""
        blocks = self.joined.get(linear)
        if blocks is None:
            return self._of(self.layout.offsets[linear][1], self.layout.rank)
        first, last = blocks.spans[linear]
        by_adapter = self.blocks(blocks).unflatten(0, (len(self.position), -1))
        whole: torch.Tensor = by_adapter[:, first:last].transpose(1, 2).flatten(2)
        return whole

    def blocks(self, blocks: Blocks) -> torch.Tensor:
        """B [adapters · blocks, rank, width] of the linears of a group"""
        found = self._of(self.layout.offsets[next(iter(blocks.group.outputs))][1], blocks.count, self.layout.rank)
        return found.flatten(0, 1)

    def _of(self, begin: int, *sizes: int) -> torch.Tensor:
        """[adapters, sizes, columns]"""
        found = self._matrices.get(begin)
        if found is None:
            part = self._parts[begin][: len(self.position)].view(self.layout.dtype)
            found = self._matrices[begin] = part.unflatten(1, (*sizes, -1))
        return found

    def hold(self, adapters: Sequence[PlacedAdapter], memory: torch.Tensor) -> None:
        """Hold exactly these adapters. An adapter that stays moves only to fill an empty place."""
        position = self.position
        wanted = {adapter.name for adapter in adapters}
        gaps = sorted((position.pop(name) for name in position.keys() - wanted), reverse=True)
        joining = [adapter for adapter in adapters if adapter.name not in position]
        if not gaps and not joining:
            return
        self._matrices = {}
        try:
            self._fill(gaps, joining, memory)
        except BaseException:  # such as out of memory: the contents are unknown, so all runs are copied again
            position.clear()
            raise

    def _fill(self, gaps: list[int], joining: Sequence[PlacedAdapter], memory: torch.Tensor) -> None:
        position = self.position
        for adapter in joining:
            place = position[adapter.name] = gaps.pop() if gaps else len(position)
            self._copy(memory[adapter.offset : adapter.offset + self.layout.bytes], place)
        last = {place: name for name, place in position.items() if place >= len(position)}
        for place in gaps:
            if place < len(position):
                old, name = last.popitem()
                for part in self._parts.values():
                    part[place].copy_(part[old])
                position[name] = place

    def _copy(self, run: torch.Tensor, place: int) -> None:
        for begin, part in self._parts.items():
            blocks = self._blocks.get(begin)
            if blocks is None:
                part[place].copy_(run[begin : begin + part.shape[1]])
                continue
            matrices = part[place].view(self.layout.dtype).unflatten(0, (-1, self.layout.rank, blocks.width))
            for linear, (first, last) in blocks.spans.items():
                b = self.layout.matrices(run, linear)[1]
                matrices[first:last].copy_(b.unflatten(1, (-1, blocks.width)).transpose(0, 1))


class RunStacks:
    def __init__(self, memory: torch.Tensor, size: int, layout: Callable[[int], RunLayout]) -> None:
        """`memory`: where the runs are; `size`: bytes for all copies together."""
        self._memory = memory
        self._layout = layout
        self._copies = torch.empty(size, dtype=torch.uint8, device=memory.device)
        self._stacks: dict[int, RunStack] = {}
        self._joined: dict[str, Blocks] = {}

    def join(self, group: LinearGroup) -> None:
        """From now on, the LoRA of this group's linears is added in one call. Existing stacks do not change."""
        blocks = blocks_of(group, self._memory.device)
        if blocks is not None:
            self._joined |= dict.fromkeys(group.outputs, blocks)

    def of(self, rank: int) -> RunStack | None:
        return self._stacks.get(rank)

    def hold(self, adapters: Iterable[PlacedAdapter]) -> None:
        """Hold exactly the adapters that fit: first the adapters that are held already, then the smallest ranks."""
        by_rank: dict[int, list[PlacedAdapter]] = {}
        left = len(self._copies)
        for adapter in sorted(adapters, key=lambda one: (not self._holds(one), one.rank)):
            size = self._layout(adapter.rank).bytes
            if size <= left:
                left -= size
                by_rank.setdefault(adapter.rank, []).append(adapter)
        if any(len(of_rank) > self._places(rank) for rank, of_rank in by_rank.items()):
            self._lay_out(by_rank, left)
        for rank, stack in self._stacks.items():
            stack.hold(by_rank.get(rank, ()), self._memory)

    def _holds(self, adapter: PlacedAdapter) -> bool:
        stack = self._stacks.get(adapter.rank)
        return stack is not None and adapter.name in stack.position

    def _places(self, rank: int) -> int:
        stack = self._stacks.get(rank)
        return 0 if stack is None else stack.places

    def _lay_out(self, by_rank: Mapping[int, Sequence[PlacedAdapter]], left: int) -> None:
        """Divide the memory anew: each rank gets places for its adapters, and an equal share of the rest, so that the
        next division comes later."""
        self._stacks, begin = {}, 0
        for rank, of_rank in sorted(by_rank.items()):
            size = self._layout(rank).bytes
            end = begin + (len(of_rank) + left // len(by_rank) // size) * size
            self._stacks[rank] = RunStack(self._layout(rank), self._copies[begin:end], self._joined)
            begin = end
