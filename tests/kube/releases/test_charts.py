"""The charts on a real API server: it accepts every object, permissions are as documented, TLS certificates stay."""

import base64
import contextlib
import http.client
import importlib.util
import json
import socket
import ssl
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import asyncpg
import pytest
import yaml
from cryptography import x509

from motet.resources.crd import CUSTOM_RESOURCES
from testbed.cluster.cluster import Cluster, CommandRefused
from testbed.cluster.network import API_PORT, CONTROL_PLANE
from testbed.cluster.operators import apply_definitions
from testbed.machine import lacking
from testbed.ports import free_port
from tests.charts.helm import (
    ADDITIONS,
    COMPONENTS,
    CRDS,
    MOTET,
    VARIANTS,
    containers,
    of_kind,
    pod_templates,
    title,
    with_values,
)
from tests.support.postgresql import MISSING, PostgreSQL
from tests.support.postgresql import find as find_postgresql

pytestmark = pytest.mark.kube

Object = dict[str, Any]
FOREIGN = {"cert-manager.io/v1", "monitoring.coreos.com/v1"}
"""Kinds of other projects, whose definitions this cluster does not have."""
NOWHERE: Object = {
    **{name: {"nodeSelector": {"motet.dev/test": "no-such-node"}} for name in COMPONENTS},
    "crds": {"install": False},
}
"""With this, pods stay pending, also if a node runs for other tests."""
ADAPTER: Object = {
    "apiVersion": "motet.dev/v1alpha1",
    "kind": "LoRAAdapter",
    "metadata": {"name": "mine"},
    "spec": {"poolRef": {"name": "base"}, "source": {"uri": "https://adapters.example.com/mine/"}},
}


@dataclass(frozen=True)
class Release:
    """A release with a unique name, its namespace, and two for its pools. Pod Security is `restricted` in all three."""

    cluster: Cluster
    name: str

    @property
    def system(self) -> str:
        return f"{self.name}-system"

    @property
    def pools(self) -> tuple[str, str]:
        return f"{self.name}-pools", f"{self.name}-more"

    def values(self, values: Object, folder: Path) -> str:
        return with_values({"pools": {"namespaces": list(self.pools[:1])}} | values, folder)

    def objects(self, values: Object, folder: Path) -> list[Object]:
        """The rendered objects, without kinds of other projects."""
        text = self.cluster.helm(
            "template", self.name, str(MOTET), f"--namespace={self.system}", self.values(values, folder)
        )
        documents = [document for document in yaml.load_all(text, yaml.CSafeLoader) if document]
        return [one for one in documents if one["apiVersion"] not in FOREIGN]

    def helm(self, command: str, values: Object, folder: Path) -> None:
        self.cluster.helm(command, self.name, str(MOTET), f"--namespace={self.system}", self.values(values, folder))

    def secrets(self, namespace: str) -> dict[str, dict[str, str]]:
        """The chart's Secrets, by their names without the release's name."""
        found = self.cluster.items("secrets", f"--namespace={namespace}", "--selector=app.kubernetes.io/part-of=motet")
        return {one["metadata"]["name"].removeprefix(f"{self.name}-"): one["data"] for one in found}


@pytest.fixture
def release(cluster: Cluster) -> Iterator[Release]:
    with new_release(cluster) as made:
        yield made


@pytest.fixture(scope="module")
def bare(cluster: Cluster) -> Iterator[Release]:
    """One that is not installed, for all tests of what the server says about its objects."""
    with new_release(cluster) as made:
        yield made


@pytest.fixture(scope="module")
def standing(cluster: Cluster, definitions: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Release]:
    """A release that is installed, with two namespaces of pools, for all tests that do not change it."""
    with new_release(cluster) as made:
        values = NOWHERE | {"pools": {"namespaces": list(made.pools)}}
        made.helm("install", values, tmp_path_factory.mktemp("standing"))
        yield made


@contextlib.contextmanager
def new_release(cluster: Cluster) -> Iterator[Release]:
    made = Release(cluster, f"m{uuid.uuid4().hex[:6]}")
    strict = {"pod-security.kubernetes.io/enforce": "restricted"}
    for name in (made.system, *made.pools):
        cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": strict}})
    try:
        yield made
    finally:
        with contextlib.suppress(CommandRefused):
            cluster.helm("uninstall", made.name, f"--namespace={made.system}")
        cluster.kubectl("delete", "namespace", made.system, *made.pools, "--wait=false")


@pytest.fixture(scope="module")
def definitions(cluster: Cluster) -> None:
    apply_definitions(cluster)


# Objects --------------------------------------------------------------------------------------------------------------


EACH_ALONE = [
    pytest.param(values, id=name, marks=[] if name.startswith(("as small", "everything")) else pytest.mark.soak)
    for name, values in VARIANTS.items()
]
"""In everything that can be asked for is what others ask for. The release as it comes is installed by other tests."""


