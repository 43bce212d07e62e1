"""Attention over pages of keys and values on a GPU (PU-22): decodes and parts of prompts in one batch."""

import math
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from motet_kernels.gpu.attention_batch import Decodes, GpuAttentionBatch, Numbers, Prompts, on_device
from motet_kernels.gpu.attention_decode import add_pieces, attend_pieces, cut_sequences
from motet_kernels.gpu.attention_pieces import SLOTS, cut_for
from motet_kernels.gpu.attention_prefill import attend_tiles
from motet_kernels.gpu.attention_write import place_decodes, write_rows
from motet_kernels.gpu.launches import launch

LOG2_E = math.log2(math.e)
READ_BYTES = 32 * 1024
"""Bytes of keys and values that a program loads at a time. One such load fits in the program's share of a
multiprocessor, beside the one that is computed."""
PROGRAMS_OF_A_MULTIPROCESSOR = 4
"""How many programs of `attend_pieces` fit in the registers and shared memory (compute capability 9.0)"""
INTERPRETED_PROGRAMS = 3


class _Asked(NamedTuple):
    """The arguments of one layer's attention"""

    query: torch.Tensor
    """[heads, rows, width]"""
    out: torch.Tensor
    """[rows, heads, width]"""
    layer: int
    batch: GpuAttentionBatch
    scales: tuple[float, float]
    """The arguments `scale` and `cap` of the kernels"""
    window: int | None


