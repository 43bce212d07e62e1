"""Attention of sequences with one new row each, over pages of keys and values (PU-22), in three kernels.

`cut_sequences` cuts each sequence into pieces, once for all layers with the same window. `attend_pieces` attends to all
pieces. It has as many programs as the GPU runs at once, whatever the lengths, so that a captured graph stays right. One
product multiplies all query heads of a KV head with the keys. `add_pieces` adds the pieces of a sequence in their
order. How a sequence is cut depends on its length and on the number of rows of the batch, or of its room. So a
sequence's bits do not depend on the contents of the other sequences.
"""

import triton
import triton.language as tl


@triton.jit
def capped(scores, cap):  # noqa: ANN201 without types, as all of Triton's language
    """cap · tanh(scores), without overflow for large scores"""
    falling = tl.exp(-2 * tl.abs(scores))
    return cap * tl.where(scores < 0, -1.0, 1.0) * (1 - falling) / (1 + falling)


@triton.jit
def _seen(lengths, window, HAS_WINDOW: tl.constexpr):
    return tl.minimum(lengths, window) if HAS_WINDOW else lengths


@triton.jit
def _piece(seen, most, LEAST: tl.constexpr):
    """Tokens of each piece of a sequence that sees `seen` tokens"""
    return tl.maximum(tl.cdiv(tl.cdiv(seen, most), LEAST), 1) * LEAST


@triton.jit(do_not_specialize=["sequences", "window", "most"])
def cut_sequences(
    lengths,
    pieces,  # [all, 4] sequence, first token, end, and the slot of its result; -1: the only piece
    total,  # [1] how many pieces there are
    counts,  # [sequences] each sequence's pieces
    sequences,
    window,
    most,  # pieces of a sequence
    LEAST: tl.constexpr,
    ROOM: tl.constexpr,
    AT_ONCE: tl.constexpr,
    MAX_ROUNDED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
) -> None:
    own = tl.program_id(0)
    before = 0
    everywhere = 0
    for first in range(0, sequences, AT_ONCE):
        others = first + tl.arange(0, AT_ONCE)
        seen = _seen(tl.load(lengths + others, mask=others < sequences, other=0), window, HAS_WINDOW)
        count = tl.cdiv(seen, _piece(seen, most, LEAST))
        before += tl.sum(tl.where(others < own, count, 0))
        everywhere += tl.sum(count)
    tl.store(total, everywhere, mask=own == 0)
    length = tl.load(lengths + own)
    seen = _seen(length, window, HAS_WINDOW)
    piece = _piece(seen, most, LEAST)
    count = tl.cdiv(seen, piece)
    tl.store(counts + own, count)
    number = tl.arange(0, MAX_ROUNDED)
    there = number < count
    entry = pieces + (before + number) * 4
    begin = length - seen + number * piece
    tl.store(entry, own + number * 0, mask=there)
    tl.store(entry + 1, begin, mask=there)
    tl.store(entry + 2, tl.minimum(begin + piece, length), mask=there)
    tl.store(entry + 3, tl.where(count > 1, own * ROOM + number, -1), mask=there)


