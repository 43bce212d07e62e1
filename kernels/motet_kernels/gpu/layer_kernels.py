"""What a decoder layer computes between its products, in one launch each: the residual addition with the norm after it,
the rotation of queries and keys with the write of keys and values, and SiLU · up (PU-21).

Numbers are fp32 inside and rounded once. No argument changes from step to step but the tensors, so a captured graph
stays right. A later kernel may add an adapter's expand here, where y is read and written anyway: each function gets the
product as it is, before anybody else has read it.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from motet_kernels.gpu.launches import interpreted, launch

HEADS_AT_ONCE = 8
"""Of a program that rotates: few rows must keep many processors busy."""

COLUMNS_AT_ONCE = 1024
"""Of a program that computes SiLU · up"""


@triton.jit
def _add_norm_kernel(
    hidden, added, weight, out, picked, width, hidden_row, added_row, epsilon,
    ADDS: tl.constexpr, PICKS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One program a row."""
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(picked + place) if PICKS else place
    columns = tl.arange(0, COLUMNS)
    there = columns < width
    x = tl.load(hidden + row * hidden_row + columns, mask=there, other=0.0).to(tl.float32)
    if ADDS:
        x += tl.load(added + row * added_row + columns, mask=there, other=0.0).to(tl.float32)
        rounded = x.to(hidden.dtype.element_ty)
        if not PICKS:
            tl.store(hidden + row * hidden_row + columns, rounded, mask=there)
        x = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / width + epsilon)
    y = x * scale * tl.load(weight + columns, mask=there, other=0.0).to(tl.float32)
    tl.store(out + place * width + columns, y.to(out.dtype.element_ty), mask=there)


@triton.jit
def _rotate_and_write_kernel(
    qkv, positions, rotation, q_norm, k_norm, pages, page_of, offset_of,
    qkv_row, page_size, half_size, head_size, token_size, epsilon,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, NORMS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    """One program for some heads of a row. A head is two halves: one is rotated by the other."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
    column = tl.arange(0, BLOCK_HALF)[None, :]
    there = (head < HEADS + 2 * KV_HEADS) & (column < HALF)
    is_query = head < HEADS
    is_value = head >= HEADS + KV_HEADS
    from_here = qkv + row * qkv_row + head * (2 * HALF) + column
    first = tl.load(from_here, mask=there, other=0.0).to(tl.float32)
    second = tl.load(from_here + HALF, mask=there, other=0.0).to(tl.float32)

    if NORMS:
        scale = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / (2 * HALF) + epsilon)[:, None]
        of_half = column < HALF
        q_first = tl.load(q_norm + column, mask=of_half, other=0.0).to(tl.float32)
        q_second = tl.load(q_norm + HALF + column, mask=of_half, other=0.0).to(tl.float32)
        k_first = tl.load(k_norm + column, mask=of_half, other=0.0).to(tl.float32)
        k_second = tl.load(k_norm + HALF + column, mask=of_half, other=0.0).to(tl.float32)
        first *= tl.where(is_value, 1.0, scale * tl.where(is_query, q_first, k_first))
        second *= tl.where(is_value, 1.0, scale * tl.where(is_query, q_second, k_second))

    angles = rotation + tl.load(positions + row) * (2 * HALF) + column
    cosine = tl.load(angles, mask=column < HALF, other=0.0)
    sine = tl.load(angles + HALF, mask=column < HALF, other=0.0)
    cosine = tl.where(is_value, 1.0, cosine)
    sine = tl.where(is_value, 0.0, sine)
    turned_first = (first * cosine - second * sine).to(qkv.dtype.element_ty)
    turned_second = (second * cosine + first * sine).to(qkv.dtype.element_ty)

    queries = there & is_query
    tl.store(from_here, turned_first, mask=queries)
    tl.store(from_here + HALF, turned_second, mask=queries)

    page = tl.load(page_of + row).to(tl.int64)
    if page >= 0:
        offset = tl.load(offset_of + row).to(tl.int64)
        kv_head = tl.where(is_value, head - KV_HEADS, head) - HEADS
        of_row = pages + page * page_size + offset * token_size
        to_there = of_row + tl.where(is_value, half_size, 0) + kv_head * head_size + column
        written = there & (head >= HEADS)
        tl.store(to_there, turned_first, mask=written)
        tl.store(to_there + HALF, turned_second, mask=written)


@triton.jit
def _silu_multiply_kernel(gate_up, out, width, row_size, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    there = columns < width
    gate = tl.load(gate_up + row * row_size + columns, mask=there, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * row_size + width + columns, mask=there, other=0.0).to(tl.float32)
    small = tl.exp(-tl.abs(gate))  # never infinite
    active = gate * tl.where(gate >= 0, 1.0, small) / (1.0 + small) * up
    tl.store(out + row * width + columns, active.to(out.dtype.element_ty), mask=there)


class HeadNorms(NamedTuple):
    """What each head of queries and keys is multiplied with after it was normed, before it is rotated: [head_dim]"""

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

    `added`: None if nothing is. `rows`: the result has these rows only [any] int64, and hidden stays as it was.
    """
    count, width = hidden.shape if rows is None else (len(rows), hidden.shape[1])
    out = hidden.new_empty((count, width))
    if not count:
        return out
    columns = triton.next_power_of_2(width)
    launch(
        _add_norm_kernel,
        (count,),
        hidden,
        hidden if added is None else added,
        weight,
        out,
        hidden if rows is None else rows,
        width,
        hidden.stride(0),
        hidden.stride(0) if added is None else added.stride(0),
        epsilon,
        ADDS=added is not None,
        PICKS=rows is not None,
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
    """Rotate queries in place, and put rotated keys, and values, where they belong.

    qkv [rows, (heads + 2 · kv_heads) · head_dim] as the product has put it    positions [rows]
    rotation [positions, 2, head_dim / 2] fp32: cosines and sines of half a head; the other half has the same
    pages [pages, 2, kv_heads, tokens, head_dim] of one layer, as a view of all pages
    page_of, offset_of [rows]: where each row's keys and values go; nowhere if the page is negative
    """
    count = len(qkv)
    if not count:
        return
    _, _, kv_heads, _, head_dim = pages.shape
    if qkv.shape[1] != (heads + 2 * kv_heads) * head_dim or rotation.shape[1:] != (2, head_dim // 2):
        raise ValueError(f"{heads} heads and the pages {tuple(pages.shape)} do not fit qkv {tuple(qkv.shape)}")
    if qkv.stride(1) != 1 or pages.stride(4) != 1 or not rotation.is_contiguous():
        raise ValueError("numbers of a head do not lie side by side")
    all_heads = heads + 2 * kv_heads
    at_once = triton.next_power_of_2(all_heads) if interpreted() else HEADS_AT_ONCE
    launch(
        _rotate_and_write_kernel,
        (count, triton.cdiv(all_heads, at_once)),
        qkv,
        positions,
        rotation,
        qkv if norms is None else norms.queries,
        qkv if norms is None else norms.keys,
        pages,
        page_of,
        offset_of,
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
    """silu(gate) · up, of gate and up side by side [rows, 2 · width] → [rows, width]"""
    count, both = gate_up.shape
    width = both // 2
    out = gate_up.new_empty((count, width))
    if count:
        columns = min(COLUMNS_AT_ONCE, triton.next_power_of_2(width))
        grid = (count, triton.cdiv(width, columns))
        launch(_silu_multiply_kernel, grid, gate_up, out, width, gate_up.stride(0), COLUMNS=columns)
    return out
