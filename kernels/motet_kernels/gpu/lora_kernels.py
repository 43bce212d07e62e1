"""add_lora in two launches: shrink computes v = x · A, expand adds v · B to y (PU-02). If an adapter scales what the
linears themselves give, a launch before these two does that.

Each launch has as many programs as the GPU runs at once. The programs share a list of work in the GPU's memory
(`work_list.py`). So unused adapters cost no time, and a captured launch stays right when the adapters change (PU-03).
Programs never share a sum: shrink writes the sums of each split of the inputs side by side, in fp32, and expand adds
these sums in the order of the splits. So a row's result does not depend on its neighbours.

A program reads its tile of a matrix once, keeps the tile, and loops over the adapter's rows, ROWS at a time.
"""

import triton
import triton.language as tl

from motet_kernels.gpu import lora_tiles, work_list
from motet_kernels.gpu.overlap import let_next_begin, wait_for_previous

ROWS = tl.constexpr(lora_tiles.ROWS)
RANK_STEP = tl.constexpr(lora_tiles.RANK_STEP)
HELD_0 = tl.constexpr(lora_tiles.HELD_RANKS[0])
HELD_1 = tl.constexpr(lora_tiles.HELD_RANKS[1])
HELD_2 = tl.constexpr(lora_tiles.HELD_RANKS[2])
HELD_3 = tl.constexpr(lora_tiles.HELD_RANKS[3])
ENTRY_STEPS = tl.constexpr(work_list.ENTRY_STEPS)
FIRST_ROW = tl.constexpr(work_list.FIRST_ROW)
ROW_COUNT = tl.constexpr(work_list.ROW_COUNT)
RANK = tl.constexpr(work_list.RANK)
RUN = tl.constexpr(work_list.RUN)
PRODUCTS = tl.constexpr(work_list.PRODUCTS)
LAYOUT = tl.constexpr(work_list.LAYOUT)
SCALED = tl.constexpr(work_list.SCALED)
CHANGED = tl.constexpr(work_list.CHANGED)
WORD_BITS = tl.constexpr(work_list.WORD_BITS)
ENTRIES = tl.constexpr(work_list.ENTRIES)
CLASS_ENDS = tl.constexpr(work_list.CLASS_ENDS)
LAST_CLASS = tl.constexpr(lora_tiles.CLASSES - 1)

PLACES = tl.constexpr(3)
"""The entries of a linear in the table of offsets: A, B and the scales"""
SCALE_BYTES = tl.constexpr(4)

NOT_SPECIALIZED = ["linear_0", "linear_1", "linear_2", "fields"]
"""Arguments that differ by layer and model: a kernel must not be compiled again if one is 1 or divisible by 16."""


