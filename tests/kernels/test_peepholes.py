"""Shapes that peepholes know, and what nearly has them: each shape with one thing changed at a time. Whatever is then
brought together gives the bits of the steps themselves."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
import pytest
import torch

from motet_kernels.cpp import Library, PagedAttention
from motet_kernels.cpp.attention import PAGE_TOKENS
from motet_kernels.cpp.peepholes import brought_together
from motet_kernels.cpp.program import CompiledProgram
from motet_kernels.cpp.steps import Compute, Place, Step, Value, read_by, written_by
from testbed.compiled_kernels import compiled_library
from tests.kernels.test_cpp_program import numbers, whole

ROWS = 3
HEADS, WIDTH = 3, 8
COUNT = HEADS * WIDTH
EVERY, EACH, OF_EACH = (1, 1, COUNT), (1, HEADS, WIDTH), (0, WIDTH, 1)
FLOAT, BFLOAT = torch.float32, torch.bfloat16
NO_NUMBER = 12345.0
"""Stands for all that are none: their bits may differ."""


class Shape:
    """Steps over numbers that are looked up by token."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
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

    def rotated(self, x: Value) -> Value:
        half = WIDTH // 2
        of_half = (1, HEADS, half)
        cosines, sines = self.given(WIDTH), self.given(WIDTH)
        straight, swapped, turned, negative = (Value(size, self.dtype) for size in (COUNT, COUNT, COUNT, COUNT // 2))
        self.compute("multiply", EACH, Place(straight, OF_EACH), Place(x, OF_EACH), Place(cosines, (0, 0, 1)))
        self.compute("negative", of_half, Place(negative, (0, half, 1)), Place(x, OF_EACH, half))
        self.compute("copy", of_half, Place(swapped, OF_EACH), Place(negative, (0, half, 1)))
        self.compute("copy", of_half, Place(swapped, OF_EACH, half), Place(x, OF_EACH))
        self.compute("multiply", EACH, Place(turned, OF_EACH), Place(swapped, OF_EACH), Place(sines, (0, 0, 1)))
        return self.of_every("add", straight, turned)

    def written(self, keys: Value) -> None:
        values = self.given(COUNT)
        self.steps.append(Compute("write", EACH, None, (Place(keys, OF_EACH), Place(values, OF_EACH))))


def of_positions(shape: Shape) -> None:
    angles = Value(WIDTH, FLOAT)
    frequencies = Place(torch.linspace(0.1, 1.0, WIDTH), (0, 0, 1))
    shape.compute("multiply", (1, 1, WIDTH), whole(angles), Place(shape.positions), frequencies)
    for turn in ("cos", "sin"):
        turned = shape.of_every(turn, angles, dtype=FLOAT)
        scaled = Value(WIDTH, FLOAT)
        shape.compute("multiply", (1, 1, WIDTH), whole(scaled), whole(turned), Place(torch.tensor(0.9)))
        rounded = shape.of_every("copy", scaled)
        shape.results.append(shape.of_every("multiply", rounded, shape.given(WIDTH)))


def norm_of_heads(shape: Shape) -> None:
    shape.results.append(shape.norm(shape.given(COUNT)))


def norm_that_rounds_last(shape: Shape) -> None:
    shape.results.append(shape.norm(shape.given(COUNT), rounds_first=False))


def norm_of_a_sum(shape: Shape) -> None:
    total = shape.of_every("add", shape.given(COUNT), shape.given(COUNT))
    shape.results += [shape.norm(total, 1), total]


def rotation(shape: Shape) -> None:
    shape.results.append(shape.rotated(shape.given(COUNT)))


def rotation_of_normed_heads(shape: Shape) -> None:
    shape.results.append(shape.rotated(shape.norm(shape.given(COUNT))))


def rotated_keys(shape: Shape) -> None:
    shape.written(shape.rotated(shape.given(COUNT)))


def rotated_keys_that_are_normed(shape: Shape) -> None:
    shape.written(shape.rotated(shape.norm(shape.given(COUNT))))


def gate(shape: Shape) -> None:
    shape.results.append(shape.of_every("multiply", shape.of_every("silu", shape.given(COUNT)), shape.given(COUNT)))


SHAPES: dict[Callable[[Shape], None], dict[str, int]] = {
    of_positions: {"by_position": 2},
    norm_of_heads: {"modules_norm": 1},
    norm_that_rounds_last: {"modules_norm": 1},
    norm_of_a_sum: {"modules_norm": 1, "sum_and_norm": 1},
    rotation: {"rotate": 1},
    rotation_of_normed_heads: {"modules_norm": 1, "rotate": 1, "norm_and_rotate": 1},
    rotated_keys: {"rotate": 1, "write_rotated": 1},
    rotated_keys_that_are_normed: {"modules_norm": 1, "rotate": 1, "norm_and_rotate": 1, "write_rotated": 1},
    gate: {"silu_times": 1},
}


@dataclass(frozen=True)
class Near:
    """A shape with one thing changed"""

    what: str
    steps: list[Step]
    results: list[Value]


def bits(library: Library, shape: Shape, near: Near, *, together: bool) -> tuple[dict[str, int], torch.Tensor]:
    """How many steps of each kind were found, and all that the steps compute: results, and pages."""
    writes = any(isinstance(step, Compute) and step.operation == "write" for step in near.steps)
    # Pages have the type of the logits. Elsewhere that of float32 keeps all bits.
    logits = Value(sum(value.size for value in near.results) or 1, shape.dtype if writes else FLOAT, kept=True)
    both = Value(logits.size, logits.dtype)
    steps, first = [*shape.tables, *near.steps], 0
    for value in near.results:
        steps.append(Compute("copy", (1, 1, value.size), whole(both, first), (whole(value),)))
        first += value.size
    if not near.results:
        steps.append(Compute("copy", (1, 1, 1), whole(both), (Place(torch.tensor(0.0)),)))
    steps.append(Compute("keep", (1, 1, logits.size), whole(logits), (whole(both),)))
    found = {}
    if together:
        joined = brought_together(steps, positions=shape.positions, logits=logits)
        assert not joined.failed
        steps, found = joined.steps, {kind: count for kind, count in joined.counts.items() if count}
    program = CompiledProgram(library, steps, tokens=shape.tokens, positions=shape.positions, logits=logits)
    pages = torch.zeros(1, 1, 2, HEADS, PAGE_TOKENS, WIDTH, dtype=shape.dtype)
    batch = PagedAttention(library, pages).make_batch(np.array([[0]], dtype=np.int32), np.array([[0, ROWS, 0, 0]]))
    every = torch.arange(ROWS)
    out = program(every, every * 2 + 1, every, attention=batch, lora=None, longest=2 * ROWS)
    every_number = torch.cat((out.float().flatten(), pages.float().flatten()))
    return found, every_number.nan_to_num(nan=NO_NUMBER).view(torch.int32)


# -- one thing changed -----------------------------------------------------------------------------------------------

OTHER_OPERATION = {
    "add": "subtract", "multiply": "add", "mean": "sum", "rsqrt": "exp", "silu": "gelu", "negative": "copy",
    "copy": "negative", "cos": "exp", "sin": "exp",
}  # fmt: skip


def near_misses(shape: Shape) -> Iterator[Near]:
    steps, results = shape.steps, shape.results
    for number, step in enumerate(steps):
        assert isinstance(step, Compute)
        for what, changed in _other_steps(shape, step):
            yield Near(f"{what} in step {number}, {step.operation}", _with(steps, number, changed), results)
        for value in written_by(step):
            yield from _other_uses(shape, number, value)
    for value in dict.fromkeys(value for step in steps for value in written_by(step)):
        if any(step.operation == "write" and value in read_by(step) for step in steps):
            continue  # it must have the type of the pages
        other = Value(value.size, BFLOAT if value.dtype is FLOAT else FLOAT)
        retyped = [_instead(step, value, other) for step in steps]
        yield Near(
            f"other type of a value of {value.size}", retyped, [other if one is value else one for one in results]
        )
        writers = [number for number, step in enumerate(steps) if value in written_by(step)]
        for first, second in combinations(writers, 2):
            one, other_one = steps[first], steps[second]
            assert isinstance(one, Compute)
            assert isinstance(other_one, Compute)
            exchanged = _with(steps, first, replace(one, out=other_one.out))
            yield Near("exchanged parts", _with(exchanged, second, replace(other_one, out=one.out)), results)


def _with(steps: Sequence[Step], number: int, *instead: Step) -> list[Step]:
    return [*steps[:number], *instead, *steps[number + 1 :]]


def _other_steps(shape: Shape, step: Compute) -> Iterator[tuple[str, Compute]]:
    if step.operation in OTHER_OPERATION:
        yield "other operation", replace(step, operation=OTHER_OPERATION[step.operation])
    if len(step.inputs) == 2:
        yield "exchanged operands", replace(step, inputs=step.inputs[::-1])
    for number, place in enumerate(step.inputs):
        for what, other in _other_places(shape, step, place):
            inputs = (*step.inputs[:number], other, *step.inputs[number + 1 :])
            yield f"{what} as operand {number}", replace(step, inputs=inputs)
    if step.out is not None and step.operation != "mean":
        transposed = replace(step.out, strides=(0, 1, step.sizes[1]))
        if step.sizes[1] > 1 and step.sizes[1] * step.sizes[2] == step.out.of.size:
            yield "transposed result", replace(step, out=transposed)


def _other_places(shape: Shape, step: Compute, place: Place) -> Iterator[tuple[str, Place]]:
    of, sizes = place.of, step.sizes
    if isinstance(of, torch.Tensor):
        yield "constant of another type", replace(place, of=of.to(BFLOAT if of.dtype is FLOAT else FLOAT))
        yield "constant of several numbers", Place(numbers(sizes[2], dtype=of.dtype, seed=5), (0, 0, 1))
        yield "constant for each head", Place(numbers(sizes[1], sizes[2], dtype=of.dtype, seed=5), (0, sizes[2], 1))
        yield "constant with gaps", Place(numbers(sizes[2], 2, dtype=of.dtype, seed=5)[:, 0], (0, 0, 2))
        return
    assert isinstance(of, Value)
    if of.dtype is not torch.int64:
        yield "other numbers", replace(place, of=shape.given(of.size, of.dtype))
        yield "constant", replace(place, of=numbers(of.size, dtype=of.dtype, seed=7))
    if step.operation == "write":  # it goes through heads alone
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


@pytest.mark.parametrize("dtype", [FLOAT, BFLOAT], ids=str)
@pytest.mark.parametrize("make", SHAPES)
def test_what_is_brought_together_keeps_its_bits(make: Callable[[Shape], None], dtype: torch.dtype) -> None:
    library = compiled_library()
    shape = Shape(dtype)
    make(shape)
    right = Near("", shape.steps, shape.results)
    found, result = bits(library, shape, right, together=True)
    assert found == SHAPES[make]
    assert torch.equal(result, bits(library, shape, right, together=False)[1])
    different = [
        near.what
        for near in near_misses(shape)
        if not torch.equal(*(bits(library, shape, near, together=together)[1] for together in (True, False)))
    ]
    assert not different
