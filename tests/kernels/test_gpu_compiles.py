"""The kernels in Triton compile for a GPU of compute capability 9.0, also in bf16, which the interpreter cannot check.

None of them spills registers into memory: that costs more than most of them read.
"""

import re
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from motet_kernels import LinearGroup, PlacedAdapter, Segment
from motet_kernels.gpu import layer_kernels
from motet_kernels.gpu.attention import PROGRAMS_OF_A_MULTIPROCESSOR, GpuAttention
from motet_kernels.gpu.lora_backend import EXPAND_WARPS, SCALE_WARPS, SHRINK_WARPS, GpuBackend
from tests.support.gpu_compiler import SPILLED_BYTES, Compiled, launches_are_compiled

REGISTERS = 65536
"""Of a multiprocessor"""

SHARED_BYTES = 227 * 1024


QKV = LinearGroup(4096, {"q": 4096, "k": 1024, "v": 1024})
DOWN = LinearGroup(11008, {"down": 4096})
GATE_UP = LinearGroup(4096, {"gate": 14336, "up": 14336})
GROUPS = {"q,k,v": QKV, "down": DOWN, "gate,up": GATE_UP}
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
USUAL = {
    ("q,k,v", torch.bfloat16, False),
    ("down", torch.bfloat16, True),
    ("gate,up", torch.bfloat16, True),
    ("q,k,v", torch.float16, True),
    ("gate,up", torch.float32, False),
}
"""Every group, type and form of adapters, each of which takes a compiler seconds. The others are compiled in a soak."""


@pytest.mark.parametrize(
    ("group", "dtype", "int8"),
    [
        pytest.param(
            GROUPS[name],
            dtype,
            int8,
            id=f"{name}-{dtype}-{'int8' if int8 else 'as rows'}",
            marks=() if (name, dtype, int8) in USUAL else pytest.mark.soak,
        )
        for name, dtype, int8 in product(GROUPS, DTYPES, (False, True))
    ],
)
def test_add_lora_compiles_and_all_its_programs_fit_at_once(
    group: LinearGroup, dtype: torch.dtype, *, int8: bool
) -> None:
    memory = torch.empty(2**20, dtype=torch.uint8)
    backend = GpuBackend([group], memory, dtype, int8=int8)
    scales = PlacedAdapter("one", 0, 32, frozenset(group.outputs), product_rank=16)
    batch = backend.make_batch([Segment(0, 1, scales)])
    x, y = torch.empty(1, group.inputs, dtype=dtype), torch.empty(1, sum(group.outputs.values()), dtype=dtype)
    with launches_are_compiled() as found:
        backend.add_lora_together(y, x, tuple(group.outputs), batch)
    assert [kernel.name for kernel in found] == ["lora_scale", "lora_shrink", "lora_expand"]
    for kernel, warps in zip(found, (SCALE_WARPS, SHRINK_WARPS, EXPAND_WARPS), strict=True):
        lets_begin, waits, stores, ends = (
            re.search(rf"\b{name}\b", kernel.instructions).start() for name in ("PREEXIT", "ACQBULK", "STG", "EXIT")
        )
        assert lets_begin < waits < min(stores, ends), "the launch before it is waited for, and then stores follow"
        assert kernel.spilled_bytes <= SPILLED_BYTES
        if dtype.itemsize == 2:  # fp32 has no products of matrices in hardware that are exact
            assert warps * 32 * kernel.registers <= REGISTERS
            assert warps // kernel.warps * (kernel.shared_bytes + 1024) <= SHARED_BYTES
            assert "HMMA" in kernel.instructions or kernel.name == "lora_scale"
            assert "LDG.E.128" in kernel.instructions
        assert kernel.name == "lora_scale" or not re.search(r"LDG\.E\.[US]8", kernel.instructions)


@pytest.mark.parametrize("int8", [False, True], ids=["as rows", "int8"])
def test_add_lora_compiles_once_for_all_models_layers_and_batches(*, int8: bool) -> None:
    found = [*add_in_layers(24, int8=int8), *add_in_layers(144, int8=int8)]  # the latter has 16 numbers of a chunk
    assert len(found) == 2 * 3 * len(LAYERS) * 2
    assert len({kernel.key for kernel in found}) == 2


LAYERS = (0, 1, 2, 16)
"""Numbers that a compiler may treat alike: 0, 1, one that 16 divides, and another."""


def add_in_layers(layers: int, *, int8: bool) -> list[Compiled]:
    groups = [LinearGroup(512, {f"{layer} a": 512, f"{layer} b": 512}) for layer in range(layers)]
    everywhere = frozenset(linear for group in groups for linear in group.outputs)
    backend = GpuBackend(groups, torch.empty(2**20, dtype=torch.uint8), torch.bfloat16, int8=int8)
    with launches_are_compiled() as found:
        for rows in range(1, 4):
            placed = [PlacedAdapter(str(row), 64 * row, 16 << row, everywhere) for row in range(rows)]
            batch = backend.make_batch([Segment(row, row + 1, placed[row]) for row in range(rows)])
            for group in (groups[layer] for layer in LAYERS):
                x, y = torch.empty(rows, 512, dtype=torch.bfloat16), torch.empty(rows, 1024, dtype=torch.bfloat16)
                backend.add_lora_together(y, x, tuple(group.outputs), batch)
    return found


