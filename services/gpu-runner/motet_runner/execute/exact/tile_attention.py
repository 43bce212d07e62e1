"""Attention of exact mode: each row reads its own blocks of 16 keys, in order.

Every product, exp and tanh has a shape that depends on the model alone, and sums are added block after block. The other
functions round at most once, so no shape changes their bits. The bits of a row therefore depend on its own keys only. A
row with fewer blocks than another row of the tile reads its first block again, with weights of zero, which change
nothing. (Page contents beyond a sequence's tokens are finite; `attention.py` says why.)
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from motet.domain import PAGE_TOKENS
from motet_runner.memory.paged import PagedStore


@dataclass(frozen=True, slots=True)
class Blocks:
    """The blocks that the rows of a tile read."""

    keys: torch.Tensor
    """[layers, blocks, rows · kv_heads] see PagedStore.block"""
    values: torch.Tensor
    hidden: torch.Tensor
    """[blocks, rows, 1, PAGE_TOKENS] True for keys that the row must not see"""


@dataclass(slots=True)
class Tile:
    """A batch of one tile, the same for all layers."""

    pages: npt.NDArray[np.int32]
    """[rows, pages] The page tables of the rows"""
    positions: npt.NDArray[np.int64]
    writes: torch.Tensor
    """[layers, ...] see PagedStore.rows_of"""
    count: int
    """The number of real rows, whose keys and values are written; the other rows are copies"""
    blocks: dict[int | None, Blocks] = field(default_factory=dict)
    """Window → its blocks"""


class TileAttention:
    def __init__(self, store: PagedStore) -> None:
        self._store = store

    def make_batch(
        self,
        table: npt.NDArray[np.int32],
        rows: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
        count: int,
    ) -> Tile:
        """`table` [any, pages]; `rows`: each row's index in `table`; the first `count` rows are real, the others are
        copies."""
        pages = table[rows, : int(positions.max()) // PAGE_TOKENS + 1]
        page_of = pages[np.arange(count), positions[:count] // PAGE_TOKENS].astype(np.int64)
        writes = self._store.rows_of(page_of, positions[:count] % PAGE_TOKENS)
        return Tile(pages, positions, writes, count)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: int,
        batch: Tile,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """query [heads, rows, dim], key and value [kv_heads, rows, dim] → [rows, heads, dim]"""
        heads, rows, dim = query.shape
        new = slice(batch.count)
        self._store.write(batch.writes[layer], torch.cat((key[:, new], value[:, new])).transpose(0, 1))
        blocks = batch.blocks.get(window)
        if blocks is None:
            blocks = batch.blocks[window] = self._blocks(batch, window)
        products = rows * len(key)
        count = len(blocks.hidden)
        # The query heads of one KV head are rows of one product.
        grouped = query.transpose(0, 1).reshape(products, heads // len(key), dim)
        scores = query.new_empty((count, products, heads // len(key), PAGE_TOKENS))
        for block, of_block in enumerate(scores):
            keys = self._store.block(blocks.keys[layer, block])
            torch.bmm(grouped, keys.transpose(1, 2), out=of_block)
            if softcap is not None:
                of_block.mul_(scale / softcap).tanh_()
        scores.mul_(scale if softcap is None else softcap)
        by_head = scores.view(count, rows, heads, PAGE_TOKENS)
        by_head.masked_fill_(blocks.hidden, float("-inf"))
        by_head.sub_(by_head.amax(dim=(0, 3), keepdim=True))
        out, total = torch.zeros_like(grouped), torch.zeros_like(grouped[..., :1])
        for block, of_block in enumerate(scores):
            weights = of_block.exp_()
            out += torch.bmm(weights, self._store.block(blocks.values[layer, block]))
            total += _sums(weights)
        return (out / total).view(rows, heads, dim)

    def _blocks(self, tile: Tile, window: int | None) -> Blocks:
        last = tile.positions
        seen_from = np.zeros_like(last) if window is None else np.maximum(0, last - window + 1)
        first_block, last_block = seen_from // PAGE_TOKENS, last // PAGE_TOKENS
        walked = first_block[:, None] + np.arange(int((last_block - first_block).max()) + 1)
        own = walked <= last_block[:, None]
        keys = walked[:, :, None] * PAGE_TOKENS + np.arange(PAGE_TOKENS)
        seen = own[:, :, None] & (keys <= last[:, None, None]) & (keys >= seen_from[:, None, None])
        pages = np.take_along_axis(tile.pages, np.where(own, walked, first_block[:, None]), axis=1)
        where = self._store.blocks_of(pages.astype(np.int64))
        shape = self._store.shape
        # [layers, 2, rows, kv_heads, blocks] → [2, layers, blocks, rows · kv_heads]
        where = (
            where.view(shape.layers, 2, len(last), shape.kv_heads, -1).permute(1, 0, 4, 2, 3).flatten(3).contiguous()
        )
        hidden = torch.from_numpy(~seen).to(self._store.device).transpose(0, 1).unsqueeze(2)
        return Blocks(where[0], where[1], hidden.contiguous())


def _sums(weights: torch.Tensor) -> torch.Tensor:
    """[..., PAGE_TOKENS] → [..., 1] Adds the halves until one number is left: one order for any shape."""
    while (width := weights.shape[-1]) > 1:
        weights = weights[..., : width // 2] + weights[..., width // 2 :]
    return weights
