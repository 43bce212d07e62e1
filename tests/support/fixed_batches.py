"""The compiled kernels with batches that stay where they are, as those of a GPU have them. The CPU shares its memory
with the arrays that they read, so a tensor that is written is the array."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import torch

from motet_kernels import Segment
from motet_kernels.cpp import AttentionBatch, CppBackend, PagedAttention
from motet_kernels.cpp.lora_backend import CppBatch


class FixedCppAttention(PagedAttention):
    def fixed_batch(self, max_rows: int, *, table: torch.Tensor) -> AttentionBatch:
        sequences = np.zeros((max_rows, 4), dtype=np.int64)
        sequences[:, 0] = np.arange(max_rows)
        return self.make_batch(table.numpy(), sequences)

    @staticmethod
    def refill(batch: AttentionBatch, lengths: torch.Tensor, *, table_rows: torch.Tensor) -> None:
        sequences = torch.from_numpy(batch.kept[1])
        sequences[:, 1] = lengths > 0
        sequences[:, 2] = lengths.clamp(min=1) - 1
        sequences[:, 3] = table_rows


@dataclass(slots=True)
class FixedCppBatch:
    """A CppBatch that becomes another one"""

    rows: int
    of: CppBatch
    segments: npt.NDArray[np.int64]
    address: int
    count: int
    products_address: int
    threads: int


class FixedCppBackend(CppBackend):
    filled = 0

    def fixed_batch(self, max_rows: int) -> FixedCppBatch:
        of = self.make_batch([])
        return FixedCppBatch(0, of, of.segments, of.address, 0, of.products_address, of.threads)

    @staticmethod
    def that_scales(batch: FixedCppBatch) -> FixedCppBatch:
        return batch

    def fill(self, batch: FixedCppBatch, segments: Sequence[Segment]) -> None:
        type(self).filled += 1
        batch.of = of = self.make_batch(segments)
        batch.rows = of.rows
        batch.segments, batch.address, batch.count = of.segments, of.address, of.count
        batch.products_address = of.products_address


@contextmanager
def fixed_batches() -> Iterator[None]:
    """The compiled kernels that are chosen meanwhile have them."""
    where = "motet_runner.execute.kernels.compiled"
    with patch(f"{where}.CppBackend", FixedCppBackend), patch(f"{where}.PagedAttention", FixedCppAttention):
        yield
