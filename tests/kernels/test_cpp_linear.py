"""Packed linears in C++ with each set of instructions that this CPU has: all tiles, both types, any threads."""

import pytest
import torch
from torch.nn import functional

from motet_kernels.cpp import Library
from motet_kernels.cpp.linear import PackedWeights
from testbed.compiled_kernels import compiled_library

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-8}
"""Of the largest result: a bfloat is rounded to one of 256 steps."""

SHAPES = [(1, 1), (7, 3), (33, 32), (64, 64), (100, 77), (256, 129), (131, 512), (200, 2101)]
"""Outputs and inputs"""


def numbers(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(ours: torch.Tensor, expected: torch.Tensor) -> None:
    assert ours.shape == expected.shape
    assert float((ours.double() - expected).abs().max()) <= TOLERANCE[ours.dtype] * float(expected.abs().max())


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_all_tiles_match_the_reference(library: Library, shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Odd inputs, outputs around whole panels, more of them than are multiplied at once, and rows below and beyond
    those that are."""
    outputs, inputs = shape
    weight, bias = numbers(outputs, inputs, dtype=dtype), numbers(outputs, dtype=dtype, seed=1)
    packed = PackedWeights(library, [weight])
    for rows in [*range(18), 25, 31, 32, 33, 40, 130, 225, 513]:
        x = numbers(rows, inputs, dtype=dtype, seed=rows)
        expected = x.double() @ weight.double().t()
        if rows:
            assert_close(packed.linear(x), expected)
            assert_close(packed.linear(x, bias), expected + bias.double())
        else:
            assert packed.linear(x).shape == (0, outputs)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_linears_that_are_packed_together_stay_apart(library: Library, dtype: torch.dtype) -> None:
    weights = [numbers(outputs, 70, dtype=dtype, seed=outputs) for outputs in (37, 64, 5)]
    packed = PackedWeights(library, weights)
    x = numbers(3, 4, 70, dtype=dtype)
    for index, weight in enumerate(weights):
        assert_close(packed.linear(x, index=index), x.double() @ weight.double().t())


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_rows_of_a_packed_matrix_are_what_they_were(library: Library, dtype: torch.dtype) -> None:
    weight = numbers(75, 33, dtype=dtype)
    ids = torch.tensor([[0, 74, 31], [32, 5, 5]])
    assert torch.equal(PackedWeights(library, [weight]).rows(ids), weight[ids])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_the_squares_of_each_packed_matrix_are_those_of_its_rows(library: Library, dtype: torch.dtype) -> None:
    weights = [numbers(outputs, 70, dtype=dtype, seed=outputs) for outputs in (37, 300)]
    packed = PackedWeights(library, weights)
    for index, weight in enumerate(weights):
        torch.testing.assert_close(packed.squares(index), weight.double().square().sum(1).float())


@pytest.mark.parametrize("rows", [9, 41])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_strided_and_transposed_tensors_are_taken(library: Library, dtype: torch.dtype, rows: int) -> None:
    weight, x = numbers(40, 50, dtype=dtype), numbers(rows, 50, dtype=dtype)
    expected = x.double() @ weight.double().t()
    assert_close(PackedWeights(library, [weight.t().contiguous().t()]).linear(x), expected)
    wide = torch.full((rows, 80), float("nan"), dtype=dtype)
    wide[:, 10:60] = x
    assert_close(PackedWeights(library, [weight]).linear(wide[:, 10:60]), expected)
    assert_close(PackedWeights(library, [weight]).linear(x.t().contiguous().t()), expected)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("inputs", [14336, 30001])
def test_long_sums_are_off_by_no_more_than_torchs(library: Library, inputs: int, dtype: torch.dtype) -> None:
    weight = numbers(40, inputs, dtype=dtype)
    packed = PackedWeights(library, [weight])
    for rows in (1, 25):
        x = numbers(rows, inputs, dtype=dtype, seed=rows)
        truth = x.double() @ weight.double().t()
        ours, torchs = (float((y - truth).square().mean()) for y in (packed.linear(x), functional.linear(x, weight)))
        assert ours <= 1.5**2 * torchs


@pytest.mark.usefixtures("threads")
def test_what_torch_computes_between_two_products_changes_neither_and_is_not_changed(library: Library) -> None:
    """On CPUs with AMX both set up its tiles, each for its own numbers of rows."""
    torch.set_num_threads(1)
    weight, x = numbers(96, 64, dtype=torch.bfloat16), numbers(40, 64, dtype=torch.bfloat16)
    packed = PackedWeights(library, [weight])
    heads = numbers(1, 4, 70, 64, dtype=torch.bfloat16)
    for rows in (3, 16, 29):
        ours = packed.linear(x[:rows])
        for theirs in (
            lambda: functional.linear(x, weight),
            lambda: functional.scaled_dot_product_attention(heads, heads, heads),
        ):
            alone = theirs()
            assert torch.equal(packed.linear(x[:rows]), ours)
            assert torch.equal(theirs(), alone)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_rows_result_depends_on_no_other_row_and_on_no_thread(library: Library, dtype: torch.dtype) -> None:
    """To the last bit: a request's answer is the same in each batch."""
    weight, x = numbers(701, 1100, dtype=dtype), numbers(513, 1100, dtype=dtype)
    packed = PackedWeights(library, [weight])
    torch.set_num_threads(1)
    together = packed.linear(x)
    for rows in (1, 2, 3, 5, 8, 11, 13, 16, 17, 33, 225):
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert torch.equal(packed.linear(x[:rows]), together[:rows])


def test_a_row_that_is_not_finite_stays_alone(library: Library) -> None:
    weight, x = numbers(64, 64, dtype=torch.float32), numbers(5, 64, dtype=torch.float32)
    packed = PackedWeights(library, [weight])
    expected = packed.linear(x)
    x[2, 7] = float("nan")
    result = packed.linear(x)
    assert result[2].isnan().all()
    others = [0, 1, 3, 4]
    assert torch.equal(result[others], expected[others])


def test_what_does_not_fit_is_refused() -> None:
    packed = PackedWeights(compiled_library(), [numbers(8, 8, dtype=torch.float32)])
    with pytest.raises(ValueError, match=r"the weights are torch\.float32, the rows torch\.bfloat16"):
        packed.linear(numbers(2, 8, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="the bias is"):
        packed.linear(numbers(2, 8, dtype=torch.float32), numbers(9, dtype=torch.float32))
    with pytest.raises(IndexError, match="no such row"):
        packed.rows(torch.tensor([8]))
