"""`benchmarks.external` without vLLM: what it asks of the child and of vLLM, and what it says of their answers."""

import argparse
import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from benchmarks.external import ON_TWO, SUITES, measure_suites, outcomes
from benchmarks.harness import MISSED
from testbed.tree import ROOT

FAKE = """
import json, sys
child = "benchmarks.child_driver" in sys.argv
for line in sys.stdin:
    asked = json.loads(line)
    with open({asked!r}, "a") as log:
        log.write(json.dumps(asked | {{"child": child}}) + "\\n")
    count = len(asked.get("prompts", []))
    tokens = [[7] * asked["output"] for _ in range(count)] if count else []
    if asked.get("overcommit") == 1.5:
        tokens[1] = []
    answer = {{"seconds": 1.0, "tokens": tokens, "margins": [1.0] * count, "parked": 3, "preempted": 0}}
    answer |= {{"failed": 0, "loads": 4, "reads": 1, "gaps": [0.01] * 97 + [0.05] * 3}}
    if asked.get("masked"):
        answer = {{"error": "StructuredOutputUnavailable: no grammars"}}
    print(json.dumps(answer), flush=True)
"""
"""Both engines, equally fast. It keeps what it is asked."""
SMALL = "--layers=2 --width=64 --vocabulary=128 --context=128 --kv-mib=8 --prompt=8 --output=4 --adapters=2 --rank=4"


def run(folder: Path, options: str) -> tuple[dict[str, Any], list[dict[str, Any]], str]:
    """The results by their names, what both were asked, and what it said."""
    fake, asked, python = folder / "fake.py", folder / "asked", folder / "python"
    fake.write_text(FAKE.format(asked=str(asked)))
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {fake} "$@"\n')
    python.chmod(0o755)
    command = [sys.executable, "-m", "benchmarks.external", f"--python={python}", "--json", "--pairs=1"]
    done = subprocess.run(
        [*command, *SMALL.split(), *options.split()], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode in {0, MISSED}, done.stdout + done.stderr
    results = {row["name"]: row for row in json.loads(done.stdout.splitlines()[-1])["results"]}
    return results, [json.loads(line) for line in asked.read_text().splitlines()], done.stdout


def test_the_child_and_vllm_get_the_same_requests(tmp_path: Path) -> None:
    results, asked, said = run(tmp_path, "--cases base plain sampled masked --requests 3 20")
    assert (results["child_base_3"]["value"], results["child_base_3"]["target"]) == (1.0, ">= 0.97")
    assert results["child_base_20"]["target"] == ">= 0.94"
    assert results["child_base_3_first_tokens"]["holds"]
    assert results["child_plain_3"]["target"] == ""
    assert results["child_sampled_3"]["target"] == ">= 0.95"
    assert "child_sampled_3_first_tokens" not in results
    assert "child_masked: not measured, the child serves no masks" in said
    loads = {(one["child"], len(one["adapters"])) for one in asked if one["do"] == "load"}
    assert loads == {(True, 2), (False, 2), (False, 0)}
    questions = [one for one in asked if one["do"] == "generate" and not one.get("masked")]
    of = [{json.dumps(one["prompts"]) for one in questions if one["child"] is child} for child in (True, False)]
    assert of[0] >= of[1]
    assert {one["temperature"] for one in questions} == {0, 1}


def test_what_happens_beside_loads_and_under_pressure_is_counted(tmp_path: Path) -> None:
    results, asked, _ = run(tmp_path, "--cases switch pressure --switches 50 --streams 10")
    assert results["reads_in_step"]["holds"] is False
    assert (results["gap_while_loading"]["value"], results["gap_while_loading"]["holds"]) == (5.0, False)
    assert (results["streams_wrong"]["value"], results["own_preemptions"]["holds"]) == (1, True)
    loads = [one for one in asked if one["do"] == "load"]
    assert [(len(one["adapters"]), one["slots"], one["dtype"]) for one in loads] == [
        (64, 4, "bfloat16"),
        (0, 1, "float32"),
    ]
    calm, *pressed = [one for one in asked if one["do"] == "under_pressure"]
    assert set(calm["promises"]) == {48}
    assert [(one["overcommit"], one["promises"].count(8)) for one in pressed] == [(1.0, 4), (1.5, 4)]


RAN = '<testsuites name="x"><testsuite name="pytest" errors="{}" failures="{}" skipped="{}" tests="{}" time="1">'


def test_tests_that_fail_or_do_not_run_are_not_among_those_that_pass() -> None:
    assert outcomes(RAN.format(0, 0, 0, 7)) == (0, 7)
    assert outcomes(RAN.format(1, 2, 3, 10)) == (3, 4)
    assert outcomes(RAN.format(0, 0, 5, 5)) == (0, 0)


@pytest.mark.parametrize(("gpus", "without"), [(0, False), (1, True), (2, False)])
def test_one_gpu_is_not_asked_for_two_workers(
    gpus: int, without: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python, ran = tmp_path / "python", []
    python.write_text(f"#!/bin/sh\necho {gpus}\n")
    python.chmod(0o755)
    run = subprocess.run

    def instead(command: list[str | Path], **how: Any) -> subprocess.CompletedProcess[str]:
        if "pytest" not in command:
            return run(command, **how)
        ran.append(command[command.index("-k") + 1])
        return subprocess.CompletedProcess([], 0)

    monkeypatch.setattr(subprocess, "run", instead)
    results = measure_suites(argparse.Namespace(python=python))
    assert [one.endswith(" and not on-two") for one in ran] == [without] * len(SUITES)
    assert not any(one.holds for one in results), "none of their tests ran"


@cache
def collected() -> str:
    """The tests of all suites, one a line."""
    files = dict.fromkeys(file for file, _ in SUITES.values())
    which = " or ".join(f"({one})" for _, one in SUITES.values())
    command = [sys.executable, "-m", "pytest", "-p", "no:randomly", "--collect-only", "-q", "-m", "soak", *files]
    return subprocess.run([*command, "-k", which], cwd=ROOT, capture_output=True, text=True, check=False).stdout


def test_tests_with_two_workers_are_told_by_their_names() -> None:
    """By which `-k` leaves them out."""
    every = collected()
    assert every.count("vllm itself on-two") == every.count("vllm itself, pages of 32") > 0
    assert every.count("[llama-on-two]") == 1
    assert not [line for line in every.splitlines() if ON_TWO in line and "vllm itself, pages" in line]


def test_each_suite_has_its_tests() -> None:
    said = collected()
    found = [said.count(text) for text in ("vllm itself", "adapters_compute_what_peft", "json_stays_valid")]
    assert (found[0] > 100, *found[1:]) == (True, 5, 1), said
