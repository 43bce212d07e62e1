"""Finds the places of new keys and values, and writes the keys and values there."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["sequences", "table_stride"])
def place_decodes(
    given_lengths,
    given_table_rows,
    table,
    lengths,
    table_rows,
    positions,
    pages,
    offsets,
    sequences,
    table_stride,
    PAGE: tl.constexpr,
    AT_ONCE: tl.constexpr,
) -> None:
    """Each sequence's new row is its last token; a sequence without tokens has no new row."""
    sequence = tl.program_id(0) * AT_ONCE + tl.arange(0, AT_ONCE)
    is_one = sequence < sequences
    length = tl.load(given_lengths + sequence, mask=is_one, other=0)
    table_row = tl.load(given_table_rows + sequence, mask=is_one, other=0)
    tl.store(lengths + sequence, length, mask=is_one)
    tl.store(table_rows + sequence, table_row, mask=is_one)
    lives = is_one & (length > 0)
    position = tl.maximum(length - 1, 0)
    page = tl.load(table + table_row.to(tl.int64) * table_stride + position // PAGE, mask=lives, other=-1)
    tl.store(positions + sequence, position, mask=is_one)
    tl.store(pages + sequence, page, mask=is_one)
    tl.store(offsets + sequence, position % PAGE, mask=is_one)


@triton.jit(do_not_specialize=["layer"])
def write_rows(
    key,
    value,
    pages,  # [pages, layers, 2, kv_heads, PAGE, width]
    layer,
    row_pages,  # [rows] the page that each row's keys and values go to; -1: none
    row_offsets,  # [rows] the token of that page
    key_row_stride,
    key_head_stride,
    value_row_stride,
    value_head_stride,
    LAYERS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    KV_HEADS_ROUNDED: tl.constexpr,
    WIDTH_ROUNDED: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    page = tl.load(row_pages + row).to(tl.int64)
    if page >= 0:
        head = tl.arange(0, KV_HEADS_ROUNDED)[:, None]
        across = tl.arange(0, WIDTH_ROUNDED)[None, :]
        is_there = (head < KV_HEADS) & (across < WIDTH)
        to = pages + ((page * LAYERS + layer) * 2 * KV_HEADS + head) * (PAGE * WIDTH)
        to += tl.load(row_offsets + row) * WIDTH + across
        new_key = tl.load(key + row * key_row_stride + head * key_head_stride + across, mask=is_there)
        new_value = tl.load(value + row * value_row_stride + head * value_head_stride + across, mask=is_there)
        tl.store(to, new_key, mask=is_there)
        tl.store(to + KV_HEADS * PAGE * WIDTH, new_value, mask=is_there)