def attend(
    dtype: torch.dtype, step: int, *, heads: int, kv_heads: int, width: int, page: int = 16, **how: Any
) -> list[Compiled]:
    """Decodes and parts of prompts, then a step of decodes as it is captured. Each step has other numbers of all."""
    attention = GpuAttention(torch.zeros(4, 3, 2, kv_heads, page, width, dtype=dtype))
    table = np.zeros((9, 21), dtype=np.int32)
    counts = [1, 40, 1, 3, *[1] * step]
    before = 200 + 16 * step  # with pages of 16, a table is 15, 16 and 17 of them wide
    described = [[sum(counts[:place]), count, before, place] for place, count in enumerate(counts)]
    with launches_are_compiled() as found:
        batch = attention.make_batch(table, np.array(described, dtype=np.int64))
        query, key = (
            torch.zeros(sum(counts), count, width, dtype=dtype).transpose(0, 1) for count in (heads, kv_heads)
        )
        for layer in range(2):
            attention.attend(query, key, key, layer, batch, scale=0.1, **how)
        fixed = attention.fixed_batch(8, table=torch.zeros(8, 33, dtype=torch.int32))
        attention.refill(fixed, torch.zeros(8, dtype=torch.int32), table_rows=torch.arange(8, dtype=torch.int32))
        attention.attend_written(torch.zeros(8, heads, width, dtype=dtype).transpose(0, 1), 1, fixed, scale=0.1, **how)
    return found


@pytest.mark.parametrize(
    ("dtype", "sizes"),
    [
        pytest.param(torch.bfloat16, {"heads": 32, "kv_heads": 8, "width": 128}, id="gqa"),
        pytest.param(
            torch.float16,
            {"heads": 16, "kv_heads": 8, "width": 256, "page": 64, "window": 64, "softcap": 50.0},
            id="windows",
        ),
        pytest.param(torch.float32, {"heads": 32, "kv_heads": 32, "width": 80}, id="mha, fp32"),
        pytest.param(torch.bfloat16, {"heads": 32, "kv_heads": 32, "width": 80}, id="mha", marks=pytest.mark.soak),
        pytest.param(torch.float32, {"heads": 32, "kv_heads": 8, "width": 128}, id="fp32", marks=pytest.mark.soak),
    ],
)
def test_attention_compiles_once_and_fits(dtype: torch.dtype, sizes: dict[str, Any]) -> None:
    found = attend(dtype, 0, **sizes)
    assert {kernel.name for kernel in found} == {
        "place_decodes", "write_rows", "cut_sequences", "attend_pieces", "add_pieces", "attend_tiles"
    }  # fmt: skip
    for kernel in found:
        assert kernel.spilled_bytes <= SPILLED_BYTES, kernel.name
        assert kernel.shared_bytes + 1024 <= SHARED_BYTES
        if kernel.name == "attend_pieces":
            assert PROGRAMS_OF_A_MULTIPROCESSOR * kernel.warps * 32 * kernel.registers <= REGISTERS
            assert PROGRAMS_OF_A_MULTIPROCESSOR * (kernel.shared_bytes + 1024) <= SHARED_BYTES
            assert "LDGSTS.E.BYPASS.128" in kernel.instructions  # while the last ones are multiplied
        if kernel.name in ("attend_pieces", "attend_tiles") and dtype.itemsize == 2:
            assert "HMMA" in kernel.instructions or "HGMMA" in kernel.instructions
    known = {kernel.key for kernel in found}
    for step in (1, 2):
        assert [kernel.name for kernel in attend(dtype, step, **sizes) if kernel.key not in known] == []


def compute_a_layer(rows: int, dtype: torch.dtype) -> list[Compiled]:
    hidden = torch.zeros(rows, 4096, dtype=dtype)
    places = torch.zeros(rows, dtype=torch.int32)
    of_head = torch.zeros(128, dtype=dtype)
    qkv = torch.zeros(rows, (32 + 2 * 8) * 128, dtype=dtype)
    rotation = torch.zeros(64, 2, 64, dtype=torch.float32)
    pages = torch.zeros(4, 2, 2, 8, 16, 128, dtype=dtype)[:, 1]
    with launches_are_compiled() as found:
        layer_kernels.add_norm(hidden, hidden.clone(), hidden[0], 1e-5)
        layer_kernels.add_norm(hidden, hidden.clone(), hidden[0], 1e-5, rows=places.long())
        for norms in (None, layer_kernels.HeadNorms(of_head, of_head)):
            layer_kernels.rotate_and_write(
                qkv, places, rotation, pages, places, places, heads=32, norms=norms, epsilon=1e-5
            )
        layer_kernels.silu_multiply(torch.zeros(rows, 2 * 14336, dtype=dtype))
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.soak)], ids=str)
def test_what_a_layer_computes_between_products_compiles_once(dtype: torch.dtype) -> None:
    found = compute_a_layer(5, dtype)
    assert len(found) == 5
    assert max(kernel.spilled_bytes for kernel in found) <= SPILLED_BYTES
    known = {kernel.key for kernel in found}
    assert [
        kernel.name for rows in (1, 16, 17) for kernel in compute_a_layer(rows, dtype) if kernel.key not in known
    ] == []
