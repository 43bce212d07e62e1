"""Compares a library with its references, on small sizes: add_lora, linears, attention, argmax, a program's operations
with one operand, and what it reads of a file. The gate checks operations with several operands, and fused operations:
it compares the forward pass of each model that is loaded.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch.nn import functional

from motet_kernels import reference
from motet_kernels.cpp.attention import PAGE_TOKENS, PagedAttention, no_attention
from motet_kernels.cpp.library import TYPES, Library
from motet_kernels.cpp.linear import PackedWeights
from motet_kernels.cpp.lora_backend import CppBackend
from motet_kernels.cpp.program import CompiledProgram
from motet_kernels.cpp.read_file import read_file
from motet_kernels.cpp.steps import Compute, Place, Value
from motet_kernels.decoder_weights import PACKED_TYPES
from motet_kernels.lora_batch import PlacedAdapter, Segment
from motet_kernels.run_layout import SCALE_ROWS, LinearGroup

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.01}
"""The largest allowed error of a result: a number left out or counted twice would cause a larger one"""

# The kernels work in blocks: these sizes have at least two blocks of each kind (tests/kernels/test_self_test.py).
INPUTS, OUTPUTS = 203, 149
SEGMENTS = ((8, 1), (16, 1), (24, 2), (8, 5), (40, 37), (16, 4))
"""Rank and rows of each segment"""
MANY_OUTPUTS = 8300
"""The outputs for an adapter with one row"""

LINEAR_INPUTS = 523
LINEAR_ROWS = (*range(1, 14), 37)
MANY_ROWS = 257
"""The rows of a product on one thread. With this number of rows, several panels stay in the cache."""

HEADS, KV_HEADS = 6, 2
SEQUENCES = ((150, 1), (0, 37), (200, 20))
"""Each sequence's tokens before its new rows, and its number of new rows"""
LONG_SEQUENCES = (*SEQUENCES[:2], (260, 90))
"""For bfloat16, which AMX tiles compute: the blocks of tiles are larger."""
ATTENTION = ((70, None, None), (64, 270, 4.0))
"""The width, the window, and the cap of the scores"""
SHARPNESS = 4.0
"""A factor of the scores. Without it, a result would be an average over hundreds of tokens, and hide a wrong one."""

FUNCTIONS = {
    "copy": lambda x: x, "negative": torch.neg, "cube": lambda x: x**3, "rsqrt": torch.rsqrt, "sqrt": torch.sqrt,
    "exp": torch.exp, "tanh": torch.tanh, "sigmoid": torch.sigmoid, "silu": functional.silu, "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"), "relu": torch.relu, "cos": torch.cos,
    "sin": torch.sin,
}  # fmt: skip
"""A program's operations with one operand"""
OF_POSITIVE = frozenset({"sqrt", "rsqrt"})


class SelfTestFailed(Exception):
    """The library computes wrong results, or none."""


def check(library: Library) -> None:
    _check_read_file(library)
    for dtype in TYPES:
        _check_add_lora(library, dtype, OUTPUTS, SEGMENTS)
        _check_add_lora(library, dtype, MANY_OUTPUTS, SEGMENTS[:1])
        for width, window, softcap in ATTENTION:
            _check_attention(library, dtype, width, window, softcap)
    for dtype in PACKED_TYPES:
        _check_linear(library, dtype)
        _check_largest(library, dtype)
        _check_program(library, dtype)


