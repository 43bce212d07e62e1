"""Attention in C++ against torch on dense tensors, with each set of instructions that this CPU has."""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from motet_kernels.cpp import Library, PagedAttention
from motet_kernels.cpp.attention import PAGE_TOKENS
from testbed.compiled_kernels import compiled_library

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 0.03, torch.float16: 3e-3}
LAYERS, LAYER = 3, 1


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    width: int


@dataclass
class Sequence:
    before: int
    """Tokens whose keys and values are already in its pages"""
    count: int
    """New rows"""
    keys: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    values: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    pages: list[int] = field(default_factory=list)


class World:
    """Sequences with pages in any order; all memory that belongs to nobody holds no numbers."""

    def __init__(
        self, library: Library, shape: Shape, sequences: list[tuple[int, int]], dtype=torch.float32, *, seed: int = 0
    ) -> None:
        random = torch.Generator().manual_seed(seed)
        self.shape = shape
        self.sequences = [Sequence(before, count) for before, count in sequences]
        needed = [-(-(before + count) // PAGE_TOKENS) for before, count in sequences]
        order = torch.randperm(sum(needed) + 3, generator=random).tolist()
        self.pages = torch.full(
            (len(order), LAYERS, 2, shape.kv_heads, PAGE_TOKENS, shape.width), float("nan"), dtype=dtype
        )
        self.table = np.full((len(sequences) + 2, max(needed) + 2), 10**6, dtype=np.int32)
        rows = 1  # and a row of nobody, first and last
        self.rows: list[slice] = []
        described = []
        for number, (sequence, count) in enumerate(zip(self.sequences, needed, strict=True)):
            sequence.pages = [order.pop() for _ in range(count)]
            self.table[number + 1, :count] = sequence.pages
            self.pages[sequence.pages, LAYER] = 0
            tokens = sequence.before + sequence.count
            sequence.keys, sequence.values = (
                torch.randn(shape.kv_heads, tokens, shape.width, generator=random).to(dtype) for _ in range(2)
            )
            for token in range(sequence.before):
                there = self.pages[sequence.pages[token // PAGE_TOKENS], LAYER, :, :, token % PAGE_TOKENS]
                there[0], there[1] = sequence.keys[:, token], sequence.values[:, token]
            described.append((rows, sequence.count, sequence.before, number + 1))
            self.rows.append(slice(rows, rows + sequence.count))
            rows += sequence.count
        self.query = torch.randn(shape.heads, rows + 1, shape.width, generator=random).to(dtype)
        self.described = np.array(described, dtype=np.int64)
        self.attention = PagedAttention(library, self.pages)

    def new(self, what: str) -> torch.Tensor:
        """The new keys or values of all rows, as a model lays them out: [kv_heads, rows, width], transposed."""
        rows = self.query.new_zeros((self.query.shape[1], self.shape.kv_heads, self.shape.width))
        for sequence, there in zip(self.sequences, self.rows, strict=True):
            rows[there] = getattr(sequence, what)[:, sequence.before :].transpose(0, 1)
        return rows.transpose(0, 1)

    def attend(self, **how) -> torch.Tensor:
        how = {"scale": self.shape.width**-0.5} | how
        batch = self.attention.make_batch(self.table, self.described)
        return self.attention.attend(self.query, self.new("keys"), self.new("values"), LAYER, batch, **how)

    def check(self, *, window: int | None = None, softcap: float | None = None, scale: float | None = None) -> None:
        scale = scale or self.shape.width**-0.5
        out = self.attend(scale=scale, window=window, softcap=softcap)
        dtype = self.pages.dtype
        for sequence, there in zip(self.sequences, self.rows, strict=True):
            expected = dense(self.query[:, there].double(), sequence, scale, window, softcap)
            torch.testing.assert_close(
                out[there].double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype], msg=f"{sequence.before}"
            )


def dense(
    query: torch.Tensor, sequence: Sequence, scale: float, window: int | None, softcap: float | None
) -> torch.Tensor:
    """[heads, rows, width] → [rows, heads, width]"""
    group = len(query) // len(sequence.keys)
    keys, values = (t.double().repeat_interleave(group, dim=0) for t in (sequence.keys, sequence.values))
    positions = torch.arange(sequence.before, sequence.before + sequence.count)[:, None]
    tokens = torch.arange(keys.shape[1])
    seen = (tokens <= positions) & (tokens > positions - (window or math.inf))
    if softcap is None:
        out = scaled_dot_product_attention(query, keys, values, attn_mask=seen, scale=scale)
    else:
        scores = torch.tanh(query @ keys.transpose(1, 2) * scale / softcap) * softcap
        out = torch.softmax(scores.masked_fill(~seen, -math.inf), dim=-1) @ values
    return out.transpose(0, 1)


MIXED = [(0, 1), (40, 1), (16, 1), (0, 37), (15, 3), (130, 1), (300, 70), (31, 2)]
"""Tokens before, and new rows: decodes and prompts, at the edges of pages and of blocks of pages"""


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    "shape", [Shape(8, 4, 64), Shape(4, 4, 16), Shape(6, 1, 80), Shape(3, 3, 5), Shape(8, 1, 128)], ids=str
)
def test_all_sizes_and_types_match_torch_on_dense_tensors(library: Library, shape: Shape, dtype: torch.dtype) -> None:
    World(library, shape, MIXED, dtype).check()


@pytest.mark.parametrize("window", [1, 5, 16, 17, 100, 1000])
def test_a_window_ends_what_a_row_attends_to(library: Library, window: int) -> None:
    World(library, Shape(4, 2, 32), MIXED).check(window=window)


def test_scores_are_scaled_and_capped(library: Library) -> None:
    world = World(library, Shape(4, 2, 32), MIXED)
    world.check(softcap=3.0)
    world.check(softcap=30.0, scale=0.3, window=20)
    world.check(scale=2.0)  # scores in the tens: the largest is taken off first


@given(
    sequences=st.lists(st.tuples(st.integers(0, 200), st.integers(1, 40)), min_size=1, max_size=6),
    shape=st.tuples(st.integers(1, 9), st.integers(1, 3), st.integers(1, 70)),
    window=st.one_of(st.none(), st.integers(1, 150)), seed=st.integers(0, 9),
)  # fmt: skip
@settings(deadline=None, max_examples=40)
def test_anything_matches_torch_on_dense_tensors(
    sequences: list[tuple[int, int]], shape: tuple[int, int, int], window: int | None, seed: int
) -> None:
    group, kv_heads, width = shape
    World(compiled_library(), Shape(kv_heads * group, kv_heads, width), sequences, seed=seed).check(window=window)


def test_new_keys_and_values_lie_in_the_pages_and_nothing_else_has_changed(library: Library) -> None:
    world = World(library, Shape(4, 2, 32), MIXED)
    before = world.pages.clone()
    world.attend()
    for sequence in world.sequences:
        for token in range(sequence.before, sequence.before + sequence.count):
            place = sequence.pages[token // PAGE_TOKENS], LAYER, slice(None), slice(None), token % PAGE_TOKENS
            assert torch.equal(world.pages[place], torch.stack((sequence.keys[:, token], sequence.values[:, token])))
            before[place] = world.pages[place]
    assert torch.equal(world.pages.nan_to_num(7), before.nan_to_num(7))


PIECES = [(0, 5), (7, 37), (16, 16), (130, 47), (250, 100), (300, 1), (5, 0)]
"""Tokens before, and rows: pieces of prompts that begin and end anywhere in a page, and one without rows"""


@pytest.mark.parametrize(
    "shape",
    [Shape(2, 2, 64), Shape(2, 1, 80), Shape(6, 2, 96), Shape(8, 2, 128), Shape(8, 1, 256), Shape(5, 1, 7),
     Shape(7, 1, 33)],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("how", [{}, {"window": 40}, {"window": 100, "softcap": 2.0}, {"scale": -0.3}], ids=str)
def test_pieces_of_prompts_in_bfloats_match_torch(library: Library, shape: Shape, how: dict[str, Any]) -> None:
    World(library, shape, PIECES, torch.bfloat16).check(**how)


@given(
    sequences=st.lists(st.tuples(st.integers(0, 300), st.integers(0, 150)), min_size=1, max_size=4),
    shape=st.tuples(st.integers(1, 9), st.integers(1, 2), st.integers(1, 140)),
    window=st.one_of(st.none(), st.integers(1, 200)), seed=st.integers(0, 9),
)  # fmt: skip
@settings(deadline=None, max_examples=30)
def test_any_pieces_in_bfloats_match_torch(
    sequences: list[tuple[int, int]], shape: tuple[int, int, int], window: int | None, seed: int
) -> None:
    group, kv_heads, width = shape
    world = World(compiled_library(), Shape(kv_heads * group, kv_heads, width), sequences, torch.bfloat16, seed=seed)
    world.check(window=window)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_pages_that_a_window_has_left_are_not_read(library: Library, dtype: torch.dtype) -> None:
    world = World(library, Shape(4, 2, 32), [(100, 1), (90, 20)], dtype)
    left = [(100 - 24 + 1) // PAGE_TOKENS, (90 - 24 + 1) // PAGE_TOKENS]
    for number, (sequence, pages) in enumerate(zip(world.sequences, left, strict=True), 1):
        world.pages[sequence.pages[:pages]] = float("nan")
        world.table[number, :pages] = 10**6
    world.check(window=24)


def test_a_sequence_that_is_not_finite_stays_alone_and_shows(library: Library) -> None:
    for what in ("keys", "values", "query"):
        world = World(library, Shape(4, 2, 32), [(20, 1), (20, 1), (5, 8)])
        if what == "query":
            world.query[:, world.rows[1]] = float("nan")
        else:
            getattr(world.sequences[1], what)[:, -1] = float("nan")
        out = world.attend()
        assert out[world.rows[1]].isnan().all()
        assert out[world.rows[0]].isfinite().all()
        assert out[world.rows[2]].isfinite().all()


def test_a_piece_that_is_not_finite_stays_alone_and_shows(library: Library) -> None:
    for what in ("keys", "values", "query"):
        world = World(library, Shape(4, 2, 64), [(200, 40), (200, 40)], torch.bfloat16)
        if what == "query":
            world.query[:, world.rows[1]] = float("nan")
        else:
            getattr(world.sequences[1], what)[:, -1] = float("nan")
        out = world.attend()
        assert out[world.rows[0]].isfinite().all()
        assert out[world.rows[1]][-1].isnan().all()
        if what == "keys":
            assert out[world.rows[1]][:-1].isfinite().all()


@pytest.mark.parametrize("number", [4, 6], ids=["few rows", "many rows"])
def test_threads_and_neighbours_change_no_bit(library: Library, number: int) -> None:
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            world = World(library, Shape(8, 4, 64), [*MIXED, (900, 64)], torch.bfloat16)
            results.append(world.attend()[world.rows[number]])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    world.described = world.described[number : number + 1]
    assert torch.equal(world.attend()[world.rows[number]], results[0])


def test_time_follows_the_context_of_all_and_not_the_longest() -> None:
    """No page is read for a sequence that is shorter than another: the table has none for it."""
    world = World(compiled_library(), Shape(4, 2, 32), [(2000, 1), (3, 1)])
    assert (world.table[2, 1:] == 10**6).all()
    world.check()


@pytest.mark.parametrize("what", ["width", "rows", "type", "kv heads", "heads", "layer"])
def test_what_does_not_fit_the_pages_is_refused(what: str) -> None:
    world = World(compiled_library(), Shape(4, 2, 32), [(20, 1), (20, 1)])
    batch = world.attention.make_batch(world.table, world.described)
    query, keys, values, layer = world.query, world.new("keys"), world.new("values"), LAYER
    if what == "width":
        query = query[..., :16]
    if what == "rows":
        query, keys, values = query[:, :2], keys[:, :2], values[:, :2]
    if what == "type":
        query = query.bfloat16()
    if what == "kv heads":
        keys, values = keys[:1], values[:1]
    if what == "heads":
        query = query[:3]
    if what == "layer":
        layer = LAYERS
    with pytest.raises(ValueError, match="do not fit the pages"):
        world.attention.attend(query, keys, values, layer, batch, scale=1.0)


def test_a_batch_that_its_table_cannot_hold_is_refused() -> None:
    world = World(compiled_library(), Shape(4, 2, 32), [(20, 1)])
    with pytest.raises(ValueError, match="more tokens"):
        world.attention.make_batch(world.table[:, :1], world.described)
    with pytest.raises(ValueError, match="int32"):
        world.attention.make_batch(world.table.astype(np.int64), world.described)
    with pytest.raises(ValueError, match="must be contiguous"):
        PagedAttention(compiled_library(), world.pages[:, :, :, :, :8])
