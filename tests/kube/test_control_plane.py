"""The control plane of these tests behaves like a real one."""

import json
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from testbed.cluster.control_plane import Cluster, CommandRefused
from testbed.cluster.kubectl_get import read
from tools.kube.binaries import KUBERNETES

pytestmark = pytest.mark.kube


@pytest.mark.own_cluster
def test_server_and_client_say_the_version_they_were_built_from(cluster: Cluster) -> None:
    said = json.loads(cluster.kubectl("get", "--raw=/version"))
    assert said["gitVersion"] == KUBERNETES.version
    assert (said["major"], said["minor"]) == ("1", KUBERNETES.version.split(".")[1])
    assert f"Client Version: {KUBERNETES.version}" in cluster.kubectl("version")


def test_pods_of_a_new_namespace_have_an_account_and_a_root_certificate(cluster: Cluster, namespace: str) -> None:
    cluster.kubectl("wait", "--for=create", "serviceaccount/default", f"--namespace={namespace}", "--timeout=20s")
    cluster.kubectl("wait", "--for=create", "configmap/kube-root-ca.crt", f"--namespace={namespace}", "--timeout=20s")
    token = cluster.kubectl("create", "token", "default", f"--namespace={namespace}")
    assert token.count(".") == 2


def test_a_deployment_becomes_pods(cluster: Cluster, namespace: str) -> None:
    container = {"name": "main", "image": "example.invalid/nothing"}
    labels = {"app": "sample"}
    cluster.apply(
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": "sample", "namespace": namespace},
            "spec": {
                "replicas": 2,
                "selector": {"matchLabels": labels},
                "template": {"metadata": {"labels": labels}, "spec": {"containers": [container]}},
            },
        }
    )
    cluster.kubectl(
        "wait", "--for=jsonpath={.status.replicas}=2", "deployment/sample", f"--namespace={namespace}", "--timeout=20s"
    )
    assert len(cluster.get("pods", f"--namespace={namespace}", "--selector=app=sample")["items"]) == 2


@pytest.mark.own_cluster
@pytest.mark.parametrize(
    "asked",
    [
        ("configmaps", "--namespace={namespace}"),
        ("configmap", "sample", "--namespace={namespace}", "--show-managed-fields"),
        ("configmaps", "--all-namespaces", "--selector=of={namespace}"),
        ("configmaps", "--field-selector=metadata.name=sample", "--namespace={namespace}"),
        ("serviceaccount", "default", "--namespace={namespace}"),
        ("configmap", "nothing", "--namespace={namespace}"),
        ("secrets", "--namespace={namespace}"),
    ],
    ids=" ".join,
)
def test_reading_without_kubectl_gives_the_same_as_kubectl(
    cluster: Cluster, namespace: str, asked: tuple[str, ...]
) -> None:
    where = f"--namespace={namespace}"
    cluster.kubectl("wait", "--for=create", "serviceaccount/default", where, "--timeout=20s")
    cluster.kubectl("create", "configmap", "sample", where)
    cluster.kubectl("label", "configmap", "sample", where, f"of={namespace}")
    arguments = [one.format(namespace=namespace) for one in asked]
    assert read(*arguments) is not None
    assert _said(lambda: cluster.get(*arguments)) == _said(
        lambda: json.loads(cluster.kubectl("get", *arguments, "--output=json"))
    )


def _said(ask: Callable[[], dict[str, Any]]) -> dict[str, Any] | str:
    try:
        answer = ask()
    except CommandRefused as refusal:
        return str(refusal)
    if "items" in answer:
        del answer["metadata"]  # a list's revision, which kubectl leaves out
    return answer


def test_a_namespace_goes_with_all_that_is_in_it(cluster: Cluster, namespace: str) -> None:
    cluster.kubectl("create", "configmap", "sample", f"--namespace={namespace}")
    cluster.kubectl("delete", "namespace", namespace, "--timeout=30s")
    with pytest.raises(CommandRefused, match=rf'configmaps "sample" not found|namespaces "{namespace}" not found'):
        cluster.get("configmap", "sample", f"--namespace={namespace}")


def test_pod_security_is_enforced(cluster: Cluster, namespace: str) -> None:
    cluster.kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")
    with pytest.raises(CommandRefused, match='violates PodSecurity "restricted'):
        cluster.kubectl("run", "sample", "--image=example.invalid/nothing", f"--namespace={namespace}")


@pytest.mark.own_cluster
def test_every_request_is_in_the_audit_log(cluster: Cluster, namespace: str) -> None:
    assert cluster.audit_log is not None
    cluster.kubectl("create", "configmap", "seen", f"--namespace={namespace}")
    assert f"/api/v1/namespaces/{namespace}/configmaps" in cluster.audit_log.read_text()


def test_a_test_can_be_any_service_account(cluster: Cluster, namespace: str) -> None:
    cluster.kubectl("create", "serviceaccount", "somebody", f"--namespace={namespace}")
    kubeconfig = cluster.kubeconfig_for("somebody", namespace)
    said = cluster.kubectl("auth", "whoami", "--output=jsonpath={.status.userInfo.username}", kubeconfig=kubeconfig)
    assert said == f"system:serviceaccount:{namespace}:somebody"
    with pytest.raises(CommandRefused, match='cannot list resource "secrets"'):
        cluster.kubectl("get", "secrets", f"--namespace={namespace}", kubeconfig=kubeconfig)
    if cluster.audit_log is not None:
        secrets = [one for one in cluster.audit(said) if one.get("objectRef", {}).get("resource") == "secrets"]
        assert {(one["verb"], one["responseStatus"]["code"]) for one in secrets} == {("list", 403)}


@pytest.mark.own_cluster
def test_an_api_server_can_be_frozen_and_waken(cluster: Cluster) -> None:
    assert cluster.apiserver is not None
    cluster.apiserver.pause()
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            cluster.kubectl("get", "nodes", timeout_s=1)
    finally:
        cluster.apiserver.resume()
    cluster.kubectl("get", "nodes")


@pytest.mark.own_cluster
def test_stored_objects_survive_a_crash_of_the_api_server(cluster: Cluster, namespace: str) -> None:
    assert cluster.apiserver is not None
    cluster.kubectl("create", "configmap", "kept", f"--namespace={namespace}")
    cluster.let_namespaces_go()
    cluster.apiserver.restart()
    cluster.get("configmap", "kept", f"--namespace={namespace}")