def _check_add_lora(
    library: Library, dtype: torch.dtype, outputs: int, ranks_and_rows: Sequence[tuple[int, int]]
) -> None:
    random = torch.Generator().manual_seed(0)
    group = LinearGroup(INPUTS, {"other": outputs, "linear": outputs})
    sizes = CppBackend([group], torch.empty(0, dtype=torch.uint8), dtype, library=library)
    memory = torch.zeros(sum(sizes.layout(rank + SCALE_ROWS).bytes for rank, _ in ranks_and_rows), dtype=torch.uint8)
    backend = CppBackend([group], memory, dtype, library=library)
    segments, matrices, scales, offset, row = [], {}, {}, 0, 0
    for number, (rank, rows) in enumerate(ranks_and_rows):
        scaled = number % 2 == 1
        layout = backend.layout(rank + SCALE_ROWS if scaled else rank)
        a = torch.randn(rank, INPUTS, generator=random, dtype=torch.float32) / INPUTS**0.5
        b = torch.randn(outputs, rank, generator=random, dtype=torch.float32) / rank**0.5
        a, b = a.to(dtype), b.to(dtype)
        of_scale, shift = torch.randn(2, outputs, generator=random, dtype=torch.float32).to(dtype).float()
        for linear in group.outputs:  # the adapter changes one linear, and has numbers for both
            run = memory[offset : offset + layout.bytes]
            layout.write(run, linear, a, b, 1.0)
            if scaled:
                layout.write_scaling(run, linear, 1 + of_scale, shift)
        adapter = PlacedAdapter(str(number), offset, layout.rank, frozenset({"linear"}), rank if scaled else 0)
        if scaled:
            scales[adapter.name] = 1 + of_scale, shift
        segments.append(Segment(row, row + rows, adapter))
        matrices[adapter.name] = a, b, 1.0
        offset += layout.bytes
        row += rows + 1  # and one row without an adapter
    x, y = (torch.randn(row, width, generator=random, dtype=torch.float32).to(dtype) for width in (INPUTS, outputs))
    unchanged, expected = y.clone(), reference.add_lora(y, x, segments, matrices, scales)
    batch = backend.make_batch(segments)
    backend.add_lora(y, x, "linear", batch)
    compare("add_lora", y, expected, TOLERANCE[dtype])
    before = unchanged.clone()
    backend.add_lora(unchanged, x, "other", batch)
    if not torch.equal(unchanged, before):
        raise SelfTestFailed(f"add_lora in {dtype} changes a linear that the adapters leave as it is")


