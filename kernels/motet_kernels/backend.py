"""The interface of a back end of add_lora. A back end reads adapters where they lie in the device's memory."""

from collections.abc import Sequence
from typing import Protocol, TypeVar

import torch

from motet_kernels.lora_batch import PlacedAdapter, Segment
from motet_kernels.run_layout import RunLayout

Batch = TypeVar("Batch")


class LoraBackend(Protocol[Batch]):
    """Adds LoRA to the results of one model's linears. Chosen once, when the engine starts.

    Its arguments are the groups of linears, the memory as bytes (`torch.uint8 [n]`), and the data type of the adapters
    there. A back end reads no environment variables, and does not manage the memory: the caller writes each adapter's
    run in the back end's layout, and moves runs only between two batches.
    """

    tile: int
    """In a run, the rank is rounded up to a multiple of `tile`, which is at most MAX_TILE."""

    copies: bool
    """True if the back end also gets `copy_bytes`: how many more bytes it may take for copies of runs."""

    def layout(self, rank: int) -> RunLayout:
        """Where the matrices of an adapter of this rank are inside its run."""

    def order(self, adapter: PlacedAdapter) -> tuple[int, int]:
        """The sort key of rows for the highest speed. Any order gives right results."""

    def make_batch(self, segments: Sequence[Segment]) -> Batch:
        """Which rows belong to which adapter, in this back end's form: made once per iteration, for all linears.

        Segments may come in any order. Rows in no segment stay as they are. The next call ends the use of this batch.
        """

    def add_lora(self, y: torch.Tensor, x: torch.Tensor, linear: str, batch: Batch) -> None:
        """y[i] += x[i] · A[adapter(i)] · B[adapter(i)]   for every row i of the batch that has an adapter. If the
        adapter scales, y[i] first becomes y[i] + d[adapter(i)] · y[i] + e[adapter(i)].

        y  [rows, out]  updated in place      x  [rows, in]
        """
