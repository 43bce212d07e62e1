"""`benchmarks.gpu` comes to its end without a GPU, and keeps what it had when a goal fails."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from benchmarks.gpu import measure, measure_apart
from benchmarks.gpu_goals import goals as all_goals
from benchmarks.gpu_goals import vllm_behind
from benchmarks.gpu_goals.bench import TINY, Bench
from benchmarks.gpu_goals.clock import Rehearsal
from benchmarks.gpu_goals.figures import Beside, Figure
from benchmarks.gpu_goals.goals import GOALS, Goal
from benchmarks.gpu_goals.kept import Kept
from benchmarks.gpu_goals.served import covered
from benchmarks.gpu_goals.twins import BLOCK, only_read
from benchmarks.harness import MISSED, Pairs
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
    begin, asked = subprocess.Popen, []

    def instead(command: list[str], **how: object) -> subprocess.Popen[bytes]:
        asked.append(command[command.index("--goals") + 1])
        return begin([sys.executable, "-c", script if len(asked) == 1 else ""], **how)

    kept = Kept(tmp_path / "gpu.json", {})
    monkeypatch.setattr(subprocess, "Popen", instead)
    assert not measure_apart([GOALS["G1"], GOALS["G2"]], kept, minutes, [])
    assert asked == (["G1", "G2"] if minutes == 1 else ["G1"])
    assert kept.document["failed"]["G1"] == failure


@pytest.mark.parametrize("waits", [True, False], ids=["in time", "too slow"])
def test_what_a_goal_has_started_ends_with_it(waits: bool) -> None:
    starts = f"""
import subprocess, sys
begun = subprocess.Popen([sys.executable, "-c", "import time; print('here', flush=True); time.sleep(600)"], stdout=-1)
begun.stdout.readline()
print(begun.pid, flush=True)
{"" if waits else "begun.wait()"}
"""
    most = 20.0 if waits else 5.0
    script = f"from benchmarks.gpu import run_as_group; run_as_group([sys.executable, '-c', {starts!r}], {most})"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; {script}"], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False
    )
    assert (done.returncode == 0) is waits, "its time is over"
    begun = int(done.stdout)
    assert not psutil.pid_exists(begun) or psutil.Process(begun).status() == psutil.STATUS_ZOMBIE


def of_vllm(monkeypatch: pytest.MonkeyPatch, says: dict[str, list[dict[str, object]] | int]) -> dict[str, Figure]:
    """The figures of G20. `says`: the rows of each case of `benchmarks.external`, or its status"""

    def run(command: list[str], **_: object) -> SimpleNamespace:
        rows = says[command[command.index("--cases") + 1]]
        if isinstance(rows, int):
            return SimpleNamespace(returncode=rows, stdout="")
        return SimpleNamespace(returncode=MISSED, stdout=f"said\n{json.dumps({'results': rows})}\n")

    monkeypatch.setattr(vllm_behind, "subprocess", SimpleNamespace(run=run, PIPE=-1))
    return {one.name: one for one in vllm_behind.g20(SimpleNamespace(rehearsal=False, vllm_python=Path("python")))}


def row(name: str, value: float, **more: object) -> dict[str, object]:
    return {"name": name, "value": value, "holds": True} | more


WRONG = [row(name, 0, counted=True) for name in vllm_behind.AT_MOST]
WELL: dict[str, list[dict[str, object]] | int] = {
    "masked": [row("child_masked_32", 0.9, same=True)],
    "served": [row("own_server_base", 1.05, holds=False), row("own_server_distinct", 1.2)],
    "suites": WRONG,
}


def test_vllm_behind_a_runner_holds_by_the_targets_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    found = of_vllm(monkeypatch, WELL)
    assert found.keys() == vllm_behind.AT_LEAST.keys() | vllm_behind.AT_MOST.keys()
    assert all(one.holds for one in found.values())


@pytest.mark.parametrize(
    ("case", "says", "missed"),
    [
        ("suites", [{**WRONG[0], "holds": False}, *WRONG[1:]], {"contract_failed"}),
        ("suites", WRONG[1:], {"contract_failed"}),
        ("served", [row("own_server_base", 1.2)], {"own_server_distinct"}),
        ("served", 1, {"own_server_base", "own_server_distinct"}),
        ("masked", [row("child_masked_32", 0.9, same=False)], {"child_masked_32"}),
    ],
    ids=["no test ran", "a suite is not there", "a figure is not there", "a case fails", "other tokens"],
)
def test_what_was_not_measured_of_vllm_is_missed(
    case: str, says: list[dict[str, object]] | int, missed: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = of_vllm(monkeypatch, WELL | {case: says})
    assert {one.name for one in found.values() if not one.holds} == missed
    assert not [one for one in found.values() if one.holds is None]
    assert len(found) == 6


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
