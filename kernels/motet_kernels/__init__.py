"""Motet's device code. A back end adds LoRA to the results of a model's linears:

    add_lora(y, x, linear, batch):   y[i] += x[i] · A[slot(i)] · B[slot(i)]   for every row i that has an adapter

    y  [rows, out]  changed in place      Aᵀ [rank, in]   rounded up to the back end's tile, padded with zeros
    x  [rows, in]                         B  [rank, out]  carries the adapter's scale

It computes what SGMV does (PU-01, PU-02), for mixed ranks. Rows without an adapter cost nothing. The package knows
nothing about serving, and reads no environment. `backend.py` says what a back end is: an object that owns the layout of
an adapter's bytes and of a batch. `TorchBackend`, in plain torch, is the only one. Tests compare with
`reference.add_lora`, which uses fp64.
"""

from motet_kernels.backend import LoraBackend
from motet_kernels.lora_batch import LoraBatch, Segment
from motet_kernels.run_layout import MAX_TILE, LinearGroup, RunLayout
from motet_kernels.torch_backend import TorchBackend
from motet_kernels.weights import RANKS, AdapterSlot, LoraWeights, WeightStack, rank_class_of, rows_of

__all__ = [
    "MAX_TILE",
    "RANKS",
    "AdapterSlot",
    "LinearGroup",
    "LoraBackend",
    "LoraBatch",
    "LoraWeights",
    "RunLayout",
    "Segment",
    "TorchBackend",
    "WeightStack",
    "rank_class_of",
    "rows_of",
]
