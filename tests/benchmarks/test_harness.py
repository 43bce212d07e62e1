"""The harness says what it measured, and nothing that it did not."""

import json
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from benchmarks import harness
from benchmarks.harness import (
    OtherLoad,
    Pairs,
    Result,
    alternate,
    cpu_seconds,
    measuring_other_load,
    report,
)


async def test_one_slow_turn_does_not_change_the_median() -> None:
    order: list[str] = []

    async def a() -> float:
        order.append("a")
        return 500.0 if len(order) == 1 else 2.0

    async def b() -> float:
        order.append("b")
        return 1.0

    pairs = await alternate(a, b, pairs=2, attempts=2, quiet_share=1.0, turns=3)
    assert "".join(order) == "abbaab" + "baabba"
    assert (pairs.a, pairs.b, pairs.ratio) == ([2.0, 2.0], [1.0, 1.0], 2.0)


async def test_a_machine_that_is_never_quiet_gives_its_least_disturbed_pairs() -> None:
    async def one() -> float:
        return 1.0

    pairs = await alternate(one, one, pairs=2, quiet_share=-1.0)
    assert pairs.disturbed
    assert (len(pairs.a), pairs.discarded, len(pairs.kept)) == (2, 4, 2)
    assert "never quiet" in str(pairs)


SPIN = "import time\nwhile time.process_time() < 0.5: pass"


def spin() -> None:
    until = time.thread_time() + 0.5
    while time.thread_time() < until:
        pass


def foreign_seconds(measured: OtherLoad, wall: float) -> float:
    return measured.share * wall * (psutil.cpu_count() or 1)


def test_only_work_of_other_processes_counts_as_foreign() -> None:
    """Whatever else this machine does: of two looks at the same time the one that knows a process sees less by what it
    used."""
    began = time.perf_counter()
    with psutil.Popen([sys.executable, "-c", "while True: pass"]) as other:
        with measuring_other_load() as as_foreign, measuring_other_load([other]) as as_ours:
            before = cpu_seconds(other)
            spin()
            used = cpu_seconds(other) - before
        wall = time.perf_counter() - began
        other.kill()
    assert used > 0
    seen = foreign_seconds(as_foreign, wall) - foreign_seconds(as_ours, wall)
    assert seen == pytest.approx(used, rel=0.3, abs=0.05)


def test_children_that_end_meanwhile_count_as_our_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that does nothing else."""
    busy = 0.0
    monkeypatch.setattr(harness, "_busy_seconds", lambda: busy)
    began = harness._seconds_of([psutil.Process()])
    with measuring_other_load() as foreign:
        spin()
        subprocess.run([sys.executable, "-c", SPIN], check=True)
        busy = harness._seconds_of([psutil.Process()]) - began
    assert busy > 0.9
    assert foreign.share == pytest.approx(0, abs=0.02)


def test_results_name_the_commit_of_their_tree(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        identity = ("-c", "user.name=somebody", "-c", "user.email=somebody@example.com")
        return subprocess.run(
            ["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout

    assert harness.commit(tmp_path) == ""
    git("init", "-q")
    (tmp_path / "file").write_text("one")
    git("add", ".")
    git("commit", "-qm", "one")
    git("tag", "-am", "a release", "v1")
    assert harness.commit(tmp_path) == git("rev-parse", "--short=10", "HEAD").strip()
    (tmp_path / "file").write_text("two")
    assert harness.commit(tmp_path) == git("rev-parse", "--short=10", "HEAD").strip() + "+"


def test_a_second_figure_of_the_same_pairs_keeps_their_disturbance() -> None:
    seconds = Pairs([2, 4], [1, 1], [0.5, 0.6], discarded=1, disturbed=True, kept=[2, 0])
    of_cpu = seconds.beside([3, 9, 1], [1, 1, 1])
    assert (of_cpu.a, of_cpu.b, of_cpu.ratio) == ([1, 3], [1, 1], 2)
    assert (of_cpu.foreign, of_cpu.discarded, of_cpu.disturbed) == ([0.5, 0.6], 1, True)
    assert seconds.ratio == 3


def test_the_last_line_is_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    pairs = Pairs([1, 2, 3], [1, 1, 1], [0.0] * 3, discarded=4, disturbed=True)
    measured = Result("ratio", 2.0, "x", baseline="a plain loop", pairs=pairs)
    report("demo", [Result("speed", 2.0, "µs", "≤ 3", True), Result("plain", 1.0, "s"), measured], as_json=True)
    lines = capsys.readouterr().out.splitlines()
    last = json.loads(lines[-1])
    assert last["benchmark"] == "demo"
    assert last["machine"]["cores"] > 0
    assert last["results"][0] == {"name": "speed", "value": 2.0, "unit": "µs", "target": "≤ 3", "holds": True}
    assert last["results"][1]["holds"] is None
    assert last["results"][2]["against"] == {
        "baseline": "a plain loop",
        "ratio": 2.0,
        "spread": [1.0, 3.0],
        "pairs": 3,
        "discarded": 4,
        "disturbed": True,
    }
    assert "holds" in lines[0]