@pytest.mark.parametrize("values", [*EACH_ALONE, pytest.param(ADDITIONS, id="with additions")])
def test_the_server_accepts_every_object(bare: Release, values: Object, tmp_path: Path) -> None:
    namespaces = list(bare.pools) if "pools" in values else [bare.pools[0]]
    objects = bare.objects(values | {"crds": {"install": False}, "pools": {"namespaces": namespaces}}, tmp_path)
    bare.cluster.apply(*of_kind(objects, "ServiceAccount"))  # the API server refuses a pod without its account
    said = bare.cluster.kubectl(
        *("apply", "--server-side", "--dry-run=server", "--validate=strict", "--filename=-", "--output=name"),
        stdin=yaml.safe_dump_all(objects),
    )
    assert len(said.splitlines()) == len(objects)


def as_pod(template: Object, account: str) -> Object:
    spec = {**template["spec"], "restartPolicy": "Never", "serviceAccountName": account}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "trial"}, "spec": spec}


def test_restricted_pod_security_admits_every_pod_and_is_there(bare: Release, tmp_path: Path) -> None:
    cluster, namespace = bare.cluster, bare.system
    cluster.wait_for(lambda: cluster.get("serviceaccount", "default", f"--namespace={namespace}"))

    def trial(pod: Object) -> None:
        cluster.kubectl(
            *("create", "--dry-run=server", f"--namespace={namespace}", "--filename=-"), stdin=yaml.safe_dump(pod)
        )

    values = VARIANTS["everything that can be asked for"] | {"pools": {"namespaces": list(bare.pools)}}
    templates = pod_templates(bare.objects(values, tmp_path))
    assert len(templates) == 8
    for template in templates.values():
        trial(as_pod(template, "default"))
    loose = as_pod(template, "default")
    containers(loose)[0]["securityContext"]["allowPrivilegeEscalation"] = True
    with pytest.raises(CommandRefused, match='violates PodSecurity "restricted'):
        trial(loose)


# The life of a release ------------------------------------------------------------------------------------------------


def certificate(secret: dict[str, str], key: str = "tls.crt") -> x509.Certificate:
    return x509.load_pem_x509_certificate(base64.b64decode(secret[key]))


def names(one: x509.Certificate) -> list[str]:
    said = one.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return said.get_values_for_type(x509.DNSName)


def test_certificates_have_one_authority_and_their_role(standing: Release) -> None:
    system = standing.secrets(standing.system)
    authority = certificate(system["ca"])
    runners = [standing.secrets(namespace)["runner-tls"] for namespace in standing.pools]
    for role, secret in [
        *((name, system[f"{name}-tls"]) for name in COMPONENTS),
        *(("runner", one) for one in runners),
    ]:
        assert names(certificate(secret)) == [f"{role}.motet.internal"]
        certificate(secret).verify_directly_issued_by(authority)
        assert certificate(secret, "ca.crt") == authority
        use = certificate(secret).extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
        assert {x509.oid.ExtendedKeyUsageOID.SERVER_AUTH, x509.oid.ExtendedKeyUsageOID.CLIENT_AUTH} <= set(use)
    assert "tls.key" not in {key for secret in runners for key in secret if secret[key] == system["ca"]["tls.key"]}


def test_upgrades_and_rollbacks_keep_certificates_and_make_what_is_missing(release: Release, tmp_path: Path) -> None:
    cluster = release.cluster
    release.helm("install", NOWHERE, tmp_path)
    before, runner = release.secrets(release.system), release.secrets(release.pools[0])
    release.helm("upgrade", NOWHERE | {"logLevel": "debug"}, tmp_path)
    cluster.helm("rollback", release.name, "1", f"--namespace={release.system}")
    assert release.secrets(release.system) == before
    assert release.secrets(release.pools[0]) == runner

    # One more namespace; and a TLS certificate that was deleted so that the chart makes a new one.
    cluster.kubectl("delete", "secret", f"{release.name}-gateway-tls", f"--namespace={release.system}")
    release.helm("upgrade", NOWHERE | {"pools": {"namespaces": list(release.pools)}}, tmp_path)
    after = release.secrets(release.system)
    assert {name for name in before if before[name] != after[name]} == {"gateway-tls"}
    for made in (after["gateway-tls"], release.secrets(release.pools[1])["runner-tls"]):
        certificate(made).verify_directly_issued_by(certificate(before["ca"]))

    # With another tls.source, the Secrets stay until others replace them.
    release.helm("upgrade", NOWHERE | {"tls": {"source": "Existing"}}, tmp_path)
    assert release.secrets(release.system) == after


