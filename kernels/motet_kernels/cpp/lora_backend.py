"""The back end of add_lora in C++. It reads adapters in place, and computes each at its own rank (PU-01, PU-04)."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np
import numpy.typing as npt
import torch

from motet_kernels.cpp.library import TYPES, Library
from motet_kernels.lora_batch import PlacedAdapter, Segment
from motet_kernels.run_layout import SCALE_ROWS, LinearGroup, RunLayout

MAX_RANK = 512
"""The highest rank that the library has room for"""

KEPT_OFFSETS = 1024
"""How many results of `_find_offsets` are cached, one per pair of a rank and a set of linears: tenants choose both."""

LINEARS_AT_ONCE = 3
"""A forward pass keeps the products x · A of three linears at once, such as q, k and v."""


@dataclass(frozen=True, slots=True)
class CppBatch:
    segments: npt.NDArray[np.int64]
    """[segments, 5] first row, end, rank, address of the run, address of its offsets"""
    offsets: Sequence[npt.NDArray[np.int64]]
    """The arrays whose addresses are in `segments`"""
    address: int
    count: int
    rows: int
    """One more than the last row that has an adapter"""
    products: torch.Tensor
    products_address: int
    threads: int


class CppBackend:
    tile = 8
    copies = False

    def __init__(
        self, groups: Sequence[LinearGroup], memory: torch.Tensor, dtype: torch.dtype, *, library: Library
    ) -> None:
        if memory.device.type != "cpu":
            raise ValueError(f"the compiled kernels compute on a CPU, and the memory is on {memory.device}")
        self._library = library
        self._memory = memory
        self._dtype = dtype
        self._type = TYPES[dtype]
        groups = tuple(groups)
        self._layout = cache(lambda rank: RunLayout(rank, groups, dtype))
        sizes = [(linear, group.inputs, outputs) for group in groups for linear, outputs in group.outputs.items()]
        self._linears = {linear: (index, *size) for index, (linear, *size) in enumerate(sizes)}
        self._offsets_of = lru_cache(KEPT_OFFSETS)(self._find_offsets)
        self._products = torch.empty(0, dtype=torch.float32)

    def layout(self, rank: int) -> RunLayout:
        return self._layout(-(-rank // self.tile) * self.tile)

    def index_of(self, linear: str) -> int:
        """The library's number of this linear; -1 if no adapter may change it."""
        return self._linears[linear][0] if linear in self._linears else -1

    def order(self, adapter: PlacedAdapter) -> tuple[int, int]:
        """Makes the rows of one adapter contiguous."""
        return adapter.rank, adapter.offset

    def make_batch(self, segments: Sequence[Segment]) -> CppBatch:
        rows: list[list[int]] = []
        kept: list[npt.NDArray[np.int64]] = []
        used = 0
        last: Segment | None = None
        for segment in sorted(segments, key=lambda one: one.start):
            adapter = segment.adapter
            count = segment.stop - segment.start
            if last is not None and (last.stop, last.adapter) == (segment.start, adapter):
                rows[-1][1] = segment.stop
            else:
                rank = adapter.product_rank or adapter.rank
                if rank > MAX_RANK:
                    raise ValueError(f"rank {rank} is above {MAX_RANK}")
                begin = self._memory.data_ptr() + adapter.offset
                kept.append(self._offsets_of(adapter.rank, adapter.linears, scales=adapter.scales))
                rows.append([segment.start, segment.stop, rank, begin, kept[-1].ctypes.data])
            used += count * rows[-1][2]
            last = segment
        if len(self._products) < used * LINEARS_AT_ONCE:
            self._products = torch.empty(used * LINEARS_AT_ONCE, dtype=torch.float32)
        table = np.array(rows, dtype=np.int64).reshape(-1, 5)
        return CppBatch(
            table,
            offsets=kept,
            address=table.ctypes.data,
            count=len(rows),
            rows=int(table[:, 1].max(initial=0)),
            products=self._products,
            products_address=self._products.data_ptr(),
            threads=torch.get_num_threads(),
        )

    def add_lora(self, y: torch.Tensor, x: torch.Tensor, linear: str, batch: CppBatch) -> None:
        index, inputs, outputs = self._linears[linear]
        if x.stride(1) != 1:
            x = x.contiguous()
        of_x, of_y, (y_stride, y_step) = x.shape, y.shape, y.stride()
        if (
            not (y.dtype is x.dtype is self._dtype)
            or (of_x[1], of_y[1], y_step) != (inputs, outputs, 1)
            or min(of_x[0], of_y[0]) < batch.rows
        ):
            raise ValueError(
                f"{linear}: {tuple(x.shape)} {x.dtype} and {tuple(y.shape)} {y.dtype} do not fit the batch"
            )
        self._library.add_lora(
            self._type,
            batch.address,
            batch.count,
            batch.products_address,
            batch.threads,
            index,
            inputs,
            outputs,
            x.data_ptr(),
            x.stride(0),
            y.data_ptr(),
            y_stride,
        )

    def _find_offsets(self, rank: int, changed: frozenset[str], *, scales: bool) -> npt.NDArray[np.int64]:
        """[linears, 3] the offsets of A, of B, and of what scales the linear's own result, in a run; -1 if the adapter
        does not change the linear, or does not scale."""
        layout = self._layout(rank)
        found = np.full((len(self._linears), 3), -1, dtype=np.int64)
        for of_linear, (linear, (_, _, outputs)) in zip(found, self._linears.items(), strict=True):
            if linear in changed:
                a, b = layout.offsets[linear]
                of_scales = b + (rank - SCALE_ROWS) * outputs * self._dtype.itemsize
                of_linear[:] = a, b, of_scales if scales else -1
        return found
