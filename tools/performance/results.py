"""What the benchmarks have measured: the files in benchmarks/results, as tools/keep_results.py keeps them."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


@dataclass(frozen=True, slots=True)
class Measured:
    """One figure. On several processors it is the worst of them."""

    name: str
    value: float
    unit: str
    target: str
    holds: bool | None
    values: Sequence[float] = ()
    """Of each processor"""
    spread: Sequence[float] = ()
    """The tenth and ninetieth percentile of the pairs of this one; empty: it was counted"""
    pairs: int = 0
    commits: frozenset[str] = frozenset()
    processors: frozenset[str] = frozenset()

    @property
    def bound(self) -> float | None:
        """The number in its target"""
        number = self.target.removeprefix(">=").removeprefix("<=").strip().rstrip("%")
        try:
            return float(number)
        except ValueError:
            return None


def read_rows(folder: Path = FOLDER) -> list[dict[str, Any]]:
    """All results of all files, as they are kept"""
    return [
        row for path in sorted(folder.glob("*.json")) for row in json.loads(path.read_text(encoding="utf-8"))["results"]
    ]


def read_results(folder: Path = FOLDER) -> dict[str, Measured]:
    """By name."""
    by_name: dict[str, list[dict[str, Any]]] = {}
    for row in read_rows(folder):
        by_name.setdefault(row["name"], []).append(row)
    return {name: _worst(rows) for name, rows in by_name.items()}


def _worst(rows: Sequence[dict[str, Any]]) -> Measured:
    """More is better unless the target says otherwise: of a figure without a target, always."""
    less_is_better = any((row["target"] or "").startswith("<=") for row in rows)
    values = sorted((row["value"] for row in rows), reverse=less_is_better)
    worst = next(row for row in rows if row["value"] == values[0])
    against = worst.get("against") or {"spread": (), "pairs": 0}
    return Measured(
        worst["name"],
        worst["value"],
        worst["unit"],
        worst["target"] or "",
        worst["holds"],
        values,
        against["spread"],
        against["pairs"],
        _all("commit", rows),
        _all("processor", rows),
    )


def _all(what: str, rows: Iterable[dict[str, Any]]) -> frozenset[str]:
    return frozenset(row[what] for row in rows if row.get(what))
