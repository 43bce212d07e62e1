"""add_lora in C++ with each set of instructions that this CPU has: every tile, every type, any threads."""

import gc

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from motet_kernels import PlacedAdapter, Segment, reference
from motet_kernels.cpp import Library
from motet_kernels.cpp.lora_backend import KEPT_OFFSETS, MAX_RANK
from testbed.compiled_kernels import compiled_library
from tests.kernels.test_add_lora import LINEAR, Projection

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.02}
"""The outputs are in the tens: a bfloat is off by up to 1/256 of them, and by rounding its products."""


def spread(projection: Projection, rows: list[int]) -> list[Segment]:
    """A segment for each adapter with its number of rows, and one row of the base between two segments."""
    segments, first = [], 0
    for adapter, count in zip(projection.placed, rows, strict=True):
        segments.append(Segment(first, first + count, adapter))
        first += count + 1
    return segments


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", [(64, 64), (203, 149), (5, 3), (1030, 517), (32, 8300)], ids=str)
def test_all_tiles_of_all_types_match_the_reference(
    library: Library, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    """Widths below and beyond a vector, a cache line and the sums that are kept at once; rows around those that are
    multiplied at once."""
    projection = Projection(*shape, [8, 3, 16, 24, 64, 100], dtype, library)
    segments = spread(projection, [1, 2, 3, 4, 5, 39])
    x, y = (projection.random(segments[-1].stop, width).to(dtype) for width in shape)
    rounded = {name: (a.to(dtype), (b * scale).to(dtype), 1.0) for name, (a, b, scale) in projection.matrices.items()}
    expected = reference.add_lora(y, x, segments, rounded)
    projection.add(y, x, segments)
    largest = max(1.0, float(expected.abs().max()))
    assert float((y.double() - expected).abs().max()) <= TOLERANCE[dtype] * largest


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_threads_share_the_work_and_change_no_bit(library: Library, dtype: torch.dtype, threads: None) -> None:
    projection = Projection(1030, 2061, [8, 16, 64, 8, 128], dtype, library)
    segments = spread(projection, [1, 1, 3, 70, 1])
    x, y = (projection.random(segments[-1].stop, width).to(dtype) for width in (1030, 2061))
    results = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        result = y.clone()
        projection.add(result, x, segments)
        results.append(result)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@given(
    owners=st.lists(st.one_of(st.none(), st.integers(0, 3)), min_size=1, max_size=70),
    ranks=st.lists(st.integers(1, 40), min_size=4, max_size=4),
    shape=st.tuples(st.integers(8, 300), st.integers(8, 300)),
    dtype=st.sampled_from(list(TOLERANCE)),
)
@example(owners=[0, 0], ranks=[16] * 4, shape=(130, 65), dtype=torch.float32)
@example(owners=[1, 0, 0, 0, 0, 0, 2], ranks=[3, 8, 8, 8], shape=(203, 149), dtype=torch.bfloat16)
@example(owners=[0] * 33, ranks=[8] * 4, shape=(300, 300), dtype=torch.float16)
@settings(deadline=None, max_examples=30)
def test_a_row_gets_the_bits_that_it_gets_alone(
    library: Library, owners: list[int | None], ranks: list[int], shape: tuple[int, int], dtype: torch.dtype
) -> None:
    """Whoever is beside it: rows of its own adapter, of others, or of none."""
    projection = Projection(*shape, ranks, dtype, library)
    x, y = (projection.random(len(owners), width).to(dtype) for width in shape)
    expected, result = y.clone(), y.clone()
    segments = projection.segments(owners)
    for one in segments:
        projection.add(expected, x, [one])
    projection.add(result, x, segments)
    assert torch.equal(result, expected)


def test_matrices_of_linears_that_an_adapter_does_not_change_are_not_read(library: Library) -> None:
    projection = Projection(16, 16, [8, 16], library=library)
    projection.memory[:] = 255  # no numbers
    projection.placed = [adapter._replace(linears=frozenset({"other"})) for adapter in projection.placed]
    x, y = projection.random(5, 16), projection.random(5, 16)
    before = y.clone()
    projection.add(y, x, spread(projection, [1, 3]))
    assert torch.equal(y, before)


def test_rows_with_a_stride_and_a_transposed_input_are_read_where_they_are(library: Library) -> None:
    projection = Projection(37, 21, [8, 16], library=library)
    segments = spread(projection, [1, 5])
    wide_x, wide_y = projection.random(7, 50), projection.random(7, 60)
    for x in (wide_x[:, 3:40], projection.random(37, 7).t()):
        y = wide_y.clone()[:, 20:41]
        expected = reference.add_lora(y, x, segments, projection.matrices)
        projection.add(y, x, segments)
        torch.testing.assert_close(y.double(), expected, rtol=1e-4, atol=1e-4)


def test_numbers_that_are_not_finite_stay_in_their_row(library: Library) -> None:
    for dtype in TOLERANCE:
        projection = Projection(70, 70, [8, 16], dtype, library)
        segments = spread(projection, [5, 5])
        x, y = (projection.random(11, 70).to(dtype) for _ in range(2))
        x[1], x[8] = float("nan"), float("inf")
        projection.add(y, x, segments)
        assert [row for row in range(11) if not y[row].isfinite().all()] == [1, 8]


@pytest.mark.parametrize(
    ("x", "y"),
    [
        (torch.zeros(2, 16), torch.zeros(2, 15)),
        (torch.zeros(2, 17), torch.zeros(2, 16)),
        (torch.zeros(1, 16), torch.zeros(2, 16)),
        (torch.zeros(2, 16), torch.zeros(1, 16)),
        (torch.zeros(2, 16).bfloat16(), torch.zeros(2, 16)),
        (torch.zeros(2, 16), torch.zeros(16, 2).t()),
    ],
    ids=["outputs", "inputs", "rows of x", "rows of y", "type", "columns of y"],
)  # fmt: skip
def test_what_does_not_fit_the_batch_is_refused_before_any_memory_is_touched(x: torch.Tensor, y: torch.Tensor) -> None:
    projection = Projection(16, 16, [8], library=compiled_library())
    with pytest.raises(ValueError, match="do not fit the batch"):
        projection.add(y, x, [Segment(0, 2, projection.placed[0])])


def test_the_largest_rank_is_computed_and_sets_of_linears_that_nobody_uses_are_forgotten() -> None:
    """Tenants choose ranks and linears. A batch keeps what it reads."""
    projection = Projection(32, 32, [MAX_RANK], library=compiled_library())
    segments = spread(projection, [3])
    x, y = projection.random(3, 32), projection.random(3, 32)
    expected = reference.add_lora(y, x, segments, projection.matrices)
    batch = projection.backend.make_batch(segments)
    for number in range(KEPT_OFFSETS + 10):
        other = PlacedAdapter("x", 0, 8, frozenset({f"other {number}"}))
        projection.backend.make_batch([Segment(0, 1, other)])
    assert projection.backend._offsets_of.cache_info().currsize == KEPT_OFFSETS  # noqa: SLF001
    gc.collect()
    torch.full((100, 64), 255, dtype=torch.uint8)
    projection.backend.add_lora(y, x, "linear", batch)
    torch.testing.assert_close(y.double(), expected, rtol=1e-4, atol=1e-3)


def test_a_rank_that_the_library_has_no_room_for_is_refused() -> None:
    projection = Projection(16, 16, [8], library=compiled_library())
    with pytest.raises(ValueError, match="above 512"):
        projection.backend.make_batch([Segment(0, 1, PlacedAdapter("x", 0, MAX_RANK + 8, LINEAR))])


def test_the_library_reads_every_byte() -> None:
    """What benchmarks compare with must not read less."""
    library = compiled_library()
    data = torch.zeros(4096 + 13, dtype=torch.uint8)
    for index in (0, 1000, 4095, 4096, 4108):
        before = library.read(data.data_ptr(), len(data))
        data[index] ^= 1
        assert library.read(data.data_ptr(), len(data)) != before
