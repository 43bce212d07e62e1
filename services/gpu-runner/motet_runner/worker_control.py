"""The control interface between the planning master and a computing worker (OR-12, OR-13, OR-14).

Only plans and results pass here: numbers, which any channel can carry. Tensors stay with the worker. The plans of one
worker are carried out in the order of their launches.
"""

from typing import Protocol

from motet_runner.plan import StepPlan, StepResult


class Worker(Protocol):
    def launch(self, plan: StepPlan) -> None:
        """Begin an iteration. The iteration may still run when this returns."""

    def collect(self) -> StepResult:
        """Wait for the oldest launched iteration that is not collected, and return its result."""
