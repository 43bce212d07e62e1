"""Keys and values lie where the store says."""

import numpy as np
import torch

from motet.domain import PAGE_TOKENS, KVShape
from motet_runner.memory.paged import PagedStore


def test_what_was_written_by_token_is_read_by_page_and_is_copied_with_it() -> None:
    shape = KVShape(layers=2, kv_heads=3, head_dim=4, dtype_bytes=4)
    store = PagedStore(6, shape, torch.float32, torch.device("cpu"))
    assert store.bytes.shape[1] == shape.bytes_per_page()
    store.data.fill_(-1.0)
    pages = np.array([4, 1])
    tokens = PAGE_TOKENS + 5
    places = np.arange(tokens)
    rows = store.rows_of(pages[places // PAGE_TOKENS], places % PAGE_TOKENS)
    heads = torch.arange(float(tokens * 6 * 4)).view(tokens, 6, 4)
    store.write(rows[1], heads)
    store.copy_within([4, 1], [0, 3])
    for table in (pages, np.array([0, 3])):
        blocks = store.blocks_of(table[None])
        read = store.read(blocks[1], 1)[:, 0]
        assert torch.equal(read[:, :, :tokens].flatten(0, 1), heads.transpose(0, 1))
        assert (read[:, :, tokens:] == -1.0).all()
        assert (store.read(blocks[0], 1) == -1.0).all(), "the other layer"
        assert torch.equal(store.block(blocks[1][:1])[0], heads[:PAGE_TOKENS, 0])
