"""KV pages, page outermost with all layers inside (PU-20): [pages, layers, 2, kv_heads, page_tokens, head_dim].

Any sequence can leave at any iteration. A page is copied to the host as one contiguous piece, with all layers.
"""

from collections.abc import Sequence

import numpy as np
import torch

from motet.domain import PAGE_TOKENS, KVShape
from motet_kernels.huge_pages import prefer_huge_pages
from motet_runner.memory.upload import uploaded

READ_BYTES = {"cpu": 8 * 1024 * 1024, "cuda": 256 * 1024 * 1024}
"""How many bytes of one layer are gathered at a time. On a CPU, these bytes should still be in the last-level cache
when attention reads them. Fewer and larger reads are faster: all threads wait for a dozen operators in each read."""


COPY_BYTES = 16 * 1024 * 1024
"""How many bytes are copied at a time from pages to other pages of the device"""


class PagedStore:
    def __init__(self, pages: int, shape: KVShape, dtype: torch.dtype, device: torch.device) -> None:
        self.pages = pages
        self.shape = shape
        self.device = device
        size = pages, shape.layers, 2, shape.kv_heads, PAGE_TOKENS, shape.head_dim
        self.data = prefer_huge_pages(torch.empty(size, dtype=dtype, device=device))
        self.bytes = self.data.view(pages, -1).view(torch.uint8)
        """[pages, bytes of a page] Adapters lie in pages, too: see `motet_kernels.RunLayout`."""
        self._numbers = self.bytes.numpy() if device.type == "cpu" else np.empty(0)
        self._tokens = self.data.view(-1, shape.head_dim)
        self._blocks = self.data.view(-1, PAGE_TOKENS * shape.head_dim)
        self._layer = torch.arange(shape.layers, device=device).view(-1, 1) * (2 * shape.kv_heads)
        self._scratch: torch.Tensor | None = None
        halves = np.arange(2 * shape.kv_heads, dtype=np.int64)
        self._halves = halves.reshape(2, shape.kv_heads, 1)

    def rows_of(self, pages: np.ndarray, offsets: np.ndarray) -> torch.Tensor:
        """Where new tokens go: [layers, tokens · 2 · kv_heads] rows of `head_dim` numbers."""
        shape = self.shape
        first = pages * (shape.layers * 2 * shape.kv_heads)
        rows = ((first[:, None] + self._halves.reshape(1, -1)) * PAGE_TOKENS + offsets[:, None]).reshape(1, -1)
        return torch.from_numpy(rows).to(self.device) + self._layer * PAGE_TOKENS

    def blocks_of(self, table: np.ndarray) -> torch.Tensor:
        """The blocks of sequences with pages `table` [sequences, pages]: [layers, 2 · sequences · kv_heads · pages]"""
        shape = self.shape
        first = table * (shape.layers * 2 * shape.kv_heads)
        blocks = first[None, :, None, :] + self._halves.reshape(2, 1, shape.kv_heads, 1)
        return torch.from_numpy(blocks.reshape(1, -1)).to(self.device) + self._layer

    def write(self, rows: torch.Tensor, heads: torch.Tensor) -> None:
        """Put [tokens, 2 · kv_heads, head_dim] keys and values, side by side, into one layer's `rows`."""
        self._tokens.index_copy_(0, rows, heads.reshape(-1, self.shape.head_dim))

    def sequences_a_read(self, pages: int) -> int:
        """How many sequences to read at once, if each has `pages` pages"""
        of_one = self.shape.bytes_per_page() // self.shape.layers * pages
        return max(1, READ_BYTES.get(self.device.type, READ_BYTES["cuda"]) // of_one)

    def read(self, blocks: torch.Tensor, sequences: int) -> torch.Tensor:
        """Keys and values of one layer: [2, sequences, kv_heads, tokens, head_dim]. The next read overwrites them."""
        count = len(blocks)
        if self._scratch is None or len(self._scratch) < count:
            self._scratch = self._blocks.new_empty((count, self._blocks.shape[1]))
        gathered = torch.index_select(self._blocks, 0, blocks, out=self._scratch[:count])
        return gathered.view(2, sequences, self.shape.kv_heads, -1, self.shape.head_dim)

    def block(self, blocks: torch.Tensor) -> torch.Tensor:
        """Some blocks of `blocks_of`, of keys or of values: [blocks, page_tokens, head_dim]"""
        return self._blocks.index_select(0, blocks).view(len(blocks), PAGE_TOKENS, -1)

    def copy_out(self, pages: Sequence[int]) -> torch.Tensor:
        return self.gather(pages).to("cpu")

    def gather(self, pages: Sequence[int], *, out: torch.Tensor | None = None) -> torch.Tensor:
        """A contiguous copy of these pages on the device"""
        return torch.index_select(self.data, 0, self._numbers_of(pages), out=out)

    def copy_in(self, pages: Sequence[int], copy: torch.Tensor) -> None:
        self.data.index_copy_(0, self._numbers_of(pages), copy.to(self.device))

    def copy_within(self, pages: Sequence[int], to: Sequence[int]) -> None:
        """`pages` and `to` must be disjoint. Copies a few pages at a time, because each copy needs a temporary
        buffer."""
        at_once = max(1, COPY_BYTES // self.shape.bytes_per_page())
        for first in range(0, len(pages), at_once):
            part = slice(first, first + at_once)
            self.data.index_copy_(0, self._numbers_of(to[part]), self.gather(pages[part]))

    def clear(self, pages: Sequence[int]) -> None:
        """Zeroes pages, so that earlier owners' contents are gone: other sequences' and adapters'."""
        if self.device.type == "cpu":  # torch would split each page among threads
            for page in pages:
                self._numbers[page] = 0
        elif pages:
            self.data.index_fill_(0, self._numbers_of(pages), 0)

    def _numbers_of(self, pages: Sequence[int]) -> torch.Tensor:
        """The page numbers on the device. Indexing with a list would wait for the device; this does not."""
        return uploaded(np.array(pages, dtype=np.int64), self.device)
