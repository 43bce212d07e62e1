"""Motet's device code, used through one function:

    add_lora(y, x, weights, batch):   y[i] += x[i] · A[slot(i)] · B[slot(i)]   for every row i that has an adapter

    y  [rows, out]  changed in place      Aᵀ [slots, rank, in]   per rank class, padded with zeros
    x  [rows, in]                         B  [slots, rank, out]  carries the adapter's scale

It computes what SGMV does (PU-01, PU-02), for mixed ranks. Rows without an adapter cost nothing. The package knows
nothing about serving. Its only back end is plain torch. Tests compare with `reference.add_lora`, which uses fp64.
"""

from motet_kernels.lora_batch import LoraBatch, Segment, make_batch
from motet_kernels.torch_backend import add_lora
from motet_kernels.weights import RANKS, AdapterSlot, LoraWeights, WeightStack, rank_class_of, rows_of

__all__ = [
    "RANKS",
    "AdapterSlot",
    "LoraBatch",
    "LoraWeights",
    "Segment",
    "WeightStack",
    "add_lora",
    "make_batch",
    "rank_class_of",
    "rows_of",
]
