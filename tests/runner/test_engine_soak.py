"""An engine under random work keeps its memory, and every stream is the one that its request gets alone."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from testbed.compiled_kernels import needs_a_compiler
from tests.runner.engine_soak import Soak
from tests.support.chosen_worker import WORKER, chosen_worker

RSS_GROWTH_MIB = 20
PAUSED_OFTEN = "The runner's memory is full and this request was paused often; try again."
SHAPES = 12
"""Of a short run: what each request gets alone takes longer than all of them together."""
ITERATIONS = 200
"""In each of which somebody arrives with 30 %, and is parked with 3 %"""
CROWDED = {"larger": 3, "overcommit": 3}
"""Adapters that fill most of the memory, and promises of three times of it"""


def short(folder: Path, worker: str = WORKER, **options: Any) -> dict[str, Any]:
    """Some iterations of it: in a second, a slow machine has too few."""
    if options["kernels"] == "cpp":
        needs_a_compiler()
    with chosen_worker(worker):
        return Soak(seconds=0, iterations=ITERATIONS, folder=folder, plan_ahead=1, shapes=SHAPES, **options).run()


def soak(seconds: int, **options: int | str) -> dict[str, Any]:
    """In a process of its own, so that its memory is only the engine's."""
    if options.get("kernels") == "cpp":
        needs_a_compiler()
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    command = [sys.executable, "-m", "tests.runner.engine_soak", f"--seconds={seconds}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(json.dumps({**result, "wrong": len(result["wrong"])}))
    return result


def check(result: dict[str, Any]) -> None:
    assert result["wrong"] == []
    assert result["failures"].keys() <= {PAUSED_OFTEN}
    assert result["pages_not_free"] == 0
    assert {"length", "parked", "resumed", "loads"} <= result["happened"].keys()


@pytest.mark.parametrize(("worker", "kernels"), [("device", "torch"), ("recorded", "cpp")])
def test_some_random_work(worker: str, kernels: str, tmp_path: Path) -> None:
    check(short(tmp_path, worker, seed=1, kernels=kernels))


def test_some_work_with_large_adapters_and_far_too_many_promises(tmp_path: Path) -> None:
    check(short(tmp_path, seed=2, kernels="cpp", **CROWDED))


@pytest.mark.soak
@pytest.mark.parametrize(
    ("worker", "plan_ahead", "kernels", "crowded"),
    [
        ("local", 0, "torch", {}),
        ("local", 1, "torch", {}),
        ("local", 1, "cpp", {}),
        ("local", 1, "cpp", CROWDED),
        ("device", 1, "torch", {}),
        ("recorded", 1, "cpp", CROWDED),
    ],
)
def test_ten_minutes_of_random_work(worker: str, plan_ahead: int, kernels: str, crowded: dict[str, int]) -> None:
    result = soak(600, seed=plan_ahead, plan_ahead=plan_ahead, worker=worker, kernels=kernels, **crowded)
    check(result)
    assert result["rss_growth_mib"] <= RSS_GROWTH_MIB
