"""`benchmarks.llama_cpp_peer` without llama.cpp: what it measures, and the weights that it writes."""

from typing import Any

import numpy as np

from benchmarks import llama_cpp_peer
from benchmarks.gguf_of_llama import with_pairs_of_neighbours
from benchmarks.page import settings_of_parts
from benchmarks.peer_sizes import settings_of


def test_without_options_it_measures_what_the_page_shows() -> None:
    assert settings_of(llama_cpp_peer.parsed([])) == settings_of_parts()["llama_cpp_peer"][0]


def rotated(x: Any, angles: Any, pairs: list[tuple[int, int]]) -> Any:
    turned = x.copy()
    for angle, (a, b) in zip(angles, pairs, strict=True):
        turned[a] = x[a] * np.cos(angle) - x[b] * np.sin(angle)
        turned[b] = x[a] * np.sin(angle) + x[b] * np.cos(angle)
    return turned


def test_rows_lie_so_that_both_rotations_give_the_same_attention() -> None:
    random, head = np.random.default_rng(0), 8
    q, k = (random.integers(1, 9, (2 * head, 3)).astype(np.uint16) for _ in range(2))
    x = random.standard_normal(3)
    at_q, at_k = (place / 10.0 ** np.arange(head // 2) for place in (5, 2))
    halves = [(i, i + head // 2) for i in range(head // 2)]
    neighbours = [(2 * i, 2 * i + 1) for i in range(head // 2)]
    of_heads = [slice(0, head), slice(head, 2 * head)]
    ours = [rotated((q @ x)[of], at_q, halves) @ rotated((k @ x)[of], at_k, halves) for of in of_heads]
    q, k = with_pairs_of_neighbours(q, 2), with_pairs_of_neighbours(k, 2)
    theirs = [rotated((q @ x)[of], at_q, neighbours) @ rotated((k @ x)[of], at_k, neighbours) for of in of_heads]
    assert np.allclose(ours, theirs)
