"""A real Kubernetes control plane: etcd, kube-apiserver and kube-controller-manager, in a network of their own.

It stores and admits objects, sets defaults and removes garbage, as on any cluster. `addons` places pods and answers
DNS, `kubelet` runs pods. All files are in one folder, and all processes end with the `with` block.
"""

import os
import ssl
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from testbed.cluster.certificates import ClusterAuthority, Pair, token_keys
from testbed.cluster.cluster import Cluster, CommandRefused, EtcdStore, identity
from testbed.cluster.network import API_PORT, CONTROL_PLANE, FIRST_SERVICE, SERVICES, Network
from testbed.cluster.programs import Program
from tools.kube.binaries import find

__all__ = ["NEEDED", "Cluster", "CommandRefused", "control_plane"]

NEEDED = ("etcd", "kube-apiserver", "kube-controller-manager", "kubectl")
ETCD = f"http://{CONTROL_PLANE}:2379"
ETCD_PEER = f"http://{CONTROL_PLANE}:2380"
MANAGER_PORT = 10257
FEWER_COLLECTIONS = {"GOGC": "400", "GOMEMLIMIT": "1500MiB"}
"""More memory for less CPU time: a test's control plane lives on few cores beside what it tests."""
AUDIT_POLICY = """\
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
  - level: Request
    userGroups: ["system:serviceaccounts:motet-system"]
    verbs: [patch]
    resources: [{group: motet.dev}]
  - {level: Metadata}
"""
"""The audit policy. It logs the bodies of the product's writes of its own objects: see `tests.kube.audit_writes`."""


@contextmanager
def control_plane(folder: Path, network: Network, *, node_grace_s: int = 16) -> Iterator[Cluster]:
    """Start a control plane and wait until it is ready. If it does not become ready, raises AssertionError with the
    logs. A node that does not report for `node_grace_s` counts as lost."""
    tools = {tool: found for tool in NEEDED if (found := find(tool)) is not None}
    plane = _Plane(folder, network, tools, node_grace_s)
    with ExitStack() as children:
        etcd = children.enter_context(plane.etcd())
        apiserver = children.enter_context(plane.apiserver())
        children.enter_context(plane.controller_manager())
        admin = identity(plane.authority, folder, "admin", "system:masters")
        cluster = Cluster(
            admin,
            folder,
            tools["kubectl"],
            plane.audit_log,
            network,
            plane.authority,
            apiserver,
            EtcdStore(etcd, apiserver, plane.etcd_data),
        )
        children.callback(cluster.close)
        first = "/api/v1/namespaces/default/serviceaccounts/default"
        # This also fills the cache of `call`, before threads use it.
        cluster.wait_for(lambda: cluster.call("GET", first), "the first ServiceAccount")
        yield cluster


