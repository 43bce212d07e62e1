"""vLLM behind a runner of ours, on a GPU (G20). vLLM has an environment of its own, so `benchmarks.external` measures
it in other processes."""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu_goals.bench import Bench
from benchmarks.gpu_goals.figures import Beside, Figure
from benchmarks.harness import MISSED, ROOT

AT_LEAST = {"child_masked_32": 0.85, "own_server_base": 1.0, "own_server_distinct": 1.0}
AT_MOST = {"contract_failed": 0.0, "adapters_wrong": 0.0, "moved_wrong": 0.0}
CASES = {
    "masked": ("child_masked_32",),
    "served": ("own_server_base", "own_server_distinct"),
    "suites": tuple(AT_MOST),
}
"""By case of `benchmarks.external`: the figures that it has to give"""
REHEARSED = "--requests 2 --pairs 1 --layers 1 --width 64 --prompt 8 --output 4 --context 128 --kv-mib 8"
NO_PYTHON = "LookupError: --vllm-python names no Python"


def g20(bench: Bench) -> Iterator[Figure]:
    """A command for each case, so that those before it are kept."""
    if bench.vllm_python is None:
        yield Figure(name="own_server_base", value=0.0, unit="x", against={"own_server": Beside(None, 1.0, NO_PYTHON)})
        return
    for case in ("masked",) if bench.rehearsal else CASES:
        rows, why = _measured(bench.vllm_python, ["--cases", case, *(REHEARSED.split() if bench.rehearsal else ())])
        for name in CASES[case]:
            yield _figure(name, rows.get(name), why)


def _figure(name: str, row: Mapping[str, Any] | None, why: str) -> Figure:
    """A figure that is not there is missed, and so is one of which its benchmark says so that counts, as where no test
    ran. Its targets for ratios are those of a CPU."""
    at_most, at_least = AT_MOST.get(name), AT_LEAST.get(name)
    unit = "failed tests" if at_least is None else "x"
    if row is None:
        note = why or "benchmarks.external gives no such figure"
        return Figure(name=name, value=0.0, unit=unit, at_most=at_most, at_least=at_least, holds_there=False, note=note)
    missed = row.get("same") is False or (row.get("counted") and not row["holds"])
    return Figure(
        name=name,
        value=row["value"],
        unit=unit,
        at_most=at_most,
        at_least=at_least,
        holds_there=False if missed else None,
    )


def _measured(python: Path, options: list[str]) -> tuple[dict[str, Mapping[str, Any]], str]:
    """The rows by their names, or why there are none"""
    command = [sys.executable, "-m", "benchmarks.external", f"--python={python}", "--json", *options]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode not in (0, MISSED):
        return {}, f"benchmarks.external ended with {done.returncode}"
    return {row["name"]: row for row in json.loads(done.stdout.splitlines()[-1])["results"]}, ""
