"""Attention over pages on a GPU against the formula in fp64."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from motet_kernels.gpu.attention import GpuAttention
from motet_kernels.gpu.launches import traced_launches
from tests.gpu.devices import DEVICE, in_types

TOLERANCE = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 0.03}
LAYERS, LAYER = 2, 1


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    width: int
    page: int = 16


@dataclass
class Sequence:
    before: int
    """Tokens whose keys and values are already in its pages"""
    count: int
    """New rows"""
    keys: torch.Tensor
    values: torch.Tensor
    queries: torch.Tensor
    """[heads, new rows, width]"""
    pages: list[int]

    @classmethod
    def random(cls, shape: Shape, before: int, count: int, dtype: torch.dtype, seed: int) -> "Sequence":
        random = torch.Generator().manual_seed(seed)
        made = (
            torch.randn(heads, tokens, shape.width, generator=random, dtype=torch.float32).to(dtype)
            for heads, tokens in (
                (shape.kv_heads, before + count),
                (shape.kv_heads, before + count),
                (shape.heads, count),
            )
        )
        return cls(before, count, *made, pages=[])

    def expected(self, scale: float, window: int | None = None, softcap: float | None = None) -> torch.Tensor:
        """[new rows, heads, width]"""
        group = len(self.queries) // len(self.keys)
        keys, values = (t.double().repeat_interleave(group, dim=0) for t in (self.keys, self.values))
        positions = torch.arange(self.before, self.before + self.count)[:, None]
        tokens = torch.arange(keys.shape[1])
        seen = (tokens <= positions) & (tokens > positions - (window or math.inf))
        scores = self.queries.double() @ keys.transpose(1, 2) * scale
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        return (torch.softmax(scores.masked_fill(~seen, -math.inf), dim=-1) @ values).transpose(0, 1)


class World:
    """Sequences with pages in any order; all memory that belongs to nobody holds no numbers."""

    def __init__(self, shape: Shape, sequences: list[Sequence], dtype: torch.dtype = torch.float32, *, seed: int = 0):
        random = torch.Generator().manual_seed(seed)
        self.shape, self.sequences = shape, sequences
        needed = [-(-(each.before + each.count) // shape.page) for each in sequences]
        order = torch.randperm(sum(needed) + 3, generator=random).tolist()
        self.pages = torch.full(
            (len(order), LAYERS, 2, shape.kv_heads, shape.page, shape.width), math.nan, dtype=dtype, device=DEVICE
        )
        self.table = np.full((len(sequences) + 2, max(needed) + 2), 10**6, dtype=np.int32)
        described, rows = [], 1  # and a row of nobody, first and last
        self.rows: list[slice] = []
        for number, (each, count) in enumerate(zip(sequences, needed, strict=True), 1):
            each.pages = [order.pop() for _ in range(count)]
            self.table[number, :count] = each.pages
            self.fill(each)
            described.append((rows, each.count, each.before, number))
            self.rows.append(slice(rows, rows + each.count))
            rows += each.count
        self.free = order
        self.described = np.array(described, dtype=np.int64)
        self.query = self.new("queries", rows + 1)
        self.attention = GpuAttention(self.pages)

    def fill(self, each: Sequence) -> None:
        """Its pages have the keys and values of the tokens before the new ones, and nothing else."""
        page = self.shape.page
        for token in range(each.before):
            there = self.pages[each.pages[token // page], LAYER, :, :, token % page]
            there[0], there[1] = each.keys[:, token].to(DEVICE), each.values[:, token].to(DEVICE)

    def new(self, what: str, rows: int = 0) -> torch.Tensor:
        """The new ones of all rows, as a model lays them out: [heads, rows, width], transposed."""
        heads = self.shape.heads if what == "queries" else self.shape.kv_heads
        made = torch.zeros((rows or self.query.shape[1], heads, self.shape.width), dtype=self.pages.dtype)
        for each, there in zip(self.sequences, self.rows, strict=True):
            made[there] = getattr(each, what)[:, -each.count :].transpose(0, 1)
        return made.to(DEVICE).transpose(0, 1)

    def attend(self, **how: Any) -> torch.Tensor:
        how = {"scale": self.shape.width**-0.5} | how
        batch = self.attention.make_batch(self.table, self.described)
        return self.attention.attend(self.query, self.new("keys"), self.new("values"), LAYER, batch, **how)

    def check(self, **how: Any) -> None:
        how = {"scale": self.shape.width**-0.5} | how
        self.compare(self.attend(**how), **how)

    def compare(self, out: torch.Tensor, **how: Any) -> None:
        limit = TOLERANCE[self.pages.dtype]
        for each, there in zip(self.sequences, self.rows, strict=True):
            torch.testing.assert_close(
                out[there].double().cpu(),
                each.expected(**how),
                rtol=limit,
                atol=limit,
                msg=f"{each.before, each.count}",
            )


def world(shape: Shape, sequences: list[tuple[int, int]], dtype: torch.dtype = torch.float32) -> World:
    made = [Sequence.random(shape, *each, dtype, seed) for seed, each in enumerate(sequences)]
    return World(shape, made, dtype)


MIXED = [(0, 1), (40, 1), (15, 1), (0, 21), (15, 3), (300, 1), (70, 40), (31, 2)]
"""Tokens before, and new rows: decodes and prompts, at the edges of pages and of pieces"""


@pytest.mark.parametrize(
    ("shape", "dtype"),
    in_types(
        *(Shape(6, 2, 80), Shape(4, 4, 64), Shape(4, 1, 128)),
        *(Shape(8, 1, 64, page=64), Shape(3, 3, 96), Shape(7, 1, 8)),
    ),
    ids=str,
)
def test_all_sizes_and_types_match_the_formula(shape: Shape, dtype: torch.dtype) -> None:
    world(shape, MIXED, dtype).check()


@pytest.mark.parametrize(
    ("window", "page"),
    [(1, 16), (5, 16), (16, 16), (100, 16), (5, 64), (100, 64)],
)
def test_a_window_ends_what_a_row_attends_to(window: int, page: int) -> None:
    world(Shape(4, 2, 16, page), MIXED).check(window=window)


def test_scores_are_scaled_and_capped() -> None:
    both = world(Shape(4, 2, 16), MIXED)
    both.check(softcap=3.0)
    both.check(softcap=30.0, scale=0.3, window=20)
    both.check(scale=2.0)  # scores in the tens: the largest is taken off first
    both.check(softcap=20.0, scale=-60.0)  # far beyond the cap, on both sides


def test_new_keys_and_values_lie_in_the_pages_and_nothing_else_has_changed() -> None:
    both = world(Shape(6, 3, 24), MIXED)
    before = both.pages.clone()
    both.attend()
    for each in both.sequences:
        for token in range(each.before, each.before + each.count):
            place = each.pages[token // 16], LAYER, slice(None), slice(None), token % 16
            new = torch.stack((each.keys[:, token], each.values[:, token]))
            assert torch.equal(both.pages[place].cpu(), new)
            before[place] = both.pages[place]
    assert torch.equal(both.pages.nan_to_num(7), before.nan_to_num(7))


def test_larger_pages_hold_what_was_attended_to() -> None:
    pages = torch.zeros(3, LAYERS, 2, 2, 64, 16, dtype=torch.float32, device=DEVICE)
    each = Sequence.random(Shape(4, 2, 16), 0, 100, torch.float32, 0)
    attention = GpuAttention(pages)
    batch = attention.make_batch(np.array([[2, 0]], dtype=np.int32), np.array([[0, 100, 0, 0]], dtype=np.int64))
    out = attention.attend(*(one.to(DEVICE) for one in (each.queries, each.keys, each.values)), LAYER, batch, scale=0.3)
    torch.testing.assert_close(out.double().cpu(), each.expected(0.3), rtol=2e-5, atol=2e-5)
    keys, values = torch.cat((pages[2, LAYER], pages[0, LAYER]), dim=2)[:, :, :100].cpu()
    assert torch.equal(keys, each.keys)
    assert torch.equal(values, each.values)


def test_pages_that_a_window_has_left_are_not_read() -> None:
    both = world(Shape(4, 2, 16), [(100, 1), (90, 20)])
    for number, each in enumerate(both.sequences, 1):
        left = (each.before - 24 + 1) // 16
        both.pages[each.pages[:left]] = math.nan
        both.table[number, :left] = each.pages[-1]
    both.check(window=24)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("what", ["keys", "values", "queries"])
def test_a_sequence_that_is_not_finite_stays_alone_and_shows(what: str) -> None:
    both = world(Shape(4, 2, 16), [(200, 1), (200, 1), (5, 8)])
    getattr(both.sequences[1], what)[:, -1] = math.nan
    both.query = both.new("queries")
    out = both.attend()
    assert out[both.rows[1]].isnan().all()
    assert not out[both.rows[0]].isnan().any()
    assert not out[both.rows[2]].isnan().any()


@pytest.mark.parametrize("window", [None, 90])
def test_the_bits_of_a_sequence_do_not_depend_on_the_others(window: int | None) -> None:
    mine = [(150, 1), (35, 9)]
    with_short = world(Shape(4, 1, 16), [*mine, (3, 1), (7, 1)]).attend(window=window)
    shape = Shape(4, 1, 16)
    made = [Sequence.random(shape, *each, torch.float32, seed) for seed, each in enumerate(mine)]
    others = [Sequence.random(shape, *each, torch.float32, 9) for each in [(400, 1), (0, 70), (130, 1)]]
    both = World(shape, [*others, *made], seed=5)
    out = both.attend(window=window)
    assert torch.equal(out[both.rows[3]], with_short[1:2])
    assert torch.equal(out[both.rows[4]], with_short[2:11])


def test_with_pieces_of_one_length_the_bits_do_not_depend_on_how_many_decode() -> None:
    shape = Shape(4, 1, 16)

    def attended(others: int) -> torch.Tensor:
        made = [Sequence.random(shape, 150, 1, torch.float32, seed) for seed in range(others + 1)]
        both = World(shape, made)
        both.attention = GpuAttention(both.pages, piece_tokens=32)
        return both.attend()[1]

    alone = attended(0)
    assert torch.equal(attended(1), alone)
    assert torch.equal(attended(20), alone)


def test_many_pieces_are_added_up() -> None:
    shape = Shape(2, 1, 16)
    made = [Sequence.random(shape, before, 1, torch.float32, before) for before in (400, 250, 30)]
    made[0].keys[:, -60:] *= 3  # the largest score comes late
    both = World(shape, made)
    both.attention = GpuAttention(both.pages, piece_tokens=16)
    both.check(scale=1.0)


def test_the_same_sequences_are_attended_again_after_more_tokens() -> None:
    shape = Shape(4, 2, 16)
    both = world(shape, [(14, 1), (64, 1), (127, 1)])
    batch = both.attention.make_batch(both.table, both.described)
    how = {"scale": 0.3, "window": 70}
    for added in range(4):
        for number, each in enumerate(both.sequences, 1):
            if added:
                each.before += 1
                for what in ("keys", "values"):
                    new = torch.randn(2, 1, 16, generator=torch.Generator().manual_seed(added), dtype=torch.float32)
                    setattr(each, what, torch.cat((getattr(each, what), new), dim=1))
            if each.before // 16 == len(each.pages):
                each.pages.append(both.free.pop())
                both.table[number, len(each.pages) - 1] = each.pages[-1]
        if added:
            both.attention.follow(batch, np.array([each.before for each in both.sequences]), 131)
        out = both.attention.attend(both.query, both.new("keys"), both.new("values"), LAYER, batch, **how)
        both.compare(out, **how)


class Graph:
    """Replays of one decode step: the same buffers, and what is in them is the device's."""

    def __init__(self, both: World, rows: int) -> None:
        self.both = both
        width = both.table.shape[1] + 1
        self.table = torch.full((rows + 3, width), 10**6, dtype=torch.int32, device=DEVICE)
        self.lengths = torch.zeros(rows, dtype=torch.int32, device=DEVICE)
        self.table_rows = torch.zeros(rows, dtype=torch.int32, device=DEVICE)
        self.batch = both.attention.fixed_batch(rows, table=self.table)
        heads, kv_heads, dim = both.shape.heads, both.shape.kv_heads, both.shape.width
        self.query, self.key, self.value = (
            torch.full((count, rows, dim), math.nan, dtype=both.pages.dtype, device=DEVICE)
            for count in (heads, kv_heads, kv_heads)
        )

    def place(self, living: dict[int, Sequence]) -> None:
        """These decode, at these rows; the others are nobody's."""
        self.lengths.zero_()
        self.table.fill_(10**6)
        for at, (row, each) in enumerate(living.items()):
            self.lengths[row] = each.before + 1
            self.table_rows[row] = at
            self.table[at, : len(each.pages)] = torch.tensor(each.pages, dtype=torch.int32)
            self.query[:, row] = each.queries[:, 0].to(DEVICE)
            self.key[:, row], self.value[:, row] = each.keys[:, -1].to(DEVICE), each.values[:, -1].to(DEVICE)

    def step(self, **how: Any) -> torch.Tensor:
        attention = self.both.attention
        attention.refill(self.batch, self.lengths, table_rows=self.table_rows)
        attention.write(self.key, self.value, LAYER, self.batch)
        out = attention.attend_written(self.query, LAYER, self.batch, **how)
        again = attention.attend_written(self.query, LAYER, self.batch, **how)  # of another layer, so to speak
        assert torch.equal(out.nan_to_num(7), again.nan_to_num(7))
        return out


