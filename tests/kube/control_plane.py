"""A real Kubernetes control plane on loopback: etcd, kube-apiserver and kube-controller-manager as child processes.

There is no kubelet and no scheduler: objects are stored, admitted, defaulted, collected and counted as on any cluster,
and pods stay pending. Everything lies in one folder and ends with the `with` block.
"""

import base64
import json
import shutil
import socket
import ssl
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.kube.certificates import Authority, Pair, token_keys
from tools.kube.locate import find

NEEDED = ("etcd", "kube-apiserver", "kube-controller-manager", "kubectl")
HOST = "127.0.0.1"
SERVICES = "10.0.0.0/24"
FIRST_SERVICE = "10.0.0.1"
"""Of the range above the API server gives itself the first address, as `kubernetes.default`."""
START_WITHIN_S = 60.0
STOP_WITHIN_S = 20.0
AUDIT_POLICY = """\
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules: [{level: Metadata}]
"""


class Refused(Exception):
    """kubectl said no. The text is what it wrote to stderr."""


@dataclass(frozen=True)
class Cluster:
    """A cluster to talk to, whoever runs it."""

    kubeconfig: Path
    folder: Path
    """For kubectl's own caches, so that they are not the developer's."""
    tool: Path
    audit_log: Path | None = None
    """One JSON object per finished request, where we run the API server."""

    def kubectl(self, *arguments: str, stdin: str = "", timeout_s: float = 60) -> str:
        """What kubectl prints. Raises Refused with what it says when it fails."""
        done = subprocess.run(
            [
                self.tool,
                f"--kubeconfig={self.kubeconfig}",
                f"--cache-dir={self.folder / 'kubectl-cache'}",
                *arguments,
            ],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        if done.returncode != 0:
            raise Refused(done.stderr.strip())
        return done.stdout

    def get(self, *arguments: str) -> dict[str, Any]:
        result: dict[str, Any] = json.loads(self.kubectl("get", *arguments, "--output=json"))
        return result

    def apply(self, *documents: dict[str, Any]) -> str:
        """Server-side, as our own documentation does it."""
        return self.kubectl("apply", "--server-side", "--filename=-", stdin=yaml.safe_dump_all(documents))


@contextmanager
def control_plane(folder: Path) -> Iterator[Cluster]:
    """Start one and wait until it is ready; raises AssertionError with the logs when it does not get there."""
    tools = {tool: found for tool in NEEDED if (found := find(tool)) is not None}
    plane = _Plane(folder, tools, *_free_ports(4))
    with ExitStack() as children:
        for start in (plane.etcd, plane.apiserver, plane.controller_manager):
            command, ready = start()
            child = children.enter_context(_running(command, folder / f"{Path(command[0]).name}.log"))
            _until(ready, child)
        cluster = Cluster(plane.kubeconfig("admin"), folder, tools["kubectl"], plane.audit_log)
        _until(lambda: _answers(lambda: cluster.get("serviceaccount", "default")), child)
        yield cluster


@dataclass
class _Child:
    process: subprocess.Popen[bytes]
    log: Path

    def assert_alive(self) -> None:
        code = self.process.poll()
        assert code is None, f"{self.log.stem} ended with {code}:\n{self.tail()}"

    def tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-20:])


