"""What a back end of add_lora is: an object that reads adapters where they lie in the device's memory."""

from collections.abc import Sequence
from typing import Protocol, TypeVar

import torch

from motet_kernels.lora_batch import PlacedAdapter, Segment
from motet_kernels.run_layout import RunLayout

Batch = TypeVar("Batch")


class LoraBackend(Protocol[Batch]):
    """Adds LoRA to the results of one model's linears. Chosen once, when the engine starts.

    It is made with the groups of linears, with the memory as bytes (`torch.uint8 [n]`) and with the data type of what
    is in it. It reads no environment, and decides nothing about the memory: the caller writes the runs of adapters,
    each as its layout says, and moves them between two batches.
    """

    tile: int
    """What ranks are rounded up to in an adapter's run; at most MAX_TILE."""

    copies: bool
    """Whether it is also given a number of bytes, `copy_bytes`, that it may take beside the memory for copies of runs.
    """

    def layout(self, rank: int) -> RunLayout:
        """Where the matrices of an adapter of this rank are inside its run."""

    def order(self, adapter: PlacedAdapter) -> tuple[int, int]:
        """Rows lie best in the order of this key of their adapters. Any order is right."""

    def make_batch(self, segments: Sequence[Segment]) -> Batch:
        """Which rows belong to which adapter, as this back end wants it: made once an iteration, for all linears.

        Segments may come in any order. Rows in no segment stay as they are. A batch is good until the next one is made.
        """

    def add_lora(self, y: torch.Tensor, x: torch.Tensor, linear: str, batch: Batch) -> None:
        """y[i] += x[i] · A[adapter(i)] · B[adapter(i)]   for every row i of the batch that has an adapter

        y  [rows, out]  changed in place      x  [rows, in]
        """
