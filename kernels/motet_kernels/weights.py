"""The adapters' matrices of one projection. Their memory is allocated once and viewed as stacks, so that one batched
product serves many adapters.

Ranks are rounded up to a rank class and padded with zeros. So a mixed batch costs about the sum of its ranks, and not
its largest rank times its rows.
"""

import torch

RANKS = (8, 16, 32, 64, 128, 256)
"""The rank classes, by their largest rank. Padding within a class costs less than another product would. Each rank is
twice the one before it, so that a slot of one class covers whole slots of each smaller class."""

AdapterSlot = tuple[int, int]
"""(rank class, slot) of an adapter: it has the rows [slot · rank, (slot + 1) · rank) of every projection."""


def rank_class_of(rank: int) -> int:
    """The rank class of a rank, as an index into RANKS."""
    for rank_class, largest in enumerate(RANKS):
        if rank <= largest:
            return rank_class
    raise ValueError(f"rank {rank} is above {RANKS[-1]}, the largest that is served")


def rows_of(place: AdapterSlot) -> range:
    rank_class, slot = place
    return range(slot * RANKS[rank_class], (slot + 1) * RANKS[rank_class])


class WeightStack:
    """a [slots, rank, in] and b [slots, rank, out] of one rank class; b includes the scale (PU-08).

    Both have their long side last: on a CPU that was up to three times as fast for one or two rows.
    """

    def __init__(self, a: torch.Tensor, b: torch.Tensor) -> None:
        self.a = a
        self.b = b
        self.acting: set[int] = set()
        """Slots whose adapter changes this projection. The other slots in use are zeros."""
        self.selection: tuple[tuple[int, ...], torch.Tensor, torch.Tensor] | None = None

    def write(self, slot: int, a: torch.Tensor, b: torch.Tensor) -> None:
        """Copy Aᵀ [rank, in] and B [rank, out] into a slot."""
        rank = a.shape[0]
        self.a[slot, :rank].copy_(a, non_blocking=True)
        self.b[slot, :rank].copy_(b, non_blocking=True)
        self.a[slot, rank:] = 0
        self.b[slot, rank:] = 0
        self.acting.add(slot)

    def clear(self, slot: int) -> None:
        self.a[slot] = 0
        self.b[slot] = 0

    def select(self, slots: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """The matrices of these slots (ascending): a view if the slots are contiguous, else a copy, which is kept until
        other slots are asked for or a slot changes."""
        if slots[-1] - slots[0] == len(slots) - 1:
            return self.a[slots[0] : slots[-1] + 1], self.b[slots[0] : slots[-1] + 1]
        if self.selection is None or self.selection[0] != slots:
            index = torch.tensor(slots, device=self.a.device)
            self.selection = (slots, self.a.index_select(0, index), self.b.index_select(0, index))
        return self.selection[1], self.selection[2]


class LoraWeights:
    """All adapters' matrices of one projection, in `rows` rows of rank. Their number never grows.

    The caller decides which adapter gets which slot; slots in use must not overlap. If the slots of a batch are not
    contiguous, they are also kept as copies, which have at most as many rows again.
    """

    def __init__(self, inputs: int, outputs: int, rows: int, dtype: torch.dtype, device: torch.device | str) -> None:
        self.inputs = inputs
        self.outputs = outputs
        a = torch.zeros((rows, inputs), dtype=dtype, device=device)
        b = torch.zeros((rows, outputs), dtype=dtype, device=device)
        self.stacks = [WeightStack(_slots_of(a, rank), _slots_of(b, rank)) for rank in RANKS]
        self._written: set[int] = set()
        """Rows that may hold more than zeros. The others need no clearing."""

    def write(self, rank_class: int, slot: int, a: torch.Tensor | None, b: torch.Tensor | None) -> None:
        """Copy an adapter's Aᵀ [rank, in] and B [rank, out] into its slot; B carries the scale. None: it does not
        change this projection."""
        self._drop_cached_stacks()
        stack, rows = self.stacks[rank_class], rows_of((rank_class, slot))
        if a is not None and b is not None:
            self._written.update(rows)
            stack.write(slot, a, b)
            return
        stack.acting.discard(slot)
        if not self._written.isdisjoint(rows):
            stack.clear(slot)
            self._written.difference_update(rows)

    def move(self, rank_class: int, slot: int, to: int) -> None:
        """Copy an adapter to another slot of its rank class. The two slots must not overlap."""
        stack = self.stacks[rank_class]
        if slot not in stack.acting:
            self.write(rank_class, to, None, None)
            return
        stack.a[to] = stack.a[slot]
        stack.b[to] = stack.b[slot]
        stack.acting.add(to)
        self._written.update(rows_of((rank_class, to)))
        self._drop_cached_stacks()

    def _drop_cached_stacks(self) -> None:
        """Rows may go from one class to another, so the copies of all classes go: together they never have more rows
        than the projection."""
        for stack in self.stacks:
            stack.selection = None


def _slots_of(rows: torch.Tensor, rank: int) -> torch.Tensor:
    """[rows, width] as the stack [slots, rank, width] of a class, in the same memory."""
    slots = len(rows) // rank
    return rows[: slots * rank].view(slots, rank, rows.shape[1])