@triton.jit
def _is_changed(chunk, linear):
    """True if the adapter of a chunk changes a linear."""
    word = tl.load(chunk + CHANGED + linear // WORD_BITS)
    return ((word >> (linear % WORD_BITS)) & 1) != 0


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def lora_shrink(
    x, x_stride, memory, scales, offsets, linear_0, linear_1, linear_2, work, chunks, rows, entries, fields,
    products, products_size,
    LINEARS: tl.constexpr, INPUTS: tl.constexpr, TILE: tl.constexpr, PARTS: tl.constexpr, INT8: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    """products[split, linear, row of a chunk, rank] = x[row, inputs of the split] · A[rank, inputs of the split]

    Each warp multiplies one of the PARTS of a tile's inputs; then the parts' sums are added. INT8: A is int8, and
    `scales` is the memory viewed as fp32 (`int8_layout.py`).
    """
    let_next_begin(OVERLAPS)
    SPLITS: tl.constexpr = (INPUTS + TILE - 1) // TILE
    PART: tl.constexpr = TILE // PARTS
    count = tl.load(work + ENTRIES) * (LINEARS * SPLITS)
    for item in range(tl.program_id(0), count, tl.num_programs(0)):
        split = item % SPLITS
        place = item // SPLITS % LINEARS
        entry = tl.load(entries + item // (SPLITS * LINEARS))
        chunk = chunks + entry // ENTRY_STEPS * fields
        step = entry % ENTRY_STEPS
        linear = linear_0
        if LINEARS > 1:
            linear = tl.where(place == 1, linear_1, linear)
        if LINEARS > 2:
            linear = tl.where(place == 2, linear_2, linear)
        # Loaded before it is known whether they are needed, so that the loads do not wait for each other.
        rank = tl.load(chunk + RANK)
        layout = tl.load(chunk + LAYOUT)
        run = tl.multiple_of(tl.load(chunk + RUN), 16)
        first = tl.load(chunk + FIRST_ROW)
        row_count = tl.load(chunk + ROW_COUNT).to(tl.int32)
        first_product = tl.load(chunk + PRODUCTS)
        if _is_changed(chunk, linear):
            places = offsets + (layout + linear) * PLACES
            a = memory + run + tl.multiple_of(tl.load(places), 16)
            part = tl.arange(0, PARTS)[:, None, None]
            inputs_down = split * TILE + part * PART + tl.arange(0, PART)[None, :, None]
            inputs_across = split * TILE + part * PART + tl.arange(0, PART)[None, None, :]
            ranks = tl.arange(0, RANK_STEP)
            of_rank = (step * RANK_STEP + ranks)[None, None, :] * INPUTS
            if INPUTS % TILE == 0:
                held = tl.load(a + of_rank + inputs_down)
            else:
                held = tl.load(a + of_rank + inputs_down, mask=inputs_down < INPUTS, other=0.0)
            held = held.to(x.dtype.element_ty)
            if INT8:
                of_run = scales + run // SCALE_BYTES + tl.load(places + 2)
                scale = tl.load(of_run + step * RANK_STEP + ranks)[None, :]
            into = products + (split * LINEARS + place) * products_size + first_product + step * RANK_STEP
            wait_for_previous(OVERLAPS)
            for start in range(0, row_count, ROWS):
                numbers = start + tl.arange(0, ROWS)
                here = numbers < row_count
                row = tl.load(rows + first + numbers, mask=here, other=0)
                wanted = here[None, :, None]
                if INPUTS % TILE != 0:
                    wanted = wanted & (inputs_across < INPUTS)
                of_rows = tl.load(x + row[None, :, None] * x_stride + inputs_across, mask=wanted, other=0.0)
                sums = tl.sum(tl.dot(of_rows, held, input_precision="ieee"), axis=0)
                if INT8:
                    sums *= scale
                tl.store(into + numbers[:, None] * rank + ranks[None, :], sums, mask=here[:, None])
    wait_for_previous(OVERLAPS)


@triton.jit
def _sum_of_splits(products, places, mask, splits, split_size):
    """v, added over the splits in their order. tl.sum over one split keeps the compiler from converting the split to a
    dot's layout before the addition. tl.sum over several splits needs too many registers in Triton 3.6."""
    v = tl.zeros(places.shape, tl.float32)
    for split in range(splits):
        one = products + split * split_size + places[None, :, :]
        v += tl.sum(tl.load(one, mask=mask[None, :, :], other=0.0), axis=0)
    return v


@triton.jit
def _times(v, b):
    """v · B in fp32. Each number of v is split into two numbers of B's type, which are both multiplied: one alone would
    lose digits of x · A.

    In fp16, each row is first divided by a power of two, which is exact. Otherwise a number above 65,504 would become
    infinite, and a small number would lose digits. PEFT computes adapters in fp32 by default, so it has no such errors.
    Infinite numbers and NaN give no finite result.
    """
    if b.dtype == tl.float16:
        unit = _power_of_two(tl.max(tl.abs(v), axis=1))[:, None]
        result = _parts_times(v * (1.0 / unit), b) * unit
    else:
        result = _parts_times(v, b)
    return result


@triton.jit
def _parts_times(v, b):
    rounded = v.to(b.dtype)
    result = tl.dot(rounded, b, input_precision="ieee")
    if b.dtype != tl.float32:
        rest = (v - rounded.to(tl.float32)).to(b.dtype)
        result = tl.dot(rest, b, acc=result)
    return result


@triton.jit
def _power_of_two(number):
    """The largest power of two up to `number` (its exponent bits alone), but within the powers whose reciprocals are
    exact"""
    power = (number.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return tl.minimum(tl.maximum(power, 2.0**-126), 2.0**126)


@triton.jit
def _linear_of(
    tile, linear_0, linear_1, linear_2, OUTPUTS_0: tl.constexpr, OUTPUTS_1: tl.constexpr, OUTPUTS_2: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Of a tile of the results: the place of its linear among those that are computed together, the linear, its
    outputs, how many results are left of them, and the tile's number among them"""
    TILES_0: tl.constexpr = (OUTPUTS_0 + COLUMNS - 1) // COLUMNS
    TILES_1: tl.constexpr = (OUTPUTS_1 + COLUMNS - 1) // COLUMNS
    place = 0
    linear = linear_0
    outputs = OUTPUTS_0
    left_of = 0
    if tile >= TILES_0 + TILES_1:
        place = 2
        linear = linear_2
        outputs = OUTPUTS_2
        left_of = OUTPUTS_0 + OUTPUTS_1
        tile -= TILES_0 + TILES_1
    elif tile >= TILES_0:
        place = 1
        linear = linear_1
        outputs = OUTPUTS_1
        left_of = OUTPUTS_0
        tile -= TILES_0
    return place, linear, outputs, left_of, tile


@triton.jit
def _tiles_of(OUTPUTS_0: tl.constexpr, OUTPUTS_1: tl.constexpr, OUTPUTS_2: tl.constexpr, COLUMNS: tl.constexpr):
    return tl.cdiv(OUTPUTS_0, COLUMNS) + tl.cdiv(OUTPUTS_1, COLUMNS) + tl.cdiv(OUTPUTS_2, COLUMNS)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def lora_scale(
    y, y_stride, memory, scales, offsets, linear_0, linear_1, linear_2, work, chunks, rows, fields,
    OUTPUTS_0: tl.constexpr, OUTPUTS_1: tl.constexpr, OUTPUTS_2: tl.constexpr, COLUMNS: tl.constexpr,
    INT8: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    """y[row] += d · y[row] + e in fp32, rounded once, for the rows whose adapter scales: see `RunLayout.scaling`. INT8:
    as in shrink; d and e each have a scale."""
    let_next_begin(OVERLAPS)
    TILES: tl.constexpr = _tiles_of(OUTPUTS_0, OUTPUTS_1, OUTPUTS_2, COLUMNS)
    count = tl.load(work + CLASS_ENDS + LAST_CLASS) * TILES
    for item in range(tl.program_id(0), count, tl.num_programs(0)):
        chunk = chunks + item // TILES * fields
        _, linear, outputs, left_of, tile = _linear_of(
            item % TILES, linear_0, linear_1, linear_2, OUTPUTS_0, OUTPUTS_1, OUTPUTS_2, COLUMNS
        )
        rank = tl.load(chunk + SCALED)
        if (rank > 0) & _is_changed(chunk, linear):
            run = tl.multiple_of(tl.load(chunk + RUN), 16)
            places = offsets + (tl.load(chunk + LAYOUT) + linear) * PLACES
            of_linear = memory + run + tl.multiple_of(tl.load(places + 1), 16)
            columns = tile * COLUMNS + tl.arange(0, COLUMNS)
            inside = columns < outputs
            d = tl.load(of_linear + (rank - 2) * outputs + columns, mask=inside, other=0.0).to(tl.float32)
            e = tl.load(of_linear + (rank - 1) * outputs + columns, mask=inside, other=0.0).to(tl.float32)
            if INT8:
                of_run = scales + run // SCALE_BYTES + tl.load(places + 2) + rank
                d *= tl.load(of_run - 2)
                e *= tl.load(of_run - 1)
            wait_for_previous(OVERLAPS)
            first = tl.load(chunk + FIRST_ROW)
            row_count = tl.load(chunk + ROW_COUNT).to(tl.int32)
            for start in range(0, row_count, ROWS):
                numbers = start + tl.arange(0, ROWS)
                here = numbers < row_count
                row = tl.load(rows + first + numbers, mask=here, other=0)
                places_y = row[:, None] * y_stride + left_of + columns[None, :]
                mask_y = here[:, None] & inside[None, :]
                before = tl.load(y + places_y, mask=mask_y, other=0.0).to(tl.float32)
                tl.store(y + places_y, (before + e + before * d).to(y.dtype.element_ty), mask=mask_y)
    wait_for_previous(OVERLAPS)


@triton.jit
def _expand_class(
    y, y_stride, memory, offsets, linear_0, linear_1, linear_2, first_chunk, last_chunk, chunks, rows,
    fields, products, products_size,
    splits, LINEARS: tl.constexpr, OUTPUTS_0: tl.constexpr, OUTPUTS_1: tl.constexpr,
    OUTPUTS_2: tl.constexpr, HELD: tl.constexpr, COLUMNS: tl.constexpr, LOOPED: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Computes the chunks of one class of ranks. LOOPED: ranks may be above HELD, and use several tiles of B."""
    TILES: tl.constexpr = _tiles_of(OUTPUTS_0, OUTPUTS_1, OUTPUTS_2, COLUMNS)
    count = (last_chunk - first_chunk) * TILES
    for item in range(tl.program_id(0), count, tl.num_programs(0)):
        chunk = chunks + (first_chunk + item // TILES) * fields
        place, linear, outputs, left_of, tile = _linear_of(
            item % TILES, linear_0, linear_1, linear_2, OUTPUTS_0, OUTPUTS_1, OUTPUTS_2, COLUMNS
        )
        rank = tl.multiple_of(tl.load(chunk + RANK).to(tl.int32), 16)
        run = tl.multiple_of(tl.load(chunk + RUN), 16)
        if _is_changed(chunk, linear):
            begin = tl.load(offsets + (tl.load(chunk + LAYOUT) + linear) * PLACES + 1)
            b = memory + run + tl.multiple_of(begin, 16)
            columns = tile * COLUMNS + tl.arange(0, COLUMNS)
            inside = columns < outputs
            ranks = tl.arange(0, HELD)
            places_b = ranks[:, None] * outputs + columns[None, :]
            held = tl.load(b + places_b, mask=(ranks < rank)[:, None] & inside[None, :], other=0.0)
            held = held.to(y.dtype.element_ty)
            wait_for_previous(OVERLAPS)
            first = tl.load(chunk + FIRST_ROW)
            row_count = tl.load(chunk + ROW_COUNT).to(tl.int32)
            v = products + place * products_size + tl.multiple_of(tl.load(chunk + PRODUCTS), 16)
            for start in range(0, row_count, ROWS):
                numbers = start + tl.arange(0, ROWS)
                here = numbers < row_count
                row = tl.load(rows + first + numbers, mask=here, other=0)
                places_y = row[:, None] * y_stride + left_of + columns[None, :]
                mask_y = here[:, None] & inside[None, :]
                before = tl.load(y + places_y, mask=mask_y, other=0.0)
                places_v = numbers[:, None] * rank + ranks[None, :]
                mask_v = here[:, None] & (ranks < rank)[None, :]
                added = _times(_sum_of_splits(v, places_v, mask_v, splits, LINEARS * products_size), held)
                if LOOPED:
                    for done in range(HELD, rank, HELD):
                        left = ranks < rank - done
                        more = tl.load(b + done * outputs + places_b, mask=left[:, None] & inside[None, :], other=0.0)
                        mask_v = here[:, None] & left[None, :]
                        added += _times(
                            _sum_of_splits(v, places_v + done, mask_v, splits, LINEARS * products_size),
                            more.to(y.dtype.element_ty),
                        )
                tl.store(y + places_y, (before.to(tl.float32) + added).to(before.dtype), mask=mask_y)


@triton.jit(do_not_specialize=[*NOT_SPECIALIZED, "splits"])
def lora_expand(
    y, y_stride, memory, offsets, linear_0, linear_1, linear_2, work, chunks, rows, fields, products,
    products_size,
    splits, LINEARS: tl.constexpr, OUTPUTS_0: tl.constexpr, OUTPUTS_1: tl.constexpr,
    OUTPUTS_2: tl.constexpr, COLUMNS_0: tl.constexpr, COLUMNS_1: tl.constexpr, COLUMNS_2: tl.constexpr,
    COLUMNS_3: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    """y[row, output] += Σ over splits of products[split, linear, row] · B, one class of ranks after the other. The
    highest ranks come first, because they take longest."""
    let_next_begin(OVERLAPS)
    end_0 = tl.load(work + CLASS_ENDS)
    end_1 = tl.load(work + CLASS_ENDS + 1)
    end_2 = tl.load(work + CLASS_ENDS + 2)
    end_3 = tl.load(work + CLASS_ENDS + 3)
    _expand_class(
        y, y_stride, memory, offsets, linear_0, linear_1, linear_2, end_2, end_3, chunks, rows, fields,
        products, products_size, splits, LINEARS, OUTPUTS_0, OUTPUTS_1, OUTPUTS_2, HELD_3, COLUMNS_3, True,
        OVERLAPS,
    )  # fmt: skip
    _expand_class(
        y, y_stride, memory, offsets, linear_0, linear_1, linear_2, end_1, end_2, chunks, rows, fields,
        products, products_size, splits, LINEARS, OUTPUTS_0, OUTPUTS_1, OUTPUTS_2, HELD_2, COLUMNS_2, False,
        OVERLAPS,
    )  # fmt: skip
    _expand_class(
        y, y_stride, memory, offsets, linear_0, linear_1, linear_2, end_0, end_1, chunks, rows, fields,
        products, products_size, splits, LINEARS, OUTPUTS_0, OUTPUTS_1, OUTPUTS_2, HELD_1, COLUMNS_1, False,
        OVERLAPS,
    )  # fmt: skip
    _expand_class(
        y, y_stride, memory, offsets, linear_0, linear_1, linear_2, 0, end_0, chunks, rows, fields,
        products, products_size, splits, LINEARS, OUTPUTS_0, OUTPUTS_1, OUTPUTS_2, HELD_0, COLUMNS_0, False,
        OVERLAPS,
    )  # fmt: skip
    wait_for_previous(OVERLAPS)
