"""Objects that the operator may not see or write, or cannot read: it reports them, harms nothing, and continues."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from motet.resources.crd import CUSTOM_RESOURCES
from testbed.cluster.cluster import Cluster
from testbed.cluster.operators import POOL_RULES, OperatorNamespaces, OperatorProcess, apply_definitions, granted, site
from testbed.tree import ROOT

pytestmark = pytest.mark.kube

QUICK_RESYNC = {"MOTET_CLUSTER_RESYNC_SECONDS": "40"}
"""Two seconds of real time."""


@pytest.fixture
def home(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OperatorNamespaces]:
    with cluster.inside(), site(cluster, tmp_path_factory.mktemp("obstacles")) as made:
        yield made


def reason(home: OperatorNamespaces, pool: str, namespace: str = "", condition: str = "Ready") -> str:
    return str(home.conditions("spool", pool, namespace or home.pools)[condition]["reason"])


def deployments(cluster: Cluster, namespace: str) -> list[tuple[str, int]]:
    """The uid and generation of each: every write changes one of them."""
    found = cluster.items("deployments", f"--namespace={namespace}")
    return sorted((one["metadata"]["uid"], one["metadata"]["generation"]) for one in found)


def pods(cluster: Cluster, namespace: str) -> list[str]:
    return sorted(one["metadata"]["uid"] for one in cluster.items("pods", f"--namespace={namespace}"))


def rights(home: OperatorNamespaces, namespace: str, verbs_lost: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    rules = [rule | {"verbs": [verb for verb in rule["verbs"] if verb not in verbs_lost]} for rule in POOL_RULES]
    account = {"kind": "ServiceAccount", "name": "operator", "namespace": home.home}
    return granted("Role", home.name, namespace, rules, account)


def test_a_namespace_without_read_permission_stops_neither_the_operator_nor_its_runners(
    cluster: Cluster, home: OperatorNamespaces
) -> None:
    tenant, other = home.tenant(), home.tenant("dark")
    env = QUICK_RESYNC | {"MOTET_CLUSTER_POOL_NAMESPACES": json.dumps([other, home.pools])}
    there = home.pool("there")
    there["metadata"]["namespace"] = other
    cluster.apply(home.pool("here"), there)
    cluster.apply(home.adapter("legal", tenant, "there") | {"spec": _served_by("there", other)})
    with OperatorProcess(home, env=env):  # it has no permissions in the other namespace
        cluster.wait_for(lambda: reason(home, "here") == "RunnersStarting")
        cluster.wait_for(lambda: reason(home, "there", other) == "PermissionDenied")
        assert deployments(cluster, home.pools)
        assert not deployments(cluster, other)
        cluster.apply(*rights(home, other))
        cluster.wait_for(lambda: reason(home, "there", other) == "RunnersStarting")
        cluster.wait_for(lambda: pods(cluster, other), "its pod")
        accepted = home.conditions("lora", "legal", tenant)["Accepted"]
        assert accepted["status"] == "True"
    before = deployments(cluster, other), pods(cluster, other)
    cluster.apply(*rights(home, other, ("list", "watch")))
    cluster.kubectl("scale", "spool/there", f"--namespace={other}", "--replicas=0")
    with OperatorProcess(home, env=env):
        cluster.apply(home.pool("another"))
        cluster.wait_for(lambda: reason(home, "another") == "RunnersStarting")
        cluster.wait_for(lambda: reason(home, "there", other) == "PermissionDenied")
        status = cluster.get("spool", "there", f"--namespace={other}")["status"]
        assert status["desiredReplicas"] == 1
        assert home.conditions("lora", "legal", tenant)["Accepted"] == accepted
        assert (deployments(cluster, other), pods(cluster, other)) == before
        cluster.apply(*rights(home, other))
        cluster.wait_for(lambda: not pods(cluster, other), "the end of the namespace's pods")


def _served_by(pool: str, namespace: str) -> dict[str, Any]:
    return {"poolRef": {"name": pool, "namespace": namespace}, "source": {"uri": "hf://acme/legal"}}


def test_a_forbidden_watch_does_not_count_as_silent(cluster: Cluster, home: OperatorNamespaces) -> None:
    def watched() -> bool:
        return f"/api/v1/namespaces/{home.pools}/pods" in operator.ask("metrics")[1]

    with OperatorProcess(home, env=QUICK_RESYNC) as operator:
        cluster.wait_for(watched)
        cluster.apply(*rights(home, home.pools, ("watch",)))
        cluster.wait_for(lambda: not watched(), "the metric of the watch to end")  # when the watch is opened again
        cluster.apply(*rights(home, home.pools))
        cluster.wait_for(watched)
        operator.program.assert_alive()


def test_conditions_have_the_servers_message_for_refused_pods_and_deployments(
    cluster: Cluster, home: OperatorNamespaces
) -> None:
    where = f"--namespace={home.pools}"
    with OperatorProcess(home, env=QUICK_RESYNC):
        cluster.apply(home.pool("lost", template={"serviceAccountName": "nobody"}))
        cluster.wait_for(lambda: reason(home, "lost") == "RunnersRefused")
        for condition in ("Available", "Progressing", "Stalled"):
            assert (
                'serviceaccount "nobody" not found'
                in home.conditions("spool", "lost", home.pools)[condition]["message"]
            )
        cluster.wait_for(
            lambda: [one for one in cluster.items("events", where) if one["reason"] == "RunnersRefused"], "its event"
        )
        policy = f"{home.name}-teams"
        cluster.apply(*_policy(policy, home.pools))
        try:
            cluster.wait_for(lambda: _is_in_force(cluster, home), "the policy")
            cluster.apply(home.pool("refused"))
            cluster.wait_for(lambda: reason(home, "refused") == "RunnersRefused")
            assert "a Deployment needs a team" in home.conditions("spool", "refused", home.pools)["Ready"]["message"]
        finally:
            cluster.kubectl("delete", "validatingadmissionpolicybinding", policy)
            cluster.kubectl("delete", "validatingadmissionpolicy", policy)
        cluster.wait_for(lambda: reason(home, "refused") == "RunnersStarting", within_s=60)
        cluster.kubectl("create", "serviceaccount", "nobody", where)
        # Its ReplicaSet waits twice as long after each failure.
        cluster.wait_for(lambda: reason(home, "lost") == "RunnersStarting", within_s=180)


def _policy(name: str, namespace: str) -> list[dict[str, Any]]:
    version = "admissionregistration.k8s.io/v1"
    rule = {
        "apiGroups": ["apps"],
        "apiVersions": ["v1"],
        "operations": ["CREATE", "UPDATE"],
        "resources": ["deployments"],
    }
    demand = {"expression": "'team' in object.metadata.labels", "message": "a Deployment needs a team"}
    return [
        {
            "apiVersion": version,
            "kind": "ValidatingAdmissionPolicy",
            "metadata": {"name": name},
            "spec": {"matchConstraints": {"resourceRules": [rule]}, "validations": [demand]},
        },
        {
            "apiVersion": version,
            "kind": "ValidatingAdmissionPolicyBinding",
            "metadata": {"name": name},
            "spec": {
                "policyName": name,
                "validationActions": ["Deny"],
                "matchResources": {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}}},
            },
        },
    ]


def _is_in_force(cluster: Cluster, home: OperatorNamespaces) -> bool:
    try:
        where = f"--namespace={home.pools}"
        cluster.kubectl("create", "deployment", "try", "--image=none", "--dry-run=server", where)
    except Exception as error:  # the refusal of the API server, in any form that kubectl prints
        return "a Deployment needs a team" in str(error)
    return False


def test_after_a_rollback_a_pool_with_a_field_of_the_future_keeps_what_it_has(
    cluster: Cluster, home: OperatorNamespaces
) -> None:
    tenant = home.tenant()
    with OperatorProcess(home):
        cluster.apply(home.pool(replicas=2), home.adapter("legal", tenant))
        cluster.wait_for(lambda: len(pods(cluster, home.pools)) == 2)
        cluster.wait_for(lambda: home.ready_reason("lora", "legal", tenant) == "WaitingForRunner")
        cluster.wait_for(lambda: _status(cluster, home)["replicas"] == 2)
    before, running = _status(cluster, home), (deployments(cluster, home.pools), pods(cluster, home.pools))
    (definition,) = [
        yaml.safe_load((ROOT / "crds" / kind.file_name).read_text())
        for kind in CUSTOM_RESOURCES
        if "servingpools" in kind.file_name
    ]
    for version in definition["spec"]["versions"]:
        fields = version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
        fields["fromTheFuture"] = {"type": "boolean"}
    try:
        # With force: Helm may own the fields after a test of the charts.
        forced = ("apply", "--server-side", "--force-conflicts", "--filename=-")
        cluster.kubectl(*forced, stdin=yaml.safe_dump(definition))
        cluster.wait_for(lambda: _applied(cluster, home.pool(replicas=2, fromTheFuture=True)), "the new schema")
        with OperatorProcess(home):
            cluster.wait_for(lambda: reason(home, "demo") == "Unreadable")
            cluster.apply(home.adapter("new", tenant, "nowhere"))
            cluster.wait_for(lambda: home.ready_reason("lora", "new", tenant) == "PoolNotFound")
            now = _status(cluster, home)
            assert {name for name in before if before[name] != now.get(name)} == {"conditions", "observedGeneration"}
            assert (deployments(cluster, home.pools), pods(cluster, home.pools)) == running
            assert home.conditions("lora", "legal", tenant)["Accepted"]["status"] == "True"
            cluster.kubectl(
                *("patch", "spool", "demo", f"--namespace={home.pools}", "--type=json"),
                '--patch=[{"op": "remove", "path": "/spec/fromTheFuture"}]',
            )
            cluster.wait_for(lambda: reason(home, "demo") == "RunnersStarting")
    finally:
        apply_definitions(cluster)


def _status(cluster: Cluster, home: OperatorNamespaces) -> dict[str, Any]:
    status: dict[str, Any] = cluster.get("spool", "demo", f"--namespace={home.pools}")["status"]
    return status


def _applied(cluster: Cluster, it: dict[str, Any]) -> bool:
    cluster.apply(it)
    where = f"--namespace={it['metadata']['namespace']}"
    return "fromTheFuture" in cluster.get("spool", it["metadata"]["name"], where)["spec"]


def test_a_foreign_object_is_not_taken_over_and_the_pool_names_it(cluster: Cluster, home: OperatorNamespaces) -> None:
    theirs = {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": "taken", "namespace": home.pools},
        "spec": {"minAvailable": 1, "selector": {"matchLabels": {"app": "theirs"}}},
    }
    cluster.apply(theirs)
    where = ("pdb", "taken", f"--namespace={home.pools}")
    cluster.wait_for(lambda: "observedGeneration" in cluster.get(*where).get("status", {}), "its controller")
    before = cluster.get(*where)
    with OperatorProcess(home):
        cluster.apply(home.pool("taken"))
        cluster.wait_for(lambda: home.conditions("spool", "taken", home.pools)["Stalled"]["reason"] == "NameTaken")
        message = home.conditions("spool", "taken", home.pools)["Progressing"]["message"]
        assert message.startswith("PodDisruptionBudget taken of this namespace was not created by the operator")
        cluster.wait_for(lambda: pods(cluster, home.pools), "the pool's runners")
        after = cluster.get(*where)
        assert (after["spec"], after["metadata"]) == (before["spec"], before["metadata"])
        cluster.kubectl("delete", *where)
        cluster.wait_for(lambda: reason(home, "taken") == "RunnersStarting", within_s=60)
        selector = cluster.get(*where)["spec"]["selector"]
        assert selector == {"matchLabels": {"motet.dev/pool": "taken"}}
