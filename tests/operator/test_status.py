"""The status document: what an operator leaves for the one that follows."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from motet.api.v1 import common_pb2
from motet.resources.status import AdapterRevision
from motet.runner_info import MAX_KERNEL_TEXT, KernelState
from motet_operator.cluster.decision import SchedulerReports
from motet_operator.local.status import (
    StatusFile,
    objects_from,
    revisions_from,
    status_document,
    wanted_from,
    with_earlier_reports,
)
from motet_operator.reconcile import ScalingAdvice, reconcile
from tests.operator.builders import DIGEST, NOW, adapter, name, pool, view


def test_a_new_operator_keeps_the_last_wanted_replicas() -> None:
    scaling = {"mode": "Builtin", "minReplicas": 0, "maxReplicas": 5}
    plan = reconcile(view(pools=[pool(autoscaling=scaling)], scaling_advice={name("demo"): ScalingAdvice(replicas=4)}))
    document = status_document(plan, [], [], url="http://127.0.0.1:1", operator_pid=1)
    assert wanted_from(document) == {("default", "demo"): 4}


def test_the_status_says_which_kernels_runners_have_and_since_when() -> None:
    kernels = {"demo-2": KernelState("torch", 1e9 + 0.5, "why"), "demo-1": KernelState("cpp (avx512)", 0.0)}
    plan = reconcile(view(pools=[pool()]))
    document = status_document(plan, [], [], url="", operator_pid=1, kernels=kernels)
    assert document["runners"] == [
        {"name": "demo-1", "kernels": {"serving": "cpp (avx512)", "since": "1970-01-01T00:00:00Z", "note": ""}},
        {"name": "demo-2", "kernels": {"serving": "torch", "since": "2001-09-09T01:46:40Z", "note": "why"}},
    ]


def test_the_file_is_the_document_whatever_was_written_before(tmp_path: Path) -> None:
    """Documents that are made anew may get the places in memory of those that have gone."""
    file = StatusFile(tmp_path / "status.json")
    stays = {"name": "stays"}
    for number in range(20):
        adapters = [{"name": f"{number}-{index}"} for index in range(number)]
        assert file.write({"url": "x", "adapters": [stays, *adapters]})
        assert not file.write({"url": "x", "adapters": [dict(stays), *adapters]})
        assert file.read() == {"url": "x", "adapters": [stays, *adapters]}


@pytest.mark.parametrize("since", [float("nan"), float("inf"), -1.0, 1e300, 2.0**36 - 1])
def test_any_time_that_a_runner_reports_can_be_written(since: float) -> None:
    state = KernelState.from_proto(common_pb2.KernelState(serving="x" * 10_000, since_unix_seconds=since))
    document = status_document(reconcile(view()), [], [], url="", operator_pid=1, kernels={"a": state})
    assert len(document["runners"][0]["kernels"]["since"]) == len("1970-01-01T00:00:00Z")
    assert len(document["runners"][0]["kernels"]["serving"]) <= MAX_KERNEL_TEXT


def test_an_invalid_status_document_gives_no_wanted_replicas() -> None:
    assert wanted_from({"pools": [{"name": "demo"}]}) == {}
    assert wanted_from({}) == {}


def test_an_adapter_that_no_scheduler_has_named_yet_stays_as_the_last_operator_left_it() -> None:
    place = view(pools=[pool()], adapters=[adapter("heard"), adapter("unheard"), adapter("checked")])
    plan = reconcile(place)
    earlier = status_document(plan, [], [], url="", operator_pid=1)
    for one in earlier["adapters"]:
        one |= {"ready": True, "certificate": {"rank": 8}}
    document = status_document(plan, [], [], url="", operator_pid=2)
    unheard = {name("unheard"): True, name("checked"): False}
    document = with_earlier_reports(document, earlier, place, SchedulerReports(), unheard)
    found = {one["name"]: (one["ready"], one["certificate"]) for one in document["adapters"]}
    checks = {"rank": 8}
    assert found == {"heard": (False, None), "unheard": (True, checks), "checked": (False, checks)}
    assert objects_from({"adapters": [{"name": "x"}]}, "adapters") == objects_from({}, "adapters") == {}


def test_the_last_revisions_survive_a_restart_of_the_operator() -> None:
    one = AdapterRevision(source="file:///a", digest=DIGEST, verdict="Replaced", time=NOW)
    place = view(pools=[pool()], adapters=[replace(adapter("legal"), revisions=(one,))])
    written = status_document(reconcile(place), [], [], url="", operator_pid=1)
    assert revisions_from(json.loads(json.dumps(written))) == {("default", "legal"): (one,)}
    assert revisions_from({"adapters": [{"name": "x"}]}) == revisions_from({"adapters": 1}) == {}
