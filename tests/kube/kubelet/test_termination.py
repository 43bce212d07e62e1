"""How a pod ends, as "Termination of Pods" of the Kubernetes documentation describes it."""

import time
from typing import Any

import pytest

from motet.processes.linux import all_stats, environment_of
from testbed.cluster.nodes import ClusterNode
from tests.kube.pods import IDLE, Pods, shell

pytestmark = pytest.mark.kube

STUBBORN = "trap '' TERM; while :; do sleep 0.1; done"


def seconds_to_delete(pods: Pods, name: str, *arguments: str) -> float:
    began = time.monotonic()
    pods.delete(name, *arguments)
    return time.monotonic() - began


def test_a_container_that_heeds_sigterm_does_not_use_its_grace(pods: Pods) -> None:
    name = pods.run(shell(IDLE), terminationGracePeriodSeconds=30)
    pods.wait_ready(name)
    assert seconds_to_delete(pods, name) < 20


def test_a_container_that_does_not_is_killed_when_its_grace_is_over(pods: Pods) -> None:
    name = pods.run(shell(STUBBORN), terminationGracePeriodSeconds=2, finalizers=["motet.dev/test"])
    pods.wait_ready(name)
    pods.delete(name, "--wait=false")
    pods.wait_phase(name, "Failed")
    assert pods.container(name)["state"]["terminated"]["exitCode"] == 137

    def confirmed() -> bool:
        grace: int = pods.get(name)["metadata"]["deletionGracePeriodSeconds"]
        return grace == 0

    pods.cluster.wait_for(confirmed, "the node's report that the pod has ended")
    # A finalizer keeps the ended pod visible. Without the finalizer, the pod is deleted.
    pods.cluster.kubectl(
        *("patch", "pod", name, f"--namespace={pods.namespace}", "--type=merge"),
        '--patch={"metadata":{"finalizers":null}}',
    )
    pods.wait_gone(name)


def test_the_first_process_without_a_handler_ignores_sigterm(pods: Pods) -> None:
    """The kernel ignores it for process 1 of a container, also on a real node. Such a container takes the whole grace
    period to end."""
    name = pods.run(shell("exec sleep 600"), terminationGracePeriodSeconds=2)
    pods.wait_ready(name)
    assert seconds_to_delete(pods, name) >= 2


@pytest.mark.parametrize(
    ("hook", "least"),
    [
        ({"exec": {"command": ["sh", "-c", "sleep 1.5"]}}, 1.5),
        ({"sleep": {"seconds": 2}}, 2.0),
    ],
    ids=["exec", "sleep"],
)
def test_the_hook_before_the_end_delays_sigterm(pods: Pods, hook: dict[str, Any], least: float) -> None:
    container = shell(IDLE, lifecycle={"preStop": hook})
    name = pods.run(container, terminationGracePeriodSeconds=30)
    pods.wait_ready(name)
    assert least <= seconds_to_delete(pods, name) < 25


def test_the_hook_before_the_end_has_no_more_than_the_grace(pods: Pods) -> None:
    container = shell(IDLE, lifecycle={"preStop": {"exec": {"command": ["sleep", "60"]}}})
    name = pods.run(container, terminationGracePeriodSeconds=1)
    pods.wait_ready(name)
    assert seconds_to_delete(pods, name) < 30


def test_forced_deletion_does_not_wait(pods: Pods) -> None:
    name = pods.run(shell(STUBBORN), terminationGracePeriodSeconds=30)
    pods.wait_ready(name)
    assert seconds_to_delete(pods, name, "--force", "--grace-period=0") < 20


def test_a_second_deletion_may_shorten_the_grace(pods: Pods) -> None:
    name = pods.run(shell(STUBBORN), terminationGracePeriodSeconds=60)
    pods.wait_ready(name)
    pods.delete(name, "--wait=false")
    assert seconds_to_delete(pods, name, "--grace-period=1") < 30


