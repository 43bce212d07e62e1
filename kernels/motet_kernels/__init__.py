"""Motet's device code, used through one entry:

    add_lora(y, x, weights, batch):   y[i] += x[i] · A[slot(i)] · B[slot(i)]   for every row i that has an adapter

    y  [rows, out]  changed in place      Aᵀ [slots, rank, in]   per rank class, padded with zeros
    x  [rows, in]                         B  [slots, rank, out]  carries the adapter's scale

The semantics of SGMV (PU-01, PU-02) for mixed ranks; rows without an adapter cost nothing. Knows nothing of serving.
The back end is chosen once; today it is plain torch. `reference.add_lora` is the fp64 oracle.
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