def _check_linear(library: Library, dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(0)
    sizes = ((OUTPUTS, LINEAR_INPUTS), (OUTPUTS,), (MANY_ROWS, LINEAR_INPUTS))
    weight, bias, x = (torch.randn(*size, generator=random, dtype=torch.float32).to(dtype) for size in sizes)
    packed = PackedWeights(library, [weight])
    expected = x.double() @ weight.double().t() + bias.double()
    for rows in LINEAR_ROWS:
        compare("linear", packed.linear(x[:rows], bias), expected[:rows], TOLERANCE[dtype])
    compare("linear", packed.linear(x, bias, threads=1), expected, TOLERANCE[dtype])
    if not torch.equal(packed.rows(torch.arange(OUTPUTS)), weight):
        raise SelfTestFailed(f"unpack in {dtype} gives other numbers")


def _check_largest(library: Library, dtype: torch.dtype) -> None:
    """Row i has its largest number at place i, and again later: the first counts. The other five rows have an infinite
    largest number, a NaN (two rows), only -infinity, or only zeros of both signs."""
    infinity, nan = float("inf"), float("nan")
    rows = torch.randn(INPUTS + 5, INPUTS, generator=torch.Generator().manual_seed(0), dtype=torch.float32).to(dtype)
    expected = [*range(INPUTS), -1, -1, -1, -1, 0]
    for row in range(INPUTS):
        rows[row, row] = rows[row, row + (INPUTS - row) // 2] = 9.0
    for row, place, number in ((0, 3, infinity), (1, INPUTS - 1, nan), (2, 0, -nan)):
        rows[INPUTS + row, place] = number
    rows[INPUTS + 3] = -infinity
    rows[INPUTS + 4], rows[INPUTS + 4, 0] = 0.0, -0.0
    chosen = np.empty(len(rows), dtype=np.int64)
    library.largest(TYPES[dtype], rows.data_ptr(), len(rows), INPUTS, chosen.ctypes.data)
    if chosen.tolist() != expected:
        raise SelfTestFailed(f"the largest numbers in {dtype} are elsewhere")


def _check_read_file(library: Library) -> None:
    with library.path.open("rb") as file:
        expected = np.frombuffer(file.read(), np.uint8)
        found = np.zeros_like(expected)
        words = len(expected) // 8 * 8
        of_all = int(expected[:words].view(np.uint64).sum()) + int(expected[words:].sum())
        if read_file(library, file.fileno(), 0, found, 0) != of_all % 2**64 or not np.array_equal(found, expected):
            raise SelfTestFailed("read_file reads other bytes")


def _check_attention(
    library: Library, dtype: torch.dtype, width: int, window: int | None, softcap: float | None
) -> None:
    """A decode and pieces of prompts, each with its own pages. `dense` has their keys and values in one piece."""
    random = torch.Generator().manual_seed(0)
    sequences = LONG_SEQUENCES if dtype is torch.bfloat16 else SEQUENCES
    counts = [-(-(before + rows) // PAGE_TOKENS) for before, rows in sequences]
    pages = torch.zeros(sum(counts), 1, 2, KV_HEADS, PAGE_TOKENS, width, dtype=dtype)
    table = np.zeros((len(sequences), max(counts)), dtype=np.int32)
    described, dense, new, page, first = [], [], [], 0, 0
    for number, ((before, rows), count) in enumerate(zip(sequences, counts, strict=True)):
        table[number, :count] = np.arange(page, page + count)
        both = torch.randn(2, KV_HEADS, before + rows, width, generator=random, dtype=torch.float32).to(dtype)
        filled = torch.zeros(2, KV_HEADS, count * PAGE_TOKENS, width, dtype=dtype)
        filled[:, :, :before] = both[:, :, :before]
        pages[page : page + count, 0] = filled.unflatten(2, (count, PAGE_TOKENS)).permute(2, 0, 1, 3, 4)
        described.append((first, rows, before, number))
        dense.append(both)
        new.append(both[:, :, before:])
        page += count
        first += rows
    query = torch.randn(HEADS, first, width, generator=random, dtype=torch.float32).to(dtype)
    key, value = torch.cat(new, dim=2)
    attention = PagedAttention(library, pages)
    batch = attention.make_batch(table, np.array(described, dtype=np.int64))
    scale = SHARPNESS * width**-0.5
    exact = torch.float64 if dtype is torch.float32 else torch.float32
    out = attention.attend(query, key, value, 0, batch, scale=scale, window=window, softcap=softcap)
    for (start, rows, before, _), both in zip(described, dense, strict=True):
        keys, values = both.to(exact)
        of_heads = query[:, start : start + rows].to(exact).unflatten(0, (KV_HEADS, -1))
        scores = of_heads.flatten(1, 2) @ keys.transpose(1, 2) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        age = torch.arange(before, before + rows)[:, None] - torch.arange(before + rows)
        seen = (age >= 0) & (age < (window or before + rows))
        weights = scores.unflatten(1, (-1, rows)).masked_fill(~seen, -torch.inf).softmax(-1)
        expected = (weights.flatten(1, 2) @ values).unflatten(1, (-1, rows)).flatten(0, 1).transpose(0, 1)
        compare("attention", out[start : start + rows], expected, TOLERANCE[dtype])


def _check_program(library: Library, dtype: torch.dtype) -> None:
    """Each operation on all numbers of three rows. The last two rows are kept, in reverse order."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(3, INPUTS, generator=random, dtype=torch.float32).to(dtype) * 3
    keep = torch.tensor([2, 1])
    for operation, function in FUNCTIONS.items():
        table = x.abs() + 1 if operation in OF_POSITIVE else x
        tokens, positions = Value(1, torch.int64), Value(1, torch.int64)
        looked_up, result, logits = Value(INPUTS, dtype), Value(INPUTS, dtype), Value(INPUTS, dtype, kept=True)
        sizes = (1, 1, INPUTS)
        steps = [
            Compute("look_up", sizes, _whole(looked_up), (Place(table), Place(tokens)), len(table)),
            Compute(operation, sizes, _whole(result), (_whole(looked_up),)),
            Compute("keep", sizes, _whole(logits), (_whole(result),)),
        ]
        program = CompiledProgram(library, steps, tokens=tokens, positions=positions, logits=logits)
        numbers = torch.tensor([1, 2, 0])
        ours = program(numbers, numbers, keep, attention=no_attention(library), lora=None)
        compare(operation, ours, function(table[numbers][keep].double()), TOLERANCE[dtype])


def _whole(value: Value) -> Place:
    return Place(value, (0, 0, 1))


def compare(what: str, ours: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    difference = float((ours.double() - expected).abs().max())
    if not difference <= tolerance * max(1.0, float(expected.abs().max())):
        raise SelfTestFailed(f"{what} in {ours.dtype} is off by {difference:.2g}")
