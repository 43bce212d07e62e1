"""The back end in plain torch, for any device: batched products, sorted by slot, without a loop over adapters.

The only loop is over long segments (prompts, or many rows of one adapter; see LONG_SEGMENT_ROWS): each has two matrix
products for itself.
"""

from collections.abc import Sequence
from functools import cache

import torch

from motet_kernels.lora_batch import LoraBatch, PaddedSegments, Segment, make_batch
from motet_kernels.run_layout import LinearGroup, RunLayout
from motet_kernels.weights import AdapterSlot, LoraWeights, WeightStack


class TorchBackend:
    """Keeps all adapters of a linear in stacks of `rows` rows of rank. An adapter has the same rows in each linear."""

    tile = 8

    def __init__(
        self, groups: Sequence[LinearGroup], rows: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        self.groups = tuple(groups)
        self.rows = rows
        self._dtype = dtype
        self._device = device
        self.weights = {
            linear: LoraWeights(group.inputs, outputs, rows, dtype, device)
            for group in self.groups
            for linear, outputs in group.outputs.items()
        }
        self._layout = cache(lambda rank: RunLayout(rank, self.groups, dtype))

    @staticmethod
    def bytes_of(groups: Sequence[LinearGroup], rows: int, dtype: torch.dtype) -> int:
        """What `rows` rows take in all linears, with the copies that a batch may need (see `LoraWeights`)."""
        of_a_row = sum(group.inputs + outputs for group in groups for outputs in group.outputs.values())
        return 2 * rows * of_a_row * dtype.itemsize

    def layout(self, rank: int) -> RunLayout:
        return self._layout(-(-rank // self.tile) * self.tile)

    def write(self, linear: str, place: AdapterSlot, a: torch.Tensor | None, b: torch.Tensor | None) -> None:
        self.weights[linear].write(*place, a, b)

    def move(self, place: AdapterSlot, to: AdapterSlot) -> None:
        for weights in self.weights.values():
            weights.move(place[0], place[1], to[1])

    def make_batch(self, segments: Sequence[Segment]) -> LoraBatch:
        return make_batch(segments, self._device)

    def add_lora(self, y: torch.Tensor, x: torch.Tensor, linear: str, batch: LoraBatch) -> None:
        weights = self.weights[linear]
        for segment in batch.long:
            stack = weights.stacks[segment.rank_class]
            if segment.slot in stack.acting:
                v = x[segment.start : segment.stop] @ stack.a[segment.slot].t()
                y[segment.start : segment.stop].addmm_(v, stack.b[segment.slot])
        for short in batch.short:
            stack = weights.stacks[short.rank_class]
            if not stack.acting.isdisjoint(short.slots):  # the slots among them that do not act are zeros
                _short(y, x, stack, short)


def _short(y: torch.Tensor, x: torch.Tensor, stack: WeightStack, short: PaddedSegments) -> None:
    a, b = stack.select(short.slots)
    blocks = (len(short.slots), short.width, -1)
    if short.whole is not None:  # the rows already lie as the blocks do
        v = torch.bmm(x[short.whole].view(blocks), a.transpose(1, 2))
        y[short.whole].view(blocks).baddbmm_(v, b)
        return
    v = torch.bmm(x.index_select(0, short.row_of_place).view(blocks), a.transpose(1, 2))
    if short.mask is not None:
        v.mul_(short.mask)
    added = torch.bmm(v, b).view(-1, y.shape[1])
    if short.places_used is not None:
        added = added.index_select(0, short.places_used)
    if isinstance(short.rows, slice):
        y[short.rows] += added
    else:
        y.index_add_(0, short.rows, added)