@triton.jit(do_not_specialize=["layer", "table_stride"])
def attend_pieces(
    query,
    out,  # [rows, heads, width]
    results,  # [slots, heads, width] of pieces, each divided by the sum of its weights
    sums,  # [slots, heads] log2 of the sum of 2^score over the piece
    pages,  # [pages, layers, 2, kv_heads, PAGE, width]
    layer,
    table,  # [any, any] page numbers
    table_rows,  # [sequences] each sequence's row of the table
    rows,  # [sequences] each sequence's row of the query
    pieces,
    total,
    row_stride,
    head_stride,
    table_stride,
    scale,  # scale / cap with a cap, else scale · log2(e)
    cap,  # cap · log2(e)
    LAYERS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of a KV head
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    GROUP_ROUNDED: tl.constexpr,
    WIDTH_ROUNDED: tl.constexpr,
    AT_ONCE: tl.constexpr,
    HAS_CAP: tl.constexpr,
) -> None:
    heads = tl.arange(0, GROUP_ROUNDED)
    across = tl.arange(0, WIDTH_ROUNDED)
    is_width = across < WIDTH
    is_query = (heads < GROUP)[:, None] & is_width[None, :]
    for item in range(tl.program_id(0), tl.load(total) * KV_HEADS, tl.num_programs(0)):
        kv_head = item % KV_HEADS
        entry = pieces + item // KV_HEADS * 4
        sequence = tl.load(entry)
        begin = tl.load(entry + 1)
        end = tl.load(entry + 2)
        slot = tl.load(entry + 3)
        row = tl.load(rows + sequence).to(tl.int64)
        own_pages = table + tl.load(table_rows + sequence).to(tl.int64) * table_stride
        first_head = kv_head * GROUP
        asked = tl.load(
            query + row * row_stride + (first_head + heads)[:, None] * head_stride + across[None, :],
            mask=is_query,
            other=0.0,
        )
        keys = pages + (layer * 2 * KV_HEADS + kv_head) * PAGE * WIDTH
        values = keys + KV_HEADS * PAGE * WIDTH
        largest = tl.full([GROUP_ROUNDED], float("-inf"), tl.float32)
        weight = tl.zeros([GROUP_ROUNDED], tl.float32)
        added = tl.zeros([GROUP_ROUNDED, WIDTH_ROUNDED], tl.float32)
        for first in range(begin, end, AT_ONCE):
            tokens = first + tl.arange(0, AT_ONCE)
            seen = tokens < end
            page = tl.load(own_pages + tokens // PAGE, mask=seen, other=0).to(tl.int64)
            there = page * (LAYERS * 2 * KV_HEADS * PAGE * WIDTH) + tokens % PAGE * WIDTH
            # Only the sequence's own values are read: a weight of zero times NaN would be NaN.
            key = tl.load(keys + there[None, :] + across[:, None], mask=seen[None, :] & is_width[:, None], other=0.0)
            value = tl.load(
                values + there[:, None] + across[None, :], mask=seen[:, None] & is_width[None, :], other=0.0
            )
            scores = tl.dot(asked, key, input_precision="ieee") * scale
            if HAS_CAP:
                scores = capped(scores, cap)
            scores = tl.where(seen[None, :], scores, float("-inf"))
            new_largest = tl.maximum(largest, tl.max(scores, 1))
            weights = tl.exp2(scores - new_largest[:, None])
            kept = tl.exp2(largest - new_largest)
            weight = weight * kept + tl.sum(weights, 1)
            added = added * kept[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
            largest = new_largest
        result = added / weight[:, None]
        where = (first_head + heads)[:, None] * WIDTH + across[None, :]
        if slot < 0:
            tl.store(out + row * (KV_HEADS * GROUP * WIDTH) + where, result, mask=is_query)
        else:
            of_slot = slot.to(tl.int64) * (KV_HEADS * GROUP)
            tl.store(results + of_slot * WIDTH + where, result, mask=is_query)
            tl.store(sums + of_slot + first_head + heads, largest + tl.log2(weight), mask=heads < GROUP)


@triton.jit
def add_pieces(
    out,
    results,
    sums,
    rows,
    counts,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_ROUNDED: tl.constexpr,
    ROOM: tl.constexpr,
    AT_ONCE: tl.constexpr,
) -> None:
    """One program for each sequence and query head. A sequence without tokens gets zeros."""
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    count = tl.load(counts + sequence)
    if count != 1:
        across = tl.arange(0, WIDTH_ROUNDED)
        is_width = across < WIDTH
        largest = tl.full([1], float("-inf"), tl.float32)
        weight = tl.zeros([1], tl.float32)
        added = tl.zeros([WIDTH_ROUNDED], tl.float32)
        for first in range(0, count, AT_ONCE):
            number = first + tl.arange(0, AT_ONCE)
            there = number < count
            slot = (sequence * ROOM + number).to(tl.int64) * HEADS + head
            sum_of = tl.load(sums + slot, mask=there, other=float("-inf"))
            result = tl.load(
                results + slot[:, None] * WIDTH + across[None, :], mask=there[:, None] & is_width[None, :], other=0.0
            )
            new_largest = tl.maximum(largest, tl.max(sum_of, 0))
            weights = tl.exp2(sum_of - new_largest)
            kept = tl.exp2(largest - new_largest)
            weight = weight * kept + tl.sum(weights, 0)
            added = added * kept + tl.sum(weights[:, None] * result, 0)
            largest = new_largest
        result = added / tl.where(count == 0, 1.0, weight)
        row = tl.load(rows + sequence).to(tl.int64)
        tl.store(out + (row * HEADS + head) * WIDTH + across, result, mask=is_width)
