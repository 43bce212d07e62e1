"""The control interface between the master, which plans, and a worker, which computes (OR-12, OR-13, OR-14).

Only plans and results travel here: numbers without tensors, which any channel can carry. Tensors stay with the worker.
The plans of one worker are carried out in the order of their launch.
"""

from typing import Protocol

from motet_runner.plan import StepPlan, StepResult


class Worker(Protocol):
    def launch(self, plan: StepPlan) -> None:
        """Begin an iteration. It may still run when this returns."""

    def collect(self) -> StepResult:
        """Wait for the oldest iteration that was launched and not collected, and return what it has brought."""
