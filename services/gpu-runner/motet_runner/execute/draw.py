"""Draws one token from each row of logits: temperature, then top-k, top-p and min-p, then one number a token.

Probabilities are float32, rounded to multiples of 2^-52. Float64 adds such numbers without an error, in any order. So
the same numbers give the same token whatever else is computed beside the row, and a short cut gives the very token
that the whole row gives.

The tokens of a row have an order: the most likely first, equally likely ones by their ids. Each cut keeps the first
ones of that order: top-k so many; top-p a token while those before it have less than top_p together, of what top-k
keeps; min-p those with at least its part of the largest probability. The first token always stays.
"""

from dataclasses import dataclass

import numpy as np
import torch

CANDIDATES = 128
"""The short cut looks at so many of a row's most likely tokens. They suffice if the cuts keep fewer."""

SHORT_CUT_FROM = 32_768
"""With fewer tokens in the vocabulary, sorting all of a row costs no more than looking for the candidates."""

BLOCK = 64
"""A CPU adds up so many numbers at once, and then looks into one block only: cumulative sums of all take longer."""

ALL = 1 << 62
"""As top_k: no cut."""

_ROUNDS = 2.0**-29
"""A float32 from this on, up to its double, is a multiple of 2^-52: adding it rounds what is smaller."""


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


def probabilities(logits: torch.Tensor, largest: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """[rows, vocabulary] `largest`: each row's largest logit, finite. Less that, no logit can leave the numbers."""
    return (logits - largest).div_(temperature).softmax(dim=-1).add_(_ROUNDS).sub_(_ROUNDS)


def draw(likely: torch.Tensor, numbers: torch.Tensor, cuts: Cuts | None) -> torch.Tensor:
    """[rows] The token of each row of probabilities that its number in [0, 1) stands for; `numbers` [rows, 1].

    What the cuts keep lies side by side, in the order of token ids, each as wide as it is likely.
    """
    if cuts is None:
        return _at(likely, numbers)
    if likely.shape[1] < SHORT_CUT_FROM or not _may_suffice(likely, cuts):
        return _draw_from_all(likely, numbers, cuts)
    ordered, ids = likely.topk(CANDIDATES, dim=-1)
    ids = ids.sort(dim=-1).values
    kept, smallest = _cut(likely.gather(1, ids), ordered.neg(), cuts)
    tokens = ids.gather(1, _at(kept, numbers)[:, None]).squeeze(1)
    # All tokens that are more likely than the last candidate are candidates. So nothing is missing among those kept if
    # the least likely of them is one. What top-k keeps in all must be known where top-p is a part of it.
    missing = smallest <= ordered[:, -1:]
    missing |= (cuts.top_k > CANDIDATES) & (cuts.top_k < ALL) & (cuts.top_p < 1)
    if bool(missing.any()):
        rows = missing.squeeze(1).nonzero().squeeze(1)
        tokens[rows] = _draw_from_all(likely[rows], numbers[rows], cuts.of(rows))
    return tokens


def draw_without_waiting(likely: torch.Tensor, numbers: torch.Tensor, cuts: Cuts | None) -> torch.Tensor:
    """The same tokens, for a device that computes by itself: no value comes to the host to decide what is computed."""
    if cuts is None:
        return _at(likely, numbers)
    kept, _ = _cut(likely, likely.neg().sort(dim=-1).values, cuts, ask=False)
    return _at(kept, numbers)


def _may_suffice(likely: torch.Tensor, cuts: Cuts) -> bool:
    """Whether the candidates of some row can be all that the cuts keep. In a flat row, so few never reach top_p."""
    if cuts.min_p is not None:
        return True
    most = CANDIDATES * likely.amax(dim=-1, keepdim=True)
    return bool(((most >= cuts.top_p) | (cuts.top_k < CANDIDATES)).any())


def _draw_from_all(likely: torch.Tensor, numbers: torch.Tensor, cuts: Cuts) -> torch.Tensor:
    negated = _sorted(likely.neg())
    if likely.device.type == "cpu" and likely.shape[1] > 2 * CANDIDATES:
        first = negated[:, :CANDIDATES].contiguous()
        negated = first if _is_cut_within(first, cuts) else negated
    kept, _ = _cut(likely, negated, cuts)
    return _at(kept, numbers)


def _is_cut_within(first: torch.Tensor, cuts: Cuts) -> bool:
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


def _cut(
    likely: torch.Tensor, negated: torch.Tensor, cuts: Cuts, *, ask: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """The probabilities with 0 for what the cuts remove, and the smallest that they keep. `likely`: some tokens of each
    row in the order of their ids; `negated`: the same, most likely first, with a minus: a search needs a rising order.
    It may lack the last ones, if the cuts keep fewer than those given. `ask` whether equal ones are cut apart, which
    saves work if none are.
    """
    upto = _sums(negated).neg_()
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


def _at(likely: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """[rows] Where the number lies: the first place up to which there is more than its part of the row."""
    if likely.device.type == "cpu" and likely.shape[1] > 2 * BLOCK:
        return _at_by_blocks(likely, numbers)
    upto = _sums(likely)
    return torch.searchsorted(upto, numbers * upto[:, -1:], right=True).squeeze(1)


def _at_by_blocks(likely: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """The same: no sum has an error, so it does not matter in which order one is made."""
    rows, size = likely.shape
    if size % BLOCK:
        likely = torch.nn.functional.pad(likely, (0, -size % BLOCK))
    blocks = likely.view(rows, -1, BLOCK)
    sums = blocks.sum(dim=-1, dtype=torch.float64)
    upto = sums.cumsum(dim=-1)
    wanted = numbers * upto[:, -1:]
    block = torch.searchsorted(upto, wanted, right=True)
    inside = _sums(blocks.gather(1, block[:, :, None].expand(-1, -1, BLOCK)).squeeze(1))
    inside += (upto - sums).gather(1, block)
    return (block * BLOCK + torch.searchsorted(inside, wanted, right=True)).squeeze(1)


def _sums(values: torch.Tensor) -> torch.Tensor:
    """Cumulative and exact. With dtype=float64 alone, cumsum takes ten times as long."""
    return values.double().cumsum(dim=-1)


def _sorted(values: torch.Tensor) -> torch.Tensor:
    """Each row sorted. NumPy sorts floats with vector instructions, many times faster than torch on a CPU."""
    if values.device.type == "cpu":
        return torch.from_numpy(np.sort(values.numpy(), axis=-1))
    return values.sort(dim=-1).values
