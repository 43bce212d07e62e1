"""Copies of the runs of adapters that compute together, one beside the other, so that one product serves many.

A copy is made when an adapter joins the others, never per iteration. The memory of all copies is taken once. The runs
of one rank make a stack: there, a linear's matrices have equal distances, as a batched product wants them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from motet_kernels.lora_batch import PlacedAdapter
from motet_kernels.run_layout import RunLayout


class RunStack:
    """Runs of adapters of one rank, as many as the room has places for."""

    def __init__(self, layout: RunLayout, room: torch.Tensor) -> None:
        """`room`: [places · bytes of a run]"""
        self.layout = layout
        self.places = len(room) // layout.bytes
        self.position: dict[str, int] = {}
        """Adapter → its place. There are no gaps."""
        self._runs = room[: self.places * layout.bytes].view(self.places, layout.bytes)
        self._matrices: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def matrices(self, linear: str) -> tuple[torch.Tensor, torch.Tensor]:
        """A [adapters, inputs, rank] and B [adapters, rank, outputs] of a linear."""
        found = self._matrices.get(linear)
        if found is None:
            a, b = self.layout.matrices(self._runs[: len(self.position)], linear)
            found = self._matrices[linear] = a.transpose(1, 2), b
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
            self._runs[place].copy_(memory[adapter.offset : adapter.offset + self.layout.bytes])
        last = {place: name for name, place in position.items() if place >= len(position)}
        for place in gaps:
            if place < len(position):
                old, name = last.popitem()
                self._runs[place].copy_(self._runs[old])
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
