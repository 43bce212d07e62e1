"""What a node reports about itself and its pods, which pods are placed on it, and what happens to them without it."""

import subprocess
import time
from typing import Any

import pytest

from motet.processes.linux import all_stats, environment_of
from testbed.cluster.cluster import Cluster, CommandRefused
from testbed.cluster.nodes import ClusterNode
from testbed.cluster.nodes import node as one_node
from tests.kube.pods import IDLE, Pods, shell

pytestmark = pytest.mark.kube

STOPPED = "T"
"""The state of a process after SIGSTOP: it writes nothing."""


def ready(cluster: Cluster, name: str) -> str:
    conditions = {one["type"]: one["status"] for one in cluster.get("node", name)["status"]["conditions"]}
    return str(conditions["Ready"])


def test_a_node_is_ready_and_renews_its_lease(cluster: Cluster, node: ClusterNode) -> None:
    cluster.wait_for(lambda: ready(cluster, node.name) == "True", "its condition")

    def renewed() -> str:
        return str(cluster.get("lease", node.name, "--namespace=kube-node-lease")["spec"]["renewTime"])

    first = renewed()
    cluster.wait_for(lambda: renewed() != first, "the next renewal", within_s=10)


def test_logs_are_read_of_this_run_and_of_the_one_before(pods: Pods, node: ClusterNode) -> None:
    script = f"test -e /memory/again && echo second || echo first; touch /memory/again; {IDLE}"
    mount = [{"name": "memory", "mountPath": "/memory"}]
    name = pods.run(shell(script, volumeMounts=mount), volumes=[{"name": "memory", "emptyDir": {}}])
    pods.wait_ready(name)
    assert pods.logs(name) == "first\n"
    with pytest.raises(CommandRefused, match="previous terminated container"):
        pods.logs(name, "--previous")
    node.kill(pods.path(name))
    pods.cluster.wait_for(lambda: pods.logs(name) == "second\n", "the second run")
    assert pods.logs(name, "--previous") == "first\n"


def test_logs_are_cut_and_followed(pods: Pods) -> None:
    name = pods.run(shell("echo one; echo two; sleep 1; echo three"), restartPolicy="Never")
    pods.wait_phase(name, "Running")
    assert pods.logs(name, "--follow") == "one\ntwo\nthree\n"
    assert pods.logs(name, "--tail=2") == "two\nthree\n"
    assert pods.logs(name, "--limit-bytes=3") == "one"


def test_a_node_serves_logs_only_to_the_api_server(cluster: Cluster, node: ClusterNode) -> None:
    logs = f"https://{node.address}:10250/containerLogs/a/b/c"
    asked = subprocess.run(
        # TLS 1.2 refuses a client certificate within the handshake; later versions refuse it afterwards.
        ["curl", "--silent", "--insecure", "--tls-max", "1.2", "--max-time", "20", logs],
        check=False,
        capture_output=True,
    )
    assert asked.returncode == 35, "not refused in the handshake"


def test_a_frozen_container_is_alive_and_silent(pods: Pods, node: ClusterNode) -> None:
    mark = f"frozen-{time.monotonic_ns()}"
    env = [{"name": "MARK", "value": mark}]
    name = pods.run(shell("while :; do date +%N; sleep 0.05; done", env=env))
    pods.wait_ready(name)
    pods.cluster.wait_for(lambda: pods.logs(name), "its first line")
    node.pause(pods.path(name))
    pods.cluster.wait_for(lambda: not marked(mark, but=STOPPED), "the stop of all its processes")
    assert marked(mark) > 0
    before = pods.logs(name)
    node.resume(pods.path(name))
    pods.cluster.wait_for(lambda: len(pods.logs(name)) > len(before), "new lines in the log")
    assert pods.container(name)["restartCount"] == 0


def test_slow_starts_can_be_ordered(pods: Pods, node: ClusterNode) -> None:
    node.delay_starts(1.5)
    try:
        began = time.monotonic()
        name = pods.run(shell(IDLE))
        pods.wait_ready(name)
        assert time.monotonic() - began >= 1.5
    finally:
        node.delay_starts(0)


def unschedulable(pods: Pods, name: str) -> str:
    pods.cluster.wait_for(lambda: pods.condition(name, "PodScheduled")["status"] == "False", "the refusal")
    condition = pods.condition(name, "PodScheduled")
    assert condition["reason"] == "Unschedulable"
    return str(condition["message"])


def test_a_pod_for_which_no_node_has_room_stays_pending_and_says_why(pods: Pods) -> None:
    name = pods.run(shell(IDLE, resources={"requests": {"cpu": "1000"}}))
    assert unschedulable(pods, name) == "0/1 nodes are available: 1 Insufficient cpu."
    assert pods.status(name)["phase"] == "Pending"


