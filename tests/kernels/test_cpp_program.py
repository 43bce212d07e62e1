"""Programs in C++ against torch, with each set of instructions that this CPU has: every operation, both types, odd
sizes, and numbers that do not lie together."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch.nn import functional

from motet_kernels import Segment
from motet_kernels.cpp import AttentionBatch, CppBackend, Library, PagedAttention
from motet_kernels.cpp.attention import PAGE_TOKENS, no_attention
from motet_kernels.cpp.linear import PackedWeights
from motet_kernels.cpp.peepholes import brought_together
from motet_kernels.cpp.program import CompiledProgram
from motet_kernels.cpp.self_test import FUNCTIONS, OF_POSITIVE
from motet_kernels.cpp.steps import Compute, Multiply, Place, Step, Value
from testbed.compiled_kernels import compiled_library
from tests.kernels.test_add_lora import Projection

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-8}
ROWS = 7
KEEP = torch.tensor([5, 0, 6])


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def whole(value: Value, offset: int = 0) -> Place:
    return Place(value, (0, 0, 1), offset)


class Rows:
    """A program over ROWS rows that begins with rows of tables."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self.tokens, self.positions = Value(1, torch.int64), Value(1, torch.int64)
        self.steps: list[Step] = []

    def of(self, table: torch.Tensor) -> Value:
        """Row i has the table's row i."""
        value = Value(table.shape[1], table.dtype)
        places = (Place(table), Place(self.positions))
        self.steps.append(Compute("look_up", (1, 1, value.size), whole(value), places, len(table)))
        return value

    def compute(self, operation: str, sizes: tuple[int, ...], out: Place, *inputs: Place, real: float = 0.0) -> None:
        self.steps.append(Compute(operation, sizes, out, inputs, real=real))

    def result(
        self,
        value: Value,
        threads: int = 1,
        chosen: torch.Tensor | None = None,
        attention: AttentionBatch | None = None,
        lora: tuple[CppBackend, list[Segment]] | None = None,
    ) -> torch.Tensor:
        """Its numbers in the rows KEEP. `chosen`: gets the place of each one's largest number"""
        attention = attention or no_attention(self._library)
        logits = Value(value.size, value.dtype, kept=True)
        keep = Compute("keep", (1, 1, value.size), whole(logits), (whole(value),))
        given = {"tokens": self.tokens, "positions": self.positions, "logits": logits}
        program = CompiledProgram(self._library, [*self.steps, keep], **given)
        if lora is not None:
            program.use_lora(lora[0])
        places, before = torch.arange(ROWS), torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            batch = None if lora is None else lora[0].make_batch(lora[1])
            return program(places, places, KEEP, attention=attention, lora=batch, chosen=chosen)
        finally:
            torch.set_num_threads(before)


def assert_close(ours: torch.Tensor, expected: torch.Tensor) -> None:
    assert ours.shape == expected.shape
    limit = TOLERANCE[ours.dtype] * expected.abs().clamp(min=1.0)
    assert bool(((ours.double() - expected).abs() <= limit).all())


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("operation", FUNCTIONS)
def test_functions_of_one_number(library: Library, operation: str, dtype: torch.dtype) -> None:
    for width in (1, 5, 16, 33, 100):
        x = numbers(ROWS, width, dtype=dtype, seed=width) * 3
        x = x.abs() + 0.5 if operation in OF_POSITIVE else x
        rows = Rows(library)
        out = Value(width, dtype)
        rows.compute(operation, (1, 1, width), whole(out), whole(rows.of(x)))
        assert_close(rows.result(out), FUNCTIONS[operation](x.double())[KEEP])