@dataclass
class _Plane:
    """The three programs, and how to see that each is ready."""

    folder: Path
    network: Network
    tools: dict[str, Path]
    node_grace_s: int
    authority: ClusterAuthority = field(init=False)
    tokens: Pair = field(init=False)

    def __post_init__(self) -> None:
        self.authority = ClusterAuthority(self.folder)
        self.tokens = token_keys(self.folder)

    @property
    def audit_log(self) -> Path:
        return self.folder / "audit.log"

    @property
    def etcd_data(self) -> Path:
        return self.folder / "etcd"

    def etcd(self) -> Program:
        return self._program(
            "etcd",
            f"--data-dir={self.etcd_data}",
            f"--listen-client-urls={ETCD}",
            f"--advertise-client-urls={ETCD}",
            f"--listen-peer-urls={ETCD_PEER}",
            f"--initial-advertise-peer-urls={ETCD_PEER}",
            f"--initial-cluster=default={ETCD_PEER}",
            "--unsafe-no-fsync",
            "--log-level=warn",
            ready=lambda: _answers(f"{ETCD}/health"),
        )

    def apiserver(self) -> Program:
        names = ["localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc"]
        names.append("kubernetes.default.svc.cluster.local")
        serving = self.authority.serving("kube-apiserver", [CONTROL_PLANE, FIRST_SERVICE, *names])
        # From a separate authority: a client with its certificate may act as any user.
        front = ClusterAuthority(self.folder, "front-proxy")
        to_extensions = front.client("front-proxy-client")
        to_kubelets = self.authority.client("kube-apiserver-kubelet-client", "system:masters")
        policy = self.folder / "audit-policy.yaml"
        policy.write_text(AUDIT_POLICY)
        prober = self.authority.client("motet-test:readiness", "system:monitoring")
        trust = ssl.create_default_context(cafile=str(self.authority.pair.certificate))
        trust.load_cert_chain(prober.certificate, prober.key)
        return self._program(
            "kube-apiserver",
            f"--etcd-servers={ETCD}",
            f"--bind-address={CONTROL_PLANE}",
            f"--secure-port={API_PORT}",
            f"--advertise-address={CONTROL_PLANE}",
            f"--service-cluster-ip-range={SERVICES}",
            f"--tls-cert-file={serving.certificate}",
            f"--tls-private-key-file={serving.key}",
            f"--client-ca-file={self.authority.pair.certificate}",
            f"--kubelet-certificate-authority={self.authority.pair.certificate}",
            f"--kubelet-client-certificate={to_kubelets.certificate}",
            f"--kubelet-client-key={to_kubelets.key}",
            "--kubelet-preferred-address-types=InternalIP",
            f"--requestheader-client-ca-file={front.pair.certificate}",
            "--requestheader-allowed-names=front-proxy-client",
            "--requestheader-username-headers=X-Remote-User",
            "--requestheader-group-headers=X-Remote-Group",
            "--requestheader-extra-headers-prefix=X-Remote-Extra-",
            f"--proxy-client-cert-file={to_extensions.certificate}",
            f"--proxy-client-key-file={to_extensions.key}",
            # The server finds API extensions by their endpoints: no kube-proxy serves a Service's address.
            "--enable-aggregator-routing",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={self.tokens.certificate}",
            f"--service-account-signing-key-file={self.tokens.key}",
            "--authorization-mode=Node,RBAC",
            "--anonymous-auth=false",
            "--enable-admission-plugins=NodeRestriction",
            "--allow-privileged",
            "--event-ttl=10m",
            f"--audit-policy-file={policy}",
            f"--audit-log-path={self.audit_log}",
            "--profiling=false",
            ready=lambda: _answers(f"https://{CONTROL_PLANE}:{API_PORT}/readyz", trust),
        )

    def controller_manager(self) -> Program:
        kubeconfig = identity(self.authority, self.folder, "system:kube-controller-manager")
        serving = self.authority.serving("kube-controller-manager", [CONTROL_PLANE])
        trust = ssl.create_default_context(cafile=str(self.authority.pair.certificate))
        return self._program(
            "kube-controller-manager",
            *(f"--{what}kubeconfig={kubeconfig}" for what in ("", "authentication-", "authorization-")),
            f"--bind-address={CONTROL_PLANE}",
            f"--secure-port={MANAGER_PORT}",
            f"--tls-cert-file={serving.certificate}",
            f"--tls-private-key-file={serving.key}",
            "--leader-elect=false",
            # The default is 20 requests a second. Creating its accounts at the start takes more than a hundred.
            "--kube-api-qps=1000",
            "--kube-api-burst=2000",
            "--use-service-account-credentials",
            f"--root-ca-file={self.authority.pair.certificate}",
            f"--service-account-private-key-file={self.tokens.key}",
            "--horizontal-pod-autoscaler-sync-period=1s",
            "--node-monitor-period=1s",
            f"--node-monitor-grace-period={self.node_grace_s}s",
            "--profiling=false",
            ready=lambda: _answers(f"https://{CONTROL_PLANE}:{MANAGER_PORT}/healthz", trust),
        )

    def _program(self, tool: str, *arguments: str, ready: Callable[[], bool]) -> Program:
        log, env = self.folder / f"{tool}.log", {**os.environ, **FEWER_COLLECTIONS}
        return Program([str(self.tools[tool]), *arguments], log, self.network, ready, env=env)


def _answers(url: str, trust: ssl.SSLContext | None = None) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5, context=trust):
            return True
    except OSError:
        return False
