"""What add_lora is measured against: the same product as people compute it without an operator of their own.

Each baseline adds to the same `y`, and takes the next set of adapters in each call. Its matrices are laid out as it
likes them best, before anything is measured.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from benchmarks.harness import Do
from motet_kernels.huge_pages import prefer_huge_pages

Matrices = tuple[torch.Tensor, torch.Tensor]
"""Aᵀ [rank, inputs] and B [rank, outputs] of an adapter"""


@dataclass(frozen=True)
class Case:
    """What is multiplied: rows [first, last) of each owner, and the rank of its adapter."""

    owners: list[int]
    ranks: list[int]

    @property
    def spans(self) -> list[tuple[int, int]]:
        return [
            (self.owners.index(owner), self.owners.index(owner) + self.owners.count(owner))
            for owner in range(len(self.ranks))
        ]


@dataclass(frozen=True)
class Product:
    """y [rows, outputs] += x [rows, inputs] @ A @ B, with the matrices of each row's owner, in the set that follows."""

    case: Case
    x: torch.Tensor
    y: torch.Tensor
    sets: Sequence[Sequence[Matrices]]


Baseline = Callable[[Product], Do]


def loop(product: Product) -> Do:
    """One adapter after the other."""
    x, y, spans = product.x, product.y, product.case.spans
    following = itertools.cycle([[(a.t(), b) for a, b in of_set] for of_set in product.sets])

    def do() -> None:
        for (first, last), (a, b) in zip(spans, next(following), strict=True):
            y[first:last].addmm_(x[first:last] @ a, b)

    return do


def gather(product: Product) -> Do:
    """The matrices of each row's adapter are collected, and all rows multiplied at once."""
    x, y = product.x, product.y
    owners = torch.tensor(product.case.owners, device=x.device)
    following = itertools.cycle(_stacks(product))

    def do() -> None:
        a, b = next(following)
        v = torch.bmm(x[:, None], a.index_select(0, owners).transpose(1, 2))
        y[:, None].baddbmm_(v, b.index_select(0, owners))

    return do


def grouped(product: Product) -> Do:
    """torch's grouped product: the rows of one adapter are a group."""
    x, y = product.x, product.y
    ends = torch.tensor([last for _, last in product.case.spans], dtype=torch.int32, device=x.device)
    following = itertools.cycle([(a.transpose(1, 2), b) for a, b in _stacks(product)])
    multiply = torch.nn.functional.grouped_mm

    def do() -> None:
        a, b = next(following)
        y.add_(multiply(multiply(x, a, offs=ends), b, offs=ends))

    return do


class _AddsToY(torch.nn.Linear):
    """In the place of PEFT's base linear: its product is not measured, and the adapters' is added to `y`."""

    def __init__(self, y: torch.Tensor, inputs: int) -> None:
        super().__init__(inputs, y.shape[1], bias=False, device="meta", dtype=y.dtype)
        self._y = y

    def forward(self, _: torch.Tensor) -> torch.Tensor:
        return self._y


def peft_layer(product: Product) -> Do:
    """PEFT's own layer, with the names of the rows' adapters."""
    from peft import LoraConfig
    from peft.tuners.lora import Linear as PeftLinear

    case, x = product.case, product.x
    # Their scale is 1, as that of our matrices.
    configs = [LoraConfig(r=rank, lora_alpha=rank, init_lora_weights=False) for rank in case.ranks]
    layer: PeftLinear | None = None
    for number, of_set in enumerate(product.sets):
        for owner, (a, b) in enumerate(of_set):
            name, config = f"{number}:{owner}", configs[owner]
            if layer is None:
                layer = PeftLinear(
                    _AddsToY(product.y, x.shape[1]), name, config, r=config.r, lora_alpha=config.lora_alpha
                )
            else:
                layer.update_layer(name, config.r, config.lora_alpha, config)
            layer.lora_A[name].weight = torch.nn.Parameter(a, requires_grad=False)
            layer.lora_B[name].weight = torch.nn.Parameter(b.t().contiguous(), requires_grad=False)
    assert layer is not None
    layer.eval()
    following = itertools.cycle([[f"{number}:{owner}" for owner in case.owners] for number in range(len(product.sets))])
    return lambda: layer(x, adapter_names=next(following))


def _stacks(product: Product) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The matrices of each set as one tensor: [adapters, rank, inputs] and [adapters, rank, outputs]."""
    return [(_stack([a for a, _ in of_set]), _stack([b for _, b in of_set])) for of_set in product.sets]


def _stack(matrices: Sequence[torch.Tensor]) -> torch.Tensor:
    first = matrices[0]
    into = torch.empty(len(matrices), *first.shape, dtype=first.dtype, device=first.device)
    if into.device.type == "cpu":
        into = prefer_huge_pages(into)
    return torch.stack(list(matrices), out=into)