@pytest.mark.parametrize("operation", ["tanh", "sigmoid", "silu", "gelu", "gelu_tanh", "relu"])
def test_numbers_far_from_zero_stay_numbers(library: Library, operation: str) -> None:
    x = torch.tensor([[-1e4, -200.0, -90.0, -30.0, -0.0, 0.0, 1e-30, 30.0, 90.0, 1e4]] * ROWS)
    rows = Rows(library)
    out = Value(10, torch.float32)
    rows.compute(operation, (1, 1, 10), whole(out), whole(rows.of(x)))
    assert_close(rows.result(out), FUNCTIONS[operation](x.double())[KEEP])


BINARY: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "add": torch.add, "subtract": torch.sub, "multiply": torch.mul, "divide": torch.div,
}  # fmt: skip


@pytest.mark.parametrize("operation", BINARY)
def test_numbers_of_both_types_meet_those_that_all_rows_share(library: Library, operation: str) -> None:
    """[heads, width] with [width] for all heads, and with one number for all."""
    x, shared = numbers(ROWS, 4 * 37, dtype=torch.bfloat16), numbers(37, seed=1).abs() + 1
    rows = Rows(library)
    first, second = Value(4 * 37, torch.float32), Value(4 * 37, torch.float32)
    place = Place(first, (0, 37, 1))
    rows.compute(operation, (1, 4, 37), place, Place(rows.of(x), (0, 37, 1)), Place(shared, (0, 0, 1)))
    rows.compute(operation, (1, 4, 37), Place(second, (0, 37, 1)), place, Place(torch.tensor(3.0)))
    compute = BINARY[operation]
    expected = compute(compute(x.double().view(ROWS, 4, 37), shared.double()), torch.tensor(3.0).double())
    assert_close(rows.result(second), expected.view(ROWS, -1)[KEEP])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_numbers_that_do_not_lie_together(library: Library, dtype: torch.dtype) -> None:
    """Every other number of two heads, in the other order of dimensions, into the second half of a value."""
    x = numbers(ROWS, 2 * 50, dtype=dtype)
    rows = Rows(library)
    out = Value(150, dtype)
    of = rows.of(x)
    rows.compute("copy", (1, 1, 100), whole(out), whole(of))
    rows.compute("copy", (1, 25, 2), Place(out, (0, 2, 1), 100), Place(of, (0, 2, 50)))
    expected = torch.cat([x, x.view(ROWS, 2, 25, 2)[..., 0].transpose(1, 2).flatten(1)], dim=1)
    assert torch.equal(rows.result(out), expected[KEEP])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("width", [1, 16, 37, 130])
def test_norms_and_sums(library: Library, width: int, dtype: torch.dtype) -> None:
    """Of each of three heads."""
    x = numbers(ROWS, 3 * width, dtype=dtype) + 0.5
    weight, bias = numbers(width, dtype=dtype, seed=1), numbers(width, dtype=dtype, seed=2)
    heads = x.double().view(ROWS, 3, width)
    of_heads, of_all = (0, width, 1), (0, 0, 1)
    expected = {
        "layer_norm": functional.layer_norm(heads, (width,), weight.double(), bias.double(), 1e-3),
        "rms_norm": functional.rms_norm(heads, (width,), weight.double(), 1e-3),
    }
    for operation, values in expected.items():
        rows = Rows(library)
        out = Value(3 * width, dtype)
        others = [Place(weight, of_all), Place(bias, of_all)][: 2 if operation == "layer_norm" else 1]
        place = Place(rows.of(x), of_heads)
        rows.compute(operation, (1, 3, width), Place(out, of_heads), place, *others, real=1e-3)
        assert_close(rows.result(out), values.view(ROWS, -1)[KEEP])
    for operation, values in {"sum": heads.sum(-1), "mean": heads.mean(-1)}.items():
        rows = Rows(library)
        out = Value(3, dtype)
        rows.compute(operation, (1, 3, width), Place(out, (0, 1, 0)), Place(rows.of(x), of_heads))
        assert_close(rows.result(out), values[KEEP])


