"""How many threads an engine takes where nobody has set it."""

import json
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from structlog.testing import capture_logs

from motet.errors import SetupError
from motet_runner.execute.tune import cores, thread_choice
from motet_runner.execute.tune.thread_choice import (
    ROUNDS,
    candidates,
    fastest,
    measure,
    quiet,
    threads_to_begin_with,
)
from testbed.compiled_kernels import compiled_library
from tests.runner.engines import ask, make_engine, run
from tests.runner.random_models import save_base


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("usable", "counts"), [(1, [1]), (2, [1, 2]), (3, [1, 3]), (4, [1, 2, 4]), (9, [1, 4, 9])], ids=str
)
def test_one_half_and_all_of_the_cores_are_tried(usable: int, counts: list[int]) -> None:
    assert candidates(usable) == counts


@pytest.mark.parametrize("asked", [0, -1, 2.5, "two"], ids=str)
def test_a_number_of_threads_that_is_none_is_refused(asked: int) -> None:
    with pytest.raises(SetupError, match=r"engine\.threads is .* whole number from 1 on"):
        threads_to_begin_with(asked)


def test_no_more_threads_are_taken_than_there_are_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_choice, "allowed_cores", lambda: 3)
    with capture_logs() as logs:
        assert [threads_to_begin_with(asked) for asked in (None, 1, 3)] == [1, 1, 3]
        assert not logs
        assert threads_to_begin_with(10_000) == 3
    assert [(line["event"], line["asked"], line["taking"]) for line in logs] == [("too_many_threads", 10_000, 3)]


@pytest.mark.parametrize(
    ("seconds", "best"),
    [
        ({1: [1.0], 2: [0.6]}, 2),
        ({1: [1.0], 2: [0.95]}, 1),  # not worth a core
        ({1: [1.0], 2: [3.0]}, 1),
        ({1: [1.0], 2: [1.2], 4: [0.5]}, 4),
        ({1: [1.0], 4: [0.5], 8: [0.48]}, 4),
        ({1: [1.0, 1.0, 9.0], 2: [0.6, 0.6, 20.0]}, 2),  # one call was disturbed
    ],
    ids=str,
)
def test_more_threads_must_be_worth_it(seconds: dict[int, list[float]], best: int) -> None:
    assert fastest(seconds) == best


@pytest.mark.parametrize(
    ("seconds", "is_quiet"),
    [
        ({1: [1.0, 1.1, 1.0], 2: [0.6, 0.6, 0.6]}, True),
        ({1: [1.0, 1.0, 1.0], 2: [0.6, 0.6, 20.0]}, True),  # once
        ({1: [1.0, 1.0, 1.0], 2: [0.6, 0.9, 1.1]}, False),
    ],
    ids=str,
)
def test_what_was_measured_on_a_busy_machine_is_not_kept(seconds: dict[int, list[float]], is_quiet: bool) -> None:
    assert quiet(seconds) == is_quiet


def returned(parts: Generator[None, None, dict[int, Sequence[float]]]) -> dict[int, Sequence[float]]:
    """What the parts bring together. Between them the usual number of threads is set."""
    usual = torch.get_num_threads()
    while True:
        try:
            next(parts)
        except StopIteration as ended:
            return ended.value
        assert torch.get_num_threads() == usual


def test_calls_take_turns_and_end_in_time() -> None:
    used: list[int] = []
    now = 0.0

    def call() -> None:
        nonlocal now
        used.append(torch.get_num_threads())
        now += 0.02 / used[-1] if len(used) > 2 else 5.0  # a slow machine, at first

    seconds = returned(measure(call, [1, 2], clock=lambda: now))
    assert used == [1, 2]  # no other round begins after ten seconds
    assert {threads: len(taken) for threads, taken in seconds.items()} == {1: 1, 2: 1}
    now = 0.0
    seconds = returned(measure(call, [1, 2], clock=lambda: now))
    assert used[2:6] == [1, 2, 1, 2]
    assert len(seconds[1]) == ROUNDS
    assert min(seconds[1]) == pytest.approx(0.02)
    assert max(seconds[2]) == pytest.approx(0.01)


