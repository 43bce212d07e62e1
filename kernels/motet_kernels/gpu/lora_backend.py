"""The back end of add_lora for a GPU. It reads adapters in place, and computes each at its own rank (PU-01, PU-04)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache

import numpy as np
import numpy.typing as npt
import torch

from motet_kernels.gpu.launches import launch_overlapping
from motet_kernels.gpu.lora_kernels import lora_expand, lora_scale, lora_shrink
from motet_kernels.gpu.lora_tiles import CLASSES, MAX_RANK, RANK_STEP, SCALED_COLUMNS, splits, tile_columns, tile_inputs
from motet_kernels.gpu.work_list import HEADER, Chunk, Room, chunks_of, room_for, smallest_room, words, write_list
from motet_kernels.int8_layout import SCALE_BYTES, Int8Layout, int8_layout
from motet_kernels.lora_batch import PlacedAdapter, Segment
from motet_kernels.run_layout import ALIGNMENT_BYTES, LinearGroup, RunLayout

LINEARS_AT_ONCE = 3
"""Such as q, k and v"""

KEPT_SETS = 1024
"""How many bit masks are cached, one per set of linears: tenants choose these sets."""

WARPS = 4
"""Of a program. Each warp of shrink multiplies its part of the inputs of a tile."""

SCALE_WARPS, SHRINK_WARPS, EXPAND_WARPS = 32, 20, 12
"""The warps that a multiprocessor's registers have room for (compute capability 9.0). So all programs run at once."""

SHRINK_REGISTERS, EXPAND_REGISTERS = 96, 168
"""The registers of a thread, so that all these warps fit. Shrink has only two stages, because more take more registers.
There is no limit for types of four bytes, which need more registers."""

INTERPRETED_PROGRAMS = 3

MAX_LAYOUT_RANK = MAX_RANK + RANK_STEP
"""Of a run: an adapter of MAX_RANK that scales has SCALE_ROWS more"""


@dataclass(frozen=True)
class GpuLoraBatch:
    """A work list in the GPU's memory, and the products that expand reads from shrink. The addresses never change."""

    room: Room
    work: torch.Tensor
    """[length] int64, see `work_list.py`"""
    products: torch.Tensor
    """[splits · linears · room.products] fp32; `splits · linears` is the model's largest."""
    empty: bool
    """True if no launch is needed. Never true for captured launches."""
    scales: bool
    """True if an adapter may scale the linears' own results, which takes one more launch"""


@dataclass(frozen=True)
class _Call:
    """Linears that are fed the same rows, and whose results lie side by side."""

    numbers: Sequence[int]
    """[LINEARS_AT_ONCE] the linears' numbers, then zeros"""
    outputs: Sequence[int]
    """[LINEARS_AT_ONCE] the linears' outputs, then zeros"""
    inputs: int
    count: int