def test_whole_numbers_become_others(library: Library) -> None:
    rows = Rows(library)
    out = Value(1, torch.float32)
    rows.compute("multiply", (1, 1, 1), Place(out), Place(rows.positions), Place(torch.tensor(0.5)))
    assert rows.result(out).flatten().tolist() == [2.5, 0.0, 3.0]


def test_rows_that_a_matrix_does_not_have_are_refused(library: Library) -> None:
    rows = Rows(library)
    out = rows.of(numbers(ROWS - 1, 5))
    with pytest.raises(IndexError, match="a token or a position"):
        rows.result(out)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("threads", [1, 2])
def test_linears_of_the_same_numbers_and_a_chain(library: Library, threads: int, dtype: torch.dtype) -> None:
    """Four of the same numbers, with one of another's result directly after them; the first rows of a packed matrix."""
    x = numbers(ROWS, 70, dtype=dtype)
    weights = [numbers(outputs, 70, dtype=dtype, seed=outputs) / 8 for outputs in (37, 64, 5, 33)]
    packed, last = PackedWeights(library, weights), PackedWeights(library, [numbers(40, 64, dtype=dtype) / 8])
    bias = numbers(37, dtype=dtype, seed=9)
    rows = Rows(library)
    of = rows.of(x)
    results = [Value(len(weight), dtype) for weight in weights]
    for index, result in enumerate(results):
        rows.steps.append(Multiply(of, 0, result, packed, index, None if index else bias, str(index)))
    chained = Value(40, dtype)
    rows.steps.append(Multiply(results[1], 0, chained, last, 0, None, "chained"))
    out = Value(37 + 5 + 33 + 40, dtype)
    first = 0
    for part in (results[0], results[2], results[3], chained):
        rows.compute("copy", (1, 1, part.size), whole(out, first), whole(part))
        first += part.size
    linears = [packed.linear(x, None if index else bias, index) for index in range(4)]
    expected = torch.cat([linears[0], linears[2], linears[3], last.linear(linears[1])], dim=1)
    assert torch.equal(rows.result(out, threads), expected[KEEP])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_row_gets_the_bits_that_its_adapter_gives_it_alone(
    library: Library, threads: int, dtype: torch.dtype
) -> None:
    """Whoever is beside it. With few blocks of rows, threads share out the columns."""
    inputs, outputs = 203, 149
    projection = Projection(inputs, outputs, [8, 3, 16], dtype, library)
    rows, out = Rows(library), Value(outputs, dtype)
    weight = numbers(outputs, inputs, dtype=dtype) / 8
    x = rows.of(numbers(ROWS, inputs, dtype=dtype))
    rows.steps.append(Multiply(x, 0, out, PackedWeights(library, [weight]), 0, None, "linear"))

    def result(owners: Sequence[int | None]) -> torch.Tensor:
        return rows.result(out, threads, lora=(projection.backend, projection.segments(owners)))

    for owners in ([0] * ROWS, [1, None, 0, 0, 0, 2, 2], [0, 1, 2, 0, 1, 2, 2], [0, 0, 1, 1, 1, 1, 1]):
        together = result(owners)
        for place, row in enumerate(KEEP.tolist()):
            alone = result([owner if number == row else None for number, owner in enumerate(owners)])
            assert torch.equal(together[place], alone[place])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("wrong", [torch.nan, -torch.nan, torch.inf])
def test_the_largest_number_of_each_row_is_chosen(library: Library, wrong: float, dtype: torch.dtype) -> None:
    """The first of equal ones, and none where a number is not finite: the other rows do not notice."""
    table = numbers(ROWS, 300, dtype=dtype)
    table[0, 299] = wrong
    table[6, [17, 200]] = 9.0
    for threads in (1, 2):
        rows, chosen = Rows(library), torch.full((3,), -7)
        rows.result(rows.of(table), threads, chosen)
        assert chosen.tolist() == [int(table[5].argmax()), -1, 17]


