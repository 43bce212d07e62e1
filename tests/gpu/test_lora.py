"""add_lora on a GPU, or in Triton's interpreter, against its fp64 oracle."""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from motet_kernels import LinearGroup, PlacedAdapter, RunLayout, Segment, reference
from motet_kernels.gpu.launches import interpreted, traced_launches
from motet_kernels.gpu.lora_backend import GpuBackend, GpuLoraBatch
from motet_kernels.gpu.lora_tiles import splits
from motet_kernels.int8_layout import int8_layout
from motet_kernels.run_layout import SCALE_ROWS
from tests.gpu.devices import DEVICE, DTYPES, in_types

TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
PAGE = 256
LAYER = [
    LinearGroup(48, {"q": 48, "k": 16, "v": 16}),
    LinearGroup(48, {"o": 48}),
    LinearGroup(48, {"gate": 80, "up": 80}),
    LinearGroup(80, {"down": 48}),
]
RANKS = [8, 16, 40, 64, 100, 5]
ALL = frozenset(linear for group in LAYER for linear in group.outputs)


class Loaded:
    """Adapters of mixed ranks on the linears of a layer, in memory that holds no numbers elsewhere."""

    def __init__(
        self,
        ranks: Sequence[int],
        dtype: torch.dtype = torch.float32,
        groups: Sequence[LinearGroup] = LAYER,
        linears: Sequence[frozenset[str]] = (),
        *,
        int8: bool = False,
        scaling: Sequence[int] = (),
    ) -> None:
        """`linears`: those that the first adapters change; the others change all. `scaling`: the numbers of the
        adapters that scale the linears' own results, too."""
        self.generator = torch.Generator().manual_seed(0)
        self.dtype = dtype
        self.groups = groups
        self.sizes = {linear: (group.inputs, n) for group in groups for linear, n in group.outputs.items()}
        make_layout = int8_layout if int8 else RunLayout
        tile = GpuBackend.tile
        in_runs = [rank + SCALE_ROWS * (index in scaling) for index, rank in enumerate(ranks)]
        layouts = [make_layout(-(-rank // tile) * tile, groups, dtype) for rank in in_runs]
        begins = [PAGE + sum(one.bytes + PAGE for one in layouts[:index]) for index in range(len(ranks))]
        begins = [-(-begin // PAGE) * PAGE for begin in begins]
        self.memory = torch.full((begins[-1] + layouts[-1].bytes + 9 * PAGE,), 255, dtype=torch.uint8, device=DEVICE)
        self.backend = GpuBackend(groups, self.memory, dtype, int8=int8)
        self.matrices: dict[str, dict[str, tuple[torch.Tensor, torch.Tensor, float]]] = {one: {} for one in self.sizes}
        self.scales: dict[str, dict[str, tuple[torch.Tensor, torch.Tensor]]] = {one: {} for one in self.sizes}
        self.placed: list[PlacedAdapter] = []
        for index, (rank, begin) in enumerate(zip(ranks, begins, strict=True)):
            layout = self.backend.layout(in_runs[index])
            run = self.memory[begin : begin + layout.bytes]
            run.zero_()
            changed = linears[index] if index < len(linears) else frozenset(self.sizes)
            for linear in changed:
                inputs, outputs = self.sizes[linear]
                a, b, scale = self.random(rank, inputs) / inputs**0.5, self.random(outputs, rank), 0.5 + index % 3
                b = (b.float() / rank**0.5).to(dtype)
                layout.write(run, linear, a, b, scale)
                if int8:
                    a, b = layout.stored(run, linear)
                    b, scale = b.t(), 1.0
                self.matrices[linear][str(index)] = a, b, scale
                if index in scaling:
                    layout.write_scaling(run, linear, 1 + self.random(outputs).float(), self.random(outputs).float())
                    d, e = layout.scaling(run, linear)
                    self.scales[linear][str(index)] = 1 + d.double().cpu(), e.double().cpu()
            products = self.backend.layout(rank).rank if index in scaling else 0
            self.placed.append(PlacedAdapter(str(index), begin, layout.rank, changed, products))

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.dtype).to(DEVICE)

    def segments(self, owners: Sequence[int | None]) -> list[Segment]:
        return [Segment(row, row + 1, self.placed[owner]) for row, owner in enumerate(owners) if owner is not None]

    def expected(self, y: torch.Tensor, x: torch.Tensor, linear: str, segments: Sequence[Segment]) -> torch.Tensor:
        having = [one for one in segments if linear in one.adapter.linears]
        return reference.add_lora(y.cpu(), x.cpu(), having, on_cpu(self.matrices[linear]), self.scales[linear])

    def check(self, owners: Sequence[int | None], linears: Sequence[str], batch: GpuLoraBatch | None = None) -> None:
        """Compare with the reference."""
        segments = self.segments(owners)
        x = self.random(len(owners), self.sizes[linears[0]][0])
        y = self.random(len(owners), sum(self.sizes[linear][1] for linear in linears))
        expected = torch.cat(
            [
                self.expected(part, x, linear, segments)
                for linear, part in zip(linears, y.split([self.sizes[one][1] for one in linears], 1), strict=True)
            ],
            dim=1,
        )
        self.backend.add_lora_together(y, x, linears, batch or self.backend.make_batch(segments))
        close(y, expected)


def on_cpu(
    matrices: dict[str, tuple[torch.Tensor, torch.Tensor, float]],
) -> dict[str, tuple[torch.Tensor, torch.Tensor, float]]:
    return {name: (a.cpu(), b.cpu(), scale) for name, (a, b, scale) in matrices.items()}


def close(y: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[y.dtype]
    torch.testing.assert_close(y.cpu().double(), expected, rtol=tolerance, atol=tolerance)


TRAFFIC = {
    "skewed": [0] * 40 + [4] * 17 + [2] * 16 + [5],
    "nobody": [None] * 5,
    "one row": [3],
    "every row its own": [0, 1, 2, 3, 4, 5],
    "two in turns": [1, 4] * 9,
    "one giant, some tiny": [3] * 133 + [1, 2, 4, 5],
    "every other one is the base": [0, None, 4, None, 4, None, 2, None],
}


@pytest.mark.parametrize("int8", [False, True], ids=["as rows", "int8"])
@pytest.mark.parametrize(("traffic", "dtype"), in_types(*TRAFFIC), ids=str)
def test_matches_the_reference(traffic: str, dtype: torch.dtype, *, int8: bool) -> None:
    Loaded(RANKS, dtype, int8=int8).check(TRAFFIC[traffic], ("q", "k", "v"))


@pytest.mark.parametrize("linears", [("gate", "up"), ("down",), ("q", "v"), ("k",)], ids=",".join)
def test_any_linears_that_are_fed_the_same_rows_may_be_together(linears: tuple[str, ...]) -> None:
    Loaded(RANKS).check([4, 4, None, 1, 0, 3], linears)


SCALING = (1, 2, 4, 5)
"""Of RANKS: where the scales take a tile more than the products, and where they do not"""


@pytest.mark.parametrize("int8", [False, True], ids=["as rows", "int8"])
@pytest.mark.parametrize(("traffic", "dtype"), in_types("every row its own", "one giant, some tiny"), ids=str)
def test_rows_are_scaled_and_shifted_as_their_adapters_say(traffic: str, dtype: torch.dtype, *, int8: bool) -> None:
    Loaded(RANKS, dtype, int8=int8, scaling=SCALING).check(TRAFFIC[traffic], ("q", "k", "v"))


def test_the_largest_rank_scales() -> None:
    loaded = Loaded([512], torch.float16, scaling=[0])
    assert (loaded.placed[0].rank, loaded.placed[0].product_rank) == (528, 512)
    loaded.check([0, None, 0], ("o",))


def test_a_linear_that_an_adapter_does_not_change_is_not_scaled_by_it() -> None:
    loaded = Loaded([16, 16], linears=[frozenset({"q", "v"}), frozenset({"k"})], scaling=[0, 1])
    loaded.check([0, 1, None, 1, 0], ("q", "k", "v"))


def test_only_a_batch_with_an_adapter_that_scales_has_a_launch_for_it() -> None:
    loaded = Loaded([16, 16], scaling=[1])
    for owners, launches in (([0, 0], []), ([0, 1], ["lora_scale"])):
        with traced_launches() as trace:
            loaded.check(owners, ("o",))
        assert trace == [*launches, "lora_shrink", "lora_expand"]


def test_the_same_launches_serve_other_adapters_that_scale() -> None:
    loaded = Loaded(RANKS, scaling=SCALING)
    plain = loaded.backend.fixed_batch(6)
    batch = loaded.backend.that_scales(plain)
    for owners in ([0, 1, 2, 3, 4, 5], [None] * 6, [2], [0, 3, 0]):
        loaded.backend.fill(batch, loaded.segments(owners))
        with traced_launches() as trace:
            loaded.check([*owners, *[None] * (6 - len(owners))], ("q", "k", "v"), batch)
        assert trace == ["lora_scale", "lora_shrink", "lora_expand"]
    with pytest.raises(ValueError, match="1 scales, and the batch has no launch for that"):
        loaded.backend.fill(plain, loaded.segments([0, 1]))
    loaded.check([0, 3, 0, None], ("q", "k", "v"), plain)


WIDE = [LinearGroup(4112, {"wide": 272, "narrow": 40})]
"""Several tiles of the inputs and of the outputs, of which the last are not full"""


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tiles_are_put_together(dtype: torch.dtype) -> None:
    assert splits(4112) == 9
    for int8 in (False, True):
        Loaded([16, 24], dtype, WIDE, int8=int8).check([0, None, *[1] * 17], ("wide", "narrow"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_lies_between_the_launches_is_not_rounded(dtype: torch.dtype) -> None:
    """1 + 2^-12 is no number of 16 bits, and 2^-12 is."""
    loaded = Loaded([16], dtype)
    (adapter,) = loaded.placed
    layout = loaded.backend.layout(16)
    a, b = layout.matrices(loaded.memory[adapter.offset :][: layout.bytes], "o")
    a.zero_()
    b.zero_()
    a[0, 0], a[0, 1], a[1, 0] = 1, 2**-12, 1
    b[0], b[1] = 1, -1
    x, y = torch.ones(1, 48, dtype=dtype, device=DEVICE), torch.zeros(1, 48, dtype=dtype, device=DEVICE)
    loaded.backend.add_lora(y, x, "o", loaded.backend.make_batch(loaded.segments([0])))
    assert (y == 2**-12).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("size", "b"), [(2.0**-15, 2.0**9), (1, 1), (2.0**9, 2.0**-9)])
def test_sums_that_sixteen_bits_do_not_hold_neither_overflow_nor_vanish(
    size: float, b: float, dtype: torch.dtype
) -> None:
    """48 · 2^9 · 2^9 is above what fp16 holds, and 48 · 2^-15 · 2^-15 is three quarters of its smallest number."""
    loaded = Loaded([16], dtype)
    (adapter,) = loaded.placed
    into_a, into_b = loaded.backend.layout(16).matrices(loaded.memory[adapter.offset :], "o")
    into_a.zero_()
    into_b.zero_()
    into_a[0], into_b[0] = size, b
    x, y = torch.full((1, 48), size, dtype=dtype, device=DEVICE), torch.zeros(1, 48, dtype=dtype, device=DEVICE)
    loaded.backend.add_lora(y, x, "o", loaded.backend.make_batch(loaded.segments([0])))
    assert (y == 48 * size**2 * b).all()


def test_a_linear_alone_gets_what_it_gets_beside_others() -> None:
    loaded = Loaded(RANKS)
    segments = loaded.segments([0, 0, 4, None, 3])
    x, y = loaded.random(5, 48), loaded.random(5, 80)
    alone = y.clone()
    batch = loaded.backend.make_batch(segments)
    loaded.backend.add_lora_together(y, x, ("q", "k", "v"), batch)
    for linear, part in zip("qkv", alone.split([48, 16, 16], 1), strict=True):
        loaded.backend.add_lora(part, x, linear, batch)
    torch.testing.assert_close(y, alone)


@pytest.mark.parametrize("int8", [False, True], ids=["as rows", "int8"])
def test_an_adapter_adds_nothing_to_a_linear_that_it_does_not_change(*, int8: bool) -> None:
    linears = [frozenset({"q", "down"}), frozenset({"k"}), frozenset({"up"})]
    loaded = Loaded([16, 16, 64, 144], linears=linears, int8=int8)
    for group in LAYER:
        loaded.check([0, 1, 2, 3, None, 0], tuple(group.outputs))


def test_what_an_adapter_does_not_change_is_not_even_read() -> None:
    loaded = Loaded([16], linears=[frozenset({"q"})])
    (adapter,) = loaded.placed
    layout = loaded.backend.layout(16)
    for matrix in layout.matrices(loaded.memory[adapter.offset :][: layout.bytes], "o"):
        matrix.fill_(float("nan"))
    loaded.check([0, None, 0], ("o",))


def test_rows_without_an_adapter_are_not_touched_at_all() -> None:
    loaded = Loaded(RANKS)
    x, y = loaded.random(6, 48), loaded.random(6, 48)
    x[[0, 2, 5]] = float("nan")
    y[[0, 2, 5]] = float("nan")
    before = y.clone()
    loaded.backend.add_lora(y, x, "o", loaded.backend.make_batch(loaded.segments([None, 0, None, 1, 1, None])))
    assert y[[0, 2, 5]].isnan().all()
    assert not y[[1, 3, 4]].isnan().any()
    assert (y[[1, 3, 4]] != before[[1, 3, 4]]).any()


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # numpy's, in the interpreter
def test_a_row_that_is_not_finite_affects_no_other_row() -> None:
    loaded = Loaded([16])
    x, y = loaded.random(4, 48), loaded.random(4, 48)
    x[1] = float("inf")
    loaded.backend.add_lora(y, x, "o", loaded.backend.make_batch(loaded.segments([0] * 4)))
    assert y[[0, 2, 3]].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_x_and_y_may_be_parts_of_wider_tensors(dtype: torch.dtype) -> None:
    loaded = Loaded(RANKS, dtype)
    segments = loaded.segments([4, None, 1, 1])
    batch = loaded.backend.make_batch(segments)
    wide_x, wide_y = loaded.random(4, 100), loaded.random(4, 70)
    for x in (wide_x[:, 7:55], wide_x.t()[:48].t(), loaded.random(48, 4).t()):
        y = wide_y[:, 3:51]
        expected, around = loaded.expected(y, x, "o", segments), wide_y.clone()
        loaded.backend.add_lora(y, x, "o", batch)
        close(y, expected)
        assert torch.equal(wide_y[:, :3], around[:, :3])
        assert torch.equal(wide_y[:, 51:], around[:, 51:])


def test_the_same_launches_serve_other_adapters() -> None:
    """As a captured graph replays them: nothing that the host gives a launch changes."""
    loaded = Loaded([*RANKS, 200])
    batch = loaded.backend.fixed_batch(6)
    where = [batch.work.data_ptr(), batch.products.data_ptr()]
    for owners in ([0, 1, 2, 3, 4, 5], [None] * 6, [2], [6, 0, 6, 1, 4, 2]):
        loaded.backend.fill(batch, loaded.segments(owners))
        with traced_launches() as trace:
            loaded.check([*owners, *[None] * (6 - len(owners))], ("q", "k", "v"), batch)
        assert trace == ["lora_shrink", "lora_expand"]
        assert [batch.work.data_ptr(), batch.products.data_ptr()] == where


@pytest.mark.gpu
def test_a_captured_graph_serves_other_adapters() -> None:
    loaded = Loaded([*RANKS, 200], torch.bfloat16)
    batch = loaded.backend.fixed_batch(6)
    x, y = loaded.random(6, 48), loaded.random(6, 80)
    linears = ("q", "k", "v")
    loaded.backend.add_lora_together(y.clone(), x, linears, batch)  # compiles
    graph = torch.cuda.CUDAGraph()
    into = y.clone()
    with torch.cuda.graph(graph):
        loaded.backend.add_lora_together(into, x, linears, batch)
    for owners in ([0, 1, 2, 3, 4, 5], [None] * 6, [2], [6, 0, 6, 1, 4, 2]):
        segments = loaded.segments(owners)
        loaded.backend.fill(batch, segments)
        into.copy_(y)
        graph.replay()
        parts = zip(linears, y.split([48, 16, 16], 1), strict=True)
        close(into, torch.cat([loaded.expected(part, x, linear, segments) for linear, part in parts], dim=1))


@pytest.mark.gpu
def test_a_batch_may_be_filled_again_before_the_device_has_come_to_the_first_one() -> None:
    """Each list is copied from pinned memory of its own, which torch gives out again when that copy has ended."""
    loaded = Loaded(RANKS, torch.bfloat16, int8=True)
    batch = loaded.backend.fixed_batch(6)
    x, y = loaded.random(6, 48), loaded.random(6, 48)
    loaded.backend.add_lora(y.clone(), x, "o", batch)  # compiles
    wanted = [loaded.segments([owner] * 6) for owner in range(6)]
    torch.cuda._sleep(10**8)  # noqa: SLF001
    found = []
    for segments in wanted:
        loaded.backend.fill(batch, segments)
        found.append(y.clone())
        loaded.backend.add_lora(found[-1], x, "o", batch)
    for result, segments in zip(found, wanted, strict=True):
        close(result, loaded.expected(y, x, "o", segments))


def test_a_fixed_batch_refuses_more_rows_than_it_has_room_for() -> None:
    loaded = Loaded([16, 16])
    with pytest.raises(ValueError, match="3 rows of 2 chunks do not fit a batch of 2 rows"):
        loaded.backend.fill(loaded.backend.fixed_batch(2), loaded.segments([0, 1, 0]))


def test_nothing_is_launched_for_rows_without_adapters() -> None:
    loaded = Loaded([16])
    batch = loaded.backend.make_batch([])
    with traced_launches() as trace:
        loaded.check([None, None], ("o",), batch)
    assert trace == []


def test_a_layer_has_at_most_eight_launches() -> None:
    loaded = Loaded([16, 64])
    batch = loaded.backend.make_batch(loaded.segments([0, 1]))
    with traced_launches() as trace:
        for group in LAYER:
            loaded.check([0, 1], tuple(group.outputs), batch)
    assert len(trace) <= 8


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_has_the_same_bits_whoever_computes_beside_it(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if interpreted():
        monkeypatch.setattr(np, "matmul", products_in_order)
    loaded = Loaded(RANKS, dtype, scaling=SCALING)
    rows = 24
    draw = random.Random(0)
    x, y = loaded.random(rows, 80), loaded.random(rows, 48)
    owners = [draw.choice([None, 0, 1, 2, 3, 4, 5, 4, 4]) for _ in range(rows)]

    def computed(chosen: Sequence[int]) -> torch.Tensor:
        part_x, part_y = x[list(chosen)], y[list(chosen)]
        segments = loaded.segments([owners[row] for row in chosen])
        loaded.backend.add_lora(part_y, part_x, "down", loaded.backend.make_batch(segments))
        return part_y

    together = computed(range(rows))
    for _ in range(4):
        chosen = draw.sample(range(rows), draw.randint(1, rows))
        assert torch.equal(computed(chosen), together[chosen])


def products_in_order(a: Any, b: Any, dtype: Any) -> Any:
    """As a GPU adds them. The bits of numpy's own depend on the place of a row in its matrix."""
    return (a[..., :, :, None].astype(dtype) * b[..., None, :, :]).sum(axis=-2, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_integers_are_as_near_as_eight_bits_are(dtype: torch.dtype) -> None:
    """Each product is off by at most half a step of A and of B: in all 1 % of what is added."""
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(*shape, generator=generator, dtype=torch.float32).to(dtype) for shape in ((16, 80), (48, 16)))
    layouts = [make(16, LAYER, dtype) for make in (RunLayout, int8_layout)]
    runs = [torch.zeros(layout.bytes, dtype=torch.uint8) for layout in layouts]
    for layout, run in zip(layouts, runs, strict=True):
        layout.write(run, "down", a[:9], b[:, :9], 2.0)
    right, rounded = (
        b.t() @ a for a, b in (layout.stored(run, "down") for layout, run in zip(layouts, runs, strict=True))
    )
    error = (rounded - right).norm() / right.norm()
    assert 1e-3 < error < 0.015
    assert layouts[1].bytes < 0.6 * RunLayout(16, LAYER, torch.bfloat16).bytes


def test_integers_of_an_adapter_of_zeros_add_nothing() -> None:
    layout = int8_layout(16, LAYER, torch.float32)
    run = torch.zeros(layout.bytes, dtype=torch.uint8)
    layout.write(run, "o", torch.zeros(16, 48), torch.ones(48, 16), 1.0)
    assert all(part.isfinite().all() for part in layout.stored(run, "o"))
    assert not layout.stored(run, "o")[0].any()


def test_parts_that_do_not_fit_are_refused() -> None:
    loaded = Loaded([16])
    batch = loaded.backend.make_batch(loaded.segments([0]))
    x, y = loaded.random(1, 48), loaded.random(1, 48)
    for bad_y, bad_x in ((y[:, :47], x), (y, x[:, :47]), (y.double(), x.double()), (y, loaded.random(2, 48))):
        with pytest.raises(ValueError, match="do not fit"):
            loaded.backend.add_lora(bad_y, bad_x, "o", batch)
    with pytest.raises(ValueError, match="cannot be computed together"):
        loaded.backend.add_lora_together(y, x, ("q", "down"), batch)
    for wrong, words in (
        (loaded.placed[0]._replace(rank=24), "not 24"),
        (loaded.placed[0]._replace(rank=528), "up to 512, not 528"),
        (loaded.placed[0]._replace(offset=8), "not at 8"),
    ):
        with pytest.raises(ValueError, match=words):
            loaded.backend.make_batch([Segment(0, 1, wrong)])
