"""Motet's device code. A back end adds LoRA to the results of a model's linears:

    add_lora(y, x, linear, batch):   y[i] += x[i] · A[adapter(i)] · B[adapter(i)]   for every row i that has an adapter

    y  [rows, out]  updated in place      Aᵀ [rank, in]   rank rounded up to the back end's tile, padded with zeros
    x  [rows, in]                         B  [rank, out]  multiplied by the adapter's scale

`add_lora` computes what SGMV does (PU-01, PU-02), for mixed ranks. Rows without an adapter cost nothing. The package
contains no serving code, and reads no environment variables. A back end (`backend.py`) is an object that reads adapters
in the runs where the caller has written them (`run_layout.py`). `TorchBackend` is in plain torch. `ExactBackend`, for
exact mode, is in plain torch, too. `cpp.CppBackend` is in C++ for a CPU. Tests compare with `reference.add_lora`, which
uses fp64.
"""

from motet_kernels.backend import LoraBackend
from motet_kernels.exact_backend import TILE_ROWS, ExactBackend
from motet_kernels.lora_batch import PlacedAdapter, Segment
from motet_kernels.run_layout import MAX_TILE, LinearGroup, RunLayout
from motet_kernels.torch_backend import LoraBatch, TorchBackend

__all__ = [
    "MAX_TILE",
    "TILE_ROWS",
    "ExactBackend",
    "LinearGroup",
    "LoraBackend",
    "LoraBatch",
    "PlacedAdapter",
    "RunLayout",
    "Segment",
    "TorchBackend",
]