def test_a_packed_matrix_is_looked_up_in() -> None:
    library = compiled_library()
    weight = numbers(75, 33)
    rows = Rows(library)
    out = Value(33, torch.float32)
    places = (Place(PackedWeights(library, [weight])), Place(rows.tokens))
    rows.steps.append(Compute("unpack", (1, 1, 33), whole(out), places, 75))
    assert torch.equal(rows.result(out), weight[KEEP])


def norm(rows: Rows, x: Value, heads: int, weight: torch.Tensor) -> Value:
    """As modules compute it"""
    count, width = x.size, x.size // heads
    wide, square, scaled = (Value(count, torch.float32) for _ in range(3))
    mean, more, root = (Value(heads, torch.float32) for _ in range(3))
    narrow, out = Value(count, x.dtype), Value(count, x.dtype)
    every, each, of_each = (1, 1, count), (1, heads, width), (0, width, 1)
    if x.dtype is torch.float32:
        wide = x
    else:
        rows.compute("copy", every, whole(wide), whole(x))
    rows.compute("multiply", every, whole(square), whole(wide), whole(wide))
    rows.compute("mean", each, Place(mean, (0, 1, 0)), Place(square, of_each))
    rows.compute("add", (1, 1, heads), whole(more), whole(mean), Place(torch.tensor(1e-3)))
    rows.compute("rsqrt", (1, 1, heads), whole(root), whole(more))
    rows.compute("multiply", each, Place(scaled, of_each), Place(wide, of_each), Place(root, (0, 1, 0)))
    if x.dtype is torch.float32:
        narrow = scaled
    else:
        rows.compute("copy", every, whole(narrow), whole(scaled))
    rows.compute("multiply", each, Place(out, of_each), Place(weight, (0, 0, 1)), Place(narrow, of_each))
    return out


