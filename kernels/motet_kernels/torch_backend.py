"""add_lora in plain torch, for any device: batched products, sorted by slot, without a loop over adapters.

The only loop is over long segments (prompts, or many rows of one adapter; see LONG_SEGMENT_ROWS): each has two matrix
products for itself.
"""

import torch

from motet_kernels.lora_batch import LoraBatch, PaddedSegments
from motet_kernels.weights import LoraWeights, WeightStack


def add_lora(y: torch.Tensor, x: torch.Tensor, weights: LoraWeights, batch: LoraBatch) -> None:
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
