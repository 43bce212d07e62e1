"""Pods find each other by name. Each has an address of its own."""

import socket
import subprocess
from typing import Any

import pytest

from testbed.cluster.cluster import Cluster
from testbed.cluster.network import API_PORT, CONTROL_PLANE, DNS
from testbed.cluster.nodes import ClusterNode
from tests.kube.kubelet.test_probes import HEALTH, POD_IP, SERVER
from tests.kube.pods import IDLE, Pods, python, shell

pytestmark = pytest.mark.kube


def service(pods: Pods, name: str, **spec: Any) -> None:
    pods.cluster.apply(
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": name, "namespace": pods.namespace},
            "spec": {"selector": {"app": name}, "ports": [{"port": 8000}], **spec},
        }
    )


def lookup(pods: Pods, *names: str) -> list[list[str]]:
    """The addresses that a pod finds for each name, with `getaddrinfo`."""
    code = """
import socket, sys
for name in sys.argv[1:]:
    try:
        print(*sorted({each[4][0] for each in socket.getaddrinfo(name, 80, socket.AF_INET)}))
    except socket.gaierror:
        print()
"""
    said = pods.finish({**python(code), "args": list(names)})
    return [line.split() for line in said.split("\n")[: len(names)]]


def test_a_service_is_the_addresses_of_its_ready_pods(pods: Pods, node: ClusterNode) -> None:
    service(pods, "web")
    service(pods, "headless", clusterIP="None", selector={"app": "web"})
    probe = {"exec": {"command": ["test", "-e", "/tmp/ready"]}, "periodSeconds": 1}
    ready = pods.run(shell(f"touch /tmp/ready; {IDLE}", readinessProbe=probe), labels={"app": "web"})
    unready = pods.run(shell(IDLE, readinessProbe=probe), labels={"app": "web"})
    pods.wait_ready(ready)
    pods.wait_phase(unready, "Running")
    address = pods.status(ready)["podIP"]
    pods.cluster.wait_for(lambda: pods.cluster.addresses("web", pods.namespace) == [address], "the endpoint")
    pods.cluster.wait_for(lambda: pods.cluster.addresses("headless", pods.namespace) == [address], "the endpoint")
    found = lookup(
        pods,
        "web",
        f"web.{pods.namespace}",
        f"web.{pods.namespace}.svc",
        f"headless.{pods.namespace}.svc.cluster.local",
        "nobody",
        "example.com",
    )
    assert found == [[address]] * 4 + [[], []]


def test_the_api_server_has_its_usual_name(pods: Pods) -> None:
    assert lookup(pods, "kubernetes.default", "kubernetes.default.svc.cluster.local") == [[CONTROL_PLANE]] * 2


def test_a_service_without_endpoints_exists_and_has_no_address(pods: Pods) -> None:
    service(pods, "empty")
    assert lookup(pods, "empty") == [[]]


def test_grpc_finds_a_service_by_its_own_resolver(pods: Pods) -> None:
    service(pods, "health", clusterIP="None", ports=[{"port": 7000}])
    probe = {"tcpSocket": {"port": 7000}, "periodSeconds": 1}
    name = pods.run(python(HEALTH, env=[POD_IP], readinessProbe=probe), labels={"app": "health"})
    pods.wait_ready(name)
    pods.cluster.wait_for(lambda: pods.cluster.addresses("health", pods.namespace), "the endpoint")
    code = """
import grpc, os
from grpc_health.v1 import health_pb2, health_pb2_grpc
channel = grpc.insecure_channel(f"dns:///health.{os.environ['NAMESPACE']}.svc:7000")
stub = health_pb2_grpc.HealthStub(channel)
print(stub.Check(health_pb2.HealthCheckRequest(service="well"), timeout=10, wait_for_ready=True).status)
"""
    namespace = {"name": "NAMESPACE", "valueFrom": {"fieldRef": {"fieldPath": "metadata.namespace"}}}
    for resolver in ("ares", "native"):
        env = [namespace, {"name": "GRPC_DNS_RESOLVER", "value": resolver}]
        assert pods.finish(python(code, env=env)).strip() == "1", resolver


def test_two_pods_have_the_same_port(pods: Pods) -> None:
    probe = {"httpGet": {"path": "/200", "port": 8000}, "periodSeconds": 1}
    names = [pods.run(python(SERVER, env=[POD_IP], readinessProbe=probe)) for _ in range(2)]
    for name in names:
        pods.wait_ready(name)
    one, other = (pods.status(name)["podIP"] for name in names)
    assert one != other


ECHO = """
import socket
server = socket.create_server(("0.0.0.0", 8000))
while True:
    connection, peer = server.accept()
    connection.sendall(peer[0].encode())
    connection.close()
"""


def test_a_pod_has_its_own_loopback_and_calls_from_its_own_address(pods: Pods, node: ClusterNode) -> None:
    server = pods.run(python(ECHO, readinessProbe={"tcpSocket": {"port": 8000}, "periodSeconds": 1}))
    pods.wait_ready(server)
    code = """
import socket, sys
print(socket.create_connection((sys.argv[1], 8000)).recv(100).decode())
try:
    socket.create_connection(("127.0.0.1", 8000))
except OSError as error:
    print(type(error).__name__)
"""
    client = pods.run({**python(code), "args": [pods.status(server)["podIP"]]}, restartPolicy="Never")
    pods.wait_phase(client, "Succeeded")
    assert pods.logs(client).split() == [pods.status(client)["podIP"], "ConnectionRefusedError"]


def test_a_pair_can_be_cut_while_all_else_passes(pods: Pods, node: ClusterNode, cluster: Cluster) -> None:
    def server() -> str:
        return pods.run(python(ECHO, readinessProbe={"tcpSocket": {"port": 8000}, "periodSeconds": 1}))

    names = [server(), server(), pods.run(shell(IDLE))]
    for name in names:
        pods.wait_ready(name)
    one, other, client = (pods.status(name)["podIP"] for name in names)

    def reaches(address: str) -> bool:
        call = f"import socket; socket.create_connection(('{address}', 8000), timeout=1)"
        return node.execute(pods.path(names[2]), "python", "-c", call)[0] == 0

    assert cluster.network is not None
    with cluster.network.cut(client, one):
        assert (reaches(one), reaches(other)) == (False, True)
    assert reaches(one)


def test_cluster_tests_run_in_their_own_network(cluster: Cluster, node: ClusterNode) -> None:
    socket.create_connection((CONTROL_PLANE, API_PORT), timeout=5).close()
    with pytest.raises(OSError, match="Network is unreachable"):
        socket.create_connection(("203.0.113.1", 80), timeout=5)
    routes = subprocess.run(["ip", "-json", "route"], capture_output=True, text=True, check=True).stdout
    assert "default" not in routes
    assert f" {DNS}/" in subprocess.run(["ip", "address"], capture_output=True, text=True, check=True).stdout


def test_other_tests_run_outside_that_network() -> None:
    """This test does not use the cluster."""
    assert f" {DNS}/" not in subprocess.run(["ip", "address"], capture_output=True, text=True, check=True).stdout