def test_an_upgrade_leaves_no_pool_behind(definitions: None, release: Release, tmp_path: Path) -> None:
    """It fails before it changes anything, while pools are in a namespace that it leaves out."""
    cluster, (first, second) = release.cluster, release.pools
    release.helm("install", NOWHERE | {"pools": {"namespaces": [first, second]}}, tmp_path)
    pool = {"apiVersion": "motet.dev/v1alpha1", "kind": "ServingPool", "spec": {"model": {"uri": "hf://acme/base"}}}
    for name in ("demo", "other"):
        cluster.apply(pool | {"metadata": {"name": name, "namespace": second}})
    with pytest.raises(
        CommandRefused, match=f"pools.namespaces leaves out {second}, .* ServingPools: demo, other. Del"
    ):
        release.helm("upgrade", NOWHERE, tmp_path)
    policies = (f"--namespace={second}", "--output=name")
    before = cluster.kubectl("get", "networkpolicies", *policies)
    assert len(before.split()) == 2
    assert cluster.kubectl("get", "roles", *policies).split() != []

    cluster.kubectl("delete", "spool", "--all", f"--namespace={second}")
    cluster.apply(pool | {"metadata": {"name": "demo", "namespace": first}})
    of_another_release = {"motet.dev/operator-class": "another"}
    cluster.apply(pool | {"metadata": {"name": "theirs", "namespace": second, "labels": of_another_release}})
    release.helm("upgrade", NOWHERE, tmp_path)
    assert cluster.kubectl("get", "roles", *policies).split() == []
    assert cluster.kubectl("get", "networkpolicies", *policies) == before, "runners may still be on their way out"
    release.helm("upgrade", NOWHERE | {"pools": {"namespaces": [first, second]}}, tmp_path)
    cluster.helm("uninstall", release.name, f"--namespace={release.system}")
    assert cluster.kubectl("get", "networkpolicies", *policies) == before


def test_an_upgrade_to_another_class_leaves_no_object_behind(
    definitions: None, release: Release, tmp_path: Path
) -> None:
    """It fails before it changes anything, while there are objects that the operator would no longer see."""
    cluster, place = release.cluster, release.pools[0]

    def of_class(name: str) -> Object:
        return NOWHERE | {"operator": NOWHERE["operator"] | {"class": name}}

    def labelled(kind: str, name: str, spec: Object) -> Object:
        labels = {"motet.dev/operator-class": release.name}
        metadata = {"name": name, "namespace": place, "labels": labels}
        return {"apiVersion": "motet.dev/v1alpha1", "kind": kind, "metadata": metadata, "spec": spec}

    release.helm("install", of_class(release.name), tmp_path)
    cluster.apply(
        labelled("ServingPool", "demo", {"model": {"uri": "hf://acme/base"}}),
        labelled("LoRAAdapter", "legal", ADAPTER["spec"]),
    )
    release.helm("upgrade", of_class(release.name), tmp_path)
    left = f"no longer handle ServingPool {place}/demo, LoRAAdapter {place}/legal: "
    fix = "Set operator.class back.*first give them the label motet.dev/operator-class=other, and wait"
    with pytest.raises(CommandRefused, match=f'operator.class changes from "{release.name}" to "other".*{left}.*{fix}'):
        release.helm("upgrade", of_class("other"), tmp_path)
    with pytest.raises(CommandRefused, match="first remove their label motet"):
        release.helm("upgrade", NOWHERE, tmp_path)
    for kind in ("spool", "lora"):
        cluster.kubectl("label", kind, "--all", "--overwrite", "motet.dev/operator-class=other", f"--namespace={place}")
    release.helm("upgrade", of_class("other"), tmp_path)


def test_expiring_certificates_are_renewed_with_an_upgrade(release: Release, tmp_path: Path) -> None:
    def secrets_after(command: str, days: int) -> dict[str, dict[str, str]]:
        release.helm(command, NOWHERE | {"tls": {"validityDays": days}}, tmp_path)
        return release.secrets(release.system)

    made = secrets_after("install", 100)
    assert secrets_after("upgrade", 290) == made, "a third of 290 days is less than what they have left"
    renewed = secrets_after("upgrade", 600)
    assert {name for name in made if made[name] == renewed[name]} == {"ca", "features-key"}
    certificate(renewed["gateway-tls"]).verify_directly_issued_by(certificate(made["ca"]))
    # The authority is replaced, too, if it would end before the certificates that it signs.
    assert [name for name, one in secrets_after("upgrade", 2000).items() if one == renewed[name]] == ["features-key"]


