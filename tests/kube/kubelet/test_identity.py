"""The identity of a pod: it has a token of its own, and the API accepts no other."""

import base64
import json

import pytest

from testbed.cluster.cluster import Cluster, CommandRefused
from testbed.cluster.nodes import ClusterNode
from tests.kube.pods import Pods, python

pytestmark = pytest.mark.kube

ASK = """
import os, ssl, sys, urllib.error, urllib.request
account = "/var/run/secrets/kubernetes.io/serviceaccount/"
host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
request = urllib.request.Request(f"https://{host}:{port}/api/v1/namespaces/%s/configmaps")
if os.path.exists(account + "token"):
    request.add_header("Authorization", "Bearer " + open(account + "token").read())
authority = account + "ca.crt"
trust = ssl.create_default_context(cafile=authority) if os.path.exists(account) else ssl._create_unverified_context()
try:
    print(urllib.request.urlopen(request, context=trust).status)
except urllib.error.HTTPError as error:
    print(error.code)
"""


def allow(cluster: Cluster, namespace: str, account: str, verb: str, what: str) -> None:
    cluster.kubectl("create", "role", account, f"--verb={verb}", f"--resource={what}", f"--namespace={namespace}")
    cluster.kubectl(
        "create", "rolebinding", account, f"--role={account}", f"--serviceaccount={namespace}:{account}",
        f"--namespace={namespace}",
    )  # fmt: skip


def test_a_pod_without_a_token_is_not_authenticated(cluster: Cluster, node: ClusterNode, namespace: str) -> None:
    pods = Pods(cluster, namespace)
    assert pods.finish(python(ASK % namespace), automountServiceAccountToken=False).strip() == "401"


def test_a_pod_is_its_service_account_in_its_own_namespace_only(
    cluster: Cluster, node: ClusterNode, namespace: str
) -> None:
    pods = Pods(cluster, namespace)
    cluster.kubectl("create", "serviceaccount", "reader", f"--namespace={namespace}")
    allow(cluster, namespace, "reader", "list", "configmaps")
    assert pods.finish(python(ASK % namespace), serviceAccountName="reader").strip() == "200"
    assert pods.finish(python(ASK % "kube-system"), serviceAccountName="reader").strip() == "403"
    assert pods.finish(python(ASK % namespace)).strip() == "403"


def test_a_token_is_bound_to_its_pod_and_dies_with_it(cluster: Cluster, node: ClusterNode, namespace: str) -> None:
    pods = Pods(cluster, namespace)
    name = pods.run(python("import signal; signal.sigwait({signal.SIGTERM})"))
    pods.wait_ready(name)
    code, token = node.execute(pods.path(name), "cat", "/var/run/secrets/kubernetes.io/serviceaccount/token")
    assert code == 0
    claims = json.loads(base64.urlsafe_b64decode(token.split(".")[1] + "=="))
    assert claims["sub"] == f"system:serviceaccount:{namespace}:default"
    assert claims["kubernetes.io"]["pod"]["name"] == name
    pods.delete(name)
    # The API server caches valid tokens for ten seconds. It has not seen this one before.
    review = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": {"token": token}}
    said = json.loads(cluster.kubectl("create", "--filename=-", "--output=json", stdin=json.dumps(review)))
    assert not said["status"].get("authenticated"), said


def test_a_node_reads_no_secret_of_pods_that_it_does_not_run(
    cluster: Cluster, node: ClusterNode, namespace: str
) -> None:
    cluster.kubectl("create", "secret", "generic", "foreign", "--from-literal=key=1", f"--namespace={namespace}")
    kubeconfig = cluster.folder / f"system-node-{node.name}.kubeconfig"
    with pytest.raises(CommandRefused, match="no relationship found between node"):
        cluster.kubectl("get", "secret", "foreign", f"--namespace={namespace}", kubeconfig=kubeconfig)
