"""An iteration in two parts, for when memory does not suffice for all of it at once. Pure."""

from dataclasses import replace

from motet_runner.plan import DecodeRows, RowStep, StepPlan


def halves(plan: StepPlan) -> tuple[StepPlan | None, StepPlan | None]:
    """The plan's rows in two plans; the only row, if it is one, in two parts of its tokens."""
    rows = plan.rows
    middle = len(rows) // 2
    if middle:
        return _with_rows(plan, rows[:middle]), _with_rows(plan, rows[middle:])
    (step,) = rows
    if step.count == 1:
        return None, None
    half = step.count // 2
    before = replace(step, count=half, samples=False)
    after = replace(step, start=step.start + half, count=step.count - half)
    return _with_rows(plan, (before,)), _with_rows(plan, (after,))


def _with_rows(plan: StepPlan, rows: tuple[RowStep, ...]) -> StepPlan:
    return replace(plan, decodes=DecodeRows(), prefills=rows)
