"""`benchmarks.vllm_peer` without vLLM: what it asks of both engines, what stops, and which texts count as equal."""

import asyncio
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from benchmarks.driven import Driven, DrivenError, Stoppable
from benchmarks.harness import MISSED
from benchmarks.peer_engines import CLEAR, agreement
from benchmarks.vllm_served import equal_first_words, until_ready
from tests.repo.tree import ROOT

FAKE = """
import json, sys
for line in sys.stdin:
    asked = json.loads(line)
    with open({asked!r}, "a") as log:
        log.write(line)
    prompts = asked.get("prompts", [])
    tokens = [[0] * asked["output"] for _ in prompts] if prompts else []
    print(json.dumps({{"seconds": 100.0, "tokens": tokens, "margins": [0.0] * len(prompts)}}), flush=True)
"""
"""A peer that takes a hundred seconds for everything, and is never sure."""


def vllm_peer(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.vllm_peer", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_both_engines_get_the_same_requests_and_a_slow_peer_is_beaten(tmp_path: Path) -> None:
    asked, fake, python = tmp_path / "asked", tmp_path / "fake.py", tmp_path / "bin" / "python"
    fake.write_text(FAKE.format(asked=str(asked)))
    python.parent.mkdir()
    python.write_text(f"#!/bin/sh\nexec {sys.executable} {fake}\n")
    python.chmod(0o755)
    sizes = (
        "--prompt=8 --output=4 --layers=2 --width=64 --vocabulary=128 --context=128 --kv-mib=8 --adapters=2 --rank=4"
    )
    cases = "--cases base distinct distinct_vs_base --kernels torch --requests 3 --pairs 1 --json"
    done = vllm_peer(f"--python={python}", *sizes.split(), *cases.split())
    assert done.returncode in (0, MISSED), done.stdout + done.stderr
    results = {row["name"]: row for row in json.loads(done.stdout.splitlines()[-1])["results"]}
    assert results["vllm_base_3_torch"]["value"] > 10
    assert results["vllm_base_3_torch"]["target"] == ">= 0.5"
    assert results["vllm_distinct_3_torch"]["against"]["baseline"] == "vLLM, distinct"
    nothing_compared = results["vllm_base_3_torch_first_tokens"]
    assert (nothing_compared["value"], nothing_compared["target"], nothing_compared["holds"]) == (0, "= 1", False)
    assert results["vllm_base_3_torch"]["same"] is False
    assert results["vllm_base_3_torch"]["settings"].items() >= {"layers": 2, "prompt": 8}.items()
    assert "vllm_distinct_vs_base_3_torch" not in results  # it has no target for these kernels
    questions = [json.loads(line) for line in asked.read_text().splitlines()]
    loads = [question for question in questions if question["do"] == "load"]
    assert [len(load["adapters"]) for load in loads] == [0, 2]
    generated = [question for question in questions if question["do"] == "generate"]
    assert {tuple(question["adapters"]) for question in generated} == {(None, None, None), (0, 1, 0)}
    assert {len(prompt) for question in generated for prompt in question["prompts"]} == {8}
    warm, measured = [question["prompts"] for question in generated if question["output"] == 4][1:3]
    assert warm != measured


def test_a_benchmark_that_is_terminated_leaves_no_process(tmp_path: Path) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text("#!/bin/sh\nexec cat >&2\n")  # it never answers, and ends with its stdin
    python.chmod(0o755)
    sizes = "--layers=1 --width=64 --vocabulary=128 --context=128 --kv-mib=8 --adapters=1 --rank=4"
    command = [sys.executable, "-m", "benchmarks.vllm_peer", f"--python={python}", "--cases=base", "--kernels=torch"]
    with subprocess.Popen([*command, *sizes.split()], cwd=ROOT, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        next(line for line in running.stdout if line.startswith("starting vLLM"))
        children = psutil.Process(running.pid).children(recursive=True)
        running.terminate()
    assert running.returncode == 128 + signal.SIGTERM
    assert psutil.wait_procs(children, timeout=10)[1] == []


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


@pytest.mark.parametrize(
    ("mine", "other", "margins", "equal", "clear"),
    [
        ([[1, 2]], [[1, 3]], (CLEAR, CLEAR), 1, 1),
        ([[1, 2]], [[4, 2]], (CLEAR, CLEAR), 0, 1),
        ([[1, 2]], [[4, 2]], (CLEAR, CLEAR / 2), 0, 0),
        ([[1, 2]], [[4, 2]], (CLEAR / 2, CLEAR), 0, 0),
    ],
)
def test_first_tokens_must_be_equal_where_both_are_sure(
    mine: list[list[int]], other: list[list[int]], margins: tuple[float, float], equal: int, clear: int
) -> None:
    ours, theirs = {"tokens": mine, "margins": [margins[0]]}, {"tokens": other, "margins": [margins[1]]}
    assert agreement(ours, theirs)[1:] == (equal, clear)


def streamed(text: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"text": text}]}).encode() + b"\n\ndata: [DONE]\n"


def test_answers_of_servers_are_equal_by_their_first_words() -> None:
    ours, theirs = [streamed(" w1 w2"), streamed(" w3 w4")], [streamed("w1 w9"), streamed("w4 w3")]
    assert equal_first_words(ours, theirs) == 0.5


def test_a_server_that_ends_before_it_is_ready_says_why() -> None:
    command = [sys.executable, "-c", "import sys; sys.exit('there is no room')"]
    with Stoppable("vLLM's server", command) as server, pytest.raises(DrivenError) as error:
        asyncio.run(until_ready(server, 9))
    assert str(error.value) == "vLLM's server ended.\nthere is no room\n"
