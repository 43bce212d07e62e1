"""Keys and values lie where the store says, whatever the size of a page."""

import numpy as np
import pytest
import torch

from motet.domain import KVShape
from motet_runner.memory.paged import PagedStore


@pytest.mark.parametrize("page_tokens", [16, 64])
def test_what_was_written_by_token_is_read_by_page_and_is_copied_with_it(page_tokens: int) -> None:
    shape = KVShape(layers=2, kv_heads=3, head_dim=4, dtype_bytes=4)
    store = PagedStore(6, shape, torch.float32, torch.device("cpu"), page_tokens=page_tokens)
    assert store.bytes.shape[1] == shape.bytes_per_page(page_tokens)
    store.data.fill_(-1.0)
    pages = np.array([4, 1])
    tokens = page_tokens + 5
    places = np.arange(tokens)
    rows = store.rows_of(pages[places // page_tokens], places % page_tokens)
    heads = torch.arange(float(tokens * 6 * 4)).view(tokens, 6, 4)
    store.write(rows[1], heads)
    store.copy_within([4, 1], [0, 3])
    for table in (pages, np.array([0, 3])):
        blocks = store.blocks_of(table[None])
        read = store.read(blocks[1], 1)[:, 0]
        assert torch.equal(read[:, :, :tokens].flatten(0, 1), heads.transpose(0, 1))
        assert (read[:, :, tokens:] == -1.0).all()
        assert (store.read(blocks[0], 1) == -1.0).all(), "the other layer"
        assert torch.equal(store.block(blocks[1][:1])[0], heads[:page_tokens, 0])
