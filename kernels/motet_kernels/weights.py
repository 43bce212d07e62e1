"""Adapters' matrices of one projection, in memory that is taken once and seen as stacks, so that one batched product
serves many adapters.

Ranks are rounded up to a class and padded with zeros: a mixed batch costs about the sum of its ranks (class by class),
not its largest rank times its rows.
"""

import torch

RANKS = (8, 16, 32, 64, 128, 256)
"""The classes. Padding within one costs less than another product would. Each is twice the one before it, so that a
slot of one covers whole slots of the others."""

AdapterSlot = tuple[int, int]
"""(rank class, slot) of an adapter: rows [slot · rank, (slot + 1) · rank) of every projection."""


def rank_class_of(rank: int) -> int:
    """The class of a rank."""
    for group, largest in enumerate(RANKS):
        if rank <= largest:
            return group
    raise ValueError(f"rank {rank} is above {RANKS[-1]}, the largest that is served")


def rows_of(place: AdapterSlot) -> range:
    group, slot = place
    return range(slot * RANKS[group], (slot + 1) * RANKS[group])


class WeightStack:
    """a [slots, rank, in] and b [slots, rank, out] of one class; b carries the scale (PU-08).

    Both with their long side last: measured on a CPU, rows of one or two go through them up to three times as fast.
    """

    def __init__(self, a: torch.Tensor, b: torch.Tensor) -> None:
        self.a = a
        self.b = b
        self.acting: set[int] = set()
        """Slots whose adapter changes this projection. The others in use are zeros."""
        self.selection: tuple[tuple[int, ...], torch.Tensor, torch.Tensor] | None = None

    def write(self, slot: int, a: torch.Tensor, b: torch.Tensor, scale: float) -> None:
        """Put lora_A [rank, in] and lora_B [out, rank] into a slot."""
        rank = a.shape[0]
        self.a[slot, :rank] = a.to(self.a.dtype)
        self.b[slot, :rank] = (b.t().float() * scale).to(self.b.dtype)
        self.a[slot, rank:] = 0
        self.b[slot, rank:] = 0
        self.acting.add(slot)

    def clear(self, slot: int) -> None:
        self.a[slot] = 0
        self.b[slot] = 0

    def select(self, slots: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """The matrices of these slots (ascending): a view if they lie together, else a copy kept until they change."""
        if slots[-1] - slots[0] == len(slots) - 1:
            return self.a[slots[0] : slots[-1] + 1], self.b[slots[0] : slots[-1] + 1]
        if self.selection is None or self.selection[0] != slots:
            index = torch.tensor(slots, device=self.a.device)
            self.selection = (slots, self.a.index_select(0, index), self.b.index_select(0, index))
        return self.selection[1], self.selection[2]


class LoraWeights:
    """All adapters' matrices of one projection: `rows` rows of rank, which never grow.

    Who may have which is decided outside: places in use must not overlap. Beside the rows there are at most as many
    again, in copies of slots that one batch uses and that do not lie together.
    """

    def __init__(self, inputs: int, outputs: int, rows: int, dtype: torch.dtype, device: torch.device | str) -> None:
        self.inputs = inputs
        self.outputs = outputs
        a = torch.zeros((rows, inputs), dtype=dtype, device=device)
        b = torch.zeros((rows, outputs), dtype=dtype, device=device)
        self.stacks = [WeightStack(_slots_of(a, rank), _slots_of(b, rank)) for rank in RANKS]
        self._written: set[int] = set()
        """Rows that may hold more than zeros: the others need no clearing."""

    def write(self, group: int, slot: int, a: torch.Tensor | None, b: torch.Tensor | None, scale: float = 1.0) -> None:
        """Put an adapter's lora_A [rank, in] and lora_B [out, rank] into its place; None where it has none."""
        self._drop_cached_stacks()
        stack, rows = self.stacks[group], rows_of((group, slot))
        if a is not None and b is not None:
            self._written.update(rows)
            stack.write(slot, a, b, scale)
            return
        stack.acting.discard(slot)
        if not self._written.isdisjoint(rows):
            stack.clear(slot)
            self._written.difference_update(rows)

    def move(self, group: int, slot: int, to: int) -> None:
        """Carry an adapter to another place of its class, which must not overlap with its own."""
        stack = self.stacks[group]
        if slot not in stack.acting:
            self.write(group, to, None, None)
            return
        stack.a[to] = stack.a[slot]
        stack.b[to] = stack.b[slot]
        stack.acting.add(to)
        self._written.update(rows_of((group, to)))
        self._drop_cached_stacks()

    def _drop_cached_stacks(self) -> None:
        """Rows change hands between classes; so all copies together stay below the rows."""
        for stack in self.stacks:
            stack.selection = None


def _slots_of(rows: torch.Tensor, rank: int) -> torch.Tensor:
    """[rows, width] as the stack [slots, rank, width] of a class: the same memory."""
    slots = len(rows) // rank
    return rows[: slots * rank].view(slots, rank, rows.shape[1])
