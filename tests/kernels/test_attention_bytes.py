"""Attention of decodes on a GPU moves hardly more bytes than any could."""

import random

import pytest

from motet_kernels.gpu.attention_pieces import SLOTS, cut_for
from testbed.attention_bytes import AttentionSizes, floor_bytes, moved_bytes

MOST = 1.1
RAGGED = [random.Random(0).randint(128, 8192) for _ in range(32)]


@pytest.mark.parametrize("kv_heads", [32, 8, 4])
@pytest.mark.parametrize(
    "lengths",
    [[1024] * 32, [8192] * 32, [32768], [1024], RAGGED, [*RAGGED, *[0] * 32], [2000] * 256],
    ids=["1k", "8k", "one_32k", "one_1k", "ragged", "half_empty", "many"],
)
@pytest.mark.parametrize("window", [None, 1000])
def test_bytes_are_near_the_floor(kv_heads: int, lengths: list[int], window: int | None) -> None:
    sizes = AttentionSizes(32, kv_heads, 128, 2)
    least = floor_bytes(lengths, sizes, window=window)
    # Of one sequence alone pieces are short, so that all of the card has something to do, and their results add up.
    most = 1.3 if len(lengths) == 1 else 1.12 if kv_heads == 4 else MOST
    assert 1 < moved_bytes(lengths, sizes, window=window) / least <= most


def test_rows_that_are_nobodys_move_next_to_nothing() -> None:
    sizes = AttentionSizes(32, 8, 128, 2)
    lengths = [1024] * 8
    alone = moved_bytes(lengths, sizes, max_rows=64)
    assert moved_bytes([*lengths, *[0] * 56], sizes) == alone + 56 * 32 * 128 * 2, "their zeros"


@pytest.mark.parametrize("rows", [1, 3, 32, 100, 2048, 5000])
@pytest.mark.parametrize("least", [None, 64])
def test_there_is_room_for_the_results_of_all_pieces(rows: int, least: int | None) -> None:
    for kv_heads in (1, 8, 32):
        cut = cut_for(rows, kv_heads, least)
        for tokens in (0, 1, 64, 65, 5000, 131072, 10**6):
            assert cut.pieces(tokens) <= cut.most
        assert cut.most == 1 or rows * cut.most <= SLOTS
