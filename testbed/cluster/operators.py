"""The operator as a process on the test cluster, with a ServiceAccount's permissions, alone or with replicas."""

import os
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from motet.resources.crd import CUSTOM_RESOURCES
from testbed.cluster.cluster import Cluster
from testbed.cluster.metrics import metric, page
from testbed.cluster.network import CONTROL_PLANE, Network
from testbed.cluster.programs import Program
from testbed.tree import ROOT

TIME_SCALE = 0.05
LEASE_SECONDS = 60
"""Three seconds of real time: on a busy machine the leader must not lose its Lease."""

TEMPLATE = {
    "metadata": {},
    "spec": {
        # No scheduler has this name, so pods stay pending: these tests check only what the operator writes.
        "schedulerName": "nobody",
        "containers": [
            {
                "name": "runner",
                "image": "motet/runner:test",
                "env": [{"name": "MOTET_RUNNER_INSTANCE", "value": "$(POD_NAME)"}],
            }
        ],
    },
}
RULES = [
    {"apiGroups": ["motet.dev"], "resources": ["loraadapters", "servingpools"], "verbs": ["list", "watch"]},
    {"apiGroups": ["motet.dev"], "resources": ["loraadapters/status", "servingpools/status"], "verbs": ["patch"]},
    {"apiGroups": [""], "resources": ["namespaces"], "verbs": ["list", "watch"]},
    {"apiGroups": [""], "resources": ["events"], "verbs": ["create", "patch"]},
    {"apiGroups": [""], "resources": ["nodes"], "verbs": ["list"]},
]
POOL_RULES = [
    {
        "apiGroups": ["apps"],
        "resources": ["deployments"],
        "verbs": ["list", "watch", "create", "patch", "delete"],
    },
    {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch", "patch", "delete"]},
    {"apiGroups": ["policy"], "resources": ["poddisruptionbudgets"], "verbs": ["list", "watch", "create", "patch"]},
]
LEASE_RULES = [{"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["get", "create", "update"]}]


@dataclass(frozen=True)
class OperatorNamespaces:
    """The namespaces of one test's operators: one for themselves, one for pools, and the permissions for both."""

    cluster: Cluster
    name: str
    kubeconfig: Path
    template: Path
    folder: Path

    @property
    def home(self) -> str:
        return f"{self.name}-system"

    @property
    def pools(self) -> str:
        return f"{self.name}-pools"

    @property
    def user(self) -> str:
        return f"system:serviceaccount:{self.home}:operator"

    def pool(self, name: str = "demo", **spec: Any) -> dict[str, Any]:
        spec = {"model": {"uri": "hf://acme/base"}, "allowedNamespaces": {"from": "All"}} | spec
        return _resource("ServingPool", name, self.pools, spec)

    def adapter(self, name: str, tenant: str, pool: str = "demo", **spec: Any) -> dict[str, Any]:
        reference = {"name": pool, "namespace": self.pools}
        return _resource(
            "LoRAAdapter", name, tenant, {"poolRef": reference, "source": {"uri": f"hf://acme/{name}"}} | spec
        )

    def conditions(self, kind: str, name: str, namespace: str) -> dict[str, dict[str, Any]]:
        found = self.cluster.get(kind, name, f"--namespace={namespace}").get("status", {}).get("conditions", [])
        return {one["type"]: one for one in found}

    def ready_reason(self, kind: str, name: str, namespace: str) -> str:
        return str(self.conditions(kind, name, namespace)["Ready"]["reason"])

    def lease_term(self) -> int:
        lease = self.cluster.get("lease", "motet-operator", f"--namespace={self.home}")
        return int(lease["metadata"]["annotations"]["motet.dev/term"])

    def tenant(self, suffix: str = "tenant", **labels: str) -> str:
        name = f"{self.name}-{suffix}"
        self.cluster.apply(
            {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": dict(labels)}}
        )
        return name


@contextmanager
def site(cluster: Cluster, folder: Path) -> Iterator[OperatorNamespaces]:
    name = f"site-{uuid.uuid4().hex[:6]}"
    apply_definitions(cluster)
    template = folder / f"{name}.yaml"
    template.write_text(yaml.safe_dump(TEMPLATE))
    home, pools = f"{name}-system", f"{name}-pools"
    account = {"kind": "ServiceAccount", "name": "operator", "namespace": home}
    cluster.apply(
        *(_plain("v1", "Namespace", each) for each in (home, pools)),
        _plain("v1", "ServiceAccount", "operator", home),
        *granted("ClusterRole", name, "", RULES, account),
        *granted("Role", name, pools, POOL_RULES, account),
        *granted("Role", name, home, LEASE_RULES, account),
    )
    try:
        yield OperatorNamespaces(cluster, name, cluster.kubeconfig_for("operator", home), template, folder)
    finally:
        namespaces = [one["metadata"]["name"] for one in cluster.items("namespaces")]
        ours = [each for each in namespaces if each.startswith(f"{name}-")]
        cluster.kubectl("delete", "namespace", *ours, "--wait=false")
        for kind in ("clusterrole", "clusterrolebinding"):
            cluster.kubectl("delete", kind, name, "--ignore-not-found")


def apply_definitions(cluster: Cluster) -> None:
    for kind in CUSTOM_RESOURCES:
        cluster.apply(yaml.safe_load((ROOT / "crds" / kind.file_name).read_text()))
        _wait_until_served(cluster, kind.crd_name)


def _wait_until_served(cluster: Cluster, definition: str) -> None:
    waiting = ("wait", "--for=condition=Established", f"crd/{definition}", "--timeout=20s")
    cluster.wait_for(lambda: cluster.kubectl(*waiting))  # without any conditions, kubectl fails at once


@contextmanager
def definition_gone(cluster: Cluster, name: str = "loraadapters.motet.dev") -> Iterator[None]:
    """Delete a definition, and with it all objects of its kind. At the end, create it again."""
    found = cluster.get("crd", name)
    written = {field: value for field, value in found["metadata"].items() if field in ("name", "labels", "annotations")}
    again = {"apiVersion": found["apiVersion"], "kind": found["kind"], "metadata": written, "spec": found["spec"]}
    try:
        cluster.kubectl("delete", "crd", name, "--timeout=30s")
        yield
    finally:
        cluster.apply(again)
        _wait_until_served(cluster, name)


def role(site: OperatorNamespaces, rules: list[dict[str, Any]]) -> dict[str, Any]:
    """The operator's Role in the namespace of its pools. A test may apply it with other rules."""
    account = {"kind": "ServiceAccount", "name": "operator", "namespace": site.home}
    return granted("Role", site.name, site.pools, rules, account)[0]


def _resource(kind: str, name: str, namespace: str, spec: dict[str, Any]) -> dict[str, Any]:
    return _plain("motet.dev/v1alpha1", kind, name, namespace) | {"spec": spec}


def _plain(version: str, kind: str, name: str, namespace: str = "") -> dict[str, Any]:
    metadata = {"name": name} | ({"namespace": namespace} if namespace else {})
    return {"apiVersion": version, "kind": kind, "metadata": metadata}


def granted(
    kind: str, name: str, namespace: str, rules: list[dict[str, Any]], subject: dict[str, str]
) -> list[dict[str, Any]]:
    group = "rbac.authorization.k8s.io"
    reference = {"apiGroup": group, "kind": kind, "name": name}
    return [
        _plain(f"{group}/v1", kind, name, namespace) | {"rules": rules},
        _plain(f"{group}/v1", f"{kind}Binding", name, namespace) | {"roleRef": reference, "subjects": [subject]},
    ]


@dataclass
class OperatorProcess:
    """One replica of the operator."""

    site: OperatorNamespaces
    name: str = "operator-0"
    lease: bool = False
    kubeconfig: Path | None = None
    """Another kubeconfig, such as one through a proxy."""

    env: dict[str, str] = field(default_factory=dict)
    port: int = 9090
    program: Program = field(init=False)

    def __post_init__(self) -> None:
        site = self.site
        kubeconfig = str(self.kubeconfig or site.kubeconfig)
        env = {
            "MOTET_DATA_DIR": str(site.folder / self.name),
            "MOTET_TIME_SCALE": str(TIME_SCALE),
            "MOTET_METRICS_ADDRESS": f"{CONTROL_PLANE}:{self.port}",
            "MOTET_SCHEDULER_ADDRESS": f"unix:{site.folder}/scheduler.sock",
            "MOTET_CLUSTER_KUBECONFIG": kubeconfig,
            "MOTET_CLUSTER_POOL_NAMESPACES": f'["{site.pools}"]',
            "MOTET_CLUSTER_RUNNER_TEMPLATE": str(site.template),
            "POD_NAME": self.name,
        }
        if self.lease:
            env |= {
                "MOTET_LEASE_NAME": "motet-operator",
                "MOTET_LEASE_NAMESPACE": site.home,
                "MOTET_LEASE_KUBECONFIG": kubeconfig,
                "MOTET_LEASE_SECONDS": str(LEASE_SECONDS),
                "MOTET_LEASE_RENEW_SECONDS": "40",
                "MOTET_LEASE_RETRY_SECONDS": "8",
            }
        network = site.cluster.network or Network()
        log = site.folder / f"{site.name}-{self.name}.log"
        command = [sys.executable, "-P", "-m", "motet_operator.cluster"]
        self.program = Program(command, log, network, self.is_ready, env={**os.environ, **env, **self.env})

    def __enter__(self) -> "OperatorProcess":
        self.program.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.program.stop()

    def is_ready(self) -> bool:
        return self.ask("readyz")[0] == 200

    def ask(self, path: str) -> tuple[int, str]:
        """The answer of its health port; status 0 if there is none."""
        with self.site.cluster.inside():
            return page(f"{CONTROL_PLANE}:{self.port}", path)

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric over all labels that are not given. Raises OSError if it does not answer."""
        with self.site.cluster.inside():
            return metric(f"{CONTROL_PLANE}:{self.port}", name, **labels)
