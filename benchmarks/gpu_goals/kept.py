"""The file of results: written after each figure, so a run that dies keeps what it had.

It holds one object in one line, as a benchmark prints with `--json`: `tools/keep_results.py` reads it. Results of
another run in the same file stay, until one of the same name takes their place.
"""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu_goals.figures import Figure
from benchmarks.harness import commit, machine

BENCHMARK = "gpu"


class Kept:
    def __init__(self, path: Path, gpu: Mapping[str, Any]) -> None:
        self.path = path
        self._document: dict[str, Any] = {
            "benchmark": BENCHMARK,
            "commit": commit(),
            "machine": machine() | {"gpu": dict(gpu)},
            "results": [],
            "failed": {},
        }
        self.read_again()

    def read_again(self) -> None:
        """What others have kept in the file meanwhile"""
        if not self.path.exists():
            return
        before = json.loads(self.path.read_text(encoding="utf-8"))
        its, ours = (document["machine"].get("gpu", {}) for document in (before, self._document))
        if its.get("name") != ours.get("name"):
            raise ValueError(f"{self.path} has results of another GPU: {its}. Name another file.")
        self._document["results"], self._document["failed"] = before["results"], before["failed"]

    @property
    def document(self) -> Mapping[str, Any]:
        return self._document

    def add(self, goal: str, figure: Figure) -> None:
        row = {"goal": goal, "commit": self._document["commit"]} | figure.as_json()
        rows = [one for one in self._document["results"] if one["name"] != figure.name]
        self._document["results"] = [*rows, row]
        self._write()

    def ended(self, goal: str, failure: str = "") -> None:
        """Keep why a goal could not be measured to its end; empty: it was."""
        self._document["failed"].pop(goal, None)
        if failure:
            self._document["failed"][goal] = failure
        self._write()

    def missed(self, goals: Collection[str]) -> bool:
        return any(row["holds"] is False and row["goal"] in goals for row in self._document["results"])

    def _write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.path.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(self._document) + "\n", encoding="utf-8")
        unfinished.replace(self.path)
