"""Draws one token from each row of logits: temperature, then top-k, top-p and min-p, then one uniform number per token.

Probabilities are float32, rounded to multiples of 2^-52. Float64 adds such numbers without an error, in any order. So a
row's token does not depend on other rows, and the short cut gives the same token as the whole row.
"""

import numpy as np
import torch

from motet_runner.execute.sample.cuts import ALL, Cuts, cut, exact_sums, is_cut_within

CANDIDATES = 128
"""The short cut uses only this number of a row's most likely tokens. They suffice if the cuts keep fewer tokens."""

SHORT_CUT_FROM = 32_768
"""With fewer tokens in the vocabulary, sorting a whole row costs no more than finding the candidates."""

BLOCK = 64
"""A CPU sums numbers in blocks, and then searches one block only: cumulative sums of all numbers take longer."""

_ROUNDS = 2.0**-29
"""Every float32 in [this, 2 · this) is a multiple of 2^-52: adding this rounds smaller numbers."""


def probabilities(logits: torch.Tensor, largest: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """[rows, vocabulary] `largest`: each row's largest logit, finite. Its subtraction prevents overflow."""
    return (logits - largest).div_(temperature).softmax(dim=-1).add_(_ROUNDS).sub_(_ROUNDS)


def draw(likely: torch.Tensor, numbers: torch.Tensor, cuts: Cuts | None) -> torch.Tensor:
    """[rows] The token that each row's number in [0, 1) selects; `numbers` [rows, 1].

    The kept tokens divide the range in the order of their ids. Each part is proportional to the token's probability.
    """
    if cuts is None:
        return _at(likely, numbers)
    if likely.shape[1] < SHORT_CUT_FROM or not _may_suffice(likely, cuts):
        return _draw_from_all(likely, numbers, cuts)
    ordered, ids = likely.topk(CANDIDATES, dim=-1)
    ids = ids.sort(dim=-1).values
    kept, smallest = cut(likely.gather(1, ids), ordered.neg(), cuts)
    tokens = ids.gather(1, _at(kept, numbers)[:, None]).squeeze(1)
    # All tokens that are more likely than the last candidate are candidates. So no kept token is missing if the least
    # likely kept token is more likely than the last candidate. If top-k and top-p both cut, all tokens that top-k keeps
    # must be candidates: top-p keeps a share of their total.
    missing = smallest <= ordered[:, -1:]
    missing |= (cuts.top_k > CANDIDATES) & (cuts.top_k < ALL) & (cuts.top_p < 1)
    if bool(missing.any()):
        rows = missing.squeeze(1).nonzero().squeeze(1)
        tokens[rows] = _draw_from_all(likely[rows], numbers[rows], cuts.of(rows))
    return tokens


def draw_without_waiting(likely: torch.Tensor, numbers: torch.Tensor, cuts: Cuts | None) -> torch.Tensor:
    """Like `draw`, for an asynchronous device: the control flow needs no value from it."""
    if cuts is None:
        return _at(likely, numbers)
    kept, _ = cut(likely, likely.neg().sort(dim=-1).values, cuts, ask=False)
    return _at(kept, numbers)


def _may_suffice(likely: torch.Tensor, cuts: Cuts) -> bool:
    """True if, in some row, all kept tokens may be candidates. If a row's probabilities are nearly equal, the
    candidates' sum never reaches top_p."""
    if cuts.min_p is not None:
        return True
    most = CANDIDATES * likely.amax(dim=-1, keepdim=True)
    return bool(((most >= cuts.top_p) | (cuts.top_k < CANDIDATES)).any())


def _draw_from_all(likely: torch.Tensor, numbers: torch.Tensor, cuts: Cuts) -> torch.Tensor:
    negated = _sorted(likely.neg())
    if likely.device.type == "cpu" and likely.shape[1] > 2 * CANDIDATES:
        first = negated[:, :CANDIDATES].contiguous()
        negated = first if is_cut_within(first, cuts) else negated
    kept, _ = cut(likely, negated, cuts)
    return _at(kept, numbers)


def _at(likely: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """[rows] The token that the number selects: the first token whose cumulative sum exceeds number × total."""
    if likely.device.type == "cpu" and likely.shape[1] > 2 * BLOCK:
        return _at_by_blocks(likely, numbers)
    upto = exact_sums(likely)
    return torch.searchsorted(upto, numbers * upto[:, -1:], right=True).squeeze(1)


def _at_by_blocks(likely: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Like `_at`, by blocks. Sums are exact in any order, so the token is the same."""
    rows, size = likely.shape
    if size % BLOCK:
        likely = torch.nn.functional.pad(likely, (0, -size % BLOCK))
    blocks = likely.view(rows, -1, BLOCK)
    sums = blocks.sum(dim=-1, dtype=torch.float64)
    upto = sums.cumsum(dim=-1)
    wanted = numbers * upto[:, -1:]
    block = torch.searchsorted(upto, wanted, right=True)
    inside = exact_sums(blocks.gather(1, block[:, :, None].expand(-1, -1, BLOCK)).squeeze(1))
    inside += (upto - sums).gather(1, block)
    return (block * BLOCK + torch.searchsorted(inside, wanted, right=True)).squeeze(1)


def _sorted(values: torch.Tensor) -> torch.Tensor:
    """Each row sorted. NumPy sorts floats with vector instructions, many times faster than torch on a CPU."""
    if values.device.type == "cpu":
        return torch.from_numpy(np.sort(values.numpy(), axis=-1))
    return values.sort(dim=-1).values
