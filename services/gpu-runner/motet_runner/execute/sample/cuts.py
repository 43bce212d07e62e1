"""What top-k, top-p and min-p keep of each row of probabilities.

The tokens of a row have an order: the most likely first, equally likely ones by their ids. Each cut keeps the first
ones of that order: top-k the first `top_k`; top-p a token while those before it have less than top_p together, of what
top-k keeps; min-p those with at least its part of the largest probability. The first token always stays.
"""

from dataclasses import dataclass

import numpy as np
import torch

ALL = 1 << 62
"""As top_k: no cut."""


@dataclass(frozen=True, slots=True)
class Cuts:
    """Each [rows, 1]."""

    top_k: torch.Tensor
    """int64; less than the vocabulary, or ALL"""
    top_p: torch.Tensor
    """float64; infinity keeps all"""
    min_p: torch.Tensor | None
    """float32; 0 keeps all, and None all of all rows"""

    def of(self, rows: torch.Tensor) -> "Cuts":
        return Cuts(self.top_k[rows], self.top_p[rows], None if self.min_p is None else self.min_p[rows])


def is_cut_within(first: torch.Tensor, cuts: Cuts) -> bool:
    """Whether all that each row keeps is among its first tokens, and not all of these are kept. `first`: their
    probabilities with a minus."""
    numbers, top_k, top_p = first.numpy(), cuts.top_k.numpy(), cuts.top_p.numpy()
    # Without the last one, which is not to be kept.
    reached = -numbers[:, :-1].sum(axis=-1, keepdims=True, dtype=np.float64) >= top_p
    if cuts.min_p is not None:
        # What top-p keeps is a part of what top-k keeps, but min-p asks for the largest only.
        reached |= -numbers[:, -1:] < cuts.min_p.numpy() * -numbers[:, :1]
    # What top-k keeps in all must be known where top-p is a part of it.
    reached &= (top_k == ALL) | (top_p >= 1)
    reached |= top_k < numbers.shape[1]
    return bool(reached.all())


def cut(
    likely: torch.Tensor, negated: torch.Tensor, cuts: Cuts, *, ask: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """The probabilities with 0 for what the cuts remove, and the smallest that they keep. `likely`: some tokens of each
    row in the order of their ids; `negated`: the same, most likely first, with a minus: a search needs a rising order.
    It may lack the last ones, if the cuts keep fewer than those given. `ask` whether equal ones are cut apart, which
    saves work if none are.
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
    """Cumulative and exact. With dtype=float64 alone, cumsum takes ten times as long."""
    return values.double().cumsum(dim=-1)
