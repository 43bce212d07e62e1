"""Least privilege, checked with the audit log: all that the chart grants is used, and all that is used is granted."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import pytest

from testbed.cluster.cluster import Cluster
from testbed.cluster.nodes import ClusterNode
from testbed.cluster.product import POOLS, RELEASE, SYSTEM, Product

pytestmark = [pytest.mark.kube, pytest.mark.timeout(600)]

WITH_RIGHTS = ("operator", "scheduler")


class Right(NamedTuple):
    group: str
    resource: str
    """The resource with its subresource."""
    verb: str
    namespace: str
    """The namespace; empty for all namespaces."""


@pytest.fixture(scope="module")
def used_in_full(product: Product, node: ClusterNode) -> Product:
    """A product that has used each of its permissions once."""
    product.patch_pool(replicas=2)
    product.cluster.wait_for(lambda: product.pool()["status"]["readyReplicas"] == 2, "two runners", within_s=120)
    product.cluster.helm("test", RELEASE, f"--namespace={SYSTEM}")
    _say_the_same_twice(product)
    _hang_a_runner(product, node)
    _shrink(product)
    _roll_out(product)
    _delete_the_leases(product)
    return product


def _say_the_same_twice(product: Product) -> None:
    for _ in range(2):
        product.cluster.kubectl("label", "namespace", "zeta", "motet.dev/tenant-")
        product.cluster.kubectl("wait", "--for=condition=Ready=false", "lora/json", "--namespace=zeta", "--timeout=20s")
        product.cluster.kubectl("label", "namespace", "zeta", "motet.dev/tenant=true")
        product.wait_ready("lora", "zeta", "json")


def _hang_a_runner(product: Product, node: ClusterNode) -> None:
    hung = product.runners()[0]["metadata"]["name"]
    # Otherwise the kubelet would restart it before the operator replaces it.
    node.lie(f"{POOLS}/{hung}", "liveness", True)
    node.pause(f"{POOLS}/{hung}")

    def replaced() -> bool:
        names = [pod["metadata"]["name"] for pod in product.runners()]
        return hung not in names and product.pool()["status"]["readyReplicas"] == 2

    product.cluster.wait_for(replaced, "another runner in place of the hung one", within_s=120)


def _shrink(product: Product) -> None:
    product.patch_pool(replicas=1)
    product.cluster.wait_for(lambda: len(product.runners()) == 1, "one runner", within_s=60)


def _roll_out(product: Product) -> None:
    before = product.pool()["status"]["currentRevision"]
    sequences = 31 if product.pool()["spec"]["engine"].get("maxConcurrentSequences") != 31 else 30
    product.patch_pool(engine={"maxConcurrentSequences": sequences})

    def rolled() -> bool:
        left = product.cluster.items("deployments", f"--namespace={POOLS}")
        return product.pool()["status"]["currentRevision"] != before and len(left) == 1

    product.cluster.wait_for(rolled, "the new revision alone", within_s=120)


def _delete_the_leases(product: Product) -> None:
    for component in ("operator", "scheduler"):
        name = (f"lease/{RELEASE}-{component}", f"--namespace={SYSTEM}")
        product.cluster.kubectl("delete", *name)

        def led(name: tuple[str, str] = name) -> bool:
            return bool(product.cluster.get(*name)["spec"].get("holderIdentity"))

        product.cluster.wait_for(led, f"a new {component} to lead", within_s=60)


@pytest.mark.parametrize("component", WITH_RIGHTS)
def test_every_permission_is_used_and_none_is_missing(used_in_full: Product, component: str) -> None:
    account = f"{RELEASE}-{component}"
    granted = set(_granted(used_in_full.cluster, account))
    assert granted, "it has rights"
    # Compare uids: pods of an earlier account with this name may still run, without permissions.
    uid = used_in_full.cluster.get("serviceaccount", account, f"--namespace={SYSTEM}")["metadata"]["uid"]
    entries = [entry for entry in used_in_full.cluster.audit() if entry["user"].get("uid") == uid]
    forbidden = [entry for entry in entries if entry["annotations"].get("authorization.k8s.io/decision") == "forbid"]
    # Other refusals do not count: a new API server does not know its roles yet.
    refused = {right for entry in forbidden for right in _asked(entry)}
    assert {right for right in refused if not any(_covers(one, right) for one in granted)} == set(), "never granted"
    used = {right for entry in entries for right in _asked(entry)}
    assert {right for right in granted if not any(_covers(right, one) for one in used)} == set(), "granted, never used"


def test_no_other_account_has_permissions(used_in_full: Product) -> None:
    for component in ("gateway", "predictor", "supervisor"):
        assert list(_granted(used_in_full.cluster, f"{RELEASE}-{component}")) == []
    assert list(_granted(used_in_full.cluster, f"{RELEASE}-runner", POOLS)) == []


def _granted(cluster: Cluster, account: str, home: str = SYSTEM) -> Iterable[Right]:
    """The permissions that our roles give an account, without those that every account has."""
    subject = {"kind": "ServiceAccount", "name": account, "namespace": home}
    for kind in ("clusterrolebindings", "rolebindings"):
        for binding in cluster.items(kind, "--all-namespaces"):
            if subject not in [{key: one.get(key) for key in subject} for one in binding.get("subjects") or ()]:
                continue
            where = binding["metadata"].get("namespace", "")
            role = binding["roleRef"]
            rules = cluster.get(role["kind"], role["name"], *([f"--namespace={where}"] if where else []))["rules"]
            for rule in rules or ():
                for group in rule["apiGroups"]:
                    for resource in rule["resources"]:
                        for verb in rule["verbs"]:
                            yield Right(group, resource, verb, where)


def _asked(entry: dict[str, Any]) -> Iterable[Right]:
    it = entry.get("objectRef")
    if it is None:
        return
    resource = it["resource"] + (f"/{it['subresource']}" if "subresource" in it else "")
    verbs = [entry["verb"]]
    if entry["verb"] == "patch" and entry["responseStatus"]["code"] == 201:
        verbs.append("create")  # the server also checks this permission before it applies a new object
    for verb in verbs:
        yield Right(it.get("apiGroup", ""), resource, verb, it.get("namespace", ""))


def _covers(granted: Right, used: Right) -> bool:
    return granted[:3] == used[:3] and granted.namespace in ("", used.namespace)
