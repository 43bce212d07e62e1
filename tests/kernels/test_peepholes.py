"""Shapes that peepholes know, and what nearly has them: each shape with one thing changed at a time. Whatever is then
brought together gives the bits of the steps themselves."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, islice, permutations, product
from math import prod

import numpy as np
import pytest
import torch

from motet_kernels.cpp import Library, PagedAttention
from motet_kernels.cpp.attention import PAGE_TOKENS
from motet_kernels.cpp.linear import PackedWeights
from motet_kernels.cpp.peepholes import brought_together
from motet_kernels.cpp.peepholes.matching import Numbers
from motet_kernels.cpp.program import CompiledProgram
from motet_kernels.cpp.steps import Compute, Multiply, Place, Step, Value, read_by, written_by
from testbed.compiled_kernels import compiled_library
from tests.kernels.test_cpp_program import numbers, whole

ROWS = 3
HEADS, WIDTH = 4, 8
COUNT = HEADS * WIDTH
EVERY, EACH, OF_EACH = (1, 1, COUNT), (1, HEADS, WIDTH), (0, WIDTH, 1)
FLOAT, BFLOAT, INTEGER = torch.float32, torch.bfloat16, torch.int64
NO_NUMBER = 12345.0
"""Stands for all that are none: their bits may differ."""


class Shape:
    """Steps over numbers that are looked up by token."""

    def __init__(self, dtype: torch.dtype, *, by_heads: bool = False) -> None:
        """`by_heads`: what is done to every number is done to those of one head after the other."""
        self.dtype = dtype
        self.by_heads = by_heads
        self.tokens, self.positions = Value(1, torch.int64), Value(1, torch.int64)
        self.tables: list[Step] = []
        self.steps: list[Step] = []
        self.results: list[Value] = []

    def given(self, size: int, dtype: torch.dtype | None = None) -> Value:
        """Numbers of its own"""
        table = numbers(ROWS, size, dtype=dtype or self.dtype, seed=len(self.tables)) * 3
        value = Value(size, table.dtype)
        self.tables.append(
            Compute("look_up", (1, 1, size), whole(value), (Place(table), Place(self.tokens)), len(table))
        )
        return value

    def compute(self, operation: str, sizes: tuple[int, ...], out: Place, *inputs: Place, number: int = 0) -> None:
        self.steps.append(Compute(operation, sizes, out, inputs, number))

    def of_every(self, operation: str, *inputs: Value, dtype: torch.dtype | None = None) -> Value:
        out = Value(inputs[0].size, dtype or self.dtype)
        if self.by_heads and out.size == COUNT:
            self.compute(operation, EACH, *(Place(one, OF_EACH) for one in (out, *inputs)))
        else:
            self.compute(operation, (1, 1, out.size), whole(out), *map(whole, inputs))
        return out

    def norm(self, x: Value, heads: int = HEADS, *, rounds_first: bool = True) -> Value:
        """As modules compute it"""
        count, width = x.size, x.size // heads
        each, of_each, of_heads = (1, heads, width), (0, width, 1), (0, 1, 0)
        scaled, mean = Value(count, FLOAT), Value(heads, FLOAT)
        weight = numbers(width, dtype=self.dtype if rounds_first else FLOAT, seed=9)
        wide = x if self.dtype is FLOAT else self.of_every("copy", x, dtype=FLOAT)
        squares = self.of_every("multiply", wide, wide, dtype=FLOAT)
        self.compute("mean", each, Place(mean, of_heads), Place(squares, of_each))
        more = Value(heads, FLOAT)
        self.compute("add", (1, 1, heads), whole(more), whole(mean), Place(torch.tensor(1e-3)))
        root = self.of_every("rsqrt", more, dtype=FLOAT)
        self.compute("multiply", each, Place(scaled, of_each), Place(wide, of_each), Place(root, of_heads))
        if self.dtype is not FLOAT and rounds_first:
            scaled = self.of_every("copy", scaled)
        out = Value(count, weight.dtype)
        self.compute("multiply", each, Place(out, of_each), Place(weight, (0, 0, 1)), Place(scaled, of_each))
        return out if out.dtype is self.dtype else self.of_every("copy", out)

    def rotated(
        self, x: Value, heads: int = HEADS, strides: tuple[int, int] = (WIDTH, 1), wide: torch.dtype | None = None
    ) -> Value:
        """`strides`: of heads and their numbers in x. `wide`: the type of what is negative"""
        width = COUNT // heads
        half = width // 2
        each, of_each, of_x, of_half = (1, heads, width), (0, width, 1), (0, *strides), (1, heads, half)
        cosines, sines = self.given(width), self.given(width)
        straight, swapped, turned = (Value(COUNT, self.dtype) for _ in range(3))
        negative = Value(COUNT // 2, wide or self.dtype)
        self.compute("multiply", each, Place(straight, of_each), Place(x, of_x), Place(cosines, (0, 0, 1)))
        self.compute("negative", of_half, Place(negative, (0, half, 1)), Place(x, of_x, half * strides[1]))
        self.compute("copy", of_half, Place(swapped, of_each), Place(negative, (0, half, 1)))
        self.compute("copy", of_half, Place(swapped, of_each, half), Place(x, of_x))
        self.compute("multiply", each, Place(turned, of_each), Place(swapped, of_each), Place(sines, (0, 0, 1)))
        return self.of_every("add", straight, turned)

    def written(self, keys: Value) -> None:
        values = self.given(COUNT)
        self.steps.append(Compute("write", EACH, None, (Place(keys, OF_EACH), Place(values, OF_EACH))))


def angles(shape: Shape, of: Value) -> Value:
    found = Value(WIDTH, FLOAT)
    frequencies = Place(torch.linspace(0.1, 1.0, WIDTH), (0, 0, 1))
    shape.compute("multiply", (1, 1, WIDTH), whole(found), Place(of), frequencies)
    return found


def of_positions(shape: Shape) -> None:
    both = angles(shape, shape.positions)
    for turn in ("cos", "sin"):
        turned = shape.of_every(turn, both, dtype=FLOAT)
        scaled = Value(WIDTH, FLOAT)
        shape.compute("multiply", (1, 1, WIDTH), whole(scaled), whole(turned), Place(torch.tensor(0.9)))
        rounded = shape.of_every("copy", scaled)
        shape.results.append(shape.of_every("multiply", rounded, shape.given(WIDTH)))


def cosines_alone(shape: Shape) -> None:
    shape.results.append(shape.of_every("cos", angles(shape, shape.positions), dtype=FLOAT))


def cosines_of_angles_that_are_there_twice(shape: Shape) -> None:
    """The second half is a copy of the first one: a step reads what it writes a part of."""
    both, half = Value(WIDTH, FLOAT), WIDTH // 2
    frequencies = Place(torch.linspace(0.1, 1.0, half), (0, 0, 1))
    shape.compute("multiply", (1, 1, half), whole(both), Place(shape.positions), frequencies)
    shape.compute("copy", (1, 1, half), whole(both, half), whole(both))
    shape.results.append(shape.of_every("cos", both, dtype=FLOAT))


def cosines_beside_other_numbers(shape: Shape) -> None:
    """In one value, of which a table would need all"""
    both, others = Value(2 * WIDTH, FLOAT), shape.given(WIDTH, FLOAT)
    shape.compute("copy", (1, 1, WIDTH), whole(both), whole(others))
    cosines = shape.of_every("cos", angles(shape, shape.positions), dtype=FLOAT)
    shape.compute("copy", (1, 1, WIDTH), whole(both, WIDTH), whole(cosines))
    shape.results.append(both)


def cosines_of_tokens(shape: Shape) -> None:
    shape.results.append(shape.of_every("cos", angles(shape, shape.tokens), dtype=FLOAT))


def cosines_of_numbers_that_positions_have(shape: Shape) -> None:
    """A table of all positions would look up where this one ends."""
    table, learned = numbers(2 * ROWS, WIDTH), Value(WIDTH, FLOAT)
    places = Place(table), Place(shape.positions)
    shape.compute("look_up", (1, 1, WIDTH), whole(learned), *places, number=len(table))
    shape.results.append(shape.of_every("cos", learned, dtype=FLOAT))


def norm_of_heads(shape: Shape) -> None:
    shape.results.append(shape.norm(shape.given(COUNT)))


def norm_of_all(shape: Shape) -> None:
    shape.results.append(shape.norm(shape.given(COUNT), 1))


def norm_that_rounds_last(shape: Shape) -> None:
    shape.results.append(shape.norm(shape.given(COUNT), rounds_first=False))


def norm_of_a_transposed_copy(shape: Shape) -> None:
    x, copied = shape.given(COUNT), Value(COUNT, shape.dtype)
    shape.compute("copy", (1, WIDTH, HEADS), Place(copied, (0, HEADS, 1)), Place(x, (0, 1, WIDTH)))
    shape.results.append(shape.norm(copied))


def norm_of_a_sum(shape: Shape) -> None:
    total = shape.of_every("add", shape.given(COUNT), shape.given(COUNT))
    shape.results += [shape.norm(total, 1), total]


def norm_of_heads_of_a_sum(shape: Shape) -> None:
    total = shape.of_every("add", shape.given(COUNT), shape.given(COUNT))
    shape.results += [shape.norm(total), total]


def rotation(shape: Shape) -> None:
    shape.results.append(shape.rotated(shape.given(COUNT)))


def rotation_by_way_of_another_type(shape: Shape) -> None:
    shape.results.append(shape.rotated(shape.given(COUNT), wide=BFLOAT if shape.dtype is FLOAT else FLOAT))


def rotation_of_transposed_heads(shape: Shape) -> None:
    shape.results.append(shape.rotated(shape.given(COUNT), strides=(1, HEADS)))


def rotation_of_normed_heads(shape: Shape) -> None:
    shape.results.append(shape.rotated(shape.norm(shape.given(COUNT))))


def rotation_of_one_normed_head(shape: Shape) -> None:
    """Again and again"""
    shape.results.append(shape.rotated(shape.norm(shape.given(COUNT)), strides=(0, 1)))


def rotation_of_what_is_normed_together(shape: Shape) -> None:
    shape.results.append(shape.rotated(shape.norm(shape.given(COUNT), 1)))


def rotated_keys(shape: Shape) -> None:
    shape.written(shape.rotated(shape.given(COUNT)))


def rotated_keys_of_wider_heads(shape: Shape) -> None:
    shape.written(shape.rotated(shape.given(COUNT), HEADS // 2, (2 * WIDTH, 1)))


def rotated_keys_that_are_normed(shape: Shape) -> None:
    shape.written(shape.rotated(shape.norm(shape.given(COUNT))))


def gate(shape: Shape) -> None:
    shape.results.append(shape.of_every("multiply", shape.of_every("silu", shape.given(COUNT)), shape.given(COUNT)))


def product_of_two_gates(shape: Shape) -> None:
    """Either may be the one that is multiplied."""
    gates = [shape.of_every("silu", shape.given(COUNT)) for _ in range(2)]
    shape.results.append(shape.of_every("multiply", *gates))


Made = tuple[dict[str, int], list[str]]
"""How often each kind is found, and the operations that are left"""
ROTATED = ["multiply", "negative", "copy", "copy", "multiply", "add"]

SHAPES: dict[Callable[[Shape], None], Made] = {
    of_positions: ({"by_position": 2}, ["look_up", "multiply"] * 2),
    cosines_alone: ({"by_position": 1}, ["look_up"]),
    cosines_of_angles_that_are_there_twice: ({"by_position": 1}, ["look_up"]),
    cosines_beside_other_numbers: ({"by_position": 1}, ["copy", "look_up", "copy"]),
    cosines_of_tokens: ({}, ["multiply", "cos"]),
    cosines_of_numbers_that_positions_have: ({}, ["look_up", "cos"]),
    norm_of_heads: ({"modules_norm": 1}, ["modules_norm"]),
    norm_of_all: ({"modules_norm": 1}, ["modules_norm"]),
    norm_that_rounds_last: ({"modules_norm": 1}, ["modules_norm"]),
    norm_of_a_transposed_copy: ({"modules_norm": 1}, ["copy", "modules_norm"]),
    norm_of_a_sum: ({"modules_norm": 1, "sum_and_norm": 1}, ["sum_and_norm"]),
    norm_of_heads_of_a_sum: ({"modules_norm": 1}, ["add", "modules_norm"]),
    rotation: ({"rotate": 1}, ["rotate"]),
    rotation_by_way_of_another_type: ({}, ROTATED),
    rotation_of_transposed_heads: ({}, ROTATED),
    rotation_of_normed_heads: ({"modules_norm": 1, "rotate": 1, "norm_and_rotate": 1}, ["norm_and_rotate"]),
    rotation_of_one_normed_head: ({"modules_norm": 1, "rotate": 1}, ["modules_norm", "rotate"]),
    rotation_of_what_is_normed_together: ({"modules_norm": 1, "rotate": 1}, ["modules_norm", "rotate"]),
    rotated_keys: ({"rotate": 1, "write_rotated": 1}, ["write_rotated"]),
    rotated_keys_of_wider_heads: ({"rotate": 1}, ["rotate", "write"]),
    rotated_keys_that_are_normed: (
        {"modules_norm": 1, "rotate": 1, "norm_and_rotate": 1, "write_rotated": 1},
        ["write_normed_rotated"],
    ),
    gate: ({"silu_times": 1}, ["silu_times"]),
    product_of_two_gates: ({"silu_times": 1}, ["silu", "silu_times"]),
}


@dataclass(frozen=True)
class Near:
    """A shape with one thing changed"""

    what: str
    steps: list[Step]
    results: list[Value]
    is_right: bool = False
    """It has the shape nevertheless."""


@dataclass(frozen=True)
class Passed:
    """What a program of a shape has computed"""

    found: dict[str, int]
    left: list[str]
    """Operations between what is given and the results"""
    bits: torch.Tensor
    """Of results and pages"""


def passed(library: Library, shape: Shape, near: Near, *, together: bool) -> Passed | None:
    """None if nothing was brought together: then it is the program of the steps themselves."""
    writes = any(isinstance(step, Compute) and step.operation == "write" for step in near.steps)
    # Pages have the type of the logits. Elsewhere that of float32 keeps all bits.
    logits = Value(sum(value.size for value in near.results) or 1, shape.dtype if writes else FLOAT, kept=True)
    both = Value(logits.size, logits.dtype)
    last: list[Step] = []
    for value in near.results:
        first = sum(step.sizes[2] for step in last if isinstance(step, Compute))
        last.append(Compute("copy", (1, 1, value.size), whole(both, first), (whole(value),)))
    if not near.results:
        last.append(Compute("copy", (1, 1, 1), whole(both), (Place(torch.tensor(0.0)),)))
    last.append(Compute("keep", (1, 1, logits.size), whole(logits), (whole(both),)))
    steps: list[Step] = [*shape.tables, *near.steps, *last]
    found: dict[str, int] = {}
    if together:
        joined = brought_together(steps, positions=shape.positions, logits=logits)
        assert not joined.failed, near.what
        steps, found = joined.steps, {kind: count for kind, count in joined.counts.items() if count}
        if not found:
            return None
    program = CompiledProgram(library, steps, tokens=shape.tokens, positions=shape.positions, logits=logits)
    pages = torch.zeros(1, 1, 2, HEADS, PAGE_TOKENS, WIDTH, dtype=BFLOAT if shape.dtype is BFLOAT else FLOAT)
    batch = PagedAttention(library, pages).make_batch(np.array([[0]], dtype=np.int32), np.array([[0, ROWS, 0, 0]]))
    every = torch.arange(ROWS)
    out = program(every, every * 2 + 1, every, attention=batch, lora=None, longest=2 * ROWS)
    every_number = torch.cat((out.float().flatten(), pages.float().flatten()))
    ends = {id(step) for step in (*shape.tables, *last)}
    left = [step.operation for step in steps if isinstance(step, Compute) and id(step) not in ends]
    return Passed(found, left, every_number.nan_to_num(nan=NO_NUMBER).view(torch.int32))


def bits(library: Library, shape: Shape, near: Near) -> torch.Tensor:
    """Of the steps themselves"""
    apart = passed(library, shape, near, together=False)
    assert apart is not None
    return apart.bits


# -- one thing changed -----------------------------------------------------------------------------------------------

OTHER_OPERATION = {
    "add": "subtract", "multiply": "add", "mean": "sum", "rsqrt": "exp", "silu": "gelu", "negative": "copy",
    "copy": "negative", "cos": "exp", "sin": "exp",
}  # fmt: skip


def near_misses(shape: Shape) -> Iterator[Near]:
    steps, results = shape.steps, shape.results
    for number, step in enumerate(steps):
        assert isinstance(step, Compute)
        if step.operation in {"add", "multiply"}:
            changed = replace(step, inputs=step.inputs[::-1])
            yield Near(f"exchanged operands in step {number}", _with(steps, number, changed), results, is_right=True)
        for what, changed in _other_steps(shape, step):
            yield Near(f"{what} in step {number}, {step.operation}", _with(steps, number, changed), results)
        for value in written_by(step):
            yield from _other_uses(shape, number, value)
    for value in dict.fromkeys(value for step in steps for value in written_by(step)):
        if any(step.operation == "write" and value in read_by(step) for step in steps):
            continue  # it must have the type of the pages
        for dtype in (one for one in (FLOAT, BFLOAT, INTEGER) if one is not value.dtype):
            other = Value(value.size, dtype)
            retyped = [_instead(step, value, other) for step in steps]
            of_results = [other if one is value else one for one in results]
            yield Near(f"a value of {value.size} is {dtype}", retyped, of_results)
        writers = [number for number, step in enumerate(steps) if value in written_by(step)]
        for first, second in combinations(writers, 2):
            one, other_one = steps[first], steps[second]
            if value in (*read_by(one), *read_by(other_one)):
                continue  # exchanged, it would read a part that nobody has written
            assert isinstance(one, Compute)
            assert isinstance(other_one, Compute)
            exchanged = _with(steps, first, replace(one, out=other_one.out))
            yield Near("exchanged parts", _with(exchanged, second, replace(other_one, out=one.out)), results)


def _with(steps: Sequence[Step], number: int, *instead: Step) -> list[Step]:
    return [*steps[:number], *instead, *steps[number + 1 :]]


def _other_steps(shape: Shape, step: Compute) -> Iterator[tuple[str, Compute]]:
    if step.operation in OTHER_OPERATION:
        yield "other operation", replace(step, operation=OTHER_OPERATION[step.operation])
    for number, place in enumerate(step.inputs):
        for what, other in _other_places(shape, step, place):
            inputs = (*step.inputs[:number], other, *step.inputs[number + 1 :])
            yield f"{what} as operand {number}", replace(step, inputs=inputs)
    if step.out is None or step.operation == "mean":
        return
    rows, columns = step.sizes[1:]
    first, second, third = step.out.strides
    if rows > 1 and rows * columns == step.out.of.size:
        yield "transposed result", replace(step, out=replace(step.out, strides=(0, 1, rows)))
    if rows == columns:
        yield "transposed part", replace(step, out=replace(step.out, strides=(first, third, second)))
    if rows == 1:
        rows, columns = HEADS, columns // HEADS
    if rows == HEADS and columns and step.operation != "look_up":
        yield from _exchanged_heads(step, columns)


def _exchanged_heads(step: Compute, columns: int) -> Iterator[tuple[str, Compute]]:
    """Each operand, and the result, with the second head and the third one in each other's place"""
    places = [step.result, *step.inputs]
    heads = [place.strides[1] if step.sizes[1] > 1 else columns * place.strides[2] for place in places]
    for exchanged in range(len(places)):
        changed = [
            replace(
                place,
                strides=(head, 2 * head, place.strides[2]) if at == exchanged else (2 * head, head, place.strides[2]),
            )
            for at, (place, head) in enumerate(zip(places, heads, strict=True))
        ]
        out, *inputs = changed
        yield f"exchanged heads of {exchanged}", replace(step, sizes=(2, 2, columns), out=out, inputs=tuple(inputs))


