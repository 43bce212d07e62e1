"""The table of the goals of a GPU: each is measured, or waits for a card."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.gpu_goals.goals import PARTS

WAITING = "waiting for a card"


def goals_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """`rows`: results as the benchmark has kept them, each with its goal"""
    heads = ("goal", "part", "what", "target", "state", "ours", "others take, times ours")
    lines = [f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}"]
    for number, part in enumerate(PARTS, 1):
        for goal in part:
            of_goal = [row for row in rows if row.get("goal") == goal.name]
            cells = (goal.name, str(number), goal.title, goal.target, _state(of_goal), _ours(of_goal), _others(of_goal))
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", *_cards([row for row in rows if "goal" in row])])


def _ours(rows: Sequence[Mapping[str, Any]]) -> str:
    """The least and the most of each unit"""
    by_unit: dict[str, list[float]] = {}
    for row in rows:
        by_unit.setdefault(row["unit"], []).append(row["value"])
    return "; ".join(f"{_range(values)} {unit}".strip() for unit, values in by_unit.items())


def _others(rows: Sequence[Mapping[str, Any]]) -> str:
    ratios: dict[str, list[float]] = {}
    for row in rows:
        for name, one in row["beside"].items():
            if "ratio" in one:
                ratios.setdefault(name, []).append(one["ratio"])
    return "; ".join(f"{name} {_range(found)}" for name, found in ratios.items())


def _range(values: Sequence[float]) -> str:
    ends = [f"{end:,.0f}" if end >= 1000 else f"{end:.3g}" for end in (min(values), max(values))]
    return ends[0] if ends[0] == ends[1] else " to ".join(ends)


def _cards(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    cards = sorted({row["gpu"]["name"] for row in rows if "gpu" in row})
    commits = sorted({row["commit"] for row in rows})
    return [f"{', '.join(cards)}; {', '.join(commits)}."] if cards else []


def _state(rows: Sequence[Mapping[str, Any]]) -> str:
    """A baseline that could not run is not beaten, and is counted beside the verdict."""
    if not rows:
        return WAITING
    verdicts = [row["holds"] for row in rows if row["holds"] is not None]
    missing = {name for row in rows for name, one in row["beside"].items() if "not_measured" in one}
    said = f"{sum(verdicts)} of {len(verdicts)} figures hold" if verdicts else f"{len(rows)} figures"
    return said + (f"; not measured: {', '.join(sorted(missing))}" if missing else "")