class GpuAttention:
    def __init__(self, pages: torch.Tensor, *, piece_tokens: int | None = None) -> None:
        """`pages` [pages, layers, 2, kv_heads, page_tokens, width]: keys, then values of all heads of each layer.

        `piece_tokens`: the tokens of each piece of a sequence, for any number of rows. Pieces are longer if there is no
        room for all of them.
        """
        _, self._layers, halves, self._kv_heads, self._page, self._width = pages.shape
        if not pages.is_contiguous() or halves != 2:
            raise ValueError(
                f"pages must be contiguous, and [pages, layers, 2, heads, tokens, width]; they are {tuple(pages.shape)}"
            )
        self._pages = pages
        self._piece_tokens = piece_tokens
        self._programs = _programs(pages.device)
        self._constants = cache(self._compiled_for)
        self._results: tuple[torch.Tensor, torch.Tensor] | None = None

    @staticmethod
    def room_bytes(heads: int, width: int) -> int:
        """Bytes on the device that all calls share"""
        return SLOTS * heads * (width + 1) * torch.float32.itemsize

    def make_batch(self, table: npt.NDArray[np.int32], sequences: npt.NDArray[np.int64]) -> GpuAttentionBatch:
        """`table` [any, pages] holds page numbers. `sequences` [sequences, 4]: the first row, the number of rows, the
        tokens before these rows, and the sequence's row of the table."""
        sequences = np.array(sequences, dtype=np.int64)
        rows = int((sequences[:, 0] + sequences[:, 1]).max(initial=0))
        nothing = torch.empty(0, dtype=torch.int32, device=self._pages.device)
        batch = GpuAttentionBatch(rows, nothing, nothing, nothing, nothing, None, None, (table, sequences))
        self._bring(batch, table, sequences, int((sequences[:, 1] + sequences[:, 2]).max(initial=0)))
        return batch

    def follow(self, batch: GpuAttentionBatch, before: npt.NDArray[np.int64], longest: int) -> None:
        """The same sequences have grown. `before`: each sequence's tokens before its new rows; `longest`: all tokens of
        the longest sequence."""
        if batch.kept is None:
            raise ValueError("the batch of a graph is filled by `refill`")
        table, sequences = batch.kept
        sequences[:, 2] = before
        self._bring(batch, table, sequences, longest)

    def fixed_batch(self, max_rows: int, *, table: torch.Tensor) -> GpuAttentionBatch:
        """For captured graphs: room for `max_rows` decodes at fixed addresses. The batch is empty at first.

        `table` [any, pages], 32-bit: the page table on the device, which is read in place.
        """
        device = self._pages.device
        if table.dtype != torch.int32 or table.stride(1) != 1 or table.device != device:
            raise ValueError(
                f"the table must have contiguous rows of int32 on {device}; it has {table.dtype} on {table.device}"
            )
        rows = torch.arange(max_rows, dtype=torch.int32, device=device)
        zeros, nowhere = torch.zeros_like(rows), torch.full_like(rows, -1)
        decodes = Decodes(rows, zeros, rows.clone(), cut_for(max_rows, self._kv_heads, self._piece_tokens))
        return GpuAttentionBatch(max_rows, zeros.clone(), nowhere, zeros.clone(), table, decodes, None, None)

    def refill(self, batch: GpuAttentionBatch, lengths: torch.Tensor, *, table_rows: torch.Tensor) -> None:
        """Put other decodes into a fixed batch. All numbers come from the device, so this call can be the first part of
        the graph.

        `lengths` [rows], 32-bit: the tokens of each row's sequence, with the new token; 0: there is no sequence.
        `table_rows` [rows], 32-bit: each sequence's row of the page table.
        """
        decodes = batch.decodes
        if decodes is None or batch.kept is not None:
            raise ValueError("only the batch of a graph is filled on the device")
        if lengths.dtype != torch.int32 or lengths.shape != decodes.lengths.shape:
            raise ValueError(
                f"`lengths` must be {len(decodes.lengths)} int32 numbers, not {tuple(lengths.shape)} {lengths.dtype}"
            )
        rows = len(decodes.rows)
        at_once = 128
        launch(
            place_decodes,
            (-(-rows // at_once),),
            lengths,
            table_rows,
            batch.table,
            decodes.lengths,
            decodes.table_rows,
            batch.positions,
            batch.pages,
            batch.offsets,
            rows,
            batch.table.stride(0),
            PAGE=self._page,
            AT_ONCE=at_once,
        )
        batch.changed()

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: int,
        batch: GpuAttentionBatch,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """Write the new keys and values into their pages. Then each new row attends to its sequence up to itself, or
        only to the last `window` tokens of this part.

        query [heads, rows, width], key and value [kv_heads, rows, width] → [rows, heads, width]
        """
        self.write(key, value, layer, batch)
        return self.attend_written(query, layer, batch, scale=scale, window=window, softcap=softcap)

    def write(self, key: torch.Tensor, value: torch.Tensor, layer: int, batch: GpuAttentionBatch) -> None:
        """Write the new keys and values [kv_heads, rows, width] into their pages."""
        if key.stride(2) != 1:
            key = key.contiguous()
        if value.stride(2) != 1:
            value = value.contiguous()
        if (
            not (key.dtype is value.dtype is self._pages.dtype)
            or key.shape != value.shape
            or (len(key), key.shape[2]) != (self._kv_heads, self._width)
            or key.shape[1] < batch.rows
            or not 0 <= layer < self._layers
        ):
            raise ValueError(f"layer {layer}: keys {tuple(key.shape)} {key.dtype} do not fit the pages")
        if not batch.rows:
            return
        launch(
            write_rows,
            (batch.rows,),
            key,
            value,
            self._pages,
            layer,
            batch.pages,
            batch.offsets,
            key.stride(1),
            key.stride(0),
            value.stride(1),
            value.stride(0),
            LAYERS=self._layers,
            KV_HEADS=self._kv_heads,
            WIDTH=self._width,
            PAGE=self._page,
            KV_HEADS_ROUNDED=_rounded(self._kv_heads),
            WIDTH_ROUNDED=_rounded(self._width),
            num_warps=4,
        )

    def attend_written(
        self,
        query: torch.Tensor,
        layer: int,
        batch: GpuAttentionBatch,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """Like `attend`, after the caller has written the new keys and values.

        query [heads, rows, width] → [rows, heads, width]
        """
        heads, rows, width = query.shape
        if query.stride(2) != 1:
            query = query.contiguous()
        if (
            query.dtype is not self._pages.dtype
            or width != self._width
            or heads % self._kv_heads
            or rows < batch.rows
            or not 0 <= layer < self._layers
        ):
            raise ValueError(f"layer {layer}: queries {tuple(query.shape)} {query.dtype} do not fit the pages")
        out = query.new_empty((rows, heads, width))
        scales = (scale * LOG2_E, 0.0) if softcap is None else (scale / softcap, softcap * LOG2_E)
        asked = _Asked(query, out, layer, batch, scales, window)
        if batch.decodes is not None:
            self._attend_decodes(asked, batch.decodes)
        if batch.prompts is not None:
            self._attend_prompts(asked, batch.prompts)
        return out

    def _attend_decodes(self, asked: _Asked, decodes: Decodes) -> None:
        query, out, layer, batch, scales, window = asked
        heads, constants = len(query), self._constants(len(query))
        pieces = decodes.pieces_of(window)
        sequences, cut = len(decodes.rows), decodes.cut
        if not pieces.current:
            launch(
                cut_sequences,
                (sequences,),
                decodes.lengths,
                pieces.list,
                pieces.total,
                pieces.counts,
                sequences,
                window or 0,
                cut.most,
                LEAST=cut.least,
                ROOM=cut.room,
                AT_ONCE=256,
                MAX_ROUNDED=_rounded(cut.room),
                HAS_WINDOW=window is not None,
            )
            pieces.current = True
        results, sums = self._room(heads)
        launch(
            attend_pieces,
            (self._programs,),
            query,
            out,
            results,
            sums,
            self._pages,
            layer,
            batch.table,
            decodes.table_rows,
            decodes.rows,
            pieces.list,
            pieces.total,
            query.stride(1),
            query.stride(0),
            batch.table.stride(0),
            *scales,
            **constants,
            GROUP_ROUNDED=max(16, _rounded(constants["GROUP"])),
            HAS_CAP=scales[1] != 0,
            num_warps=4,
            num_stages=2,
        )
        launch(
            add_pieces,
            (sequences, heads),
            out,
            results,
            sums,
            decodes.rows,
            pieces.counts,
            HEADS=heads,
            WIDTH=self._width,
            WIDTH_ROUNDED=constants["WIDTH_ROUNDED"],
            ROOM=cut.room,
            AT_ONCE=16,
            num_warps=2,
        )

    def _attend_prompts(self, asked: _Asked, prompts: Prompts) -> None:
        query, out, layer, batch, scales, window = asked
        constants = self._constants(len(query))
        group = _rounded(constants["GROUP"])
        # Larger tiles do not fit in the registers. Products in fp32 need the most registers.
        tile = max(32 if query.element_size() > 2 else 128, group)
        tiles = prompts.tiles_of(tile // group)
        launch(
            attend_tiles,
            (len(tiles) * self._kv_heads,),
            query,
            out,
            self._pages,
            layer,
            batch.table,
            prompts.described,
            tiles,
            query.stride(1),
            query.stride(0),
            batch.table.stride(0),
            window or 0,
            *scales,
            **constants,
            GROUP_ROUNDED=group,
            TILE=tile,
            HAS_WINDOW=window is not None,
            HAS_CAP=scales[1] != 0,
            num_warps=8,
            num_stages=2,
        )

    def _compiled_for(self, heads: int) -> dict[str, int]:
        """Compile-time constants, the same for all layers of a model. A product has at least 16 rows and columns."""
        width = max(16, _rounded(self._width))
        return {
            "LAYERS": self._layers,
            "KV_HEADS": self._kv_heads,
            "GROUP": heads // self._kv_heads,
            "WIDTH": self._width,
            "PAGE": self._page,
            "WIDTH_ROUNDED": width,
            "AT_ONCE": max(16, min(64, READ_BYTES // (2 * width * self._pages.element_size()))),
        }

    def _room(self, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Room for the results of pieces until these are added. All graphs share the room: they run one at a time."""
        if self._results is None or self._results[0].shape[1] != heads:
            shape = (SLOTS, heads, self._width)  # see room_bytes
            results = torch.empty(shape, dtype=torch.float32, device=self._pages.device)
            self._results = results, results.new_empty(shape[:2])
        return self._results

    def _bring(self, batch: GpuAttentionBatch, table: npt.NDArray[np.int32], sequences: Numbers, longest: int) -> None:
        """Copies the present state of these sequences to the device."""
        if longest > table.shape[1] * self._page:
            raise ValueError("a sequence has more tokens than the pages in its row of the table hold")
        if table.dtype != np.int32:
            raise ValueError(f"the table must be int32, not {table.dtype}")
        firsts, counts, before, table_rows = sequences.T
        of = np.repeat(np.arange(len(sequences)), counts)
        within = np.arange(len(of)) - np.repeat(counts.cumsum() - counts, counts)
        positions = before[of] + within
        places = np.zeros((3, _aligned(batch.rows)), dtype=np.int64)
        places[1] = -1
        pages = table[table_rows[of], positions // self._page]
        places[:, firsts[of] + within] = positions, pages, positions % self._page
        device = self._pages.device
        batch.positions, batch.pages, batch.offsets = on_device(places, device)[:, : batch.rows].unbind()
        # Only the rows and columns of the table that are read are copied.
        batch.table = on_device(table[table_rows, : -(-longest // self._page)], device)
        own_rows = np.arange(len(sequences))
        is_decode = counts == 1
        if is_decode.any():
            decoding = int(is_decode.sum())
            numbers = np.zeros((3, _aligned(decoding)), dtype=np.int64)
            numbers[:, :decoding] = np.stack((firsts, before + counts, own_rows))[:, is_decode]
            rows, lengths, table_places = on_device(numbers, device)[:, :decoding].unbind()
            known = batch.decodes
            batch.decodes = Decodes(rows, lengths, table_places, cut_for(decoding, self._kv_heads, self._piece_tokens))
            if known is not None:
                batch.decodes.pieces = known.pieces
                batch.changed()
        several = counts > 1
        if several.any():
            described = np.stack((firsts, counts, before, own_rows), axis=1)[several]
            batch.prompts = Prompts(on_device(described, device), described)


def _programs(device: torch.device) -> int:
    """As many programs as run at once: so each gets the same share of the pieces."""
    if device.type != "cuda":
        return INTERPRETED_PROGRAMS
    return PROGRAMS_OF_A_MULTIPROCESSOR * int(torch.cuda.get_device_properties(device).multi_processor_count)


def _aligned(numbers: int) -> int:
    """Rounds up the length of a row of 32-bit numbers, so that the next row begins at a multiple of 16 bytes. Kernels
    are compiled again for unaligned addresses."""
    return -(-numbers // 4) * 4


def _rounded(number: int) -> int:
    """Rounded up to a power of two"""
    return 1 << max(0, number - 1).bit_length()
