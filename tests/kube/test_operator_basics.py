"""The operator process on a real API server: what tenants and platform teams see of it."""

from collections.abc import Iterator
from typing import Any

import pytest

from testbed.cluster.cluster import Cluster
from testbed.cluster.operators import OperatorNamespaces, OperatorProcess, site
from tests.kube.site_state import SiteState

pytestmark = pytest.mark.kube


@pytest.fixture(scope="module")
def home(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OperatorNamespaces]:
    with cluster.inside(), site(cluster, tmp_path_factory.mktemp("operator")) as made:
        yield made


@pytest.fixture(scope="module")
def operator(home: OperatorNamespaces) -> Iterator[OperatorProcess]:
    with OperatorProcess(home) as running:
        yield running


def test_an_adapter_without_its_pool_says_so_and_one_with_it_waits_for_a_runner(
    cluster: Cluster, home: OperatorNamespaces, operator: OperatorProcess
) -> None:
    tenant = home.tenant()
    cluster.apply(home.adapter("lonely", tenant, pool="nowhere"))
    cluster.wait_for(lambda: home.ready_reason("lora", "lonely", tenant) == "PoolNotFound")
    cluster.apply(home.pool(), home.adapter("legal", tenant))
    cluster.wait_for(lambda: home.ready_reason("lora", "legal", tenant) == "WaitingForRunner")
    assert home.conditions("lora", "legal", tenant)["Accepted"]["status"] == "True"


def test_a_pool_becomes_a_deployment_of_its_revision_with_as_many_pods(
    cluster: Cluster, home: OperatorNamespaces, operator: OperatorProcess
) -> None:
    cluster.apply(home.pool("three", replicas=3))
    where = (f"--namespace={home.pools}", "--selector=motet.dev/pool=three")
    cluster.wait_for(lambda: len(cluster.items("pods", *where)) == 3)
    (made,) = cluster.items("deployments", *where)
    status = cluster.get("spool", "three", f"--namespace={home.pools}")["status"]
    assert made["metadata"]["name"] == f"three-{status['updateRevision']}"
    assert made["metadata"]["ownerReferences"][0]["name"] == "three"
    assert home.ready_reason("spool", "three", home.pools) == "RunnersStarting"


def test_operators_of_two_classes_leave_each_others_objects_alone(
    cluster: Cluster, home: OperatorNamespaces, operator: OperatorProcess
) -> None:
    """Even with the same namespace for pools: to neither, the other's runners are those of a deleted pool."""
    label = {"motet.dev/operator-class": "staging"}
    tenant = home.tenant("classes")
    pool, adapter = home.pool("staged", replicas=2), home.adapter("new", tenant, pool="staged")
    for each in (pool, adapter):
        each["metadata"]["labels"] = label

    def made(pool: str) -> list[dict[str, Any]]:
        return cluster.items("pods", f"--namespace={home.pools}", f"--selector=motet.dev/pool={pool}")

    def handles_all_without_a_class() -> bool:
        # Pools of earlier tests may still be going.
        without = cluster.items("servingpools", "--all-namespaces", "--selector=!motet.dev/operator-class")
        return operator.metric("motet_declared_objects", kind="ServingPool") == len(without)

    with OperatorProcess(home, "staging", env={"MOTET_CLUSTER_OPERATOR_CLASS": "staging"}, port=9091) as staging:
        cluster.apply(pool, adapter, home.adapter("unlabelled", tenant, pool="staged"))
        cluster.wait_for(lambda: len(made("staged")) == 2)
        cluster.wait_for(lambda: home.ready_reason("lora", "new", tenant) == "WaitingForRunner")
        cluster.wait_for(lambda: home.ready_reason("lora", "unlabelled", tenant) == "PoolNotFound")
        assert staging.metric("motet_declared_objects", kind="ServingPool") == 1
        of_before = {pod["metadata"]["uid"] for pod in made("staged")}
        starting = {"kind": "ServingPool", "namespace": home.pools, "type": "Reconciling"}
        cluster.wait_for(lambda: staging.metric("motet_object_condition", **starting) == 1)

        cluster.apply(home.pool("ordinary"))
        cluster.wait_for(lambda: len(made("ordinary")) == 1)
        cluster.wait_for(handles_all_without_a_class)
        assert {pod["metadata"]["uid"] for pod in made("staged")} == of_before
        for pod in made("staged"):
            assert label.items() <= pod["metadata"]["labels"].items()
            assert "motet.dev/draining-until" not in pod["metadata"].get("annotations", {})
        assert [pod for pod in made("ordinary") if label.items() <= pod["metadata"]["labels"].items()] == []


def test_a_pool_owns_a_budget_that_follows_it_and_comes_back(
    cluster: Cluster, home: OperatorNamespaces, operator: OperatorProcess
) -> None:
    def budget() -> dict[str, Any]:
        return cluster.get("pdb", "guarded", f"--namespace={home.pools}")

    cluster.apply(home.pool("guarded", replicas=2))
    cluster.wait_for(lambda: budget()["status"]["expectedPods"] == 2, "the controller to count its pods")
    assert budget()["spec"]["minAvailable"] == 2
    assert budget()["status"]["disruptionsAllowed"] == 0
    written = operator.metric("motet_kubernetes_writes_total", write="poddisruptionbudget")
    cluster.apply(home.pool("guarded", replicas=2, updateStrategy={"maxUnavailable": 1}))
    cluster.wait_for(lambda: budget()["spec"]["minAvailable"] == 1, "a budget that lets one runner be evicted")
    state = SiteState(home)
    first, second = cluster.items("pods", f"--namespace={home.pools}", "--selector=motet.dev/pool=guarded")
    state.make_ready(first)
    cluster.wait_for(lambda: budget()["status"]["currentHealthy"] == 1)
    assert budget()["status"]["disruptionsAllowed"] == 0, "the Pending one is the one that may be missing"
    state.make_ready(second)
    cluster.wait_for(lambda: budget()["status"]["disruptionsAllowed"] == 1)
    before = budget()["metadata"]["uid"]
    cluster.kubectl("delete", "pdb", "guarded", f"--namespace={home.pools}")
    cluster.wait_for(lambda: budget()["metadata"]["uid"] != before, "it to be made again")
    assert operator.metric("motet_kubernetes_writes_total", write="poddisruptionbudget") == written + 2
    (owner,) = budget()["metadata"]["ownerReferences"]
    assert owner["uid"] == cluster.get("spool", "guarded", f"--namespace={home.pools}")["metadata"]["uid"]
