"""`benchmarks.gpu` comes to its end without a GPU, and keeps what it had when a goal fails."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import measure, measure_apart
from benchmarks.gpu_goals import goals as all_goals
from benchmarks.gpu_goals.bench import TINY, Bench
from benchmarks.gpu_goals.clock import Rehearsal
from benchmarks.gpu_goals.figures import Beside, Figure
from benchmarks.gpu_goals.goals import GOALS, Goal
from benchmarks.gpu_goals.kept import Kept
from benchmarks.gpu_goals.served import covered
from benchmarks.gpu_goals.twins import BLOCK, only_read
from benchmarks.harness import Pairs
from motet_kernels.gpu.launches import launch
from testbed.tree import ROOT
from tests.support.gpu_compiler import launches_are_compiled
from tools.performance.goals import goals_table

NO_FOLDER = "LookupError: --vllm-kernels names no folder"
NO_PYTHON = "LookupError: --vllm-python names no Python"


def gpu(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.gpu", *arguments]
    return subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)


def bench() -> Bench:
    return Bench(torch.device("cpu"), torch.float32, Rehearsal(), TINY)


@pytest.mark.parametrize("goals", [["G0", "G1", "G9", "G11"], pytest.param([*GOALS], marks=pytest.mark.soak)], ids=len)
def test_goals_can_be_rehearsed_and_a_rehearsal_has_no_figures(goals: list[str]) -> None:
    done = gpu("--rehearse", "--goals", *goals)
    assert done.returncode == 0, done.stdout
    assert re.findall(r"^(\w+) rehearsed: [1-9]", done.stdout, re.MULTILINE) == goals
    lacking = set(re.findall(r"^    (\w+) not rehearsed: (.*)", done.stdout, re.MULTILINE))
    of_all = {("own_server", NO_PYTHON)} if "G20" in goals else set()
    assert lacking == {("vllm", NO_FOLDER), ("vllm_invariant", NO_FOLDER)} | of_all
    assert not re.search(r"\d (us|GB/s|x ours)", done.stdout)


def test_the_plain_read_uses_the_widest_loads() -> None:
    """Else it would be slower than what it stands for, and would flatter our kernels."""
    with launches_are_compiled() as found:
        launch(
            only_read, (4,), torch.empty(BLOCK, dtype=torch.int32), torch.empty(4, dtype=torch.int32), 1, BLOCK=BLOCK
        )
    assert found[0].spilled_bytes == 0
    assert set(re.findall(r"LDG\S*", found[0].instructions)) == {"LDG.E.128"}


def test_the_time_in_which_a_gpu_is_busy_counts_kernels_beside_each_other_once() -> None:
    assert covered([(0.0, 4.0), (1.0, 2.0), (3.0, 5.0), (9.0, 10.0)]) == 0.6
    assert covered([(0.0, 1.0), (1.0, 2.0)]) == 1.0
    assert covered([(0.0, 4.0), (5.0, 8.0), (9.5, 10.0)], short_gap=1.0) == 0.85


def test_the_table_says_of_every_goal_whether_it_was_measured() -> None:
    row = {"goal": "G1", "holds": True, "value": 4.25, "unit": "us", "commit": "abc", "gpu": {"name": "a card"}}
    row["beside"] = {"vllm": {"not_measured": "no folder"}, "loop": {"ratio": 2.0}}
    other = row | {"holds": False, "value": 1234.5}
    lines = goals_table([row, other, row | {"goal": "G0", "holds": None, "beside": {}}]).splitlines()
    assert lines[-1] == "a card; abc."
    cells = [line.removeprefix("| ").removesuffix(" |").split(" | ") for line in lines[2:-2]]
    said = {one[0]: one[4:] for one in cells}
    assert said.pop("G1") == ["1 of 2 figures hold; not measured: vllm", "4.25 to 1,234 us", "loop 2"]
    assert said.pop("G0") == ["1 figures", "4.25 us", ""]
    assert said == {name: ["waiting for a card", "", ""] for name in GOALS.keys() - {"G0", "G1"}}


@pytest.mark.parametrize(
    ("script", "minutes", "failure"),
    [
        ("import os; os.abort()", 1.0, "its process ended with -6"),
        ("import time; time.sleep(60)", 0.01, "not measured to its end within --minutes 0.01"),
    ],
    ids=["dies", "too slow"],
)
def test_each_goal_has_a_process_of_its_own_and_the_next_one_its_turn(
    script: str, minutes: float, failure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, asked = subprocess.run, []

    def instead(command: list[str], **how: object) -> subprocess.CompletedProcess[bytes]:
        asked.append(command[command.index("--goals") + 1])
        return run([sys.executable, "-c", script if len(asked) == 1 else ""], **how)

    kept = Kept(tmp_path / "gpu.json", {})
    monkeypatch.setattr(subprocess, "run", instead)
    assert not measure_apart([GOALS["G1"], GOALS["G2"]], kept, minutes, [])
    assert asked == (["G1", "G2"] if minutes == 1 else ["G1"])
    assert kept.document["failed"]["G1"] == failure


def test_a_goal_that_fails_keeps_its_figures_and_lets_the_next_one_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Goals:
        @staticmethod
        def g1(_: Bench) -> Iterator[Figure]:
            yield Figure(name="first", value=1.0, unit="us", at_most=2.0)
            raise RuntimeError("the card is gone")

        @staticmethod
        def g2(_: Bench) -> Iterator[Figure]:
            yield Figure(name="second", value=3.0, unit="us", at_most=2.0)

    monkeypatch.setattr(all_goals, "import_module", lambda _: Goals)
    kept = Kept(tmp_path / "gpu.json", {"name": "a card"})
    assert not measure([Goal("G1", "", "", ""), Goal("G2", "", "", "")], bench(), kept)
    kept_now = json.loads((tmp_path / "gpu.json").read_text())
    rows = [(row["goal"], row["name"], row["holds"]) for row in kept_now["results"]]
    assert rows == [("G1", "first", True), ("G2", "second", False)]
    assert kept_now["failed"] == {"G1": "RuntimeError: the card is gone"}
    assert kept.missed(["G2"])
    assert not kept.missed(["G1"])


def test_a_figure_holds_only_if_what_stands_beside_it_does() -> None:
    slow, fast = Pairs([3.0, 3.0], [1.0, 1.0]), Pairs([1.0, 1.0], [1.0, 1.0])
    figure = lambda **against: Figure(name="f", value=1.0, unit="us", at_most=2.0, against=against)  # noqa: E731
    assert figure(loop=Beside(slow, 2.0)).holds
    assert not figure(loop=Beside(slow, 2.0), other=Beside(fast, 2.0)).holds
    assert figure(loop=Beside(slow, 2.0), other=Beside(None, 2.0, "it is not here")).holds is None, "it is not beaten"
    assert figure(loop=Beside(slow, 2.0), other=Beside(None, None, "it is not here")).holds
    assert Figure(name="f", value=1.0, unit="us").holds is None