def test_a_lost_authority_is_replaced_with_all_it_had_signed(release: Release, tmp_path: Path) -> None:
    release.helm("install", NOWHERE, tmp_path)
    before = release.secrets(release.system)
    release.cluster.kubectl("delete", "secret", f"{release.name}-ca", f"--namespace={release.system}")
    release.helm("upgrade", NOWHERE, tmp_path)
    after = release.secrets(release.system)
    assert [name for name in before if before[name] == after[name]] == ["features-key"]
    certificate(after["gateway-tls"]).verify_directly_issued_by(certificate(after["ca"]))


@pytest.mark.usefixtures("definitions")
def test_definitions_and_certificates_are_left_and_a_second_installation_takes_over(
    release: Release, tmp_path: Path
) -> None:
    cluster = release.cluster
    # Other tests own the definitions, too. On a cluster of its own the release would create them.
    whole = [*("--take-ownership", "--force-conflicts", f"--namespace={release.system}")]
    cluster.helm("install", f"{release.name}-crds", str(CRDS), *whole)
    release.helm("install", NOWHERE, tmp_path)
    certificates = [release.secrets(namespace) for namespace in (release.system, release.pools[0])]
    for name in (release.name, f"{release.name}-crds"):
        cluster.helm("uninstall", name, f"--namespace={release.system}")

    kinds = "deployments,services,serviceaccounts,configmaps,roles,rolebindings,networkpolicies,"
    kinds += "poddisruptionbudgets,leases,clusterroles,clusterrolebindings,flowschemas"
    left = cluster.items(kinds, "--all-namespaces", "--selector=app.kubernetes.io/part-of=motet")
    ours = [title(one) for one in left if one["metadata"]["name"].startswith(release.name)]
    kept = [f"{release.pools[0]}/{release.name}-{name}" for name in ("default-deny", "runner")]
    assert sorted(ours) == [f"NetworkPolicy {name}" for name in kept], "runners go on, and so do their policies"
    for kind in CUSTOM_RESOURCES:
        cluster.get("crd", kind.crd_name)

    cluster.helm("install", f"{release.name}-crds", str(CRDS), *whole)
    release.helm("install", NOWHERE, tmp_path)
    assert [release.secrets(namespace) for namespace in (release.system, release.pools[0])] == certificates
    cluster.helm("uninstall", f"{release.name}-crds", f"--namespace={release.system}")


def test_an_upgrade_that_fails_leaves_the_operator_of_before_the_template_that_it_started_with(
    release: Release, tmp_path: Path
) -> None:
    cluster, here = release.cluster, f"--namespace={release.system}"
    ours = f"app.kubernetes.io/component=operator,app.kubernetes.io/instance={release.name}"

    def sets() -> dict[str, str]:
        """The operator's ReplicaSets by the ConfigMap with the runner template of their pods."""
        return {
            volume["configMap"]["name"]: one["metadata"]["name"]
            for one in cluster.items("replicasets", here, f"--selector={ours}")
            for volume in one["spec"]["template"]["spec"]["volumes"]
            if volume["name"] == "runner"
        }

    def templates() -> dict[str, str]:
        found = cluster.items("configmaps", here, f"--selector=app.kubernetes.io/instance={release.name}")
        return {
            one["metadata"]["name"]: one["data"]["template.yaml"] for one in found if "template.yaml" in one["data"]
        }

    def upgraded(level: str) -> Object:
        return NOWHERE | {"runner": {"env": {"MOTET_LOG_LEVEL": level}}}

    release.helm("install", upgraded("info"), tmp_path)
    (first,) = cluster.wait_for(sets)
    before = templates()
    values = release.values(upgraded("debug"), tmp_path)
    with pytest.raises(CommandRefused):  # pods of this test never start
        cluster.helm("upgrade", release.name, str(MOTET), here, values, "--wait", "--timeout=3s")
    cluster.wait_for(lambda: len(sets()) == 2)
    assert templates()[first] == before[first]
    assert set(templates()) == set(sets())
    with pytest.raises(CommandRefused, match="immutable"):
        cluster.kubectl("patch", "configmap", first, here, '--patch={"data": {"template.yaml": "another"}}')

    # After two upgrades that operator still runs. When it is gone, its ConfigMap is removed, too.
    release.helm("upgrade", upgraded("warning"), tmp_path)
    cluster.wait_for(lambda: len(sets()) == 3)
    assert templates()[first] == before[first]
    cluster.kubectl("delete", "replicaset", sets()[first], here)
    cluster.wait_for(lambda: first not in sets())
    release.helm("upgrade", upgraded("error"), tmp_path)
    assert first not in templates()
    # An unchanged template keeps its ConfigMap, and the operator does not restart.
    release.helm("upgrade", upgraded("error") | {"logLevel": "debug", "gateway": {"replicas": 1}}, tmp_path)
    assert set(templates()) >= set(cluster.wait_for(sets))


