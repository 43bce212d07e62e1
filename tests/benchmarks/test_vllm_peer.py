"""`benchmarks.vllm_peer` without vLLM: what it asks of both engines, what stops, and which texts count as equal."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.driven import Driven
from benchmarks.harness import MISSED
from benchmarks.peer_engines import CLEAR, agreement
from testbed.tree import ROOT

FAKE = """
import json, sys
for line in sys.stdin:
    asked = json.loads(line)
    with open({asked!r}, "a") as log:
        log.write(line)
    prompts = asked.get("prompts", [])
    tokens = [[0] * asked["output"] for _ in prompts] if prompts else []
    answer = {{"version": "0.1", "seconds": 100.0, "tokens": tokens, "margins": [0.0] * len(prompts)}}
    print(json.dumps(answer), flush=True)
"""
"""A peer that takes a hundred seconds for everything, and is never sure. It keeps what it is asked."""
SMALL = "--layers=2 --width=64 --vocabulary=128 --context=128 --kv-mib=8 --prompt=8 --output=4 --kernels=torch"


def run_beside_it(folder: Path, options: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The results by their names, and what the peer was asked."""
    fake, asked, python = folder / "fake.py", folder / "asked", folder / "python"
    fake.write_text(FAKE.format(asked=str(asked)))
    python.write_text(f"#!/bin/sh\nexec {sys.executable} {fake}\n")
    python.chmod(0o755)
    command = [sys.executable, "-m", "benchmarks.vllm_peer", f"--python={python}", "--json", "--pairs=1"]
    done = subprocess.run(
        [*command, *SMALL.split(), *options.split()], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == MISSED, done.stdout + done.stderr  # no first token is compared
    results = {row["name"]: row for row in json.loads(done.stdout.splitlines()[-1])["results"]}
    return results, [json.loads(line) for line in asked.read_text().splitlines()]


def test_both_engines_get_the_same_requests_and_a_slow_peer_is_beaten(tmp_path: Path) -> None:
    cases = "--cases base distinct distinct_vs_base --requests 3 --adapters=2 --rank=4"
    results, questions = run_beside_it(tmp_path, cases)
    base = results["vllm_base_3_torch"]
    assert (base["value"] > 10, base["target"], base["same"]) == (True, ">= 0.5", False)
    assert base["settings"].items() >= {"layers": 2, "prompt": 8}.items()
    assert results["vllm_distinct_3_torch"]["against"]["baseline"] == "vLLM, distinct"
    nothing_compared = results["vllm_base_3_torch_first_tokens"]
    assert (nothing_compared["value"], nothing_compared["target"], nothing_compared["holds"]) == (0, "= 1", False)
    assert "vllm_distinct_vs_base_3_torch" not in results  # it has no target for these kernels
    loads = [question for question in questions if question["do"] == "load"]
    assert [len(load["adapters"]) for load in loads] == [0, 2]
    generated = [question for question in questions if question["do"] == "generate"]
    assert {tuple(question["adapters"]) for question in generated} == {(None, None, None), (0, 1, 0)}
    assert {len(prompt) for question in generated for prompt in question["prompts"]} == {8}
    warm, measured = [question["prompts"] for question in generated if question["output"] == 4][1:3]
    assert warm != measured


def test_a_driven_process_is_stopped_between_two_questions_with_its_children() -> None:
    code = (
        "import subprocess, sys; subprocess.Popen(['sleep', '60'])\n"
        "for line in sys.stdin: print(line, end='', flush=True)"
    )
    with Driven("echo", [sys.executable, "-c", code]) as driven:
        assert driven.ask({"a": 1}) == {"a": 1}
        processes = driven.processes
        assert len(processes) == 2
        deadline = time.monotonic() + 10
        while {process.status() for process in processes} != {psutil.STATUS_STOPPED}:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert driven.ask({"b": 2}) == {"b": 2}
    psutil.wait_procs(processes, timeout=10)
    assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes)


def test_first_tokens_must_be_equal_where_both_are_sure() -> None:
    for mine, other, sure, equal, clear in (
        ([1, 2], [1, 3], (CLEAR, CLEAR), 1, 1),
        ([1, 2], [4, 2], (CLEAR, CLEAR), 0, 1),
        ([1, 2], [4, 2], (CLEAR, CLEAR / 2), 0, 0),
        ([1, 2], [4, 2], (CLEAR / 2, CLEAR), 0, 0),
    ):
        ours, theirs = ({"tokens": [tokens], "margins": [one]} for tokens, one in zip((mine, other), sure, strict=True))
        assert agreement(ours, theirs)[1:] == (equal, clear)