def rotated(rows: Rows, x: Value, heads: int, cosines: Value, sines: Value) -> Value:
    """The first half of each head with the second"""
    count, width = x.size, x.size // heads
    half, every, each, of_each = width // 2, (1, 1, count), (1, heads, width), (0, width, 1)
    straight, swapped, turned, out = (Value(count, x.dtype) for _ in range(4))
    negative, of_half = Value(count // 2, x.dtype), (1, heads, half)
    rows.compute("multiply", each, Place(straight, of_each), Place(x, of_each), Place(cosines, (0, 0, 1)))
    rows.compute("negative", of_half, Place(negative, (0, half, 1)), Place(x, of_each, half))
    rows.compute("copy", of_half, Place(swapped, of_each), Place(negative, (0, half, 1)))
    rows.compute("copy", of_half, Place(swapped, of_each, half), Place(x, of_each))
    rows.compute("multiply", each, Place(turned, of_each), Place(swapped, of_each), Place(sines, (0, 0, 1)))
    rows.compute("add", every, whole(out), whole(straight), whole(turned))
    return out


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("heads", [1, 3])
def test_steps_that_are_brought_together_give_the_same_bits(library: Library, heads: int, dtype: torch.dtype) -> None:
    for width in (4, 10, 32, 66, 134):
        rows, count = Rows(library), heads * width
        x, more, up = (rows.of(numbers(ROWS, count, dtype=dtype, seed=seed) * 3) for seed in range(3))
        cosines, sines = (rows.of(numbers(ROWS, width, dtype=dtype, seed=seed)) for seed in (3, 4))
        total, active, product = (Value(count, dtype) for _ in range(3))
        every = (1, 1, count)
        rows.compute("add", every, whole(total), whole(x), whole(more))
        normed = norm(rows, total, heads, numbers(width, dtype=dtype, seed=5))
        turned = rotated(rows, normed, heads, cosines, sines)
        rows.compute("silu", every, whole(active), whole(turned))
        rows.compute("multiply", every, whole(product), whole(active), whole(up))
        both = Value(2 * count, dtype)
        rows.compute("copy", every, whole(both), whole(product))
        rows.compute("copy", every, whole(both, count), whole(total))
        apart = rows.result(both)
        together = brought_together(rows.steps, positions=rows.positions, logits=both)
        rows.steps, counts = together.steps, {kind: count for kind, count in together.counts.items() if count}
        after_norm = "sum_and_norm" if heads == 1 else "norm_and_rotate"
        assert counts == {"modules_norm": 1, "rotate": 1, "silu_times": 1, after_norm: 1}
        assert torch.equal(rows.result(both), apart)


@pytest.mark.parametrize("gap", [0, 16])
def test_weights_of_norms_may_lie_apart(library: Library, gap: int) -> None:
    """They are of another type than what they are multiplied with, and each head has its own."""
    heads, width = 3, 16
    rows, count = Rows(library), heads * width
    x, out = rows.of(numbers(ROWS, count, dtype=torch.bfloat16)), Value(count, torch.bfloat16)
    weight = numbers(heads, width + gap, dtype=torch.bfloat16, seed=1)[:, :width]
    wide, squares, scaled, product = (Value(count, torch.float32) for _ in range(4))
    mean, more, root = (Value(heads, torch.float32) for _ in range(3))
    every, each, of_each = (1, 1, count), (1, heads, width), (0, width, 1)
    rows.compute("copy", every, whole(wide), whole(x))
    rows.compute("multiply", every, whole(squares), whole(wide), whole(wide))
    rows.compute("mean", each, Place(mean, (0, 1, 0)), Place(squares, of_each))
    rows.compute("add", (1, 1, heads), whole(more), whole(mean), Place(torch.tensor(1e-3)))
    rows.compute("rsqrt", (1, 1, heads), whole(root), whole(more))
    rows.compute("multiply", each, Place(scaled, of_each), Place(wide, of_each), Place(root, (0, 1, 0)))
    of_weight = Place(weight, (0, width + gap, 1))
    rows.compute("multiply", each, Place(product, of_each), of_weight, Place(scaled, of_each))
    rows.compute("copy", every, whole(out), whole(product))
    apart = rows.result(out)
    together = brought_together(rows.steps, positions=rows.positions, logits=out)
    rows.steps = together.steps
    assert together.counts["modules_norm"] == (gap == 0)
    assert torch.equal(rows.result(out), apart)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("norms", [False, True])
def test_rotated_keys_are_written_into_their_pages(library: Library, norms: bool, dtype: torch.dtype) -> None:
    """Of rows of two sequences, beside their values. One row is of none."""
    heads, width = 3, 34
    pages = [torch.zeros(2, 1, 2, heads, PAGE_TOKENS, width, dtype=dtype) for _ in range(2)]
    for number, paged in enumerate(pages):
        rows = Rows(library)
        keys, values = (rows.of(numbers(ROWS, heads * width, dtype=dtype, seed=seed)) for seed in (0, 1))
        cosines, sines = (rows.of(numbers(ROWS, width, dtype=dtype, seed=seed)) for seed in (3, 4))
        if norms:
            keys = norm(rows, keys, heads, numbers(width, dtype=dtype, seed=5))
        turned = rotated(rows, keys, heads, cosines, sines)
        places = tuple(Place(one, (0, width, 1)) for one in (turned, values))
        rows.steps.append(Compute("write", (1, heads, width), None, places, 0))
        if number:
            together = brought_together(rows.steps, positions=rows.positions, logits=values)
            rows.steps = together.steps
            assert together.counts["write_rotated"] == 1
            assert together.counts["norm_and_rotate"] == norms
        table, sequences = np.array([[0], [1]], dtype=np.int32), np.array([[0, 2, 3, 0], [3, 4, 0, 1]])
        batch = PagedAttention(library, paged).make_batch(table, sequences)
        rows.result(values, attention=batch)
    apart, joint = pages
    assert torch.equal(joint, apart)
    assert joint.flatten(0, 3).any(-1).reshape(2, 2, -1, PAGE_TOKENS).all(2).sum((1, 2)).tolist() == [4, 8]
