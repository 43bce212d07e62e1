"""vLLM behind a runner of ours, on a GPU (G20). vLLM has an environment of its own, so `benchmarks.external` measures
it in other processes."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.gpu_goals.bench import Bench
from benchmarks.gpu_goals.figures import Beside, Figure
from benchmarks.harness import MISSED, ROOT

CASES = ("masked", "served", "suites")
AT_LEAST = {"child_masked_32": 0.85, "own_server_base": 1.0, "own_server_distinct": 1.0}
AT_MOST = {"contract_failed": 0.0, "adapters_wrong": 0.0, "moved_wrong": 0.0}
REHEARSED = "--cases masked --requests 2 --pairs 1 --layers 1 --width 64 --prompt 8 --output 4 --context 128 --kv-mib 8"
NO_PYTHON = "LookupError: --vllm-python names no Python"


def g20(bench: Bench) -> Iterator[Figure]:
    if bench.vllm_python is None:
        yield Figure(name="own_server_base", value=0.0, unit="x", against={"own_server": Beside(None, 1.0, NO_PYTHON)})
        return
    for name, value in _measured(bench.vllm_python, REHEARSED.split() if bench.rehearsal else ["--cases", *CASES]):
        at_most, at_least = AT_MOST.get(name), AT_LEAST.get(name)
        if at_most is not None or at_least is not None:
            yield Figure(
                name=name, value=value, unit="x" if at_least else "failed tests", at_most=at_most, at_least=at_least
            )


def _measured(python: Path, options: list[str]) -> list[tuple[str, float]]:
    command = [sys.executable, "-m", "benchmarks.external", f"--python={python}", "--json", *options]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode not in (0, MISSED):
        raise RuntimeError(f"benchmarks.external ended with {done.returncode}")
    return [(row["name"], row["value"]) for row in json.loads(done.stdout.splitlines()[-1])["results"]]
