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


def read_results(folder: Path = FOLDER) -> dict[str, Measured]:
    """By name. If two files have a result of one name, the later file in the order of names counts."""
    measured: dict[str, Measured] = {}
    for path in sorted(folder.glob("*.json")):
        run: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        for row in run["results"]:
            measured[row["name"]] = Measured(
                row["name"], row["value"], row["unit"], row.get("target") or "", row.get("holds"), run["benchmark"]
            )
    return measured
