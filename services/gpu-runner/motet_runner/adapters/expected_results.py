"""What an adapter's linears must give for four fixed rows, by kernels' reference, from the tensors that were checked.

A thread reads the tensors again, and shares nothing with the load but the reader, what is known of the base, and the
layout: what that says of the config was read twice, by rules that share no code (`second_reading`). The thread may be
ahead of the engine by a few linears only: then it waits.

While sequences run, the thread computes, too. If none does, the engine's thread computes what the other one has read:
two threads that compute beside each other take Python's lock from each other with each operator, which takes nearly as
long again. What takes long, the thread always computes: a sequence may come at any time.
"""

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from typing import NamedTuple

import torch

from motet_kernels import PlacedAdapter, RunLayout, Segment
from motet_kernels.reference import add_lora
from motet_runner.adapters.host_load import BaseLinear, BaseLinearOf, norms_of_changed
from motet_runner.adapters.layout import AdapterLayout, LoraLinear
from motet_runner.adapters.load_threads import THREADS
from motet_runner.adapters.weight_reader import WeightReader, has_changed

ROWS = 4
"""Half of them begin with zeros as the linear's own result, so that the product stands alone."""
MAX_AHEAD = 4
"""The number of times that the thread may be ahead, each with some linears"""
MAX_AT_ONCE = 16
"""How many linears of one shape are computed together, if their matrices take no more than `MAX_BYTES_AT_ONCE`"""
MAX_BYTES_AT_ONCE = 4 << 20
FP32_STEP = 2.0**-24
"""By what share one number is rounded in fp32 at most"""
FP32_ROUNDING = 4 * FP32_STEP
"""The same of what a linear computes, but for its long sums"""
ROUNDING = {torch.float64: 2.0**-52, torch.float32: FP32_ROUNDING, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
"""By the type of the rows"""
ROUNDING_OF_LENGTHS = 2.0**-12
"""Of the squares of DoRA's lengths, which the load computes in fp32: 30 times what sums of 14,336 products explain"""
INT8_ROUNDING = 1 / 254
"""Of adapters in integers"""

_Types = tuple[tuple[str, tuple[int, ...]], ...]
"""Of A and B, with their shapes"""


class _Scales(NamedTuple):
    c: torch.Tensor
    e: torch.Tensor
    squares: torch.Tensor
    """Of what e is the sum of"""


class Expected(NamedTuple):
    linears: tuple[str, ...]
    """Of one shape: what is computed for all together costs hardly more than for each"""
    rows: torch.Tensor
    """[ROWS, inputs] in the engine's type"""
    own: torch.Tensor
    """[linears, ROWS, outputs] the linears' own results, in the engine's type"""
    result: torch.Tensor
    """[linears, ROWS, outputs] in fp64"""
    explained: torch.Tensor
    """[linears, ROWS, outputs] in fp64: by how much rounding moves a result. 0 where nothing may change."""
    of_row: torch.Tensor
    """[linears, ROWS, 1] of each row, the root of its mean square"""
    in_integers: bool
    """Whether the device has the adapter in 8-bit integers"""


Compute = Callable[[], Expected]
"""Of what has been read"""


class ExpectedResults:
    def __init__(
        self, adapter: AdapterLayout, layout: RunLayout, dtype: torch.dtype, base: BaseLinearOf | None
    ) -> None:
        """`layout`: of the engine's memory; `dtype`: of the engine's rows"""
        self.linears = sum(len(group.outputs) for group in layout.groups)
        """How many there are, with those that the adapter must not change"""
        self._adapter = adapter
        self._layout = layout
        self._dtype = dtype
        self._base = base
        self._in_integers = layout.dtype is torch.int8
        self._rounding = max(ROUNDING[dtype], INT8_ROUNDING if self._in_integers else 0.0)
        self._thread_computes = True
        self._read: deque[Compute] = deque()
        self._found: deque[Expected | BaseException] = deque()
        self._changes = threading.Condition()
        self._given_up = False
        THREADS.run(self._run)

    def let_thread_compute(self, *, computes: bool) -> None:
        """Whether the thread computes what it has read, and not who takes it"""
        with self._changes:
            if computes != self._thread_computes:
                self._thread_computes = computes
                self._changes.notify()

    def take(self, wait_seconds: float = 0.0) -> Expected | None:
        """Of any linears that were not taken yet; None if nothing is there yet. Raises the error of the thread."""
        with self._changes:
            if not self._changes.wait_for(
                lambda: self._found or (self._read and not self._thread_computes), wait_seconds
            ):
                return None
            found = self._found.popleft() if self._found else self._read.popleft()
            self._changes.notify()
        if isinstance(found, BaseException):
            raise found
        return found if isinstance(found, Expected) else found()

    def give_up(self) -> None:
        """Nobody takes any more."""
        with self._changes:
            self._given_up = True
            self._changes.notify()

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                for read in self._all():
                    if not self._put(read):
                        return
                self._compute_until(lambda: not self._read)
        except BaseException as error:  # `take` raises it on the engine's thread
            with self._changes:
                self._found.append(error)
                self._changes.notify()

    def _put(self, read: Expected | Compute) -> bool:
        """False: given up"""
        with self._changes:
            if isinstance(read, Expected):
                self._found.append(read)
            else:
                self._read.append(read)
            self._changes.notify()
        return self._compute_until(lambda: len(self._found) + len(self._read) < MAX_AHEAD)

    def _compute_until(self, done: Callable[[], bool]) -> bool:
        """Compute what has been read, as long as that is for the thread to do. False: given up"""
        while True:
            with self._changes:
                self._changes.wait_for(lambda: self._given_up or done() or (self._thread_computes and bool(self._read)))
                if self._given_up or not (self._thread_computes and self._read):
                    return not self._given_up
                compute = self._read.popleft()
            found = compute()
            with self._changes:
                self._found.append(found)
                self._changes.notify()

    def _all(self) -> Iterator[Expected | Compute]:
        try:
            linears = {linear.module: linear for linear in self._adapter.linears}
        except (OSError, ValueError) as error:
            raise has_changed(self._adapter) from error
        unchanged: defaultdict[tuple[int, int], list[str]] = defaultdict(list)
        alike: defaultdict[tuple[int, int, bool, _Types], list[LoraLinear]] = defaultdict(list)
        for group in self._layout.groups:
            for module, outputs in group.outputs.items():
                linear = linears.get(module)
                if linear is None:
                    unchanged[group.inputs, outputs].append(module)
                else:
                    types = tuple((one.dtype, one.shape) for one in (linear.a, linear.b) if one is not None)
                    alike[group.inputs, outputs, linear.scales, types].append(linear)
        for (inputs, outputs), modules in unchanged.items():
            for first in range(0, len(modules), MAX_AT_ONCE):
                names = tuple(modules[first : first + MAX_AT_ONCE])
                yield partial(self._unchanged, names, inputs, outputs)
        last: Expected | Compute | None = None
        with WeightReader(self._adapter) as matrices:  # the last one only once the file is known to be the same still
            for (inputs, outputs, *_), of_shape in alike.items():
                rank = of_shape[0].a.shape[0] if of_shape[0].a is not None else 1
                size = 8 * rank * (inputs + outputs)
                most = max(1, min(MAX_AT_ONCE, MAX_BYTES_AT_ONCE // size))
                for first in range(0, len(of_shape), most):
                    some = of_shape[first : first + most]
                    a, b = self._matrices(some, matrices, inputs, outputs)
                    scales = self._all_scales(some, matrices, a, b) if some[0].scales else None
                    if last is not None:
                        yield last
                    compute = partial(self._changed, some, a, b, scales)
                    last = compute if size * len(some) <= MAX_BYTES_AT_ONCE else compute()
        if last is not None:
            yield last

    def _unchanged(self, names: tuple[str, ...], inputs: int, outputs: int) -> Expected:
        rows, own = self._rows(inputs, outputs)
        owns = own.repeat(len(names), 1, 1)
        none = torch.zeros(owns.shape, dtype=torch.float64)
        return Expected(names, rows, owns, owns.double(), none, none[:, :, :1], self._in_integers)

    def _rows(self, inputs: int, outputs: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows, and the linear's own result, as it is for half of them"""
        return fixed_rows(inputs, 1, self._dtype), fixed_rows(outputs, 2, self._dtype)

    def _changed(
        self, linears: Sequence[LoraLinear], a: torch.Tensor, b: torch.Tensor, scales: _Scales | None
    ) -> Expected:
        """Of linears of one shape. All that has as many numbers as their matrices is passed as seldom as can be."""
        inputs, outputs = a.shape[2], b.shape[1]
        rows, own = self._rows(inputs, outputs)
        a, b = a.double(), b.double()
        scale = torch.tensor([one.scale for one in linears], dtype=torch.float64)[:, None, None]
        if scales is not None:
            b = scales.c.unsqueeze(2) * b
        wide_rows = rows.double()
        # The squares of the sizes of what is summed, as errors that are independent of each other add up: of all single
        # products, and of the sums of one rank.
        product = wide_rows @ a.mT
        singles, sums = self._of_single_products(wide_rows, a), product.square()
        of_b, of_scale, of_sizes = self._squares_of_b(b, product), scale.square(), singles + sums
        # A number that is nearly 0 is off by a whole step, not by a share of itself: one of B, which is stored with the
        # scale, of the result, of A, or of the product with A.
        step = (torch.finfo(self._dtype).smallest_normal * torch.finfo(self._dtype).eps) ** 2
        of_steps = step * (wide_rows.square().sum(1, keepdim=True) + 1)
        # A sum of n products is rounded n times in fp32, each time by a step's share of what is summed so far. These
        # errors are independent of each other, and the square of the sum of k products is about k/n of `singles`. So
        # the squares of the errors add up to step² · n/2 · `singles`: the error grows with the root of n.
        wide = FP32_STEP**2 * (inputs / 2) * singles
        # The linear's own result is as large as what is added to it, so that rounding hides neither.
        mean_of_b = of_b.new_full((1, outputs), 1 / outputs) @ of_b
        typical = (of_scale * of_sizes.mean(1, keepdim=True) * mean_of_b).sum((1, 2), keepdim=True)
        if scales is not None:
            changed, shifted = (scales.c - 1).abs(), scales.e.square()
            if self._in_integers:  # a row of integers is as coarse as its largest number asks for
                changed, shifted = (one.amax(1, keepdim=True).expand_as(one) for one in (changed, shifted))
            typical = typical + shifted.mean(1)[:, None, None]
        typical = typical.sqrt()
        owns = own.new_zeros(len(linears), ROWS, outputs)
        owns[:, ROWS // 2 :] = own[ROWS // 2 :].double() * torch.where(typical > 0, typical, 1.0)
        result = _reference(owns, rows, (a, b, scale), scales)
        share = self._rounding**2
        of_ranks = of_scale * torch.add(wide + of_steps, of_sizes, alpha=share)
        explained = torch.baddbmm(step * (sums.sum(2, keepdim=True) + 1), of_ranks, of_b.mT)
        scaled_owns = owns[:, ROWS // 2 :].double()
        if scales is not None:
            scaled_owns *= (1 + changed).unsqueeze(1)
            explained += (share * shifted + FP32_ROUNDING**2 * scales.squares).unsqueeze(1)
        explained[:, ROWS // 2 :].addcmul_(scaled_owns, scaled_owns, value=share)
        explained.addcmul_(result, result, value=share)
        of_row = explained.mean(2, keepdim=True).sqrt_()
        names = tuple(one.module for one in linears)
        return Expected(names, rows, owns, result, explained.sqrt_(), of_row, self._in_integers)

    def _matrices(
        self, linears: Sequence[LoraLinear], matrices: WeightReader, inputs: int, outputs: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[linears, rank, inputs] and [linears, outputs, rank] as they are stored"""
        every_a, every_b = [one.a for one in linears if one.a], [one.b for one in linears if one.b]
        if every_a and every_b:
            return matrices.read_alike(every_a), matrices.read_alike(every_b)
        count = len(linears)
        return (
            torch.zeros(count, 1, inputs, dtype=torch.float64),
            torch.zeros(count, outputs, 1, dtype=torch.float64),
        )

    def _of_single_products(self, rows: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        """[linears, ROWS, ranks] the sum of their squares"""
        if self._in_integers:  # a row of integers is as coarse as its largest number asks for
            return rows.square().sum(1)[:, None] * a.abs().amax(2).square().unsqueeze(1)
        return rows.square() @ a.square().mT

    def _squares_of_b(self, b: torch.Tensor, product: torch.Tensor) -> torch.Tensor:
        """[linears, outputs, ranks]"""
        squares = b.square()
        equal = _squares_of_equal_rows(product, b, self._rounding)
        if equal is not None:
            squares = torch.maximum(squares, equal)
        return torch.maximum(squares, squares.amax(1, keepdim=True)) if self._in_integers else squares

    def _all_scales(
        self, linears: Sequence[LoraLinear], matrices: WeightReader, a: torch.Tensor, b: torch.Tensor
    ) -> _Scales:
        each = (self._scales(one, matrices, *pair) for one, *pair in zip(linears, a.double(), b.double(), strict=True))
        return _Scales(*map(torch.stack, zip(*each, strict=True)))

    def _scales(self, linear: LoraLinear, matrices: WeightReader, a: torch.Tensor, b: torch.Tensor) -> _Scales:
        """y ← c·y + e + the product, for y with the linear's own bias. e may be much smaller than what it is the sum
        of: DoRA that changes little adds a bias and takes away nearly the same."""
        assert self._base is not None, "the adapter scales, and nothing is known of the base"
        base = self._base(linear.module)
        bias = torch.zeros(len(b), dtype=torch.float64) if base.bias is None else base.bias.double()
        c = torch.ones(len(b), dtype=torch.float64)
        if linear.magnitude is not None:
            c = matrices.read(linear.magnitude).double() / _lengths(base, a, linear.scale * b)
        added = [bias, -c * bias]  # DoRA scales the product without the bias
        if linear.lora_bias is not None:
            added.append(linear.scale * c * matrices.read(linear.lora_bias).double())
        if linear.bias is not None:
            added += [matrices.read(linear.bias).double(), -bias]
        every = torch.stack(added)
        return _Scales(c, every.sum(0), every.square().sum(0))


def _lengths(base: BaseLinear, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """[outputs] of the rows of W + B · A, computed in fp64. They are the load's where these are off by no more than
    rounding explains: where B · A takes away most of a row, a little rounding makes a large difference."""
    of_base = base.squares().double()
    crossed = torch.einsum("or,ro->o", b, base.multiply(a.float()).double())
    added = torch.linalg.vecdot(b, b @ (a @ a.mT))
    loaded = norms_of_changed(base, a.float(), b.float()).double()
    squares = of_base + 2 * crossed + added
    explained = ROUNDING_OF_LENGTHS * (of_base + 2 * crossed.abs() + added)
    return torch.where((loaded.square() - squares).abs() <= explained, loaded, squares.clamp_min(0).sqrt())


def _squares_of_equal_rows(product: torch.Tensor, b: torch.Tensor, rounding: float) -> torch.Tensor | None:
    """[linears, outputs, ranks] what stands for the squares of B where some ranks have one row of A, but for a factor:
    the errors of such ranks are equal, and not independent, so what B does with them is summed before it is squared.
    Each of these ranks gets an equal part. Rows of A are equal where their products with the fixed rows are."""
    lengths = torch.linalg.vector_norm(product, dim=1, keepdim=True)
    units = product / lengths.clamp_min(torch.finfo(product.dtype).tiny)
    cosines = units.mT @ units
    equal = cosines * (cosines.abs() > 1 - rounding**2 / 2)
    count = (equal != 0).sum(1, keepdim=True)
    if not (count > 1).any():
        return None
    parts = lengths.square() * count
    squares: torch.Tensor = ((b * lengths) @ equal).square()
    return squares / torch.where(parts > 0, parts, 1.0)


def _reference(
    owns: torch.Tensor,
    rows: torch.Tensor,
    matrices: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    scales: _Scales | None,
) -> torch.Tensor:
    name = "adapter"
    segment = Segment(0, ROWS, PlacedAdapter(name, 0, matrices[0].shape[1], frozenset()))
    c_and_e = None if scales is None else {name: (scales.c, scales.e)}
    return add_lora(owns, rows, [segment], {name: matrices}, c_and_e)


@lru_cache(maxsize=64)  # a model has a few widths
def fixed_rows(width: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[ROWS, width] the same numbers from -1 to 1 in each proof"""
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(ROWS, width, generator=generator, dtype=torch.float32) * 2 - 1).to(dtype)