# The database ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def postgresql(cluster: Cluster) -> Iterator[PostgreSQL]:
    """A PostgreSQL server that pods can reach."""
    if find_postgresql("postgres") is None:
        lacking(MISSING)
    with tempfile.TemporaryDirectory(prefix="motet-postgresql-") as folder, cluster.inside():
        server = PostgreSQL(Path(folder), CONTROL_PLANE)
        server.start()
        try:
            yield server
        finally:
            server.stop()


@pytest.mark.usefixtures("node")
async def test_nothing_starts_before_the_database_has_its_schema(
    release: Release, postgresql: PostgreSQL, tmp_path: Path
) -> None:
    cluster, system = release.cluster, f"--namespace={release.system}"
    url = await postgresql.new_database()
    alone = {
        "crds": {"install": False},
        "env": {"MOTET_DATABASE_WAIT_SECONDS": "2"},
        **{name: {"replicas": 0} for name in COMPONENTS if name != "predictor"},
    }

    def values(url: str) -> str:
        return release.values(alone | {"database": {"url": url}}, tmp_path)

    wrong = values(postgresql.url(url.rsplit("/", 1)[1], password="mistaken"))
    with pytest.raises(CommandRefused, match="pre-install"):
        cluster.helm("install", release.name, str(MOTET), system, wrong, "--timeout=2m")
    assert cluster.items("deployments", system) == []
    # A failed Job is kept, so that people can read its log.
    (pod, *_) = cluster.items("pods", system, "--selector=app.kubernetes.io/component=migrate")
    said = cluster.logs(pod["metadata"]["name"], release.system)
    assert "refuses this user or password. Correct them in MOTET_DATABASE_URL." in said
    assert cluster.items("secrets", system, "--selector=app.kubernetes.io/component=migrate") == []
    cluster.helm("uninstall", release.name, system)

    cluster.helm("install", release.name, str(MOTET), system, values(url), "--wait", "--timeout=2m")
    connection = await asyncpg.connect(url.replace("+asyncpg", ""))
    try:
        assert await connection.fetchval("SELECT count(*) FROM alembic_version") == 1
    finally:
        await connection.close()
    cluster.helm("upgrade", release.name, str(MOTET), system, values(url), "--wait", "--timeout=2m")
    left = cluster.items("jobs,secrets,networkpolicies", system, "--selector=app.kubernetes.io/component=migrate")
    assert left == []


# Rights ---------------------------------------------------------------------------------------------------------------


def may_do(cluster: Cluster, who: str, verb: str, what: str, namespace: str, *, subresource: str = "") -> bool:
    """What `kubectl auth can-i` says, without a process for each question. `what`: resource.group/name"""
    resource, _, name = what.partition("/")
    resource, _, group = resource.partition(".")
    groups = ["system:authenticated"]
    if who.startswith("system:serviceaccount:"):
        groups += ["system:serviceaccounts", f"system:serviceaccounts:{who.split(':')[2]}"]
    attributes = {"verb": verb, "group": group, "resource": resource, "name": name, "subresource": subresource}
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {"user": who, "groups": groups, "resourceAttributes": attributes | {"namespace": namespace}},
    }
    answer = cluster.call("POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews", review)
    return bool(answer["status"]["allowed"])


def test_rights_are_what_the_roles_say(standing: Release) -> None:
    system, pools = standing.system, standing.pools[0]

    def may(account: str, verb: str, what: str, namespace: str, home: str = system) -> bool:
        who = f"system:serviceaccount:{home}:{standing.name}-{account}"
        return may_do(standing.cluster, who, verb, what, namespace)

    for verb, what, namespace in [
        ("watch", "loraadapters.motet.dev", "default"),
        ("list", "servingpools.motet.dev", "default"),
        ("watch", "namespaces", "default"),
        ("create", "events", "default"),
        ("patch", "deployments.apps", pools),
        ("delete", "pods", pools),
        ("update", f"leases.coordination.k8s.io/{standing.name}-operator", system),
    ]:
        assert may("operator", verb, what, namespace), f"{verb} {what} in {namespace}"
    for verb, what, namespace in [
        ("patch", "loraadapters.motet.dev", "default"),
        ("delete", "servingpools.motet.dev", pools),
        ("get", "secrets", pools),
        ("get", "secrets", system),
        ("list", "pods", "default"),
        ("create", "pods", pools),
        ("create", "deployments.apps", system),
        ("update", f"leases.coordination.k8s.io/{standing.name}-scheduler", system),
        ("get", "leases.coordination.k8s.io/other", system),
    ]:
        assert not may("operator", verb, what, namespace), f"{verb} {what} in {namespace}"
    assert may("scheduler", "update", f"leases.coordination.k8s.io/{standing.name}-scheduler", system)
    assert not may("scheduler", "get", "pods", system)
    assert not may("runner", "get", "secrets/token", pools, home=pools)
    for account in ("gateway", "predictor", "supervisor"):
        assert not may(account, "get", "pods", system)