class GpuBackend:
    tile = RANK_STEP
    copies = False

    def __init__(
        self, groups: Sequence[LinearGroup], memory: torch.Tensor, dtype: torch.dtype, *, int8: bool = False
    ) -> None:
        """`dtype`: the type of rows, and of adapters without `int8`"""
        groups, stored = tuple(groups), torch.int8 if int8 else dtype
        whole = memory[: len(memory) // SCALE_BYTES * SCALE_BYTES]
        self._memory, self._scales = whole.view(stored), whole.view(torch.float32)
        self._dtype, self._int8 = dtype, int8
        # Registers hold an int8 tile and its copy in the type of the rows. With bf16 rows both fit; with other rows,
        # tiles are half as large.
        self._tile_itemsize = dtype.itemsize * (2 if int8 and dtype is not torch.bfloat16 else 1)
        make_layout = int8_layout if int8 else RunLayout
        self._layout = cache(lambda rank: make_layout(rank, groups, dtype))
        self._sizes = {linear: (group.inputs, outputs) for group in groups for linear, outputs in group.outputs.items()}
        self._numbers = {linear: number for number, linear in enumerate(self._sizes)}
        self._changed = lru_cache(KEPT_SETS)(lambda linears: words([linear in linears for linear in self._sizes]))
        self._call = cache(self._describe)
        self._products = _most_products(groups)
        self._offsets = torch.from_numpy(self._all_offsets()).to(memory.device)
        self._processors = 0
        if memory.is_cuda:
            self._processors = torch.cuda.get_device_properties(memory.device).multi_processor_count

    @staticmethod
    def room_bytes(groups: Sequence[LinearGroup], rows: int, max_rank: int = MAX_RANK) -> int:
        """Bytes on the device of a batch of at most `rows` rows"""
        max_rank = -(-max_rank // RANK_STEP) * RANK_STEP
        room = room_for(rows, sum(len(group.outputs) for group in groups), max_rank)
        return _most_products(groups) * room.products * 4 + room.size * 8

    def layout(self, rank: int) -> RunLayout:
        return self._layout(-(-rank // self.tile) * self.tile)

    def order(self, adapter: PlacedAdapter) -> tuple[int, int]:
        """Makes the rows of one adapter contiguous: the GPU reads contiguous rows a little faster."""
        return adapter.rank, adapter.offset

    def make_batch(self, segments: Sequence[Segment]) -> GpuLoraBatch:
        chunks = chunks_of(segments)
        room = smallest_room(chunks, len(self._sizes))
        batch = self._batch(room, empty=not chunks, scales=any(chunk.adapter.scales for chunk in chunks))
        self._write(batch, chunks)
        return batch

    def fixed_batch(self, max_rows: int) -> GpuLoraBatch:
        """A batch for captured launches, to be refilled with at most `max_rows` rows of adapters that do not scale."""
        batch = self._batch(room_for(max_rows, len(self._sizes)), empty=False, scales=False)
        self._write(batch, [])
        return batch

    @staticmethod
    def that_scales(batch: GpuLoraBatch) -> GpuLoraBatch:
        """The same batch in the same memory, for other captured launches: any of its adapters may scale."""
        return replace(batch, scales=True)

    def fill(self, batch: GpuLoraBatch, segments: Sequence[Segment]) -> None:
        """Put these segments into the batch, for later launches on this stream, also captured ones."""
        self._write(batch, chunks_of(segments))

    def add_lora(self, y: torch.Tensor, x: torch.Tensor, linear: str, batch: GpuLoraBatch) -> None:
        self.add_lora_together(y, x, (linear,), batch)

    def add_lora_together(self, y: torch.Tensor, x: torch.Tensor, linears: Sequence[str], batch: GpuLoraBatch) -> None:
        """Like `add_lora`, for linears that are fed the same rows: y has the results of all linears side by side."""
        call = self._call(tuple(linears))
        if x.stride(1) != 1:
            x = x.contiguous()
        if (
            not (y.dtype is x.dtype is self._dtype)
            or (x.shape[1], y.shape[1], y.stride(1)) != (call.inputs, sum(call.outputs), 1)
            or len(x) != len(y)
        ):
            raise ValueError(
                f"{', '.join(linears)}: {tuple(x.shape)} {x.dtype} and {tuple(y.shape)} {y.dtype} do not fit"
            )
        if batch.empty:
            return
        room, work = batch.room, batch.work
        chunks, rows, entries = work[HEADER:], work[room.begin_rows :], work[room.begin_entries :]
        tile = tile_inputs(call.inputs)
        places = self._offsets, *call.numbers
        outputs = {f"OUTPUTS_{place}": outputs for place, outputs in enumerate(call.outputs)}
        if batch.scales:
            launch_overlapping(
                lora_scale,
                self._programs(SCALE_WARPS // WARPS),
                *(y, y.stride(0), self._memory, self._scales, *places, work, chunks, rows, room.fields),
                **outputs,
                COLUMNS=SCALED_COLUMNS,
                INT8=self._int8,
                num_warps=WARPS,
                num_stages=1,
            )
        launch_overlapping(
            lora_shrink,
            self._programs(SHRINK_WARPS // WARPS),
            *(x, x.stride(0), self._memory, self._scales, *places),
            *(work, chunks, rows, entries, room.fields, batch.products, room.products),
            LINEARS=call.count,
            INPUTS=call.inputs,
            TILE=tile,
            PARTS=WARPS,
            INT8=self._int8,
            num_warps=WARPS,
            num_stages=2,
            maxnreg=SHRINK_REGISTERS if self._dtype.itemsize == 2 else None,
        )
        widest = max(call.outputs)
        launch_overlapping(
            lora_expand,
            self._programs(EXPAND_WARPS // WARPS),
            *(y, y.stride(0), self._memory, *places, work, chunks, rows, room.fields, batch.products, room.products),
            splits(call.inputs),
            LINEARS=call.count,
            **outputs,
            **{f"COLUMNS_{place}": tile_columns(place, widest, self._tile_itemsize) for place in range(CLASSES)},
            num_warps=WARPS,
            num_stages=1,
            maxnreg=EXPAND_REGISTERS if self._dtype.itemsize == 2 else None,
        )

    def _programs(self, of_a_multiprocessor: int) -> tuple[int]:
        return (self._processors * of_a_multiprocessor or INTERPRETED_PROGRAMS,)

    def _batch(self, room: Room, *, empty: bool, scales: bool) -> GpuLoraBatch:
        device = self._memory.device
        products = torch.empty(self._products * room.products, dtype=torch.float32, device=device)
        return GpuLoraBatch(room, torch.empty(room.size, dtype=torch.int64, device=device), products, empty, scales)

    def _write(self, batch: GpuLoraBatch, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            adapter = chunk.adapter
            for rank, most in ((chunk.rank, MAX_RANK), (adapter.rank, MAX_LAYOUT_RANK)):
                if rank % self.tile or not 0 < rank <= most:
                    raise ValueError(f"a rank must be a multiple of {self.tile} up to {most}, not {rank}")
            if adapter.scales and not batch.scales:
                raise ValueError(f"{adapter.name} scales, and the batch has no launch for that")
            if adapter.offset % ALIGNMENT_BYTES:
                raise ValueError(f"a run must begin at a multiple of {ALIGNMENT_BYTES} bytes, not at {adapter.offset}")
        array = write_list(chunks, batch.room, self._memory.itemsize, lambda adapter: self._changed(adapter.linears))
        written = torch.from_numpy(array)
        if batch.work.is_cuda:
            written = written.pin_memory()  # torch does not reuse this memory before the copy ends
        batch.work[: len(array)].copy_(written, non_blocking=True)

    def _all_offsets(self) -> npt.NDArray[np.int64]:
        """[ranks / RANK_STEP, linears, PLACES] where A, B and the scales of each linear begin in a run, each counted in
        elements of its own type"""
        layouts = [self._layout(rank) for rank in range(RANK_STEP, MAX_LAYOUT_RANK + 1, RANK_STEP)]
        return np.array([[self._places_in(layout, linear) for linear in self._sizes] for layout in layouts])

    def _places_in(self, layout: RunLayout, linear: str) -> tuple[int, int, int]:
        a, b = layout.offsets[linear]
        scales = layout.scale_offsets[linear] if isinstance(layout, Int8Layout) else 0
        return a // self._memory.itemsize, b // self._memory.itemsize, scales // SCALE_BYTES

    def _describe(self, linears: tuple[str, ...]) -> _Call:
        inputs = {self._sizes[linear][0] for linear in linears}
        if len(inputs) != 1 or len(linears) > LINEARS_AT_ONCE:
            raise ValueError(f"{', '.join(linears)} cannot be computed together")
        beyond = [0] * (LINEARS_AT_ONCE - len(linears))
        return _Call(
            numbers=[*(self._numbers[linear] for linear in linears), *beyond],
            outputs=[*(self._sizes[linear][1] for linear in linears), *beyond],
            inputs=inputs.pop(),
            count=len(linears),
        )


def _most_products(groups: Sequence[LinearGroup]) -> int:
    """The largest linears · splits of one group"""
    return max((len(group.outputs) * splits(group.inputs) for group in groups), default=0)
