"""The sums of the benchmark are what the real plan does, and its results are named and complete."""

import json
import subprocess
import sys
from math import isinf

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from benchmarks.harness import MISSED
from benchmarks.presets import (
    COMPARED,
    TARGETS,
    Request,
    Runner,
    Step,
    Workload,
    held_by,
    virtual_time,
)
from tests.repo.tree import ROOT

CONTEXT = 320
workloads = st.lists(st.builds(Request, st.integers(1, 150), st.integers(1, 150)), min_size=1, max_size=8).map(
    lambda requests: Workload("small", CONTEXT, requests)
)


def steps(workload: Workload, name: str, *, pages: int, places: int) -> list[Step]:
    runner = Runner(workload, name, pages=pages, places=places)
    done = []
    while runner.busy:
        done.append(runner.step())
    return done


@example(workload=Workload("doubles", CONTEXT, [Request(20, 10)] * 5 + [Request(20, 150)]), name="paged-chunk")
@given(workload=workloads, name=st.sampled_from([name for name in COMPARED if not COMPARED[name].request_level]))
def test_the_sums_are_those_of_the_real_plan(workload: Workload, name: str) -> None:
    """One request after the other, so that no prompt waits for another one's iteration."""
    held = held_by(workload, name, workload.requests)
    done = steps(workload, name, pages=40, places=1)
    held_in_plan = sum(step.pages if isinf(COMPARED[name].overcommit) else step.promised for step in done)
    assert (len(done), sum(step.tokens for step in done), held_in_plan) == (held.steps, held.tokens, held.pages)


@given(workload=workloads, name=st.sampled_from(["ft-max", "orca", "s3", "oracle"]))
def test_the_sums_hold_for_requests_that_share_the_memory(workload: Workload, name: str) -> None:
    held = held_by(workload, name, workload.requests)
    done = steps(workload, name, pages=40, places=8)
    assert (sum(step.tokens for step in done), sum(step.promised for step in done)) == (held.tokens, held.pages)
    assert all(step.promised <= 40 for step in done)


def test_a_batch_that_is_padded_takes_longer_than_one_that_is_not() -> None:
    """Two requests in a rectangle: 10 and 30 prompt tokens, 1 and 3 answer tokens."""
    workload = Workload("two", 64, [Request(10, 1), Request(30, 3)])
    padded = virtual_time(workload, "request-level", 2, rectangle=True)
    assert padded == pytest.approx(3 + 0.004 * (2 * 30 + 2 + 2))
    assert virtual_time(workload, "request-level", 2, rectangle=False) == pytest.approx(3 + 0.004 * (40 + 1 + 1))


def test_the_benchmark_names_its_results_and_says_what_it_leaves_out() -> None:
    command = [sys.executable, "-m", "benchmarks.presets", "--json", "--requests=40", "--in-plan=20", "--data=/none"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode in (0, MISSED)
    said = json.loads(done.stdout.splitlines()[-1])
    with_target = {result["name"] for result in said["results"] if result["target"]}
    assert with_target == {f"resident_{name}" for name in TARGETS} | {"iteration_vs_request"}
    assert "azure_conv: left out; --data or TEST_DATA names no folder" in done.stdout
    assert "step = 1 + 0.004 per token" in done.stdout
