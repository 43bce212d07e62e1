"""What probes decide, as "Liveness, Readiness and Startup Probes" of the Kubernetes documentation describes it.

Readiness and startup probes run ten times as often as the manifests here say, and three times while a container is
ready. A probe that kills takes as long as its manifest says.
"""

import time
from typing import Any

import pytest

from testbed.cluster.nodes import ClusterNode
from tests.kube.pods import IDLE, Pods, python, shell

pytestmark = pytest.mark.kube

SERVER = """
import http.server, os, threading
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(int(self.path[1:])); self.end_headers()
    def log_message(self, *_): pass
http.server.ThreadingHTTPServer((os.environ["POD_IP"], 8000), Handler).serve_forever()
"""
POD_IP = {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
HEALTH = """
import grpc, os, signal
from concurrent.futures import ThreadPoolExecutor
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
server, service = grpc.server(ThreadPoolExecutor(2)), health.HealthServicer()
health_pb2_grpc.add_HealthServicer_to_server(service, server)
service.set("well", health_pb2.HealthCheckResponse.SERVING)
service.set("ill", health_pb2.HealthCheckResponse.NOT_SERVING)
server.add_insecure_port(os.environ["POD_IP"] + ":7000")
server.start(); server.wait_for_termination()
"""


def file_exists(name: str, **more: int) -> dict[str, Any]:
    return {"exec": {"command": ["test", "-e", f"/tmp/{name}"]}, "periodSeconds": 1, **more}


def execute(node: ClusterNode, pods: Pods, name: str, *command: str) -> None:
    code, said = node.execute(pods.path(name), *command)
    assert code == 0, said


def wait_refused(pods: Pods, name: str) -> None:
    """Wait until a readiness probe has failed."""
    pods.cluster.wait_for(lambda: "Readiness probe failed" in str(pods.events(name)), "a failure of the probe")


def restarts(pods: Pods, name: str) -> int:
    count: int = pods.container(name)["restartCount"]
    return count


def test_a_container_is_ready_when_its_probe_says_so_and_not_ready_when_it_no_longer_does(
    pods: Pods, node: ClusterNode
) -> None:
    name = pods.run(shell(IDLE, readinessProbe=file_exists("ready", failureThreshold=1)))
    wait_refused(pods, name)
    assert pods.condition(name, "Ready")["status"] == "False"
    pods.cluster.wait_for(lambda: pods.container(name)["started"], "its start")
    execute(node, pods, name, "touch", "/tmp/ready")
    pods.wait_ready(name)
    execute(node, pods, name, "rm", "/tmp/ready")
    pods.wait_condition(name, "Ready", "False")
    assert restarts(pods, name) == 0  # it is not restarted
    pods.cluster.wait_for(lambda: "Unhealthy" in [event["reason"] for event in pods.events(name)], "its event")


def test_a_container_that_is_no_longer_alive_is_started_again(pods: Pods, node: ClusterNode) -> None:
    container = shell(
        f"touch /tmp/alive; {IDLE}",
        startupProbe=file_exists("alive", failureThreshold=100),  # it is ready once the file exists
        livenessProbe=file_exists("alive", failureThreshold=2, timeoutSeconds=20),
    )
    name = pods.run(container)
    pods.wait_ready(name)
    execute(node, pods, name, "rm", "/tmp/alive")
    pods.cluster.wait_for(lambda: restarts(pods, name) == 1, "a restart")
    assert pods.container(name)["lastState"]["terminated"]["exitCode"] == 0  # it ended after SIGTERM
    pods.cluster.wait_for(lambda: "failed liveness probe, will be restarted" in str(pods.events(name)), "its event")


def test_nothing_else_is_asked_before_the_container_has_started(pods: Pods, node: ClusterNode) -> None:
    container = shell(
        IDLE,
        startupProbe=file_exists("started", failureThreshold=100),
        livenessProbe=file_exists("started", failureThreshold=1),
        readinessProbe=file_exists("started"),
    )
    name = pods.run(container)
    pods.wait_phase(name, "Running")
    time.sleep(0.6)
    assert (pods.container(name)["started"], restarts(pods, name)) == (False, 0)
    execute(node, pods, name, "touch", "/tmp/started")
    pods.wait_ready(name)
    assert pods.container(name)["started"] is True


def test_a_container_that_does_not_start_in_time_is_started_again(pods: Pods) -> None:
    name = pods.run(shell(IDLE, startupProbe=file_exists("never", failureThreshold=3)))
    pods.cluster.wait_for(lambda: restarts(pods, name) >= 1, "a restart")


@pytest.mark.parametrize(
    ("probe", "ready"),
    [
        ({"httpGet": {"path": "/200", "port": "web"}}, True),
        ({"httpGet": {"path": "/302", "port": 8000}}, True),
        ({"httpGet": {"path": "/404", "port": 8000}}, False),
        ({"httpGet": {"path": "/503", "port": 8000}}, False),
        ({"tcpSocket": {"port": 8000}}, True),
        ({"tcpSocket": {"port": 8001}}, False),
    ],
    ids=["named port", "redirect", "not found", "unavailable", "open", "closed"],
)
def test_a_server_is_ready_when_it_answers(pods: Pods, probe: dict[str, Any], ready: bool) -> None:
    container = python(
        SERVER,
        env=[POD_IP],
        ports=[{"name": "web", "containerPort": 8000}],
        startupProbe={"tcpSocket": {"port": 8000}, "periodSeconds": 1, "failureThreshold": 100},
        readinessProbe={**probe, "periodSeconds": 1, "failureThreshold": 1},
    )
    name = pods.run(container)
    pods.cluster.wait_for(lambda: pods.container(name)["started"], "its start")
    if ready:
        pods.wait_ready(name)
    else:
        wait_refused(pods, name)
        assert pods.container(name)["ready"] is False


def test_a_grpc_server_is_asked_for_its_health(pods: Pods) -> None:
    def server(service: str) -> str:
        probe = {"grpc": {"port": 7000, "service": service}, "periodSeconds": 1, "failureThreshold": 1}
        return pods.run(python(HEALTH, env=[POD_IP], readinessProbe=probe))

    well, ill = server("well"), server("ill")
    pods.wait_ready(well)
    pods.cluster.wait_for(lambda: "responded with 'NOT_SERVING'" in str(pods.events(ill)), "the answer NOT_SERVING")
    assert pods.container(ill)["ready"] is False


def test_a_probe_that_takes_too_long_has_failed(pods: Pods) -> None:
    probe = {"exec": {"command": ["sleep", "30"]}, "periodSeconds": 1, "timeoutSeconds": 1, "failureThreshold": 1}
    name = pods.run(shell(IDLE, readinessProbe=probe))
    pods.cluster.wait_for(lambda: "timed out after 1 s" in str(pods.events(name)), "the event of the timeout")


def test_a_hook_after_the_start_comes_before_readiness(pods: Pods) -> None:
    hook = {"postStart": {"exec": {"command": ["sh", "-c", "sleep 5; touch /tmp/hooked"]}}}
    name = pods.run(shell(IDLE, lifecycle=hook))
    pods.wait_phase(name, "Running")
    assert pods.container(name)["ready"] is False
    pods.wait_ready(name)


def test_a_pod_with_a_gate_is_ready_when_the_gate_is_open(pods: Pods) -> None:
    name = pods.run(shell(IDLE), readinessGates=[{"conditionType": "motet.dev/loaded"}])
    pods.wait_condition(name, "ContainersReady")
    assert pods.condition(name, "Ready")["reason"] == "ReadinessGatesNotReady"
    pods.cluster.kubectl(
        *("patch", "pod", name, f"--namespace={pods.namespace}", "--subresource=status"),
        '--patch={"status":{"conditions":[{"type":"motet.dev/loaded","status":"True"}]}}',
    )
    pods.wait_ready(name)


def test_a_probe_can_be_made_to_lie(pods: Pods, node: ClusterNode) -> None:
    name = pods.run(shell(IDLE, readinessProbe={"exec": {"command": ["true"]}, "periodSeconds": 1}))
    pods.wait_ready(name)
    node.lie(pods.path(name), "readiness", says=False)
    pods.wait_condition(name, "Ready", "False")
    node.lie(pods.path(name), "readiness", says=None)
    pods.wait_ready(name)
