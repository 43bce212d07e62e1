"""Cuts each row of probabilities by top-k, top-p and min-p.

The tokens of a row have an order: the most likely first, equally likely ones by id. Each cut keeps the first tokens of
that order. top-k keeps `top_k` tokens. top-p keeps a token if the tokens before it sum to less than `top_p` times the
sum of all that top-k keeps. min-p keeps tokens with at least `min_p` times the largest probability. The first token is
always kept.
"""

from dataclasses import dataclass

import numpy as np
import torch

ALL = 1 << 62
"""The top_k that cuts nothing"""


@dataclass(frozen=True, slots=True)
class Cuts:
    """All tensors are [rows, 1]."""

    top_k: torch.Tensor
    """int64; less than the vocabulary, or ALL"""
    top_p: torch.Tensor
    """float64; infinity keeps all"""
    min_p: torch.Tensor | None
    """float32; 0 keeps all; None: no row has a min_p"""

    def of(self, rows: torch.Tensor) -> "Cuts":
        return Cuts(self.top_k[rows], self.top_p[rows], None if self.min_p is None else self.min_p[rows])


def is_cut_within(first: torch.Tensor, cuts: Cuts) -> bool:
    """True if it is certain that the cuts keep fewer tokens of each row than `first` has: then `first` is enough.
    `first`: the negated probabilities of the first tokens."""
    numbers, top_k, top_p = first.numpy(), cuts.top_k.numpy(), cuts.top_p.numpy()
    # top-p cuts the last of the first tokens if those before it already reach top_p.
    reached = -numbers[:, :-1].sum(axis=-1, keepdims=True, dtype=np.float64) >= top_p
    if cuts.min_p is not None:
        reached |= -numbers[:, -1:] < cuts.min_p.numpy() * -numbers[:, :1]
    # If both top-k and top-p cut, `cut` needs the sum of all that top-k keeps.
    reached &= (top_k == ALL) | (top_p >= 1)
    reached |= top_k < numbers.shape[1]
    return bool(reached.all())


def cut(
    likely: torch.Tensor, negated: torch.Tensor, cuts: Cuts, *, ask: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """The probabilities with 0 for tokens that are cut, and the smallest kept probability. `likely`: probabilities
    of some tokens of each row, in the order of their ids. `negated`: their negative values in ascending order, as a
    search needs; the end may be missing if all tokens there are cut. `ask`: look whether a cut divides equally
    likely tokens, and save work if none does. This waits for the device.
    """
    upto = exact_sums(negated).neg_()
    count = cuts.top_k.clamp(max=negated.shape[1])
    whole = torch.where(cuts.top_k == ALL, 1.0, upto.gather(1, count - 1))
    count = torch.minimum(count, torch.searchsorted(upto, cuts.top_p * whole) + 1)
    if cuts.min_p is not None:
        count = torch.minimum(count, torch.searchsorted(negated, cuts.min_p * negated[:, :1], right=True))
    last = negated.gather(1, count - 1)
    smallest = -last
    # A product is much faster than masked_fill, which branches.
    kept = likely * (likely >= smallest)
    too_many = torch.searchsorted(negated, last, right=True) - count
    if not ask or bool(too_many.any()):
        equal = likely == smallest
        staying = count - torch.searchsorted(negated, last)
        kept *= ~equal | (equal.cumsum(dim=-1) <= staying)
    return kept, smallest


def exact_sums(values: torch.Tensor) -> torch.Tensor:
    """Exact cumulative sums. Converting first is ten times as fast as `cumsum(dtype=float64)`."""
    return values.double().cumsum(dim=-1)
