"""Adapters' matrices of one projection, stacked by rank class, so that one batched product serves many adapters.

Ranks are rounded up to a class and padded with zeros: a mixed batch costs about the sum of its ranks (class by class),
not its largest rank times its rows.
"""

from typing import Any

import torch

RANKS = (8, 16, 32, 64, 128, 256)
"""The classes. Padding within one costs less than another product would."""


def group_of(rank: int) -> int:
    """The class of a rank."""
    for group, largest in enumerate(RANKS):
        if rank <= largest:
            return group
    raise ValueError(f"rank {rank} is above {RANKS[-1]}, the largest that is served")


class Stack:
    """a [slots, rank, in] and b [slots, rank, out] of one class; b carries the scale (PU-08).

    Both with their long side last: measured on a CPU, rows of one or two go through them up to three times as fast.
    """

    def __init__(self, inputs: int, outputs: int, rank: int, dtype: Any, device: Any) -> None:
        self.a = torch.zeros((0, rank, inputs), dtype=dtype, device=device)
        self.b = torch.zeros((0, rank, outputs), dtype=dtype, device=device)
        self.slots = 0
        self._selection: tuple[tuple[int, ...], Any, Any] | None = None

    def write(self, slot: int, a: Any | None, b: Any | None, scale: float = 1.0) -> None:
        """Put lora_A [rank, in] and lora_B [out, rank] into a slot; None clears it."""
        self._selection = None
        if slot >= self.slots:
            self.slots = slot + 1
            self.a = _grown(self.a, self.slots)
            self.b = _grown(self.b, self.slots)
        self.a[slot] = 0
        self.b[slot] = 0
        if a is not None and b is not None:
            rank = a.shape[0]
            self.a[slot, :rank, :] = a.to(self.a.dtype)
            self.b[slot, :rank, :] = (b.t().float() * scale).to(self.b.dtype)

    def select(self, slots: tuple[int, ...]) -> tuple[Any, Any]:
        """The matrices of these slots (ascending): a view if they lie together, else a copy kept until they change."""
        if slots[-1] - slots[0] == len(slots) - 1:
            return self.a[slots[0] : slots[-1] + 1], self.b[slots[0] : slots[-1] + 1]
        if self._selection is None or self._selection[0] != slots:
            index = torch.tensor(slots, device=self.a.device)
            self._selection = (slots, self.a.index_select(0, index), self.b.index_select(0, index))
        return self._selection[1], self._selection[2]


class Weights:
    """All adapters' matrices of one projection. A class comes to be with its first adapter."""

    def __init__(self, inputs: int, outputs: int, dtype: Any, device: Any) -> None:
        self.inputs = inputs
        self.outputs = outputs
        self._make = (dtype, device)
        self.stacks: list[Stack | None] = [None] * len(RANKS)

    def write(self, group: int, slot: int, a: Any | None, b: Any | None, scale: float = 1.0) -> None:
        stack = self.stacks[group]
        if stack is None:
            if a is None:
                return
            stack = self.stacks[group] = Stack(self.inputs, self.outputs, RANKS[group], *self._make)
        if a is None and slot >= stack.slots:
            return
        stack.write(slot, a, b, scale)


def _grown(old: Any, slots: int) -> Any:
    new = old.new_zeros((slots, *old.shape[1:]))
    new[: len(old)] = old
    return new