def test_all_processes_of_a_container_end_with_it(pods: Pods) -> None:
    mark = f"left-{time.monotonic_ns()}"
    name = pods.run(shell(f"MARK={mark} setsid sleep 600 & MARK={mark} sleep 600 & {IDLE}"))
    pods.wait_ready(name)

    def left() -> int:
        return sum(environment_of(stat.identity.pid).get("MARK") == mark for stat in all_stats() if not stat.dead)

    pods.cluster.wait_for(lambda: left() == 2, "its processes")
    pods.delete(name)
    pods.cluster.wait_for(lambda: left() == 0, "the end of its processes")


def test_a_pod_that_never_started_goes_at_once(pods: Pods) -> None:
    missing = [{"name": "missing", "secret": {"secretName": "not-there"}}]
    name = pods.run(shell(IDLE), volumes=missing, terminationGracePeriodSeconds=30)
    pods.cluster.wait_for(lambda: pods.status(name).get("hostIP"), "the node to have it")
    assert pods.condition(name, "PodReadyToStartContainers")["status"] == "False"
    assert seconds_to_delete(pods, name) < 20


def test_a_pod_that_never_started_has_not_succeeded(pods: Pods) -> None:
    missing = [{"name": "missing", "secret": {"secretName": "not-there"}}]
    name = pods.run(shell("exit 0"), volumes=missing, restartPolicy="Never", finalizers=["motet.dev/test"])
    pods.cluster.wait_for(lambda: pods.status(name).get("hostIP"), "the node to have it")
    pods.delete(name, "--wait=false")
    pods.wait_phase(name, "Failed")
    assert pods.container(name)["state"]["terminated"]["reason"] == "ContainerStatusUnknown"
    pods.cluster.kubectl(
        *("patch", "pod", name, f"--namespace={pods.namespace}", "--type=merge"),
        '--patch={"metadata":{"finalizers":null}}',
    )


def test_a_pod_that_is_ending_gets_no_new_requests_while_it_finishes_its_old_ones(
    pods: Pods, node: ClusterNode
) -> None:
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "ending", "namespace": pods.namespace},
        "spec": {"selector": {"app": "ending"}, "clusterIP": "None", "ports": [{"port": 8000}]},
    }
    pods.cluster.apply(service)
    container = shell(IDLE, lifecycle={"preStop": {"sleep": {"seconds": 10}}})
    name = pods.run(container, labels={"app": "ending"}, terminationGracePeriodSeconds=30)
    pods.wait_ready(name)
    address = pods.status(name)["podIP"]
    pods.cluster.wait_for(lambda: pods.cluster.addresses("ending", pods.namespace) == [address], "the endpoint")
    pods.delete(name, "--wait=false")
    pods.cluster.wait_for(
        lambda: not pods.cluster.addresses("ending", pods.namespace), "removal from the endpoints", within_s=10
    )
    assert "running" in pods.container(name)["state"]
    (one,) = pods.cluster.items(
        "endpointslices", f"--namespace={pods.namespace}", "--selector=kubernetes.io/service-name=ending"
    )
    assert one["endpoints"][0]["conditions"] == {"ready": False, "serving": True, "terminating": True}


def test_the_jobs_of_a_deployment_are_handed_over_one_by_one(pods: Pods) -> None:
    def deployment(version: str) -> dict[str, Any]:
        container = {"name": "main", **shell(f": {version}; {IDLE}")}
        return {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": "rolling", "namespace": pods.namespace},
            "spec": {
                "replicas": 2,
                "selector": {"matchLabels": {"app": "rolling"}},
                "strategy": {"rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
                "template": {"metadata": {"labels": {"app": "rolling"}}, "spec": {"containers": [container]}},
            },
        }

    for version in ("one", "two"):
        pods.cluster.apply(deployment(version))
        pods.cluster.kubectl(
            "rollout", "status", "deployment/rolling", f"--namespace={pods.namespace}", "--timeout=50s"
        )
    pods.cluster.kubectl("delete", "deployment", "rolling", f"--namespace={pods.namespace}", "--cascade=foreground")
    assert not pods.cluster.items("pods", f"--namespace={pods.namespace}", "--selector=app=rolling")
