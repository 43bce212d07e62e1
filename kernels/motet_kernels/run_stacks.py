"""Copies of the runs of adapters that compute together, one beside the other, so that one product serves many.

A copy is made when an adapter joins the others, never per iteration. The memory of all copies is taken once. The runs
of one rank make a stack: there, matrices that are multiplied together follow each other with nothing in between. Where
there is something, torch copies them in each product, which takes several times as long as the product.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from motet_kernels.lora_batch import PlacedAdapter
from motet_kernels.run_layout import LinearGroup, RunLayout


class RunStack:
    """Runs of adapters of one rank, as many as the room has places for."""

    def __init__(self, layout: RunLayout, room: torch.Tensor) -> None:
        """`room`: [places · bytes of a run]"""
        self.layout = layout
        self.places = places = len(room) // layout.bytes
        self.position: dict[str, int] = {}
        """Adapter → its place. There are no gaps."""
        self._parts = {
            begin: room[begin * places : (begin + size) * places].view(places, size) for begin, size in layout.parts
        }
        """Where a part of a run begins → this part of all runs [places, bytes]"""
        self._matrices: dict[int, torch.Tensor] = {}

    def group_a(self, group: LinearGroup) -> torch.Tensor:
        """Aᵀ [adapters, linears · rank, inputs] of all linears of a group"""
        return self._of(self.layout.begin(group), len(group.outputs) * self.layout.rank)

    def b(self, linear: str) -> torch.Tensor:
        """B [adapters, rank, outputs] of a linear"""
        return self._of(self.layout.offsets[linear][1], self.layout.rank)

    def _of(self, begin: int, rows: int) -> torch.Tensor:
        found = self._matrices.get(begin)
        if found is None:
            part = self._parts[begin][: len(self.position)].view(self.layout.dtype)
            found = self._matrices[begin] = part.unflatten(1, (rows, -1))
        return found

    def hold(self, adapters: Sequence[PlacedAdapter], memory: torch.Tensor) -> None:
        """Hold these adapters, and no others. Those that stay keep their places, if no place before is empty."""
        position = self.position
        wanted = {adapter.name for adapter in adapters}
        gaps = sorted((position.pop(name) for name in position.keys() - wanted), reverse=True)
        joining = [adapter for adapter in adapters if adapter.name not in position]
        if not gaps and not joining:
            return
        self._matrices = {}
        for adapter in joining:
            place = position[adapter.name] = gaps.pop() if gaps else len(position)
            for begin, part in self._parts.items():
                first = adapter.offset + begin
                part[place].copy_(memory[first : first + part.shape[1]])
        last = {place: name for name, place in position.items() if place >= len(position)}
        for place in gaps:
            if place < len(position):
                old, name = last.popitem()
                for part in self._parts.values():
                    part[place].copy_(part[old])
                position[name] = place


class RunStacks:
    def __init__(self, memory: torch.Tensor, size: int, layout: Callable[[int], RunLayout]) -> None:
        """`memory`: where the runs are; `size`: bytes for all copies together."""
        self._memory = memory
        self._layout = layout
        self._copies = torch.empty(size, dtype=torch.uint8, device=memory.device)
        self._stacks: dict[int, RunStack] = {}

    def of(self, rank: int) -> RunStack | None:
        return self._stacks.get(rank)

    def hold(self, adapters: Iterable[PlacedAdapter]) -> None:
        """Hold those of these adapters that fit: first those that are there, then by their rank. No others stay."""
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
        """Give each rank a part of the memory anew, with places for those that are wanted and an equal share of what is
        left. So this is rare."""
        self._stacks, begin = {}, 0
        for rank, of_rank in sorted(by_rank.items()):
            size = self._layout(rank).bytes
            end = begin + (len(of_rank) + left // len(by_rank) // size) * size
            self._stacks[rank] = RunStack(self._layout(rank), self._copies[begin:end])
            begin = end
