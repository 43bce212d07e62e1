"""Results of benchmarks are kept by name, each with its commit."""

import json
import subprocess
import sys
from pathlib import Path

from tests.repo.tree import ROOT
from tools.keep_results import keep

MACHINE = {"processor": "a processor", "cores": 2, "memory_gib": 8.0, "load": 0.5, "system": "a system"}


def printed(commit: str, **values: float) -> str:
    rows = [{"name": name, "value": value} for name, value in values.items()]
    return json.dumps({"benchmark": "engine", "commit": commit, "machine": MACHINE, "results": rows})


def test_a_new_result_takes_the_place_of_the_older_one_of_its_name(tmp_path: Path) -> None:
    keep(["a table", printed("first", base=1.0, distinct=2.0)], tmp_path)
    assert keep([printed("second", distinct=3.0, host=4.0)], tmp_path) == [tmp_path / "engine.json"]
    kept = json.loads((tmp_path / "engine.json").read_text())
    assert kept["machine"] == {"processor": "a processor", "cores": 2, "memory_gib": 8.0}
    assert [(row["name"], row["value"], row["commit"]) for row in kept["results"]] == [
        ("base", 1.0, "first"),
        ("distinct", 3.0, "second"),
        ("host", 4.0, "second"),
    ]


def test_a_file_without_results_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run.txt").write_text("skipped: there is no vLLM\n")
    command = [sys.executable, "tools/keep_results.py", tmp_path / "run.txt"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "has no results. Run the benchmark with --json." in done.stderr
