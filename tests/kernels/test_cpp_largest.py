"""The greedy choice of the compiled decoder, against NumPy's search in floats."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from motet_kernels.cpp.library import TYPES
from testbed.compiled_kernels import compiled_library

SPECIAL = [0.0, -0.0, 1.0, -1.0, float("inf"), float("-inf"), float("nan"), -float("nan"), 1e-40, -1e-40, 3e38, -3e38]
NUMBERS = st.sampled_from(SPECIAL) | st.floats(-4, 4, width=16)


def chosen_of(rows: torch.Tensor) -> list[int]:
    chosen = np.empty(len(rows), dtype=np.int64)
    compiled_library().largest(TYPES[rows.dtype], rows.data_ptr(), *rows.shape, chosen.ctypes.data)
    return chosen.tolist()


def expected_of(rows: torch.Tensor) -> list[int]:
    numbers = rows.float().numpy()
    places = numbers.argmax(axis=-1)
    finite = np.isfinite(numbers[np.arange(len(places)), places])
    return np.where(finite, places, -1).tolist()


@given(
    numbers=st.lists(NUMBERS, min_size=1, max_size=40),
    repeats=st.integers(1, 30),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_it_is_the_first_of_the_largest_and_none_where_numbers_are_not_finite(numbers, repeats, dtype) -> None:
    rows = torch.tensor([numbers * repeats, (numbers * repeats)[::-1], sorted(numbers * repeats)]).to(dtype)
    assert chosen_of(rows) == expected_of(rows)


def test_it_finds_each_place_of_a_long_row() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        rows = torch.full((1030, 1030), -3.0, dtype=dtype)
        rows.fill_diagonal_(-2.0)
        assert chosen_of(rows) == list(range(1030))
