"""What the benchmarks have measured: the files in benchmarks/results, each the JSON of one run."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


@dataclass(frozen=True, slots=True)
class Measured:
    name: str
    value: float
    unit: str
    target: str
    holds: bool | None
    benchmark: str

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
        row | {"benchmark": run["benchmark"]}
        for path in sorted(folder.glob("*.json"))
        for run in [json.loads(path.read_text(encoding="utf-8"))]
        for row in run["results"]
    ]


def read_results(folder: Path = FOLDER) -> dict[str, Measured]:
    """By name. If two files have a result of one name, the later file in the order of names counts."""
    measured: dict[str, Measured] = {}
    for row in read_rows(folder):
        measured[row["name"]] = Measured(
            row["name"], row["value"], row["unit"], row.get("target") or "", row.get("holds"), row["benchmark"]
        )
    return measured
