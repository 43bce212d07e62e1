"""What the kernels of add_lora load and store in Triton's interpreter is what `lora_bytes` counts without a card."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from motet_kernels import LinearGroup, PlacedAdapter, Segment
from motet_kernels.gpu.lora_backend import GpuBackend, GpuLoraBatch
from motet_kernels.gpu.work_list import chunks_of, smallest_room
from testbed.lora_bytes import LIST_BYTES, expand_bytes, shrink_bytes

INPUTS = 192
OUTPUTS = {"q": 160, "k": 48}
DTYPE = torch.float16
RANKS = (16, 48, 160)
"""One with its own tile of B, one that is padded, one that takes several tiles"""


class Loaded:
    """The bytes of each region of memory that programs load or store; masked numbers are neither."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, regions: dict[str, torch.Tensor]) -> None:
        from triton.runtime.interpreter import InterpreterBuilder

        self.bytes: Counter[str] = Counter()
        self._regions = {name: (one.data_ptr(), one.data_ptr() + one.nbytes) for name, one in regions.items()}
        load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

        def counted_load(builder: Any, pointers: Any, mask: Any, *more: Any) -> Any:
            found = load(builder, pointers, mask, *more)
            self._count(pointers.data, mask.data, found.data.itemsize)
            return found

        def counted_store(builder: Any, pointers: Any, value: Any, mask: Any, *more: Any) -> Any:
            self._count(pointers.data, mask.data, value.data.itemsize)
            return store(builder, pointers, value, mask, *more)

        monkeypatch.setattr(InterpreterBuilder, "create_masked_load", counted_load)
        monkeypatch.setattr(InterpreterBuilder, "create_masked_store", counted_store)

    def _count(self, pointers: np.ndarray, mask: np.ndarray, itemsize: int) -> None:
        wanted = np.broadcast_to(pointers, np.broadcast(pointers, mask).shape)[np.broadcast_to(mask, pointers.shape)]
        for name, (begin, end) in self._regions.items():
            self.bytes[name] += int(((wanted >= begin) & (wanted < end)).sum()) * itemsize


def segments_of(backend: GpuBackend, owners: Sequence[int]) -> list[Segment]:
    begins = [0, *np.cumsum([backend.layout(rank).bytes for rank in RANKS]).tolist()]
    placed = [PlacedAdapter(str(one), begins[one], rank, frozenset(OUTPUTS)) for one, rank in enumerate(RANKS)]
    return [Segment(row, row + 1, placed[owner]) for row, owner in enumerate(owners)]


@pytest.mark.parametrize("owners", [(0,), (0, 1, 2), (2, 2, 2, 0), (1,) * 20, (2,) * 70], ids=str)
def test_programs_load_the_bytes_that_are_counted(monkeypatch: pytest.MonkeyPatch, owners: Sequence[int]) -> None:
    groups = [LinearGroup(INPUTS, OUTPUTS)]
    empty = GpuBackend(groups, torch.zeros(64, dtype=torch.uint8), DTYPE)
    memory = torch.zeros(sum(empty.layout(rank).bytes for rank in RANKS), dtype=torch.uint8)
    backend = GpuBackend(groups, memory, DTYPE)
    segments = segments_of(backend, owners)
    batch: GpuLoraBatch = backend.make_batch(segments)
    x, y = torch.ones(len(owners), INPUTS, dtype=DTYPE), torch.zeros(len(owners), sum(OUTPUTS.values()), dtype=DTYPE)
    loaded = Loaded(monkeypatch, {"adapters": memory, "x": x, "y": y, "sums": batch.products})
    backend.add_lora_together(y, x, list(OUTPUTS), batch)
    of_lists = smallest_room(chunks_of(segments), len(OUTPUTS)).size * LIST_BYTES
    counted = [
        count(segments, INPUTS, OUTPUTS, len(OUTPUTS), 2).loaded - of_lists for count in (shrink_bytes, expand_bytes)
    ]
    assert loaded.bytes.total() == sum(counted), loaded.bytes
