"""The table of the goals of a GPU: each is measured, or waits for a card."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.gpu_goals.goals import PARTS

WAITING = "waiting for a card"


def goals_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """`rows`: results as the benchmark has kept them, each with its goal"""
    lines = ["| goal | part | what | target | state |", "| --- | --- | --- | --- | --- |"]
    for number, part in enumerate(PARTS, 1):
        for goal in part:
            state = _state([row for row in rows if row.get("goal") == goal.name])
            lines.append(f"| {goal.name} | {number} | {goal.title} | {goal.target} | {state} |")
    return "\n".join(lines)


def _state(rows: Sequence[Mapping[str, Any]]) -> str:
    """A baseline that could not run is not beaten, and is counted beside the verdict."""
    if not rows:
        return WAITING
    verdicts = [row["holds"] for row in rows if row["holds"] is not None]
    missing = {name for row in rows for name, one in row["beside"].items() if "not_measured" in one}
    said = f"{sum(verdicts)} of {len(verdicts)} figures hold" if verdicts else f"{len(rows)} figures"
    return said + (f"; not measured: {', '.join(sorted(missing))}" if missing else "")
