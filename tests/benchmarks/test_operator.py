"""The operator's benchmark ends as all others do: what it measures needs a cluster, and is put in its place here."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks import operator
from benchmarks.harness import MISSED, SKIPPED, Pairs, Result
from tests.kube.network import CannotIsolate


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that has the Kubernetes tools."""
    monkeypatch.setattr(sys, "argv", ["benchmarks.operator", "--json"])
    monkeypatch.setattr(operator, "find", lambda tool: Path("/tools") / tool)
    monkeypatch.setattr(operator, "uses_existing_cluster", lambda: False)


def measured(monkeypatch: pytest.MonkeyPatch, *results: Result) -> None:
    monkeypatch.setattr(operator, "in_own_cluster", lambda given: list(results))


def test_a_missed_target_gives_the_exit_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    against = Pairs([3.0], [2.0], [0.0])
    usual = Result("usual_way_ratio", against.ratio, "x", baseline="the usual way", pairs=against)
    measured(monkeypatch, Result("idle_writes", 1, "writes", "0", False), usual)
    with pytest.raises(SystemExit) as ended:
        operator.main()
    assert ended.value.code == MISSED
    idle, ratio = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    assert idle["holds"] is False
    assert (ratio["against"]["baseline"], ratio["against"]["pairs"]) == ("the usual way", 1)


def test_met_targets_give_exit_status_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    measured(monkeypatch, Result("idle_writes", 0, "writes", "0", True))
    operator.main()


def test_a_machine_without_network_namespaces_is_named_and_skipped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def cannot(_: object) -> list[Result]:
        raise CannotIsolate("needs root")

    monkeypatch.setattr(operator, "in_own_cluster", cannot)
    with pytest.raises(SystemExit) as ended:
        operator.main()
    assert ended.value.code == SKIPPED
    assert capsys.readouterr().out == "skipped: needs root\n"


async def test_cpu_time_and_wall_time_come_from_the_same_pairs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where the machine was never quiet neither figure passes for an undisturbed one."""

    async def disturbed(*sides: object, **how: object) -> Pairs:
        return Pairs([2.0], [1.0], [0.9], disturbed=True)

    class Home:
        folder = tmp_path

    monkeypatch.setattr(operator, "alternate", disturbed)
    contest = await operator.compare_with_kopf(None, Home(), 1, 1)  # type: ignore[arg-type]
    assert contest.cpu.disturbed
    assert contest.cpu.foreign == contest.wall.foreign
