"""Linears in C++: weights packed in the order of their reads, and products with any number of rows."""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

import torch

from motet_kernels.cpp.library import TYPES, Library
from motet_kernels.decoder_weights import ROWS_AT_ONCE, squares_of_rows

Allocate = Callable[[int, torch.dtype], torch.Tensor]
"""Allocates this number of elements of the type"""

PART_BYTES = 8 << 20
"""How many bytes of weights `parts` packs before it yields"""


class PackedWeights:
    """Weights [outputs, inputs] of linears that are fed the same rows, packed one after the other.

    The results of all these linears are columns of one matrix. Each linear's number of columns is rounded up to whole
    panels of the library.
    """

    def __init__(
        self,
        library: Library,
        weights: Sequence[torch.Tensor],
        *,
        later: bool = False,
        allocate: Allocate = lambda count, dtype: torch.empty(count, dtype=dtype),
    ) -> None:
        """`later`: nothing is packed yet; the caller packs the weights by `parts`."""
        self._library = library
        self.dtype = weights[0].dtype
        self.inputs = weights[0].shape[1]
        self.outputs = [len(weight) for weight in weights]
        self._type = TYPES[self.dtype]
        sizes: list[int] = [library.packed_size(outputs, self.inputs) for outputs in self.outputs]
        self._begins: list[int] = [0, *accumulate(sizes)]
        widths = [library.packed_width(outputs) for outputs in self.outputs]
        self.columns = [0, *accumulate(widths)]
        """The first column of each linear; the last entry is the number of all columns."""
        self._packed = allocate(self._begins[-1], self.dtype)
        if not later:
            for _ in self.parts(weights):
                pass

    def parts(self, weights: Sequence[torch.Tensor]) -> Iterator[None]:
        """Pack the weights, a few at a time. The packed weights may be used only after the last part."""
        panel: int = self._library.packed_width(1)
        at_once = max(panel, PART_BYTES // (self.inputs * self.dtype.itemsize) // panel * panel)
        for index, weight in enumerate(weights):
            for first in range(0, len(weight), at_once):
                some = weight[first : first + at_once]
                rows = some if some.stride(1) == 1 else some.contiguous()
                self._library.pack(
                    self._type,
                    rows.data_ptr(),
                    rows.stride(0),
                    len(rows),
                    self.inputs,
                    self.address_of(index, first),
                    torch.get_num_threads(),
                )
                yield

    @property
    def address(self) -> int:
        return self._packed.data_ptr()

    def address_of(self, index: int, row: int = 0) -> int:
        """The address of the panel of a weight that begins at the weight's row `row`."""
        before: int = self._library.packed_size(row, self.inputs)
        return self.address + (self._begins[index] + before) * int(self.dtype.itemsize)

    def linear(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, index: int = 0, *, threads: int | None = None
    ) -> torch.Tensor:
        """x · Wᵀ (+ bias) with one of the linears, for x [..., inputs]. `threads`; None: as many as torch uses."""
        outputs = self.outputs[index]
        rows = x.reshape(-1, self.inputs)
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        if rows.dtype is not self.dtype:
            raise ValueError(f"the weights are {self.dtype}, the rows {rows.dtype}")
        if bias is not None and (bias.dtype is not self.dtype or bias.shape != (outputs,)):
            raise ValueError(f"the bias is {tuple(bias.shape)} {bias.dtype}, and the weights have {outputs} outputs")
        y = rows.new_empty((len(rows), outputs))
        self._library.linear(
            self._type,
            rows.data_ptr(),
            rows.stride(0),
            len(rows),
            self.inputs,
            self.address_of(index),
            None if bias is None else bias.data_ptr(),
            y.data_ptr(),
            outputs,
            outputs,
            threads or torch.get_num_threads(),
        )
        return y.view(*x.shape[:-1], outputs)

    def rows(self, of: torch.Tensor) -> torch.Tensor:
        """Unpacks rows of the first weight: for an embedding that shares its matrix with a linear."""
        return self._rows(of, 0)

    def squares(self, index: int) -> torch.Tensor:
        every = torch.arange(self.outputs[index])
        return torch.cat([squares_of_rows(self._rows(some, index)) for some in every.split(ROWS_AT_ONCE)])

    def _rows(self, of: torch.Tensor, index: int) -> torch.Tensor:
        into = torch.empty((*of.shape, self.inputs), dtype=self.dtype)
        of = of.contiguous()
        if of.numel() and not 0 <= int(of.min()) <= int(of.max()) < self.outputs[index]:
            raise IndexError("there is no such row")
        begin = self.address_of(index)
        self._library.unpack(self._type, begin, self.inputs, of.data_ptr(), of.numel(), into.data_ptr())
        return into
