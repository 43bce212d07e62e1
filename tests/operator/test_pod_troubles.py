"""Why a runner's pod does not serve, as its pool's status repeats it."""

import pytest

from motet_operator.cluster.view import LONGEST_TROUBLE, read_instance


def pod(*containers):
    labels = {"motet.dev/pool": "demo", "motet.dev/revision": "r1"}
    metadata = {
        "name": "demo-r1-x",
        "namespace": "pools",
        "labels": labels,
        "creationTimestamp": "2026-01-01T00:00:00Z",
    }
    return {"metadata": metadata, "spec": {}, "status": {"containerStatuses": list(containers)}}


@pytest.mark.parametrize(
    ("ended", "reason"),
    [
        (
            {"reason": "Error", "exitCode": 2, "message": "runner: there is no repository hf://org/base"},
            "runner: there is no",
        ),
        ({"reason": "OOMKilled", "exitCode": 137}, "OOMKilled, exit code 137"),
        ({}, "Error, exit code ?"),
    ],
)
def test_what_a_runner_said_when_it_ended_is_its_reason(ended, reason):
    said = {"restartCount": 3, "state": {"waiting": {"reason": "CrashLoopBackOff"}}, "lastState": {"terminated": ended}}
    instance = read_instance(pod(said))
    assert instance.reason.startswith(reason)
    assert instance.failures == 3


def test_a_long_last_word_is_cut():
    ended = {"reason": "Error", "exitCode": 2, "message": "x" * 4000}
    assert len(read_instance(pod({"restartCount": 1, "lastState": {"terminated": ended}})).reason) == LONGEST_TROUBLE
