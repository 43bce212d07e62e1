"""Rows whose prompts are scored. A prompt's logits are many: its tokens times the vocabulary. For too many logits, the
worker computes the iteration in parts."""

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
    """True if one call of the model may compute the logits that prompts need."""
    found = (scored_row(table[step.row], step) for step in plan.prefills)
    places = sum(len(one.places) for one in found if one is not None)
    return places <= 1 or places * vocabulary <= LOGITS_AT_ONCE