def roles_in_the_readme(tenant: str, runners: str, release: str) -> list[Object]:
    """What a tenant applies to let runners read one Secret, for this release."""
    readme = (MOTET / "README.md").read_text()
    (block,) = [one.split("```")[0] for one in readme.split("```yaml\n")[1:] if "resourceNames" in one]
    block = (
        block.replace("tenant-a", tenant).replace("motet-pools", runners).replace("motet-runner", f"{release}-runner")
    )
    return list(yaml.safe_load_all(block))


def test_a_tenant_grants_the_runners_one_secret(standing: Release, namespace: str) -> None:
    cluster, pools = standing.cluster, standing.pools[0]
    runner = cluster.kubeconfig_for(f"{standing.name}-runner", pools)
    for name in ("hub-token", "other"):
        cluster.kubectl("create", "secret", "generic", name, f"--namespace={namespace}", "--from-literal=token=x")

    def read(name: str) -> None:
        cluster.kubectl("get", "secret", name, f"--namespace={namespace}", kubeconfig=runner)

    with pytest.raises(CommandRefused, match="Forbidden"):
        read("hub-token")
    cluster.apply(*roles_in_the_readme(namespace, pools, standing.name))
    read("hub-token")
    with pytest.raises(CommandRefused, match="Forbidden"):
        read("other")


def test_tenants_and_the_platform_team_get_their_roles(standing: Release, namespace: str) -> None:
    cluster = standing.cluster
    for who, role in (("edith", "edit"), ("vera", "view"), ("paul", f"{standing.name}-platform-admin")):
        cluster.kubectl(
            "create", "rolebinding", who, f"--clusterrole={role}", f"--user={who}", f"--namespace={namespace}"
        )

    def may(who: str, verb: str, what: str) -> bool:
        what, _, part = what.partition("/")
        return may_do(cluster, who, verb, what, namespace, subresource=part)

    # A controller aggregates our roles into those of the cluster.
    cluster.wait_for(
        lambda: may("edith", "create", "loraadapters.motet.dev") and may("vera", "get", "servingpools.motet.dev")
    )
    assert may("edith", "get", "servingpools.motet.dev")
    assert not may("edith", "create", "servingpools.motet.dev")
    assert not may("edith", "patch", "loraadapters.motet.dev/status")
    assert not may("vera", "create", "loraadapters.motet.dev")
    assert may("paul", "create", "servingpools.motet.dev")
    assert may("paul", "patch", "servingpools.motet.dev/scale")
    assert not may("paul", "get", "secrets")


# Policies -------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("definitions")
def test_each_policy_refuses_its_case_with_its_message(release: Release, namespace: str, tmp_path: Path) -> None:
    cluster = release.cluster
    limits = f"{release.name}-limits"
    cluster.kubectl("label", "namespace", namespace, f"motet-test={release.name}")
    cluster.kubectl("create", "configmap", limits, f"--namespace={namespace}", "--from-literal=maxReplicas=2")
    cluster.kubectl("create", "rolebinding", "tess", "--clusterrole=edit", "--user=tess", f"--namespace={namespace}")
    ours, digest = f"https://ours.example/{namespace}/mine/", {"digest": f"sha256:{'0' * 64}"}

    def apply(user: str, spec: Object) -> None:
        good = {"poolRef": {"name": "base"}, "source": {"uri": ours, **digest}, "placement": {"maxReplicas": 2}}
        cluster.kubectl(
            *("apply", "--server-side", "--dry-run=server", f"--namespace={namespace}", "--filename=-"),
            *([f"--as={user}"] if user else []),
            stdin=yaml.safe_dump(ADAPTER | {"spec": good | spec}),
        )

    def on_a_volume(path: str) -> Object:
        return {"source": {"persistentVolumeClaim": {"claimName": "shared", "path": path}, **digest}}

    prefixed = (
        "spec.source must begin with one of https://ours.example/{namespace}/, pvc://shared/teams/{namespace}/ "
        "({namespace} is the name of its namespace)"
    )
    cases: list[tuple[str, Object, str]] = [
        *(("", on_a_volume(path), prefixed) for path in ("teams/zeta/a", f"teams/{namespace}-2/a", namespace, "teams")),
        (
            "",
            {"source": {"uri": "https://ours.example/other/mine/", **digest}},
            prefixed,
        ),
        (
            "",
            {"source": {"uri": ours}},
            "spec.source.digest must be set in this namespace: where it is not required, an adapter's status shows it",
        ),
        (
            "tess",
            {},
            "spec.poolRef names a pool that you may not use: ask the platform team for the permission to `use` it",
        ),
        (
            "",
            {"placement": {"maxReplicas": 3}},
            f"spec.placement.maxReplicas must be set, to at most maxReplicas in this namespace's ConfigMap {limits}",
        ),
    ]
    release.helm("install", NOWHERE, tmp_path)
    cluster.wait_for(
        lambda: [apply(user, spec) for user, spec, _ in cases], "all objects to be accepted without the policies"
    )

    enabled = {"enabled": True}
    policies = {
        "sourcePrefix": enabled
        | {"prefixes": ["https://ours.example/{namespace}/", "pvc://shared/teams/{namespace}/"]},
        "requireDigest": enabled | {"namespaceLabel": f"motet-test={release.name}"},
        "usePool": enabled,
        "maxReplicas": enabled | {"configMapName": limits},
    }
    release.helm("upgrade", NOWHERE | {"admissionPolicies": policies}, tmp_path)

    def is_refused(user: str, spec: Object, sentence: str) -> bool:
        said = "nothing"
        try:
            apply(user, spec)
        except CommandRefused as refused:
            said = str(refused)
        assert f"denied request: {sentence}" in said
        return True

    for user, spec, sentence in cases:
        cluster.wait_for(lambda case=(user, spec, sentence): is_refused(*case), sentence)
    for allowed in ({}, on_a_volume(f"teams/{namespace}/a"), on_a_volume(f"teams/{namespace}")):
        apply("", allowed)


