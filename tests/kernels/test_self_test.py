"""What the test of a compiled library reaches: of each block that the kernels work in, a second one."""

import re
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from motet_kernels.cpp import CppBackend, self_test
from motet_kernels.cpp.attention import PAGE_TOKENS
from motet_kernels.cpp.builder import SOURCE
from motet_kernels.run_layout import SCALE_ROWS
from motet_runner.execute.gate import allowed_error
from testbed.compiled_kernels import compiled_library

ROWS_OF_A_TILE = 16


def constant(file: str, name: str) -> int:
    """The largest number that it may have"""
    text = (SOURCE / file).read_text(encoding="utf-8")
    (value,) = re.findall(rf"constexpr \w+ (?:\w+ = \w+, )*{name} = ([^,;]+)[,;]", text)
    return max(map(int, re.findall(r"\d+", value.partition("?")[2] or value)))


def test_the_self_test_attends_to_a_second_block_from_a_second_unit() -> None:
    group = self_test.HEADS // self_test.KV_HEADS
    of_tiles = constant("tiled_attention.h", "PAGES") * PAGE_TOKENS
    assert any(
        before > of_tiles and rows * group > constant("tiled_attention.h", "QUERIES_IN_UNIT")
        for before, rows in self_test.LONG_SEQUENCES
    )
    assert any(
        before > constant("page_products.h", "PAGES_IN_BLOCK") * PAGE_TOKENS and rows == 1
        for before, rows in self_test.SEQUENCES
    )
    assert any(rows * group > constant("attention.cpp", "QUERIES_IN_UNIT") for _, rows in self_test.SEQUENCES)
    longest = max(map(sum, self_test.LONG_SEQUENCES))
    assert any(window and softcap and of_tiles < window < longest for _, window, softcap in self_test.ATTENTION)
    widths = [width for width, _, _ in self_test.ATTENTION]
    assert {width % (2 * ROWS_OF_A_TILE) == 0 for width in widths} == {True, False}


def test_the_self_test_multiplies_blocks_of_inputs_and_of_rows() -> None:
    inputs_of_a_sum = 2 * constant("linear.h", "PAIRS_OF_A_SUM")
    assert 2 * inputs_of_a_sum < self_test.LINEAR_INPUTS
    assert self_test.LINEAR_INPUTS % 2
    in_registers = constant("linear.h", "MOST_SUMS_IN_REGISTERS") // 2
    assert set(range(1, in_registers + 2)) <= set(self_test.LINEAR_ROWS)
    assert self_test.MANY_ROWS > 8 * 2 * ROWS_OF_A_TILE, "several panels stay in the cache"
    assert allowed_error.LINEAR_ROWS > 2 * 2 * ROWS_OF_A_TILE


def test_the_self_test_adds_second_blocks_of_rows_and_of_columns_for_adapters() -> None:
    assert max(rows for _, rows in self_test.SEGMENTS) > constant("lora_products.h", "ROWS_IN_BLOCK")
    assert self_test.SEGMENTS[0][1] == 1
    assert constant("lora_products.h", "MOST_SUMS") < self_test.MANY_OUTPUTS


def test_the_self_test_has_a_linear_that_adapters_leave_as_it_is() -> None:
    def first_for_others(self: CppBackend, rank: int, changed: frozenset[str], *, scales: bool) -> Any:
        """As if the library took an offset that is negative for 0"""
        layout = self.layout(rank)
        found = []
        for linear, (_, _, outputs) in self._linears.items():
            a, b = layout.offsets[linear]
            scaling = b + (rank - SCALE_ROWS) * outputs * layout.dtype.itemsize if scales else -1
            found.append((a, b, scaling) if linear in changed else (0, 0, -1))
        return np.array(found, dtype=np.int64)

    library = compiled_library()
    with (
        patch.object(CppBackend, "_find_offsets", first_for_others),
        pytest.raises(self_test.SelfTestFailed, match="changes a linear that the adapters leave as it is"),
    ):
        self_test.check(library)