@contextmanager
def _running(command: list[str], log: Path) -> Iterator[_Child]:
    # A test run that is killed takes them along, where util-linux can arrange that.
    guard = ["setpriv", "--pdeathsig=KILL"] if shutil.which("setpriv") else []
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*guard, *command], stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    try:
        yield _Child(process, log)
    finally:
        process.terminate()
        try:
            process.wait(STOP_WITHIN_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _until(ready: Callable[[], bool], child: _Child) -> None:
    deadline = time.monotonic() + START_WITHIN_S
    while not ready():
        child.assert_alive()
        assert time.monotonic() < deadline, f"{child.log.stem} was not ready in time:\n{child.tail()}"
        time.sleep(0.05)


def _answers(ask: Callable[[], object]) -> bool:
    try:
        ask()
    except (OSError, Refused):
        return False
    return True


def _free_ports(count: int) -> list[int]:
    """All are held until the last is known, so that they differ."""
    with ExitStack() as held:
        trials = [held.enter_context(socket.socket()) for _ in range(count)]
        for trial in trials:
            trial.bind((HOST, 0))
        return [int(trial.getsockname()[1]) for trial in trials]


@dataclass
class _Plane:
    """The three commands, with when each is ready."""

    folder: Path
    tools: dict[str, Path]
    etcd_port: int
    peer_port: int
    api_port: int
    manager_port: int
    authority: Authority = field(init=False)
    tokens: Pair = field(init=False)

    def __post_init__(self) -> None:
        self.authority = Authority(self.folder)
        self.tokens = token_keys(self.folder)

    @property
    def audit_log(self) -> Path:
        return self.folder / "audit.log"

    def etcd(self) -> tuple[list[str], Callable[[], bool]]:
        client, peer = f"http://{HOST}:{self.etcd_port}", f"http://{HOST}:{self.peer_port}"
        command = [
            str(self.tools["etcd"]),
            f"--data-dir={self.folder / 'etcd'}",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
            "--unsafe-no-fsync",
            "--log-level=warn",
        ]
        return command, lambda: _answers(lambda: _fetch(f"{client}/health"))

    def apiserver(self) -> tuple[list[str], Callable[[], bool]]:
        hosts = [HOST, "localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc", FIRST_SERVICE]
        serving = self.authority.serving("kube-apiserver", hosts)
        policy = self.folder / "audit-policy.yaml"
        policy.write_text(AUDIT_POLICY)
        command = [
            str(self.tools["kube-apiserver"]),
            f"--etcd-servers=http://{HOST}:{self.etcd_port}",
            f"--bind-address={HOST}",
            f"--secure-port={self.api_port}",
            f"--advertise-address={HOST}",
            # It would write its own address into the endpoints of `kubernetes`, and refuses a loopback one.
            "--endpoint-reconciler-type=none",
            f"--service-cluster-ip-range={SERVICES}",
            f"--tls-cert-file={serving.certificate}",
            f"--tls-private-key-file={serving.key}",
            f"--client-ca-file={self.authority.pair.certificate}",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={self.tokens.certificate}",
            f"--service-account-signing-key-file={self.tokens.key}",
            "--authorization-mode=Node,RBAC",
            "--allow-privileged",
            "--event-ttl=10m",
            f"--audit-policy-file={policy}",
            f"--audit-log-path={self.audit_log}",
            "--profiling=false",
        ]
        admin = self.authority.client("admin", "system:masters")
        self._write_kubeconfig("admin", admin)
        trust = ssl.create_default_context(cafile=str(self.authority.pair.certificate))
        trust.load_cert_chain(admin.certificate, admin.key)
        return command, lambda: _answers(lambda: _fetch(f"{self._url}/readyz", trust))

    def controller_manager(self) -> tuple[list[str], Callable[[], bool]]:
        self._write_kubeconfig("manager", self.authority.client("system:kube-controller-manager"))
        serving = self.authority.serving("kube-controller-manager", [HOST])
        trust = ssl.create_default_context(cafile=str(self.authority.pair.certificate))
        command = [
            str(self.tools["kube-controller-manager"]),
            *(f"--{what}kubeconfig={self.kubeconfig('manager')}" for what in ("", "authentication-", "authorization-")),
            f"--bind-address={HOST}",
            f"--secure-port={self.manager_port}",
            f"--tls-cert-file={serving.certificate}",
            f"--tls-private-key-file={serving.key}",
            "--leader-elect=false",
            # Its own limit is 20 a second, and its accounts alone are more than a hundred requests at the start.
            "--kube-api-qps=1000",
            "--kube-api-burst=2000",
            "--use-service-account-credentials",
            f"--root-ca-file={self.authority.pair.certificate}",
            f"--service-account-private-key-file={self.tokens.key}",
            "--horizontal-pod-autoscaler-sync-period=1s",
            "--node-monitor-period=1s",
            "--node-monitor-grace-period=8s",
            "--profiling=false",
        ]
        return command, lambda: _answers(lambda: _fetch(f"https://{HOST}:{self.manager_port}/healthz", trust))

    def kubeconfig(self, user: str) -> Path:
        return self.folder / f"{user}.kubeconfig"

    @property
    def _url(self) -> str:
        return f"https://{HOST}:{self.api_port}"

    def _write_kubeconfig(self, user: str, pair: Pair) -> None:
        """With everything inside, so that the file alone can be handed on."""
        cluster = {"server": self._url, "certificate-authority-data": _encoded(self.authority.pair.certificate)}
        identity = {"client-certificate-data": _encoded(pair.certificate), "client-key-data": _encoded(pair.key)}
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "motet-test", "cluster": cluster}],
            "users": [{"name": user, "user": identity}],
            "contexts": [{"name": "motet-test", "context": {"cluster": "motet-test", "user": user}}],
            "current-context": "motet-test",
        }
        path = self.kubeconfig(user)
        path.touch(mode=0o600)
        path.write_text(yaml.safe_dump(document))


def _encoded(file: Path) -> str:
    return base64.b64encode(file.read_bytes()).decode()


def _fetch(url: str, trust: ssl.SSLContext | None = None) -> None:
    """Raises OSError for anything but success."""
    with urllib.request.urlopen(url, timeout=5, context=trust):
        pass
