"""Log probabilities of prompts, from the logits of the tokens before.

A prompt's logits take as much memory as its tokens times the vocabulary. So the worker computes an iteration in parts
if they are too many (`fits`), and here only a few rows at a time become probabilities.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from motet_runner.execute.row_table import RowTable, TableRow
from motet_runner.interface import Logprobs
from motet_runner.plan import RowStep, StepPlan
from motet_runner.plan.prompt_scores import PromptScores, places_to_score

LOGITS_AT_ONCE = 1 << 23
"""32 MiB in float32."""

CPU_BLOCK = 1 << 18
"""Logits that become probabilities together, so that they stay in a CPU's cache."""


@dataclass(frozen=True, slots=True)
class ScoredRow:
    """A row of the table whose prompt is scored, and the places in it."""

    row: TableRow
    places: range


def scored_row(row: TableRow, step: RowStep) -> ScoredRow | None:
    if row.to_score is None:
        return None
    places = places_to_score(step.start, step.count, first=row.to_score, prompt_tokens=row.prompt_tokens)
    return ScoredRow(row, places) if places else None


def fits(plan: StepPlan, table: RowTable, vocabulary: int) -> bool:
    """Whether the logits that prompts need are few enough for one call of the model."""
    found = (scored_row(table[step.row], step) for step in plan.prefills)
    places = sum(len(one.places) for one in found if one is not None)
    return places <= 1 or places * vocabulary <= LOGITS_AT_ONCE


def scores_of(logits: torch.Tensor, scored: Iterable[ScoredRow]) -> dict[int, PromptScores]:
    """`logits` are those of all places, one row after the other. → by the row's number"""
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
    """How many of the best tokens it asks for beside each of its own"""
    return min(scored.row.sampling.prompt_logprobs or 0, vocabulary)


class Scores(NamedTuple):
    """Of some places, on the device"""

    finite: torch.Tensor
    """[] bool"""
    chosen: torch.Tensor
    """[places]"""
    values: torch.Tensor
    """[places, alternatives]"""
    ids: torch.Tensor
    """[places, alternatives]"""


def score(logits: torch.Tensor, tokens: torch.Tensor, count: int) -> Scores:
    """`tokens` [places] are those that followed."""
    logits = logits.float()
    finite = torch.isfinite(logits.amax(dim=-1)).all()
    logs = logits.log_softmax(dim=-1)
    values, ids = logs.topk(count, dim=-1)
    return Scores(finite, logs.gather(1, tokens[:, None]).squeeze(1), values, ids)


def read_scores(first: int, found: Scores) -> PromptScores:
    """`first`: the place of the first of them"""
    chosen, values, ids = found.chosen.tolist(), found.values.tolist(), found.ids.tolist()
    logprobs = [
        Logprobs(logprob, tuple(zip(best, values_of, strict=True)))
        for logprob, best, values_of in zip(chosen, ids, values, strict=True)
    ]
    return PromptScores(first, logprobs, bool(found.finite))