def test_a_pod_that_wants_another_node_waits_for_it(pods: Pods, cluster: Cluster) -> None:
    name = pods.run(
        shell('echo "[$CUDA_VISIBLE_DEVICES]"', resources={"limits": {"nvidia.com/gpu": "2"}}),
        nodeSelector={"zone": "gpu"},
        restartPolicy="Never",
    )
    assert "didn't match Pod's node affinity/selector" in unschedulable(pods, name)
    with one_node(cluster, "node-gpu", 7, gpus=2, labels={"zone": "gpu"}) as other:
        pods.wait_phase(name, "Succeeded")
        assert pods.logs(name) == "[0,1]\n"
        assert pods.status(name)["hostIP"] == other.address


def test_a_drained_node_gets_no_pods_and_loses_those_it_has(pods: Pods, cluster: Cluster) -> None:
    with one_node(cluster, "node-drained", 8, labels={"zone": "drained"}) as other:
        name = pods.run(shell(IDLE), nodeSelector={"zone": "drained"})
        pods.wait_ready(name)
        cluster.kubectl(
            "drain", other.name, "--force", "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=20s"
        )
        with pytest.raises(CommandRefused, match="not found"):
            pods.get(name)
        late = pods.run(shell(IDLE), nodeSelector={"zone": "drained"})
        assert "unschedulable" in unschedulable(pods, late)


def deployment(pods: Pods, name: str, **spec: Any) -> None:
    """Create a Deployment whose pods leave a node at once when it is not ready."""
    gone = [
        {"key": f"node.kubernetes.io/{kind}", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 0}
        for kind in ("not-ready", "unreachable")
    ]
    template = {
        "containers": [{"name": "main", **shell(IDLE)}],
        "tolerations": gone,
        "terminationGracePeriodSeconds": 1,
    }
    pods.cluster.apply(
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": name, "namespace": pods.namespace},
            "spec": {
                "replicas": 1,
                "selector": {"matchLabels": {"app": name}},
                "template": {"metadata": {"labels": {"app": name}}, "spec": {**template, **spec}},
            },
        }
    )


def test_the_pods_of_a_silent_node_are_replaced_and_end_when_it_reports_again(pods: Pods, cluster: Cluster) -> None:
    with one_node(cluster, "node-silent", 9, labels={"zone": "silent"}) as other:
        pods.wait_ready(pods.run(shell(IDLE), nodeSelector={"kubernetes.io/hostname": "node-1"}))
        deployment(pods, "moving")

        def running() -> list[str]:
            found = cluster.items("pods", f"--namespace={pods.namespace}", "--selector=app=moving")
            return [one["spec"].get("nodeName", "") for one in found if one["status"]["phase"] == "Running"]

        # The pod scheduler places it on the node with fewer pods, which is the new one.
        cluster.wait_for(lambda: running() == [other.name], "the pod")
        with other.silent():
            cluster.wait_for(lambda: ready(cluster, other.name) == "Unknown", "the controllers to notice", within_s=60)
            cluster.wait_for(lambda: "node-1" in running(), "a replacement")
            assert other.name in running()  # the API server does not know yet that the node is gone
        cluster.wait_for(lambda: ready(cluster, other.name) == "True", "the node to be ready again")
        cluster.wait_for(lambda: running() == ["node-1"], "the end of the old pod")
        cluster.kubectl("delete", "deployment", "moving", f"--namespace={pods.namespace}")


def marked(mark: str, *, but: str = "") -> int:
    """The number of processes on this machine that were started with this mark, without those in the state `but`."""
    living = [stat.identity.pid for stat in all_stats() if not stat.dead and stat.state != but]
    return sum(environment_of(pid).get("MARK") == mark for pid in living)


def test_a_node_that_lost_its_power_starts_its_pods_again(pods: Pods, cluster: Cluster) -> None:
    with one_node(cluster, "node-lost", 10, labels={"zone": "lost"}) as other:
        mark = f"lost-{time.monotonic_ns()}"
        name = pods.run(shell(f"MARK={mark} sleep 600 & {IDLE}"), nodeSelector={"zone": "lost"})
        pods.wait_ready(name)
        cluster.wait_for(lambda: marked(mark) == 1, "its process")
        other.lose()
        cluster.wait_for(lambda: not marked(mark), "the end of all its processes")
        other.program.start()
        pods.cluster.wait_for(lambda: pods.container(name)["restartCount"] == 1, "the restart")
        pods.wait_ready(name)
        other.execute(pods.path(name), "true")


def test_pods_run_on_while_the_api_server_is_away(pods: Pods, cluster: Cluster, node: ClusterNode) -> None:
    name = pods.run(shell(IDLE))
    pods.wait_ready(name)
    node.execute(pods.path(name), "touch", "/tmp/first-run")
    assert cluster.apiserver is not None
    cluster.let_namespaces_go()
    cluster.apiserver.kill()
    try:
        node.kill(pods.path(name))

        def runs_again() -> bool:
            return node.execute(pods.path(name), "test", "!", "-e", "/tmp/first-run")[0] == 0

        cluster.wait_for(runs_again, "a restart without the API server")
    finally:
        cluster.apiserver.start()
    cluster.wait_for(lambda: pods.container(name)["restartCount"] == 1, "the restart in the pod's status")
