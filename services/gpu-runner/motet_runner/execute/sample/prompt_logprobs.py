"""Log probabilities of prompts, each from the logits of the previous token.

A prompt's logits are many: its tokens times the vocabulary. On a CPU, only a few rows at a time become probabilities.
"""

from collections.abc import Iterable, Sequence

import torch

from motet_runner.execute.batch.scored_rows import ScoredRow
from motet_runner.execute.sample.logprobs import best, read
from motet_runner.interface import Logprobs
from motet_runner.plan.prompt_scores import PromptScores

CPU_BLOCK = 1 << 18
"""The logits that become probabilities together: few, so that they stay in a CPU's cache."""


def scores_of(logits: torch.Tensor, scored: Iterable[ScoredRow]) -> dict[int, PromptScores]:
    """`logits` of all places, one row after the other → scores by row number"""
    found, at = {}, 0
    for one in scored:
        found[one.row.number] = _scores(logits[at : at + len(one.places)], one)
        at += len(one.places)
    return found


def joined(earlier: PromptScores | None, later: PromptScores) -> PromptScores:
    """The scores of two parts of one prompt that were computed one after the other."""
    if earlier is None:
        return later
    finite = earlier.finite and later.finite
    return PromptScores(earlier.first, [*earlier.logprobs, *later.logprobs], finite)


def _scores(logits: torch.Tensor, scored: ScoredRow) -> PromptScores:
    row, places = scored.row, scored.places
    size = max(1, CPU_BLOCK // logits.shape[1]) if logits.device.type == "cpu" else len(places)
    logprobs: list[Logprobs] = []
    finite = True
    for first in range(0, len(places), size):
        block = logits[first : first + size]
        tokens = row.tokens[places[first] : places[first] + len(block)]
        found = score(block, torch.tensor(tokens, device=logits.device), alternatives(scored, logits.shape[1]))
        of_block = read_scores(first, found)
        finite = finite and of_block.finite
        logprobs += of_block.logprobs
    return PromptScores(places.start, logprobs, finite)


def alternatives(scored: ScoredRow, vocabulary: int) -> int:
    """The number of best tokens that the row wants beside each of its own tokens"""
    return min(scored.row.sampling.prompt_logprobs or 0, vocabulary)


Scores = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Scores of some places, on the logits' device: whether all logits are finite [], the fields of `Best`, and the ranks
of the tokens [places]"""
PARTS = 5
"""Of `Scores`"""


def score(logits: torch.Tensor, tokens: torch.Tensor, count: int) -> Scores:
    """`tokens` [places]: the tokens that followed"""
    ranks = (logits > logits.gather(1, tokens[:, None])).sum(dim=-1) + 1
    return torch.isfinite(logits.amax(dim=-1)).all(), *best(logits, tokens, count), ranks


def read_scores(first: int, found: Sequence[torch.Tensor]) -> PromptScores:
    """`first`: the place of the first score"""
    finite, chosen, values, ids, ranks = found
    logprobs = read((chosen, values, ids), [values.shape[1]] * len(chosen))
    ranked = [Logprobs(one.logprob, one.top, rank) for one, rank in zip(logprobs, ranks.tolist(), strict=True)]
    return PromptScores(first, ranked, bool(finite))
