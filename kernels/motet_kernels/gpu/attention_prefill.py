"""Attention of sequences with several new rows each: prompts, and parts of them that follow tokens in pages (PU-22).

A program computes a tile: some rows of one sequence, with all query heads of one KV head.
"""

import triton
import triton.language as tl

from motet_kernels.gpu.attention_decode import capped


@triton.jit(do_not_specialize=["layer", "table_stride", "window"])
def attend_tiles(
    query,
    out,  # [rows, heads, width]
    pages,  # [pages, layers, 2, kv_heads, PAGE, width]
    layer,
    table,  # [any, any] page numbers
    prompts,  # [sequences, 4] first row, new rows, tokens before them, row of the table
    tiles,  # [tiles, 2] sequence, and the tile's first row within its new rows
    row_stride,
    head_stride,
    table_stride,
    window,
    scale,  # scale / cap with a cap, else scale · log2(e)
    cap,  # cap · log2(e)
    LAYERS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of a KV head
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    GROUP_ROUNDED: tl.constexpr,
    WIDTH_ROUNDED: tl.constexpr,
    TILE: tl.constexpr,  # rows of the tile, times GROUP_ROUNDED
    AT_ONCE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
) -> None:
    kv_head = tl.program_id(0) % KV_HEADS
    entry = tiles + tl.program_id(0) // KV_HEADS * 2
    prompt = prompts + tl.load(entry) * 4
    first_of_tile = tl.load(entry + 1)
    count = tl.load(prompt + 1)
    before = tl.load(prompt + 2)
    own_pages = table + tl.load(prompt + 3).to(tl.int64) * table_stride
    place = tl.arange(0, TILE)
    new_row = first_of_tile + place // GROUP_ROUNDED
    head = kv_head * GROUP + place % GROUP_ROUNDED
    across = tl.arange(0, WIDTH_ROUNDED)
    is_width = across < WIDTH
    is_query = ((new_row < count) & (place % GROUP_ROUNDED < GROUP))[:, None] & is_width[None, :]
    row = (tl.load(prompt) + new_row).to(tl.int64)
    asked = tl.load(
        query + (row * row_stride + head * head_stride)[:, None] + across[None, :], mask=is_query, other=0.0
    )
    position = before + new_row
    begin = 0
    if HAS_WINDOW:
        begin = tl.maximum(before + first_of_tile - window + 1, 0)
    end = before + tl.minimum(count, first_of_tile + TILE // GROUP_ROUNDED)
    keys = pages + (layer * 2 * KV_HEADS + kv_head) * PAGE * WIDTH
    values = keys + KV_HEADS * PAGE * WIDTH
    largest = tl.full([TILE], float("-inf"), tl.float32)
    weight = tl.zeros([TILE], tl.float32)
    added = tl.zeros([TILE, WIDTH_ROUNDED], tl.float32)
    for first in range(begin, end, AT_ONCE):
        tokens = first + tl.arange(0, AT_ONCE)
        own = tokens < end
        page = tl.load(own_pages + tokens // PAGE, mask=own, other=0).to(tl.int64)
        there = page * (LAYERS * 2 * KV_HEADS * PAGE * WIDTH) + tokens % PAGE * WIDTH
        # Only the sequence's own values are read: a weight of zero times NaN would be NaN.
        key = tl.load(keys + there[None, :] + across[:, None], mask=own[None, :] & is_width[:, None], other=0.0)
        value = tl.load(values + there[:, None] + across[None, :], mask=own[:, None] & is_width[None, :], other=0.0)
        scores = tl.dot(asked, key, input_precision="ieee") * scale
        if HAS_CAP:
            scores = capped(scores, cap)
        seen = tokens[None, :] <= position[:, None]
        if HAS_WINDOW:
            seen = seen & (tokens[None, :] > position[:, None] - window)
        scores = tl.where(seen & own[None, :], scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        # Some rows of the tile may have seen no key yet.
        taken = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weights = tl.exp2(scores - taken[:, None])
        kept = tl.exp2(largest - taken)
        weight = weight * kept + tl.sum(weights, 1)
        added = added * kept[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        largest = new_largest
    tl.store(
        out + ((row * (KV_HEADS * GROUP) + head) * WIDTH)[:, None] + across[None, :],
        added / tl.where(weight == 0, 1.0, weight)[:, None],
        mask=is_query,
    )
