"""Attention over pages of keys and values, in C++ (PU-22)."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from motet_kernels.cpp.library import TYPES, Library

PAGE_TOKENS = 16
"""The library's page size; the caller's pages must have the same size."""


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """The rows and the pages of each sequence: the same for all layers."""

    description: npt.NDArray[np.int64]
    """The library's `Batch`"""
    address: int
    rows: int
    kept: tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]
    """The arrays that `description` points to"""


class PagedAttention:
    def __init__(self, library: Library, pages: torch.Tensor) -> None:
        """`pages` [pages, layers, 2, kv_heads, PAGE_TOKENS, width]: keys, then values of all heads of each layer."""
        _, self._layers, halves, self._kv_heads, tokens, self._width = pages.shape
        if pages.device.type != "cpu" or not pages.is_contiguous() or (halves, tokens) != (2, PAGE_TOKENS):
            raise ValueError(
                f"pages must be contiguous, on a CPU, and [pages, layers, 2, heads, {PAGE_TOKENS}, width]; "
                f"they are {tuple(pages.shape)} on {pages.device}"
            )
        self._attention = library.attention
        self._pages = pages
        self._type = TYPES[pages.dtype]

    def make_batch(self, table: npt.NDArray[np.int32], sequences: npt.NDArray[np.int64]) -> AttentionBatch:
        """`table` [any, pages] holds page numbers. `sequences` [sequences, 4]: the first row, the number of rows, the
        tokens before these rows, and the sequence's row of the table."""
        sequences = np.ascontiguousarray(sequences, dtype=np.int64)
        if table.dtype != np.int32 or table.strides[1] != table.itemsize:
            raise ValueError(f"the table must have contiguous rows of int32; it has {table.dtype}")
        rows = sequences[:, 0] + sequences[:, 1]
        _check_room(table, int((sequences[:, 1] + sequences[:, 2]).max(initial=0)))
        description = np.array(
            [
                self._pages.data_ptr(),
                self._pages.stride(0),
                self._pages.stride(1),
                self._kv_heads,
                self._width,
                table.ctypes.data,
                table.strides[0] // table.itemsize,
                sequences.ctypes.data,
                len(sequences),
                torch.get_num_threads(),
            ],
            dtype=np.int64,
        )
        return AttentionBatch(description, description.ctypes.data, int(rows.max(initial=0)), (table, sequences))

    def follow(self, batch: AttentionBatch, before: npt.NDArray[np.int64], longest: int) -> None:
        """The same sequences have grown. `before`: each sequence's tokens before its new rows; `longest`: all tokens of
        the longest sequence."""
        table, sequences = batch.kept
        sequences[:, 2] = before
        _check_room(table, longest)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: int,
        batch: AttentionBatch,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """Write the new keys and values into their pages. Then each new row attends to its sequence up to itself, or
        only to the last `window` tokens of this part.

        query [heads, rows, width], key and value [kv_heads, rows, width] → [rows, heads, width]
        """
        heads, rows, width = query.shape
        query, key, value = (one if one.stride(2) == 1 else one.contiguous() for one in (query, key, value))
        if (
            not (query.dtype is key.dtype is value.dtype is self._pages.dtype)
            or key.shape != value.shape
            or key.shape != (self._kv_heads, rows, self._width)
            or width != self._width
            or heads % self._kv_heads
            or rows < batch.rows
            or not 0 <= layer < self._layers
        ):
            raise ValueError(
                f"layer {layer}: queries {tuple(query.shape)} and keys {tuple(key.shape)} {query.dtype} do not fit the "
                "pages or the batch"
            )
        out = query.new_empty((rows, heads, width))
        strides = (*query.stride()[:2], *key.stride()[:2], *value.stride()[:2])
        self._attention(
            self._type,
            batch.address,
            layer,
            heads,
            query.data_ptr(),
            key.data_ptr(),
            value.data_ptr(),
            *strides,
            out.data_ptr(),
            scale,
            window or 0,
            softcap or 0.0,
        )
        return out


def _check_room(table: npt.NDArray[np.int32], longest: int) -> None:
    if longest > table.shape[1] * PAGE_TOKENS:
        raise ValueError("a sequence has more tokens than the pages in its row of the table hold")


def no_attention(library: Library) -> AttentionBatch:
    """An empty batch, for programs without attention"""
    pages = torch.empty(1, 1, 2, 1, PAGE_TOKENS, 1, dtype=torch.float32)  # never read
    return PagedAttention(library, pages).make_batch(np.zeros((1, 1), np.int32), np.zeros((0, 4), np.int64))
