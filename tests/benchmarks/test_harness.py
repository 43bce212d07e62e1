"""The harness says what it measured, and nothing that it did not."""

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from benchmarks import harness
from benchmarks.harness import alternate, measuring_other_load
from testbed.tree import commit, git


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


def test_children_that_end_meanwhile_count_as_our_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that does nothing else."""
    busy = 0.0
    monkeypatch.setattr(harness, "_busy_seconds", lambda: busy)
    began = harness.seconds_of([psutil.Process()])
    with measuring_other_load() as foreign:
        spin()
        subprocess.run([sys.executable, "-c", SPIN], check=True)
        busy = harness.seconds_of([psutil.Process()]) - began
    assert busy > 0.9
    assert foreign.share == pytest.approx(0, abs=0.02)


def test_results_name_the_commit_of_their_tree(tmp_path: Path) -> None:
    assert harness.commit(tmp_path) == ""
    git(tmp_path, "init", "-q")
    commit(tmp_path, file="one")
    git(tmp_path, "tag", "-am", "a release", "v1")
    head = git(tmp_path, "rev-parse", "--short=10", "HEAD")
    assert harness.commit(tmp_path) == head
    (tmp_path / "file").write_text("two")
    assert harness.commit(tmp_path) == f"{head}+"
