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