def test_a_pool_runs_as_no_account_that_its_author_could_not_use_anyway(standing: Release) -> None:
    cluster, pools = standing.cluster, standing.pools[0]
    for who, role in (("paul", f"{standing.name}-platform-admin"), ("edith", f"{standing.name}-platform-admin")):
        cluster.kubectl("create", "rolebinding", who, f"--clusterrole={role}", f"--user={who}", f"--namespace={pools}")
    cluster.kubectl("create", "rolebinding", "pods", "--clusterrole=edit", "--user=edith", f"--namespace={pools}")
    cluster.kubectl(
        *("create", "role", "as-own", "--verb=impersonate", "--resource=serviceaccounts", "--resource-name=own"),
        f"--namespace={pools}",
    )
    cluster.kubectl("create", "rolebinding", "as-own", "--role=as-own", "--user=paul", f"--namespace={pools}")

    def apply(user: str, account: str, replicas: int = 1, name: str = "mine") -> None:
        template = {"serviceAccountName": account} if account else {}
        spec = {"model": {"uri": "hf://acme/base"}, "replicas": replicas, "template": template}
        pool = {"apiVersion": "motet.dev/v1alpha1", "kind": "ServingPool", "metadata": {"name": name}, "spec": spec}
        cluster.kubectl(
            *("apply", "--server-side", "--force-conflicts", f"--namespace={pools}", "--filename=-", f"--as={user}"),
            stdin=yaml.safe_dump(pool),
        )

    refused = "may create pods in this namespace or impersonate that ServiceAccount"

    tries = count()

    def policy_acts() -> bool:
        """Whether the new policy acts yet. Each attempt creates another pool: an existing one may keep its account."""
        try:
            apply("paul", "cluster-admin", name=f"early-{next(tries)}")
        except CommandRefused as error:
            return refused in str(error)
        return False

    cluster.wait_for(policy_acts)
    apply("paul", "")
    apply("paul", "own")
    with pytest.raises(CommandRefused, match=refused):
        apply("paul", "another")
    apply("edith", "another")
    apply("paul", "another", replicas=2)  # he does not change the account
    with pytest.raises(CommandRefused, match=refused):
        apply("paul", "another", name="second")


def test_an_unlikely_value_is_accepted_with_a_warning(standing: Release, namespace: str) -> None:
    cluster = standing.cluster

    def apply(one: Object) -> str:
        """The warnings of the server."""
        try:
            cluster.kubectl(
                *("apply", "--server-side", "--warnings-as-errors", f"--namespace={namespace}", "--filename=-"),
                stdin=yaml.safe_dump(one),
            )
        except CommandRefused as refused:
            return str(refused)
        return ""

    def adapter(*, suspend: bool, replicas: int) -> Object:
        spec = {**ADAPTER["spec"], "suspend": suspend, "placement": {"minReplicas": replicas}}
        return ADAPTER | {"spec": spec}

    def pool(**engine: int) -> Object:
        about = {"apiVersion": "motet.dev/v1alpha1", "kind": "ServingPool", "metadata": {"name": "strange"}}
        return about | {"spec": {"model": {"uri": "hf://example/base"}, "replicas": 0, "engine": engine}}

    suspended = "Warning: Validation failed for ValidatingAdmissionPolicy"
    cluster.wait_for(lambda: "spec.placement.minReplicas has no effect" in apply(adapter(suspend=True, replicas=1)))
    assert suspended in apply(adapter(suspend=True, replicas=1))
    assert cluster.get("loraadapters.motet.dev", "mine", f"--namespace={namespace}")["spec"]["suspend"] is True
    assert apply(adapter(suspend=False, replicas=1)) == apply(adapter(suspend=True, replicas=0)) == ""
    for engine, lowered in (({"maxLoraRank": 128}, False), ({}, True), ({"maxLoraRank": 32}, True), ({}, False)):
        assert ("spec.engine.maxLoraRank becomes lower" in apply(pool(**engine))) is lowered, engine
    found = cluster.get("servingpools.motet.dev", "strange", f"--namespace={namespace}")
    assert "maxLoraRank" not in found["spec"]["engine"]


