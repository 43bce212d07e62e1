"""Rows whose prompts are scored. The size of a prompt's logits is its tokens times the vocabulary: if they are too
large, the worker computes an iteration in parts."""

from dataclasses import dataclass

from motet_runner.execute.batch.row_table import RowTable, TableRow
from motet_runner.plan import RowStep, StepPlan
from motet_runner.plan.prompt_scores import places_to_score

LOGITS_AT_ONCE = 1 << 23
"""32 MiB in float32."""


@dataclass(frozen=True, slots=True)
class ScoredRow:
    """A row of the table whose prompt is scored, and the range of its scored tokens."""

    row: TableRow
    places: range


def scored_row(row: TableRow, step: RowStep) -> ScoredRow | None:
    if row.to_score is None:
        return None
    places = places_to_score(step.start, step.count, first=row.to_score, prompt_tokens=row.prompt_tokens)
    return ScoredRow(row, places) if places else None


def fits(plan: StepPlan, table: RowTable, vocabulary: int) -> bool:
    """True if the logits that prompts need are few enough for one call of the model."""
    found = (scored_row(table[step.row], step) for step in plan.prefills)
    places = sum(len(one.places) for one in found if one is not None)
    return places <= 1 or places * vocabulary <= LOGITS_AT_ONCE
