"""What an adapter's linears must give for four fixed rows, by kernels' reference, from the tensors that were checked.

A thread reads the tensors again, and shares nothing with the load but the reader and what is known of the base. It may
be ahead of the engine by a few linears only: then it waits.
"""

import queue
import threading
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import torch

from motet_kernels import LinearGroup, PlacedAdapter, RunLayout, Segment
from motet_kernels.reference import add_lora
from motet_runner.adapters.host_load import BaseLinearOf, norms_of_changed
from motet_runner.adapters.layout import AdapterLayout, LoraLinear
from motet_runner.adapters.weight_reader import WeightReader, has_changed

ROWS = 4
"""Half of them begin with zeros as the linear's own result, so that the product stands alone."""
MAX_AHEAD = 8
"""The number of linears by which the thread may be ahead"""
FP32_STEP = 2.0**-24
"""By what share one number is rounded in fp32 at most"""
FP32_ROUNDING = 4 * FP32_STEP
"""The same of what a linear computes, but for its long sums"""
LOOK_SECONDS = 0.2
"""How often a thread that waits looks whether it is still needed"""


class Expected(NamedTuple):
    linear: str
    rows: torch.Tensor
    """[ROWS, inputs] in the engine's type"""
    own: torch.Tensor
    """[ROWS, outputs] the linear's own result, in the engine's type"""
    result: torch.Tensor
    """[ROWS, outputs] in fp64"""
    size: torch.Tensor
    """[ROWS, outputs] in fp64: rounding moves a result by a share of this. 0 where nothing may change."""
    wide: torch.Tensor
    """[ROWS, outputs] in fp64: rounding in fp32 moves a result by a share of this, whatever the engine's type"""
    floor: torch.Tensor
    """[ROWS, outputs] in fp64: by how much the smallest steps of the engine's type move a result"""


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
        self._found: queue.Queue[Expected | BaseException] = queue.Queue(MAX_AHEAD)
        self._given_up = threading.Event()
        threading.Thread(target=self._run, name="adapter-proof", daemon=True).start()

    def take(self, wait_seconds: float = 0.0) -> Expected | None:
        """Of the next linear; None if it is not there yet. Raises the error of the thread."""
        try:
            found = self._found.get(timeout=wait_seconds) if wait_seconds else self._found.get_nowait()
        except queue.Empty:
            return None
        if isinstance(found, BaseException):
            raise found
        return found

    def give_up(self) -> None:
        """Nobody takes any more."""
        self._given_up.set()

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                for found in self._all():
                    if not self._put(found):
                        return
        except BaseException as error:  # `take` raises it on the engine's thread
            self._put(error)

    def _put(self, found: Expected | BaseException) -> bool:
        while not self._given_up.is_set():
            try:
                self._found.put(found, timeout=LOOK_SECONDS)
            except queue.Full:
                continue
            return True
        return False

    def _all(self) -> Iterator[Expected]:
        try:
            linears = {linear.module: linear for linear in self._adapter.linears}
        except (OSError, ValueError) as error:
            raise has_changed(self._adapter) from error
        rows = cache(lambda width, seed: fixed_rows(width, seed).to(self._dtype))
        with WeightReader(self._adapter) as matrices:
            for group in self._layout.groups:
                for module, outputs in group.outputs.items():
                    given = rows(group.inputs, 1)
                    linear = linears.get(module)
                    if linear is None:
                        own = rows(outputs, 2)
                        none = torch.zeros(own.shape, dtype=torch.float64)
                        yield Expected(module, given, own, own.double(), none, none, none)
                    else:
                        yield self._changed(group, linear, matrices, given, rows(outputs, 2))

    def _changed(
        self, group: LinearGroup, linear: LoraLinear, matrices: WeightReader, rows: torch.Tensor, own: torch.Tensor
    ) -> Expected:
        outputs = group.outputs[linear.module]
        if linear.a is not None and linear.b is not None:
            a, b = matrices.read(linear.a).double(), matrices.read(linear.b).double()
        else:
            a, b = torch.zeros(1, group.inputs, dtype=torch.float64), torch.zeros(outputs, 1, dtype=torch.float64)
        scales = self._scales(linear, matrices, a, b) if linear.scales else None
        ones, zeros = torch.ones(outputs, dtype=torch.float64), torch.zeros(outputs, dtype=torch.float64)
        c, e, parts = scales or (ones, zeros, zeros)
        b = c.unsqueeze(1) * b
        singles, sums = self._sizes(rows.double(), a, b, linear.scale)
        size = singles + sums + e.square()
        # The linear's own result is as large as what is added to it, so that rounding hides neither.
        typical = size.mean().sqrt()
        own = (own.double() * (typical if typical > 0 else 1.0)).to(self._dtype)
        own[: ROWS // 2] = 0
        name = "adapter"
        segment = Segment(0, ROWS, PlacedAdapter(name, 0, len(a), frozenset()))
        factors = None if scales is None else {name: (c, e)}
        result = add_lora(own, rows, [segment], {name: (a, b, linear.scale)}, factors)
        size += ((1 + (c - 1).abs()) * own.double()).square() + result.square()
        # A number that is nearly 0 is off by a whole step, not by a share of itself: one of B, which is stored with the
        # scale, of the result, of A, or of the product with A.
        inputs, of_outputs = rows.double(), linear.scale**2 * b.square().sum(1)
        steps = (inputs @ a.t()).square().sum(1, keepdim=True) + 1
        steps = steps + (inputs.square().sum(1, keepdim=True) + 1) * of_outputs
        floor = torch.finfo(self._dtype).smallest_normal * torch.finfo(self._dtype).eps * steps.sqrt()
        # A sum of n products is rounded n times in fp32, each time by a step's share of what is summed so far. These
        # errors are independent of each other, and the square of the sum of k products is about k/n of `singles`. So
        # the squares of the errors add up to step² · n/2 · `singles`: the error grows with the root of n.
        wide = parts + singles * (group.inputs / 2) * (FP32_STEP / FP32_ROUNDING) ** 2
        return Expected(linear.module, rows, own, result, size.sqrt(), wide.sqrt(), floor)

    def _sizes(
        self, rows: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[ROWS, outputs] the squares of the sizes of what is summed, of all single products and of the sums of one
        rank, as errors that are independent of each other add up"""
        product = rows @ a.t()
        if self._layout.dtype is torch.int8:  # a row of integers is as coarse as its largest number asks for
            a = a.abs().amax(1, keepdim=True).expand_as(a)
            b = b.abs().amax(0, keepdim=True).expand_as(b)
        squares = scale**2 * b.square().t()
        return rows.square() @ a.square().t() @ squares, product.square() @ squares

    def _scales(
        self, linear: LoraLinear, matrices: WeightReader, a: torch.Tensor, b: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """c and e: y ← c·y + e + the product, for y with the linear's own bias. And the squares of what e is the sum
        of, as e may be much smaller: DoRA that changes little adds a bias and takes away nearly the same."""
        assert self._base is not None, "the adapter scales, and nothing is known of the base"
        base = self._base(linear.module)
        bias = torch.zeros(len(b), dtype=torch.float64) if base.bias is None else base.bias.double().cpu()
        c = torch.ones(len(b), dtype=torch.float64)
        if linear.magnitude is not None:
            norms = norms_of_changed(base, a.float(), linear.scale * b.float())
            c = matrices.read(linear.magnitude).double() / norms.double().cpu()
        added = [bias, -c * bias]  # DoRA scales the product without the bias
        if linear.lora_bias is not None:
            added.append(linear.scale * c * matrices.read(linear.lora_bias).double())
        if linear.bias is not None:
            added += [matrices.read(linear.bias).double(), -bias]
        every = torch.stack(added)
        return c, every.sum(0), every.square().sum(0)


def fixed_rows(width: int, seed: int) -> torch.Tensor:
    """[ROWS, width] the same numbers from -1 to 1 in each proof"""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(ROWS, width, generator=generator, dtype=torch.float32) * 2 - 1
