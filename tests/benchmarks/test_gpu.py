"""`benchmarks.gpu` comes to its end without a GPU, and keeps what it had when a goal fails."""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.gpu import main, measure, measure_apart
from benchmarks.gpu_goals import goals as all_goals
from benchmarks.gpu_goals.bench import TINY, Bench
from benchmarks.gpu_goals.clock import CudaClock, Rehearsal, Way
from benchmarks.gpu_goals.figures import Beside, Figure
from benchmarks.gpu_goals.goals import GOALS, PARTS, Goal
from benchmarks.gpu_goals.kept import Kept
from benchmarks.gpu_goals.served import covered
from benchmarks.gpu_goals.twins import BLOCK, only_read
from benchmarks.harness import SKIPPED, Pairs
from motet_kernels.gpu.launches import launch
from tests.repo.tree import ROOT
from tests.support.gpu_compiler import launches_are_compiled
from tools.performance.goals import goals_table

NO_FOLDER = "LookupError: --vllm-kernels names no folder"


def gpu(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.gpu", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=None, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )


def bench() -> Bench:
    return Bench(torch.device("cpu"), torch.float32, Rehearsal(), TINY)


@pytest.mark.parametrize("goals", [["G0", "G1", "G9", "G11"], pytest.param([*GOALS], marks=pytest.mark.soak)], ids=len)
def test_goals_can_be_rehearsed_and_a_rehearsal_has_no_figures(goals: list[str]) -> None:
    done = gpu("--rehearse", "--goals", *goals)
    assert done.returncode == 0, done.stdout
    assert re.findall(r"^(\w+) rehearsed: [1-9]", done.stdout, re.MULTILINE) == goals
    lacking = set(re.findall(r"^    (\w+) not rehearsed: (.*)", done.stdout, re.MULTILINE))
    assert lacking == {("vllm", NO_FOLDER), ("vllm_invariant", NO_FOLDER)}
    assert not re.search(r"\d (us|GB/s|x ours)", done.stdout)


def test_without_a_gpu_it_says_so_and_prints_what_can_be_counted() -> None:
    done = gpu("--json")
    assert done.returncode == SKIPPED, done.stdout
    said = done.stdout.splitlines()
    assert [line for line in said if line.endswith("waiting for a card")] == [
        f"{name}: waiting for a card" for name in GOALS
    ]
    assert any(line.startswith("skipped: there is no CUDA device") for line in said)
    results = {row["name"]: row for row in json.loads(said[-1])["results"]}
    assert results["lora_launches_per_layer"]["value"] <= 8
    assert 1 < results["bytes_vs_floor"]["value"] <= 1.1


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
    row = {"goal": "G1", "holds": True, "beside": {"vllm": {"not_measured": "no folder"}, "loop": {"ratio": 2.0}}}
    lines = goals_table([row, row | {"holds": False}, row | {"goal": "G0", "holds": None, "beside": {}}]).splitlines()
    states = {line.split(" | ")[0].removeprefix("| "): line.split(" | ")[-1].removesuffix(" |") for line in lines[2:]}
    assert states.pop("G1") == "1 of 2 figures hold; not measured: vllm"
    assert states.pop("G0") == "1 figures"
    assert states == dict.fromkeys(GOALS.keys() - {"G0", "G1"}, "waiting for a card")


SLEEPS = "import sys, time; time.sleep(60)"


@pytest.mark.parametrize(
    ("script", "minutes", "failure"),
    [
        ("", 1.0, ""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 1.0, "its process ended with -9"),
        (SLEEPS, 0.01, "not measured to its end within --minutes 0.01"),
    ],
    ids=["works", "dies", "too slow"],
)
def test_each_goal_has_a_process_of_its_own_and_the_next_one_its_turn(
    script: str, minutes: float, failure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = subprocess.run
    asked = []

    def instead(command: list[str], **how: object) -> subprocess.CompletedProcess[bytes]:
        asked.append(command[command.index("--goals") + 1])
        return run([sys.executable, "-c", script if len(asked) == 1 else ""], **how)

    kept = Kept(tmp_path / "gpu.json", {})
    monkeypatch.setattr(subprocess, "run", instead)
    goals = [GOALS["G1"], GOALS["G2"]]
    assert measure_apart(goals, kept, minutes, []) == (not failure)
    assert asked == (["G1", "G2"] if minutes == 1 else ["G1"])
    assert kept.document["failed"].get("G1", "") == failure


def test_a_part_of_one_goal_is_bounded_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (alone,) = next(part for part in PARTS if len(part) == 1)
    bounded = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("benchmarks.gpu.gpu_here", lambda: {"name": "a card"})
    monkeypatch.setattr("benchmarks.gpu.measure_apart", lambda goals, *_: bounded.extend(goals) or True)
    command = ["gpu", "--part", str(PARTS.index((alone,)) + 1), "--results", str(tmp_path / "gpu.json")]
    monkeypatch.setattr(sys, "argv", command)
    main()
    assert bounded == [alone]


def test_the_list_names_every_goal_once_and_bad_arguments_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(sys, "argv", ["gpu", "--list"])
    main()
    assert re.findall(r"^  (G\d+) ", capsys.readouterr().out, re.MULTILINE) == list(GOALS)
    for arguments, said in (
        (("--part", "99"), "invalid choice: 99"),
        (("--rehearse", "--results", "kept.json"), "a rehearsal measures nothing"),
        (("--rehearse", "--vllm-kernels", "docs"), "docs lacks kernel_utils.py"),
    ):
        monkeypatch.setattr(sys, "argv", ["gpu", *arguments])
        with pytest.raises(SystemExit, match="2"):
            main()
        assert said in capsys.readouterr().err


def test_a_goal_that_fails_keeps_its_figures_and_lets_the_next_one_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
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
    path = tmp_path / "gpu.json"
    assert not measure(
        [Goal("G1", "", "", ""), Goal("G2", "", "", "")], bench(), kept := Kept(path, {"name": "a card"})
    )
    kept_now = json.loads(path.read_text())
    assert [(row["goal"], row["name"], row["holds"]) for row in kept_now["results"]] == [
        ("G1", "first", True),
        ("G2", "second", False),
    ]
    assert kept_now["failed"] == {"G1": "RuntimeError: the card is gone"}
    assert "G1 FAILED after 1 figures: RuntimeError: the card is gone" in capsys.readouterr().out
    assert kept.missed(["G2"])
    assert not kept.missed(["G1"])


def test_parts_add_to_one_file_and_a_new_figure_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    for value in (1.0, 2.0):
        kept = Kept(path, {"name": "a card"})
        kept.add("G1", Figure(name="first", value=value, unit="us"))
        kept.ended("G1")
    Kept(path, {"name": "a card"}).add("G2", Figure(name="second", value=3.0, unit="us"))
    rows = json.loads(path.read_text())["results"]
    assert [(row["name"], row["value"]) for row in rows] == [("first", 2.0), ("second", 3.0)]
    with pytest.raises(ValueError, match="another GPU"):
        Kept(path, {"name": "another card"})


class FakeCard:
    """Stands for torch.cuda: its clock advances when work is replayed, by so much for each call that was captured."""

    def __init__(self) -> None:
        self.now = 0.0
        self.replayed: list[str] = []
        self.capturing: list[tuple[str, float]] | None = None

    def work(self, name: str, milliseconds: float) -> Callable[[], None]:
        def do() -> None:
            if self.capturing is not None:
                self.capturing.append((name, milliseconds))

        return do

    def module(self) -> SimpleNamespace:
        card = self

        class Event:
            def __init__(self, *, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at = card.now

            def elapsed_time(self, end: "Event") -> float:
                return end.at - self.at

        class Graph:
            def __init__(self) -> None:
                self.calls: list[tuple[str, float]] = []

            def replay(self) -> None:
                card.replayed.append(self.calls[0][0])
                card.now += sum(milliseconds for _, milliseconds in self.calls)

        @contextmanager
        def graph(into: Graph) -> Iterator[None]:
            card.capturing = into.calls
            yield
            card.capturing = None

        def sleep(cycles: int) -> None:
            card.now += cycles / 1e6

        stream = SimpleNamespace(wait_stream=lambda _: None)
        return SimpleNamespace(
            Event=Event,
            CUDAGraph=Graph,
            graph=graph,
            Stream=lambda: stream,
            stream=lambda _: nullcontext(),
            current_stream=lambda: stream,
            synchronize=lambda: None,
            _sleep=sleep,
        )


def test_ways_are_replayed_in_turns_and_timed_by_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    card = FakeCard()
    monkeypatch.setattr(torch, "cuda", card.module())

    def cannot_be_captured() -> None:
        if card.capturing is not None:
            raise RuntimeError("operation not permitted when stream is capturing")

    ways = {
        "ours": Way(card.work("ours", 0.002), 50),
        "slow": Way(card.work("slow", 0.006), 10),
        "synchronises": Way(cannot_be_captured),
    }
    times = CudaClock().compare(ways, seconds=0.002)
    assert times.failed == {"synchronises": "RuntimeError: operation not permitted when stream is capturing"}
    assert times.median("ours") == pytest.approx(2.0)
    assert times.pairs("slow", "ours").ratio == pytest.approx(3.0)
    rounds = len(times.samples["ours"])
    assert rounds == 12  # of 160 us each
    in_turns = card.replayed[4:]  # after two rounds that warm up
    assert in_turns == ["ours", "slow", "slow", "ours"] * (rounds // 2)


def test_a_figure_holds_only_if_what_stands_beside_it_does() -> None:
    slow, fast = Pairs([3.0, 3.0], [1.0, 1.0]), Pairs([1.0, 1.0], [1.0, 1.0])
    figure = lambda **against: Figure(name="f", value=1.0, unit="us", at_most=2.0, against=against)  # noqa: E731
    assert figure(loop=Beside(slow, 2.0)).holds
    assert not figure(loop=Beside(slow, 2.0), other=Beside(fast, 2.0)).holds
    assert figure(loop=Beside(slow, 2.0), other=Beside(None, 2.0, "it is not here")).holds is None, "it is not beaten"
    assert figure(loop=Beside(slow, 2.0), other=Beside(None, None, "it is not here")).holds
    assert Figure(name="f", value=1.0, unit="us").holds is None