def _other_places(shape: Shape, step: Compute, place: Place) -> Iterator[tuple[str, Place]]:
    of, sizes = place.of, step.sizes
    if isinstance(of, torch.Tensor):
        for dtype in (of.dtype, BFLOAT if of.dtype is FLOAT else FLOAT):
            yield f"constant of {dtype}", replace(place, of=of.to(dtype))
            yield f"constant of several {dtype}", Place(numbers(sizes[2], dtype=dtype, seed=5), (0, 0, 1))
            of_each = numbers(sizes[1], 2 * sizes[2], dtype=dtype, seed=5)
            yield f"constant for each head of {dtype}", Place(of_each, (0, 2 * sizes[2], 1))
            yield f"a part of that of {dtype}", Place(of_each[:, : sizes[2]], (0, 2 * sizes[2], 1))
            yield f"constant with gaps of {dtype}", Place(of_each[0, ::2], (0, 0, 2))
        yield "numbers of each row", Place(shape.given(sizes[2], of.dtype), (0, 0, 1))
        return
    assert isinstance(of, Value)
    if of in written_by(step):
        return  # a part of it that is there
    if of.dtype is not INTEGER:
        yield "other numbers", replace(place, of=shape.given(of.size, of.dtype))
        yield "constant", replace(place, of=numbers(of.size, dtype=of.dtype, seed=7))
    if step.operation == "write":  # it goes through heads alone
        yield "one head", replace(place, strides=(0, 0, 1))
        return
    for strides in (
        (0, *place.strides[1:2], 0),
        (0, 0, place.strides[2]),
        (0, 1, sizes[1]),
        (0, sizes[2], 1),
        (0, 0, 1),
        (0, 1, 0),
    ):
        for offset in {0, 1, of.size // 2, sizes[2], sizes[2] // 2, place.offset}:
            other = Place(of, strides, offset)
            if other != place and _last(other, sizes) < of.size:
                yield f"{strides} from {offset}", other


def _last(place: Place, sizes: Sequence[int]) -> int:
    return place.offset + sum((size - 1) * stride for size, stride in zip(sizes, place.strides, strict=True))


def _other_uses(shape: Shape, number: int, value: Value) -> Iterator[Near]:
    steps, results = shape.steps, shape.results
    yield Near(f"the result of step {number} is read at the end", list(steps), [*results, value])
    copied = Value(value.size, value.dtype)
    copy = Compute("copy", (1, 1, value.size), whole(copied), (whole(value),))
    last = max(one for one, writes in enumerate(steps) if value in written_by(writes))
    yield Near(
        f"the result of step {number} is read at once", _with(steps, last, steps[last], copy), [*results, copied]
    )
    other, part = shape.given(value.size, value.dtype), (1, 1, -(-value.size // 2))
    over = Compute("copy", part, whole(value), (whole(other),))
    yield Near(f"the result of step {number} is half of another", _with(steps, last, steps[last], over), results)


def _instead(step: Step, value: Value, other: Value) -> Step:
    def place(of: Place) -> Place:
        return replace(of, of=other) if of.of is value else of

    assert isinstance(step, Compute)
    return replace(step, out=step.out and place(step.out), inputs=tuple(map(place, step.inputs)))


@pytest.mark.parametrize("every", [2, pytest.param(1, marks=pytest.mark.soak)])
@pytest.mark.parametrize(("dtype", "by_heads"), [(FLOAT, False), (BFLOAT, True)])
@pytest.mark.parametrize("make", SHAPES)
def test_what_is_brought_together_keeps_its_bits(
    make: Callable[[Shape], None], dtype: torch.dtype, by_heads: bool, every: int
) -> None:
    """`every`: of what nearly has the shape. One type begins with the first, the other with the second."""
    library = compiled_library()
    shape = Shape(dtype, by_heads=by_heads)
    make(shape)
    right = Near("as it is", shape.steps, shape.results, is_right=True)
    made = SHAPES[make]
    for near in (right, *islice(near_misses(shape), by_heads % every, None, every)):
        together = passed(library, shape, near, together=True)
        if near.is_right:
            assert ({}, made[1]) == made if together is None else (together.found, together.left) == made
        if together is not None:
            keeps_bits = torch.equal(together.bits, bits(library, shape, near))
            assert keeps_bits, near.what
            if together.found.get("by_position") == made[0].get("by_position", 0):
                assert not {"cos", "sin"} & {*together.left}, near.what


@pytest.mark.parametrize("make", [of_positions, norm_of_heads, norm_of_a_sum, rotation, gate])
def test_integers_stay_apart(make: Callable[[Shape], None]) -> None:
    shape = Shape(INTEGER)
    make(shape)
    assert passed(compiled_library(), shape, Near("as it is", shape.steps, shape.results), together=True) is None


@pytest.mark.parametrize("reads", [True, False], ids=["reads cosines", "computes angles"])
def test_what_linears_compute_is_in_no_table(reads: bool) -> None:
    library, shape = compiled_library(), Shape(FLOAT)
    weights = PackedWeights(library, [numbers(WIDTH, WIDTH)])
    first, multiplied = angles(shape, shape.positions), Value(WIDTH, FLOAT)
    x = shape.of_every("cos", first) if reads else first
    shape.steps.append(Multiply(x, 0, multiplied, weights, 0, None, "linear"))
    near = Near("", shape.steps, [multiplied if reads else shape.of_every("cos", multiplied)])
    together = passed(library, shape, near, together=True)
    assert (together.found if together else {}) == ({"by_position": 1} if reads else {})
    assert together is None or torch.equal(together.bits, bits(library, shape, near))


def factors(count: int) -> list[tuple[int, ...]]:
    return [sizes for sizes in product(range(1, count + 1), repeat=3) if prod(sizes) == count]


def test_numbers_are_gone_through_in_other_sizes_if_strides_can_say_that() -> None:
    value = Value(1, FLOAT)
    for sizes, order in product(factors(20), permutations(range(3))):
        strides = [prod(sizes[other] for other in order[order.index(one) + 1 :]) for one in range(3)]
        given = Numbers(Place(value, tuple(strides), 7), sizes)
        offsets = offsets_of(strides, sizes)
        for wanted in (*factors(20), *factors(10), *factors(40)):
            each = [prod(wanted[one + 1 :]) if wanted[one] > 1 else 0 for one in range(3)]  # how many numbers later
            found = [offsets[later] if later < 20 else 0 for later in each]
            can_say = offsets_of(found, wanted) == offsets
            assert given.in_sizes(wanted) == (Place(value, tuple(found), 7) if can_say else None), (given, wanted)


def offsets_of(strides: Sequence[int], sizes: Sequence[int]) -> list[int]:
    places = product(*map(range, sizes))
    return [sum(at * stride for at, stride in zip(place, strides, strict=True)) for place in places]
