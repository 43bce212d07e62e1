"""What a back end of add_lora is: an object that owns how adapters and batches lie in memory."""

from collections.abc import Sequence
from typing import Protocol, TypeVar

import torch

from motet_kernels.lora_batch import Segment
from motet_kernels.run_layout import RunLayout
from motet_kernels.weights import AdapterSlot

Batch = TypeVar("Batch")


class LoraBackend(Protocol[Batch]):
    """Adds LoRA to the results of one model's linears. Chosen once, when the engine starts.

    It reads no environment and decides no slot: the caller says which adapter gets which slot.
    """

    tile: int
    """What ranks are rounded up to in an adapter's run; at most MAX_TILE."""

    def layout(self, rank: int) -> RunLayout:
        """Where the matrices of an adapter of this rank are inside its run."""

    def write(self, linear: str, place: AdapterSlot, a: torch.Tensor | None, b: torch.Tensor | None) -> None:
        """Copy one linear's matrices of a run into an adapter's slot. None: the adapter does not change the linear."""

    def move(self, place: AdapterSlot, to: AdapterSlot) -> None:
        """Carry an adapter to another slot. The two must not overlap."""

    def make_batch(self, segments: Sequence[Segment]) -> Batch:
        """Which rows belong to which adapter, as this back end wants it: made once an iteration, for all linears.

        Segments may come in any order. Rows in no segment stay as they are.
        """

    def add_lora(self, y: torch.Tensor, x: torch.Tensor, linear: str, batch: Batch) -> None:
        """y[i] += x[i] · A[slot(i)] · B[slot(i)]   for every row i of the batch that has an adapter

        y  [rows, out]  changed in place      x  [rows, in]
        """
