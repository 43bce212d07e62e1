"""Linears in plain torch: weights concatenated and, if this torch can, in the layout that its products read.

torch has operators for this layout. They are not public, so `reorders` tries them first: if they are missing, or
compute wrong results, the weights are only concatenated.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import accumulate

import torch
from torch.nn.functional import embedding, linear

from motet_kernels.decoder_weights import PACKED_TYPES, squares_of_rows

SAME = {torch.float32: 1e-4, torch.bfloat16: 0.05}
"""The largest allowed error of a result in the trial. The exact results are below 1."""


def padded(rows: int) -> int:
    """To how many rows `rows` rows are padded: oneDNN keeps a program (some hundred KiB) for each number of rows and
    shape of weights."""
    if rows <= 8:
        return 1 << (rows - 1).bit_length()
    step = 8 if rows <= 64 else 32 if rows <= 256 else 128
    return -(-rows // step) * step


class TorchWeights:
    """See PackedLinears."""

    def __init__(self, weights: Sequence[torch.Tensor], *, reordered: bool) -> None:
        """`parts` packs the weights. `reordered`: use the layout that torch's products read; see `reorders`."""
        self.dtype = weights[0].dtype
        self.inputs = weights[0].shape[1]
        self.outputs = [len(weight) for weight in weights]
        self.columns = [0, *accumulate(self.outputs)]
        self._weight = torch.empty(0, dtype=self.dtype)
        self._reordered = reordered

    def parts(self, weights: Sequence[torch.Tensor]) -> Iterator[None]:
        together = weights[0].contiguous() if len(weights) == 1 else torch.cat(tuple(weights))
        if self._reordered:
            together = torch.ops.mkldnn._reorder_linear_weight(together)  # noqa: SLF001 - see above
        self._weight = together
        yield

    def all_of(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x · Wᵀ (+ bias) with all linears: [rows, columns]"""
        if not self._reordered or not x.numel():
            return self._as_usual(x, bias)
        rows = x.shape[:-1].numel()
        multiply = torch.ops.mkldnn._linear_pointwise  # noqa: SLF001 - see above
        product: torch.Tensor = multiply(_padded(x), self._weight, bias, "none", [], "")
        return product[:rows].view(*x.shape[:-1], -1)

    def added_to(self, y: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """y + x · Wᵀ (+ bias)"""
        if not self._reordered:
            return self._as_usual(x, bias).add_(y)
        rows = x.shape[:-1].numel()
        multiply = torch.ops.mkldnn._linear_pointwise.binary  # noqa: SLF001 - see above
        added: torch.Tensor = multiply(_padded(x), _padded(y), self._weight, bias, "add")
        return added[:rows].view(*x.shape[:-1], -1)

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None, index: int = 0) -> torch.Tensor:
        if len(self.outputs) == 1:
            return self.all_of(x, bias)
        columns = slice(self.columns[index], self.columns[index + 1])
        if not self._reordered:
            return linear(x, self._weight[columns], bias)
        one = self.all_of(x)[..., columns]
        return one if bias is None else one + bias

    def rows(self, of: torch.Tensor) -> torch.Tensor:
        if self._reordered:
            raise ValueError("the rows have another order")
        return embedding(of, self._weight)

    def squares(self, index: int) -> torch.Tensor:
        weight = self._weight.to_dense() if self._reordered else self._weight
        return squares_of_rows(weight[self.columns[index] : self.columns[index + 1]])

    def _as_usual(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if self._reordered:  # there are no rows
            return x.new_empty((*x.shape[:-1], self.columns[-1]))
        return linear(x, self._weight, bias)


def _padded(x: torch.Tensor) -> torch.Tensor:
    """[padded rows, columns]"""
    x = x.reshape(-1, x.shape[-1])
    rows = len(x)
    size = padded(rows)
    if size == rows:
        return x
    larger = x.new_zeros((size, x.shape[1]))
    larger[:rows] = x
    return larger


@cache
def reorders(dtype: torch.dtype) -> bool:
    """True if this torch has the operators, and their results are right."""
    if dtype not in PACKED_TYPES or not torch.backends.mkldnn.is_available():
        return False
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32).mul_(0.1).to(dtype)

    weight, bias, y = random(80, 100), random(80), random(9, 80)
    try:
        weights = TorchWeights([weight], reordered=True)
        for _ in weights.parts([weight]):
            pass
        for rows in (1, 9):
            x = random(rows, 100)
            expected = linear(x.double(), weight.double(), bias.double())
            for found, wanted in (
                (weights.all_of(x, bias), expected),
                (weights.added_to(y[:rows], x, bias), expected + y[:rows].double()),
            ):
                if not float((found.double() - wanted).abs().max()) <= SAME[dtype]:
                    return False
    except (RuntimeError, AttributeError, NotImplementedError, TypeError):
        return False
    return True