def test_a_replay_with_other_sequences_in_the_same_buffers_is_right() -> None:
    both = world(Shape(4, 2, 16), [(0, 1), (15, 1), (300, 1), (64, 1), (129, 1)])
    a, b, c, d, e = both.sequences
    graph = Graph(both, 6)
    how = {"scale": 0.25, "window": 130}
    for living in ({0: a, 1: b, 4: c}, {5: d}, {}, {0: e, 2: c, 3: a, 5: b}):
        both.pages.fill_(math.nan)
        for each in living.values():
            both.fill(each)
        graph.place(living)
        with traced_launches() as trace:
            out = graph.step(**how)
        assert trace == ["place_decodes", "write_rows", "cut_sequences", *["attend_pieces", "add_pieces"] * 2]
        for row in range(6):
            if row in living:
                expected = living[row].expected(**how)[0]
                torch.testing.assert_close(out[row].double().cpu(), expected, rtol=2e-5, atol=2e-5)
            else:
                assert not out[row].any()
        written = {(each.pages[each.before // 16], each.before % 16) for each in living.values()}
        before = {(each.pages[token // 16], token % 16) for each in living.values() for token in range(each.before)}
        has_numbers = both.pages[:, LAYER, 0, 0, :, 0].isfinite().nonzero().tolist()
        assert {tuple(each) for each in has_numbers} == written | before


@pytest.mark.parametrize(("window", "piece_tokens"), [(None, None), (70, None), (None, 16)])
def test_sequences_are_cut_in_the_device_as_bytes_are_counted(window: int | None, piece_tokens: int | None) -> None:
    lengths = [1, 0, 64, 65, 300, 2100, 129, 70]  # more tokens than 128 of the shortest pieces have
    pages = torch.zeros(1, 1, 2, 1, 16, 16, dtype=torch.float32, device=DEVICE)
    attention = GpuAttention(pages, piece_tokens=piece_tokens)
    batch = attention.fixed_batch(len(lengths), table=torch.zeros(len(lengths), 132, dtype=torch.int32, device=DEVICE))
    rows = torch.arange(len(lengths), dtype=torch.int32, device=DEVICE)
    attention.refill(batch, torch.tensor(lengths, dtype=torch.int32, device=DEVICE), table_rows=rows)
    query = torch.zeros(1, len(lengths), 16, dtype=torch.float32, device=DEVICE)
    attention.attend_written(query, 0, batch, scale=1.0, window=window)
    decodes = batch.decodes
    assert decodes is not None
    pieces = decodes.pieces_of(window)
    counts = pieces.counts.tolist()
    seen = [length if window is None else min(length, window) for length in lengths]
    assert counts == [decodes.cut.pieces(tokens) for tokens in seen]
    listed = pieces.list[: int(pieces.total)].tolist()
    assert [entry[0] for entry in listed] == [one for one, count in enumerate(counts) for _ in range(count)]
    for one, (length, tokens) in enumerate(zip(lengths, seen, strict=True)):
        own = [entry for entry in listed if entry[0] == one]
        walked = [token for _, begin, end, _ in own for token in range(begin, end)]
        assert walked == list(range(length - tokens, length))
        slots = range(one * decodes.cut.room, one * decodes.cut.room + len(own)) if len(own) > 1 else [-1] * len(own)
        assert [entry[3] for entry in own] == list(slots)


def test_a_batch_tells_where_keys_and_values_of_each_row_go() -> None:
    both = world(Shape(4, 2, 16), [(40, 1), (15, 3)])
    batch = both.attention.make_batch(both.table, both.described)
    first, second = both.sequences
    assert batch.positions.tolist() == [0, 40, 15, 16, 17]
    assert batch.pages.tolist() == [-1, first.pages[2], second.pages[0], second.pages[1], second.pages[1]]
    assert batch.offsets.tolist() == [0, 8, 15, 0, 1]


def test_what_does_not_fit_is_refused() -> None:
    both = world(Shape(4, 2, 16), [(20, 1)])
    attention, how = both.attention, {"scale": 1.0}
    batch = attention.make_batch(both.table, both.described)
    with pytest.raises(ValueError, match="more tokens"):
        attention.make_batch(both.table[:, :1], both.described)
    with pytest.raises(ValueError, match="more tokens"):
        attention.follow(batch, np.array([100]), 101)
    with pytest.raises(ValueError, match="int32"):
        attention.make_batch(both.table.astype(np.int64), both.described)
    with pytest.raises(ValueError, match="must be contiguous"):
        GpuAttention(both.pages[:, :, :, :, :8])
    with pytest.raises(ValueError, match="int32"):
        attention.fixed_batch(2, table=torch.zeros(2, 2, dtype=torch.int64, device=DEVICE))
    fixed = attention.fixed_batch(2, table=torch.zeros(2, 2, dtype=torch.int32, device=DEVICE))
    three = torch.zeros(3, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match="on the device"):
        attention.refill(batch, three[:1], table_rows=three[:1])
    with pytest.raises(ValueError, match="of a graph"):
        attention.follow(fixed, np.array([1]), 2)
    with pytest.raises(ValueError, match="`lengths` must be"):
        attention.refill(fixed, three, table_rows=three)
    for query in (both.query[:3], both.query[:, :1], both.query[:, :, :8], both.query.half()):
        with pytest.raises(ValueError, match="do not fit"):
            attention.attend_written(query, LAYER, batch, **how)
    with pytest.raises(ValueError, match="do not fit"):
        attention.attend_written(both.query, LAYERS, batch, **how)
    for key in (both.new("keys")[:1], both.new("keys").half()):
        with pytest.raises(ValueError, match="do not fit"):
            attention.attend(both.query, key, key, LAYER, batch, **how)
