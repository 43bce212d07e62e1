"""An iteration whose rows do not fit into memory together is computed in parts, one after the other."""

from collections.abc import Callable
from dataclasses import replace
from typing import Generic, Protocol, TypeVar

import torch

from motet_runner.execute.batch.row_table import RowTable
from motet_runner.execute.batch.scored_rows import fits
from motet_runner.memory.out_of_memory import is_out_of_memory
from motet_runner.plan import RowStep, SizeLimit, StepPlan
from motet_runner.plan.presets import UNBOUNDED


class Parts(Protocol):
    """The combined results of one iteration's parts"""

    out_of_memory: set[int]
    """Rows that did not fit into memory even alone"""
    model_calls: int
    retries: int


Its = TypeVar("Its", bound=Parts)


class InParts(Generic[Its]):
    def __init__(
        self,
        table: RowTable,
        vocabulary: int,
        device: torch.device,
        *,
        compute: Callable[[StepPlan, Its], None],
        no_token: Callable[[RowStep, Its], None],
    ) -> None:
        """`compute` computes all rows of a plan at once. If it runs out of memory, it must be possible to compute the
        same rows again. `no_token` is called for a row that should be sampled but gets no token."""
        self._table = table
        self._vocabulary = vocabulary
        self._device = device
        self._compute_at_once = compute
        self._no_token = no_token
        self.decodes = SizeLimit(UNBOUNDED)
        """The most decodes that are computed at once"""

    def compute(self, plan: StepPlan, parts: Its) -> None:
        """Compute the rows at once or, if memory does not suffice, in two partial plans."""
        if fits(plan, self._table, self._vocabulary) and plan.count <= self.decodes.size and self._fits(plan, parts):
            return
        if plan.count == 1 and plan.rows[0].count == 1:
            self.leave_out(plan, parts)
            return
        first, second = _partial_plans(plan)
        self.compute(first, parts)
        if any(step.row in parts.out_of_memory for step in second.rows):  # `second` is the rest of the failed row
            self.leave_out(second, parts)
        else:
            self.compute(second, parts)

    def leave_out(self, plan: StepPlan, parts: Its) -> None:
        for step in plan.rows:
            parts.out_of_memory.add(step.row)
            if step.samples:
                self._no_token(step, parts)

    def ended(self, parts: Its) -> None:
        """Call this when all parts of an iteration are computed."""
        if not parts.retries:
            self.decodes.fitted(parts.model_calls)

    def did_not_fit(self, plan: StepPlan, parts: Its) -> None:
        """Call this after the exception is gone, because the exception holds the attempt's tensors."""
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        parts.retries += 1
        # After an iteration with prompts, the next plans have smaller chunks.
        if all(step.count == 1 for step in plan.rows):
            self.decodes.did_not_fit(plan.count)

    def _fits(self, plan: StepPlan, parts: Its) -> bool:
        """Compute the rows at once. False if memory does not suffice: also an asynchronous device allocates at the
        launch, so the failure is known here."""
        try:
            self._compute_at_once(plan, parts)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
        else:
            return True
        self.did_not_fit(plan, parts)
        return False


def _partial_plans(plan: StepPlan) -> tuple[StepPlan, StepPlan]:
    """Two partial plans: halves of the plan's rows, or of the tokens of a single row."""
    rows = plan.rows
    middle = len(rows) // 2
    if middle:
        return plan.with_rows(rows[:middle]), plan.with_rows(rows[middle:])
    (step,) = rows
    first = step.count // 2
    before = replace(step, count=first, samples=False)
    after = replace(step, start=step.start + first, count=step.count - first)
    return plan.with_rows((before,)), plan.with_rows((after,))
