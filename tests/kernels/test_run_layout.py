"""The run of an adapter: every matrix inside it, none over another, and all at offsets that only the rank decides."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from motet_kernels import MAX_TILE, LinearGroup, RunLayout, TorchBackend
from motet_kernels.int8_layout import int8_layout
from motet_kernels.run_layout import ALIGNMENT_BYTES

GROUPS = (
    LinearGroup(32, {"q": 32, "k": 16, "v": 16}),
    LinearGroup(32, {"o": 32}),
    LinearGroup(32, {"gate": 56, "up": 56}),
    LinearGroup(56, {"down": 32}),
)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
WIDTHS = st.integers(1, 40)


@st.composite
def layouts(draw: st.DrawFn) -> RunLayout:
    groups = []
    for number in range(draw(st.integers(1, 4))):
        linears = draw(st.integers(1, 3))
        groups.append(LinearGroup(draw(WIDTHS), {f"{number}.{linear}": draw(WIDTHS) for linear in range(linears)}))
    return RunLayout(draw(st.integers(1, 4)) * draw(st.sampled_from([1, 8, 16])), groups, draw(DTYPES))


@given(layouts())
def test_every_byte_of_a_run_belongs_to_one_matrix_at_most(layout: RunLayout) -> None:
    spans = []
    for group in layout.groups:
        for linear, outputs in group.outputs.items():
            for begin, width in zip(layout.offsets[linear], (group.inputs, outputs), strict=True):
                spans.append((begin, begin + layout.rank * width * layout.dtype.itemsize))
        assert layout.offsets[next(iter(group.outputs))][0] % ALIGNMENT_BYTES == 0
        assert all(layout.offsets[linear][1] % ALIGNMENT_BYTES == 0 for linear in group.outputs)
    spans.sort()
    assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
    assert spans[-1][1] <= layout.bytes < sum(end - begin + ALIGNMENT_BYTES for begin, end in spans)


@pytest.mark.parametrize("make", [RunLayout, int8_layout])
def test_scales_and_shifts_are_read_as_they_were_written_and_those_without_end_are_seen(make) -> None:
    layout = make(16, GROUPS, torch.float32)
    run = torch.zeros(layout.bytes, dtype=torch.uint8)
    c, e = torch.linspace(0.5, 2, 56), torch.linspace(-3, 3, 56)
    layout.write(run, "up", torch.ones(14, 32), torch.ones(56, 14), 1.0)
    layout.write_scaling(run, "up", c, e)
    for found, written in zip(layout.scaling(run, "up"), (c - 1, e), strict=True):
        step = written.abs().max() / 127 if make is int8_layout else 1e-6
        assert float((found - written).abs().max()) <= step
    assert not layout.matrices(run, "up")[0][-2:].any()
    assert layout.is_finite(run, "up")
    layout.write_scaling(run, "up", c, e.index_fill(0, torch.tensor([3]), torch.inf))
    assert not layout.is_finite(run, "up")


@given(layouts(), st.integers(0, 3))
def test_a_run_gives_back_what_was_written_into_it_and_zeros_elsewhere(layout: RunLayout, less: int) -> None:
    rank = max(1, layout.rank - less)
    run = torch.zeros(layout.bytes, dtype=torch.uint8)
    random = torch.Generator().manual_seed(0)
    written = {}
    for group in layout.groups:
        for linear, outputs in list(group.outputs.items())[:2]:
            a, b = torch.randn(rank, group.inputs, generator=random), torch.randn(outputs, rank, generator=random)
            layout.write(run, linear, a, b, 0.5)
            written[linear] = a.to(layout.dtype), (b.t() * 0.5).to(layout.dtype)
    for group in layout.groups:
        assert layout.begin(group) == layout.offsets[next(iter(group.outputs))][0]
        stacked = layout.group_a(run, group).view(len(group.outputs), layout.rank, group.inputs)
        for index, linear in enumerate(group.outputs):
            a, b = layout.matrices(run, linear)
            assert torch.equal(stacked[index], a), "a group's A is one matrix"
            if linear not in written:
                assert not a.any()
                assert not b.any()
                continue
            assert torch.equal(a[:rank], written[linear][0])
            assert torch.equal(b[:rank], written[linear][1])
            assert not a[rank:].any()
            assert not b[rank:].any()


@pytest.mark.parametrize(("rank", "rounded"), [(1, 8), (8, 8), (9, 16), (64, 64), (100, 104)])
def test_a_back_end_lays_an_adapter_out_at_its_rank_rounded_up_to_the_tile(rank: int, rounded: int) -> None:
    backend = TorchBackend(GROUPS, torch.empty(0, dtype=torch.uint8), torch.bfloat16, copy_bytes=0)
    assert backend.tile <= MAX_TILE
    layout = backend.layout(rank)
    assert layout.rank == rounded
    assert layout.bytes == 2 * rounded * sum(group.inputs + out for group in GROUPS for out in group.outputs.values())
    assert backend.layout(rounded) is layout, "the offsets depend on the rank alone"


@given(layouts(), st.integers(1, 3))
def test_the_matrices_of_several_runs_lie_side_by_side(layout: RunLayout, runs: int) -> None:
    memory = torch.randint(0, 100, (runs, layout.bytes), dtype=torch.uint8)
    for linear in layout.offsets:
        stacked = layout.matrices(memory, linear)
        for run in range(runs):
            for of_all, of_one in zip(stacked, layout.matrices(memory[run], linear), strict=True):
                assert torch.equal(of_all[run].view(torch.uint8), of_one.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("make", [RunLayout, int8_layout])
def test_linears_that_are_written_together_are_written_as_each_alone(make, stored, dtype) -> None:
    layout, linears, scales = make(16, GROUPS, dtype), ["gate", "up"], [0.3, 1.7]
    drawn = torch.Generator().manual_seed(1)
    a, b = (torch.randn(2, *size, generator=drawn, dtype=torch.float32).to(stored) for size in ((5, 32), (56, 5)))
    together, alone = torch.zeros(2, layout.bytes, dtype=torch.uint8)
    layout.write_alike(together, linears, a, b, scales)
    for one in zip(linears, a, b, scales, strict=True):
        layout.write(alone, *one)
    assert together.any()
    assert torch.equal(together, alone)


@pytest.mark.parametrize("make", [RunLayout, int8_layout])
@pytest.mark.parametrize(("rank", "inputs", "outputs"), [(20, 32, 56), (5, 200, 56), (5, 32, 57)])
def test_matrices_of_another_shape_are_written_over_no_neighbour(make, rank: int, inputs: int, outputs: int) -> None:
    layout = make(16, GROUPS, torch.float32)
    run = torch.zeros(layout.bytes, dtype=torch.uint8)
    a, b = torch.ones(2, rank, inputs), torch.ones(2, outputs, rank)
    with pytest.raises((ValueError, RuntimeError)):
        layout.write_alike(run, ["gate", "up"], a, b, [1.0, 1.0])
    for other in ("q", "k", "v", "o", "down"):
        assert not any(matrix.any() for matrix in layout.matrices(run, other))
