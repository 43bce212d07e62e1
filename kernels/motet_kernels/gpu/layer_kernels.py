"""What a decoder layer computes between its products, in three kernels: the residual addition with the norm after it,
the rotation of queries and keys with the write of keys and values, and SiLU · up (PU-21).

A kernel computes in fp32 and rounds each result once. Only the contents of tensors change from step to step, so a
captured graph stays right.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from motet_kernels.gpu.launches import interpreted, launch

HEADS_AT_ONCE = 8
"""How many heads a program rotates. With more heads, a few rows would use only a few multiprocessors."""

COLUMNS_AT_ONCE = 1024
"""How many columns of SiLU · up a program computes"""

INTERPRETED_ROWS = 16
"""How many rows a program computes in the interpreter, where one row would take as long. On a GPU it computes one."""


@triton.jit(do_not_specialize=["count"])
def _add_norm_kernel(
    hidden, added, weight, out, picked, count, width, hidden_row, added_row, epsilon,
    ADDS: tl.constexpr, PICKS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    place = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    there = (place < count) & (column < width)
    row = tl.load(picked + place, mask=place < count, other=0) if PICKS else place
    x = tl.load(hidden + row * hidden_row + column, mask=there, other=0.0).to(tl.float32)
    if ADDS:
        x += tl.load(added + row * added_row + column, mask=there, other=0.0).to(tl.float32)
        rounded = x.to(hidden.dtype.element_ty)
        if not PICKS:
            tl.store(hidden + row * hidden_row + column, rounded, mask=there)
        x = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 1) / width + epsilon)[:, None]
    y = x * scale * tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    tl.store(out + place * width + column, y.to(out.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["count"])
def _rotate_and_write_kernel(
    qkv, positions, rotation, q_norm, k_norm, pages, page_of, offset_of,
    count, qkv_row, page_size, half_size, head_size, token_size, epsilon,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, NORMS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    """A program computes BLOCK_HEADS heads. Each half of a head is rotated with the other half."""
    place = tl.program_id(0) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
    exists = place < count * (HEADS + 2 * KV_HEADS)
    row = (place // (HEADS + 2 * KV_HEADS)).to(tl.int64)
    head = place % (HEADS + 2 * KV_HEADS)
    is_query = head < HEADS
    is_value = head >= HEADS + KV_HEADS
    column = tl.arange(0, BLOCK_HALF)[None, :]
    of_half = column < HALF
    there = exists & of_half
    from_here = qkv + row * qkv_row + head * (2 * HALF) + column
    first = tl.load(from_here, mask=there, other=0.0).to(tl.float32)
    second = tl.load(from_here + HALF, mask=there, other=0.0).to(tl.float32)

    if NORMS:
        scale = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / (2 * HALF) + epsilon)[:, None]
        q_first = tl.load(q_norm + column, mask=of_half, other=0.0).to(tl.float32)
        q_second = tl.load(q_norm + HALF + column, mask=of_half, other=0.0).to(tl.float32)
        k_first = tl.load(k_norm + column, mask=of_half, other=0.0).to(tl.float32)
        k_second = tl.load(k_norm + HALF + column, mask=of_half, other=0.0).to(tl.float32)
        first *= tl.where(is_value, 1.0, scale * tl.where(is_query, q_first, k_first))
        second *= tl.where(is_value, 1.0, scale * tl.where(is_query, q_second, k_second))

    position = tl.load(positions + row, mask=exists, other=0).to(tl.int64)
    angles = rotation + position * (2 * HALF) + column
    turned = there & (head < HEADS + KV_HEADS)
    cosine = tl.load(angles, mask=turned, other=1.0)
    sine = tl.load(angles + HALF, mask=turned, other=0.0)
    turned_first = (first * cosine - second * sine).to(qkv.dtype.element_ty)
    turned_second = (second * cosine + first * sine).to(qkv.dtype.element_ty)

    queries = there & is_query
    tl.store(from_here, turned_first, mask=queries)
    tl.store(from_here + HALF, turned_second, mask=queries)

    page = tl.load(page_of + row, mask=exists, other=-1).to(tl.int64)
    offset = tl.load(offset_of + row, mask=exists, other=0).to(tl.int64)
    kv_head = tl.where(is_value, head - KV_HEADS, head) - HEADS
    of_row = pages + page * page_size + offset * token_size
    to_there = of_row + tl.where(is_value, half_size, 0) + kv_head * head_size + column
    written = there & (head >= HEADS) & (page >= 0)
    tl.store(to_there, turned_first, mask=written)
    tl.store(to_there + HALF, turned_second, mask=written)


@triton.jit(do_not_specialize=["count"])
def _silu_multiply_kernel(gate_up, out, count, width, row_size, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    there = (row < count) & (column < width)
    gate = tl.load(gate_up + row * row_size + column, mask=there, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * row_size + width + column, mask=there, other=0.0).to(tl.float32)
    small = tl.exp(-tl.abs(gate))  # cannot overflow
    active = gate * tl.where(gate >= 0, 1.0, small) / (1.0 + small) * up
    tl.store(out + row * width + column, active.to(out.dtype.element_ty), mask=there)


class HeadNorms(NamedTuple):
    """The weights [head_dim] of the norms of each head, before the rotation"""

    queries: torch.Tensor
    keys: torch.Tensor


def add_norm(
    hidden: torch.Tensor,
    added: torch.Tensor | None,
    weight: torch.Tensor,
    epsilon: float,
    *,
    rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """hidden += added, in place; → RMSNorm(hidden) · weight [rows, width]

    `added`; None: nothing is added. `rows` [any] int64: the result has only these rows, and hidden does not change.
    """
    count, width = hidden.shape if rows is None else (len(rows), hidden.shape[1])
    out = hidden.new_empty((count, width))
    if not count:
        return out
    columns, rows_at_once = triton.next_power_of_2(width), _rows_at_once()
    launch(
        _add_norm_kernel,
        (triton.cdiv(count, rows_at_once),),
        hidden,
        hidden if added is None else added,
        weight,
        out,
        hidden if rows is None else rows,
        count,
        width,
        hidden.stride(0),
        hidden.stride(0) if added is None else added.stride(0),
        epsilon,
        ADDS=added is not None,
        PICKS=rows is not None,
        ROWS=rows_at_once,
        COLUMNS=columns,
        num_warps=min(16, max(4, columns // 512)),
    )
    return out


def rotate_and_write(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    rotation: torch.Tensor,
    pages: torch.Tensor,
    page_of: torch.Tensor,
    offset_of: torch.Tensor,
    *,
    heads: int,
    norms: HeadNorms | None,
    epsilon: float,
) -> None:
    """Rotate queries in place, and write rotated keys and values into their pages.

    qkv [rows, (heads + 2 · kv_heads) · head_dim] as the product wrote it    positions [rows]
    rotation [positions, 2, head_dim / 2] fp32: cosines and sines of half a head, the same for both halves
    pages [pages, 2, kv_heads, tokens, head_dim] of one layer, as a view of all pages
    page_of, offset_of [rows]: where each row's keys and values go; a negative page: nowhere
    """
    count = len(qkv)
    if not count:
        return
    _, _, kv_heads, _, head_dim = pages.shape
    if qkv.shape[1] != (heads + 2 * kv_heads) * head_dim or rotation.shape[1:] != (2, head_dim // 2):
        raise ValueError(f"{heads} heads and the pages {tuple(pages.shape)} do not fit qkv {tuple(qkv.shape)}")
    if qkv.stride(1) != 1 or pages.stride(4) != 1 or not rotation.is_contiguous():
        raise ValueError("the last dimension of qkv and of the pages, and the rotation, must be contiguous")
    at_once = HEADS_AT_ONCE * _rows_at_once()
    launch(
        _rotate_and_write_kernel,
        (triton.cdiv(count * (heads + 2 * kv_heads), at_once),),
        qkv,
        positions,
        rotation,
        qkv if norms is None else norms.queries,
        qkv if norms is None else norms.keys,
        pages,
        page_of,
        offset_of,
        count,
        qkv.stride(0),
        *pages.stride()[:4],
        epsilon,
        HEADS=heads,
        KV_HEADS=kv_heads,
        HALF=head_dim // 2,
        NORMS=norms is not None,
        BLOCK_HEADS=at_once,
        BLOCK_HALF=triton.next_power_of_2(head_dim // 2),
        num_warps=4,
    )


def silu_multiply(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) · up, with gate and up side by side [rows, 2 · width] → [rows, width]"""
    count, both = gate_up.shape
    width = both // 2
    out = gate_up.new_empty((count, width))
    if count:
        columns, rows = min(COLUMNS_AT_ONCE, triton.next_power_of_2(width)), _rows_at_once()
        grid = (triton.cdiv(count, rows), triton.cdiv(width, columns))
        launch(_silu_multiply_kernel, grid, gate_up, out, count, width, gate_up.stride(0), ROWS=rows, COLUMNS=columns)
    return out


def _rows_at_once() -> int:
    return INTERPRETED_ROWS if interpreted() else 1