# -- cores ------------------------------------------------------------------------------------------------------------


def groups(root: Path, own: str, files: dict[str, str]) -> float:
    for name, text in files.items():
        path = root / "mount" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="utf-8")
    (root / "own").write_text(own, encoding="utf-8")
    return cores.quota(root / "mount", root / "own")


def test_the_least_quota_of_all_groups_counts(tmp_path: Path) -> None:
    files = {"cpu.max": "max 100000", "pods/cpu.max": "150000 100000", "pods/one/cpu.max": "max 100000"}
    assert groups(tmp_path, "0::/pods/one\n", files) == 1.5
    assert groups(tmp_path, "0::/\n", files) == float("inf")
    assert groups(tmp_path, "0::/\n", {"cpu.max": "400000 100000"}) == 4.0


def test_quotas_of_version_1_count(tmp_path: Path) -> None:
    files = {"cpu,cpuacct/one/cpu.cfs_quota_us": "250000", "cpu,cpuacct/one/cpu.cfs_period_us": "100000"}
    assert groups(tmp_path, "4:memory:/one\n3:cpu,cpuacct:/one\n", files) == 2.5
    files["cpu,cpuacct/one/cpu.cfs_quota_us"] = "-1"
    assert groups(tmp_path, "3:cpu,cpuacct:/one\n", files) == float("inf")


def test_without_control_groups_there_is_no_quota(tmp_path: Path) -> None:
    assert cores.quota(tmp_path, tmp_path / "missing") == float("inf")


@pytest.mark.parametrize(("quota", "usable"), [(0.5, 1), (1.9, 1), (2.0, 2), (float("inf"), 3)])
def test_only_whole_cores_of_a_quota_count(monkeypatch: pytest.MonkeyPatch, quota: float, usable: int) -> None:
    monkeypatch.setattr(cores.os, "sched_getaffinity", lambda _: {0, 1, 5}, raising=False)
    monkeypatch.setattr(cores, "quota", lambda: quota)
    assert cores.usable_cores() == usable


# -- engines ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kernels", "busy"), [("cpp", False), ("cpp", True), ("torch", False)])
def test_an_engine_measures_once_and_keeps_the_choice_unless_the_machine_was_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernels: str, busy: bool
) -> None:
    compiled_library()
    monkeypatch.setattr(thread_choice, "quiet", lambda _: not busy)
    monkeypatch.setattr(thread_choice, "usable_cores", lambda: 2)
    measured = []

    def two_are_best(seconds: dict[int, list[float]]) -> int:
        measured.append(sorted(seconds))
        return 2

    monkeypatch.setattr(thread_choice, "fastest", two_are_best)
    monkeypatch.setattr(thread_choice, "FILE", str(tmp_path / "threads.json"))
    base = save_base("llama", tmp_path / "base")
    for _ in range(2):
        torch.set_num_threads(1)
        engine = make_engine(base, kernels=kernels, threads=None)
        assert torch.get_num_threads() == 2
        run(engine, ask("one", max_tokens=3))
    if busy:
        assert measured == [[1, 2], [1, 2]]
        assert not (tmp_path / "threads.json").exists()
    else:
        assert measured == [[1, 2]]
        assert len(json.loads((tmp_path / "threads.json").read_text())) == 1


@pytest.mark.parametrize(
    ("settings", "expected"),
    [({"kernels": "cpp", "threads": 3}, 3), ({"kernels": "torch", "threads": 2}, 2), ({"kernels": "exact"}, 1)],
)
def test_nothing_is_measured_for_set_threads_and_in_exact_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, object], expected: int
) -> None:
    compiled_library()
    monkeypatch.setattr(thread_choice, "measure", lambda *_: pytest.fail("it was measured"))
    monkeypatch.setattr(thread_choice, "allowed_cores", lambda: 4)
    make_engine(save_base("llama", tmp_path / "base"), **settings)
    assert torch.get_num_threads() == expected
