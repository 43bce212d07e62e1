"""Why a runner's pod does not serve, as its pool's status repeats it."""

import pytest

from motet_operator.cluster.object_parser import MAX_TROUBLE_LENGTH, read_failed, read_instance


def at(second):
    return f"2026-01-01T00:{second // 60:02}:{second % 60:02}Z"


def life(began, ended):
    return {"terminated": {"startedAt": at(began), "finishedAt": at(ended), "message": "its last words", "exitCode": 1}}


def unready(container, *, since):
    it = pod(container)
    it["status"]["conditions"] = [{"type": "Ready", "status": "False", "lastTransitionTime": at(since)}]
    return read_instance(it)


def running(began, restarts, last, *, started=True):
    state = {"running": {"startedAt": at(began)}}
    return {"restartCount": restarts, "state": state, "lastState": last, "started": started, "ready": False}


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
def test_a_runners_termination_message_is_its_reason(ended, reason):
    status = {
        "restartCount": 3,
        "state": {"waiting": {"reason": "CrashLoopBackOff"}},
        "lastState": {"terminated": ended},
    }
    instance = read_instance(pod(status))
    assert instance.reason.startswith(reason)
    assert instance.failures == 3


def test_a_long_termination_message_is_cut():
    ended = {"reason": "Error", "exitCode": 2, "message": "x" * 4000}
    assert len(read_instance(pod({"restartCount": 1, "lastState": {"terminated": ended}})).reason) == MAX_TROUBLE_LENGTH


def test_failures_before_the_runner_last_served_do_not_count():
    instance = unready(running(100, 2, life(50, 99)), since=500)
    assert instance.failures == 0
    assert instance.reason == "the container runs, but its readiness check fails"


def test_a_runner_that_served_and_died_has_died_once_however_often_it_did_before():
    waiting = {"restartCount": 7, "state": {"waiting": {"reason": "CrashLoopBackOff"}}, "lastState": life(100, 500)}
    for now in (waiting, running(501, 7, life(100, 500), started=False)):
        instance = unready(now, since=500)
        assert (instance.failures, instance.reason) == (1, "its last words")


@pytest.mark.parametrize("began", [500, 510])
def test_deaths_without_a_moment_of_readiness_between_them_are_in_a_row(began):
    """Also within one second: Kubernetes tells no less."""
    waiting = {"restartCount": 7, "state": {"waiting": {"reason": "CrashLoopBackOff"}}, "lastState": life(began, 520)}
    instance = unready(waiting, since=500)
    assert instance.failures > 1
    assert instance.reason == "its last words"


def test_a_runner_that_was_never_ready_counts_every_death():
    instance = unready(running(30, 3, life(20, 29), started=False), since=0)
    assert (instance.failures, instance.reason) == (3, "its last words")


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        ({"reason": "Evicted", "message": "The node was low on resource: memory."}, "Evicted: The node was low on"),
        ({"reason": "UnexpectedAdmissionError", "message": "Allocate failed"}, "UnexpectedAdmissionError: Allocate"),
        ({"message": "Pod was terminated in response to imminent node shutdown."}, "Pod was terminated in response"),
        ({"containerStatuses": [{"state": {"terminated": {"reason": "Error", "finishedAt": at(30)}}}]}, "Error"),
        ({}, "Failed"),
    ],
)
def test_a_failed_pod_has_the_reason_of_whoever_ended_it(status, reason):
    it = pod()
    it["status"] = {"phase": "Failed", "conditions": [{"type": "Ready", "lastTransitionTime": at(20)}], **status}
    found = read_failed(it)
    assert found.reason.startswith(reason)
    assert found.at - int(read_failed(pod()).at) == (30 if "containerStatuses" in status else 20)