def test_the_operators_requests_have_a_flow_of_their_own(standing: Release) -> None:
    cluster = standing.cluster
    flow = cluster.get("flowschema", standing.name)["metadata"]["uid"]
    trust = ssl.create_default_context(cadata=authority(cluster))

    def flow_of(account: str) -> str | None:
        token = cluster.token_for(f"{standing.name}-{account}", standing.system)
        connection = http.client.HTTPSConnection(CONTROL_PLANE, API_PORT, context=trust, timeout=10)
        with contextlib.closing(connection):
            connection.request("GET", "/api/v1/namespaces?limit=1", headers={"authorization": f"Bearer {token}"})
            answer = connection.getresponse()
            answer.read()
            return answer.getheader("X-Kubernetes-Pf-Flowschema-Uid")

    cluster.wait_for(lambda: flow_of("operator") == flow, "the operator's flow")
    assert flow_of("scheduler") == flow
    assert flow_of("gateway") not in (flow, None)


# helm test ------------------------------------------------------------------------------------------------------------


def authority(cluster: Cluster) -> str:
    """The authority that signed the API server's certificate, as PEM."""
    said = yaml.safe_load(cluster.kubeconfig.read_text())["clusters"][0]["cluster"]["certificate-authority-data"]
    return base64.b64decode(said).decode()


@pytest.fixture(scope="module")
def script(bare: Release, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The script of `helm test`, beside the account that it has in its pod, which has its permissions."""
    cluster, folder = bare.cluster, tmp_path_factory.mktemp("script")
    objects = bare.objects(NOWHERE, folder)
    of_the_test = [one for one in objects if one["metadata"]["labels"]["app.kubernetes.io/component"] == "test"]
    cluster.apply(*of_kind(of_the_test, "ServiceAccount", "Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding"))
    account = folder / "account"
    account.mkdir()
    (account / "token").write_text(cluster.token_for(f"{bare.name}-test", bare.system))
    (account / "namespace").write_text(bare.system)
    (account / "ca.crt").write_text(authority(cluster))
    (pod,) = of_kind(of_the_test, "Pod")
    (folder / "helm_test.py").write_text(pod["spec"]["containers"][0]["args"][0])
    return folder / "helm_test.py"


@pytest.fixture
def check(script: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("helm_test", script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "ACCOUNT", script.parent / "account")
    monkeypatch.setattr(module, "MAX_WAIT_SECONDS", 2.0)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", CONTROL_PLANE)
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(API_PORT))
    return module


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[str]:
    """The address of a real gateway, without runners."""
    port = free_port()
    environment = {
        "PATH": "/usr/bin:/bin",
        "MOTET_GATEWAY_PORT": str(port),
        "MOTET_DATA_DIR": str(tmp_path / "data"),
    }
    with (tmp_path / "gateway.log").open("w") as log:
        process = subprocess.Popen([sys.executable, "-P", "-m", "motet_gateway"], env=environment, stderr=log)
    try:
        deadline = time.monotonic() + 30
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            assert process.poll() is None, (tmp_path / "gateway.log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


@pytest.mark.usefixtures("definitions")
def test_helm_test_is_content_with_a_good_installation(
    check: ModuleType, gateway: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GATEWAY", gateway)
    check.main()
    said = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in said] == ["ok", "ok", "ok"]
    assert "exactly one of uri, image and persistentVolumeClaim must be set" in said[1]


@pytest.mark.usefixtures("definitions")
def test_helm_test_names_what_is_missing(
    check: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GATEWAY", "127.0.0.1:9")
    with pytest.raises(SystemExit):
        check.main()
    assert "FAILED the_gateway_answers: <urlopen error [Errno 111] Connection refused>" in capsys.readouterr().out


@pytest.mark.usefixtures("definitions")
def test_helm_test_does_not_take_a_good_adapter_for_refused(check: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "INVALID", json.loads(json.dumps(ADAPTER)))
    with pytest.raises(AssertionError, match="was accepted"):
        check.an_invalid_adapter_is_refused()
