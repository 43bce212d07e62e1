"""Where the matrices of an adapter are inside its run, which is one contiguous piece of memory.

All offsets depend on the rank alone. So kernels find each matrix of an adapter from its rank and the address of its
run. The bytes of a run are taken from the memory for KV (S3-02).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

SCALE_ROWS = 2
"""How many rows of rank an adapter takes for what scales and shifts the linears' own results"""

MAX_TILE = 16
"""The largest tile of a back end. A larger tile would waste memory on adapters of small ranks."""

ALIGNMENT_BYTES = 64
"""The alignment of each group's A and each B: a cache line of a CPU, and more than the widest load of a GPU."""


@dataclass(frozen=True)
class LinearGroup:
    """Linears that are fed the same tensor, such as q, k and v of a layer, in the order in which they are called."""

    inputs: int
    outputs: dict[str, int]
    """Linear → its number of outputs."""


@dataclass(frozen=True, eq=False)
class RunLayout:
    """The layout of all adapters of one rank, which is a multiple of the back end's tile.

    Group after group: first the Aᵀ [rank, inputs] of all linears of the group, as one matrix, then the B [rank,
    outputs] of each linear. In both, the numbers of one rank are contiguous: on a CPU, this took as little as a third
    of the time for one or two rows.
    """

    rank: int
    groups: Sequence[LinearGroup]
    dtype: torch.dtype

    @cached_property
    def offsets(self) -> dict[str, tuple[int, int]]:
        """Linear → where its A and its B begin, in bytes."""
        return self._laid_out[0]

    @cached_property
    def bytes(self) -> int:
        return self._laid_out[1]

    @cached_property
    def parts(self) -> Sequence[tuple[int, int, str]]:
        """Offset, bytes and linear of each part that is multiplied as one matrix: each group's A (no linear: ""), each
        B."""
        of_one = self.rank * self.dtype.itemsize
        found = []
        for group in self.groups:
            found.append((self.begin(group), len(group.outputs) * group.inputs * of_one, ""))
            found += [(self.offsets[linear][1], outputs * of_one, linear) for linear, outputs in group.outputs.items()]
        return found

    @cached_property
    def _laid_out(self) -> tuple[dict[str, tuple[int, int]], int]:
        end, begin_a, begin_b = 0, {}, {}
        for group in self.groups:
            for linear in group.outputs:
                begin_a[linear] = end
                end += self.rank * group.inputs * self.dtype.itemsize
            end = _aligned(end)
            for linear, outputs in group.outputs.items():
                begin_b[linear] = end
                end = _aligned(end + self.rank * outputs * self.dtype.itemsize)
        return {linear: (begin_a[linear], begin_b[linear]) for linear in begin_a}, end

    @cached_property
    def _widths(self) -> dict[str, tuple[int, int]]:
        return {linear: (group.inputs, outputs) for group in self.groups for linear, outputs in group.outputs.items()}

    def begin(self, group: LinearGroup) -> int:
        """The byte where the matrices of a group begin, and the matrices of the previous group end."""
        return self.offsets[next(iter(group.outputs))][0]

    def matrices(self, run: torch.Tensor, linear: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Aᵀ [rank, inputs] and B [rank, outputs] of a linear, as views of a run [bytes]. For several runs [runs,
        bytes], the views have a first dimension `runs`."""
        (a, b), (inputs, outputs) = self.offsets[linear], self._widths[linear]
        return self._view(run, a, inputs), self._view(run, b, outputs)

    def group_a(self, run: torch.Tensor, group: LinearGroup) -> torch.Tensor:
        """Aᵀ [linears · rank, inputs] of all linears of a group, for one product with their common input"""
        return self._view(run, self.begin(group), group.inputs, len(group.outputs))

    def write(self, run: torch.Tensor, linear: str, a: torch.Tensor, b: torch.Tensor, scale: float) -> None:
        """Put lora_A [rank, in] and lora_B [out, rank], as PEFT saves them, into a run; B gets the scale (PU-08).

        The rows between the adapter's rank and the layout's are not written, so a new run must be zeros.
        """
        into_a, into_b = self.matrices(run, linear)
        rank = a.shape[0]
        into_a[:rank] = a
        # Turned first, so that what comes after it is contiguous: in strides it takes longer.
        turned = b.new_empty(b.shape[::-1], dtype=torch.float32).copy_(b.t())
        into_b[:rank] = turned.mul_(scale)

    def write_alike(
        self, run: torch.Tensor, linears: Sequence[str], a: torch.Tensor, b: torch.Tensor, scales: Sequence[float]
    ) -> None:
        """The same for linears of one shape, in a run on the host: lora_A [linears, rank, in] and lora_B [linears, out,
        rank]. What is computed for all together takes hardly longer than for one."""
        widths = a.shape[2], b.shape[1]
        if not a.shape[1] == b.shape[2] <= self.rank or any(self._widths[linear] != widths for linear in linears):
            raise ValueError(f"{linears[0]}: {tuple(a.shape)} and {tuple(b.shape)} do not fit the layout")
        turned = b.new_empty((len(b), b.shape[2], b.shape[1]), dtype=torch.float32).copy_(b.mT)
        turned.mul_(torch.tensor(scales, dtype=torch.float32)[:, None, None])
        into = run.numpy()
        for number, of_each in enumerate((a, turned)):
            every = of_each.to(self.dtype).contiguous().view(torch.uint8).numpy().reshape(len(linears), -1)
            for linear, values in zip(linears, every, strict=True):
                begin = self.offsets[linear][number]
                into[begin : begin + len(values)] = values

    def scaling(self, run: torch.Tensor, linear: str) -> tuple[torch.Tensor, torch.Tensor]:
        """d and e [outputs], as views of a run: y becomes y + d · y + e before the product is added. They are the last
        rows of B. The same rows of Aᵀ are zeros, so that a product with all of B adds nothing more.

        d is the scale less one: numbers near 0 keep more of their digits in bf16."""
        b = self.matrices(run, linear)[1]
        return b[-2], b[-1]

    def is_finite(self, run: torch.Tensor, linear: str) -> bool:
        """True if what `write` and `write_scaling` have put into B are numbers"""
        return bool(self.matrices(run, linear)[1].isfinite().all())

    def write_scaling(self, run: torch.Tensor, linear: str, scale: torch.Tensor, shift: torch.Tensor) -> None:
        """`scale`, `shift` [outputs] in fp32. The adapter's own rank must leave SCALE_ROWS rows of the layout's."""
        d, e = self.scaling(run, linear)
        d.copy_(scale - 1)
        e.copy_(shift)

    def stored(self, run: torch.Tensor, linear: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Aᵀ [rank, inputs] and B [rank, outputs] of a linear in fp32: copies; Aᵀ of integers is multiplied by the
        scales."""
        a, b = self.matrices(run, linear)
        return a.float(), b.float()

    def _view(self, run: torch.Tensor, begin: int, width: int, count: int = 1) -> torch.Tensor:
        rows = count * self.rank
        part = run.narrow(-1, begin, rows * width * self.dtype.itemsize).view(self.dtype)
        return part.view(*run.shape[:-1], rows, width)


def scale(y: torch.Tensor, d: torch.Tensor, e: torch.Tensor) -> None:
    """y += d · y + e in place, rounded once"""
    wide = y.float()
    y.copy_(torch.addcmul(wide + e.float(), wide, d.float()))


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
