"""A cluster as a test sees it: kubectl, helm, and methods for what tests do often."""

import base64
import json
import os
import shutil
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import orjson
import yaml

from testbed.cluster.api_connection import ApiConnection
from testbed.cluster.certificates import ClusterAuthority
from testbed.cluster.kubectl_get import read
from testbed.cluster.network import API_PORT, CONTROL_PLANE, Network
from testbed.cluster.programs import Program
from testbed.last_seen import last_seen, shortened
from tools.kube.binaries import find

T = TypeVar("T")


class CommandRefused(Exception):
    """kubectl or helm failed. The text is what it wrote to stderr."""


@dataclass(frozen=True)
class EtcdStore:
    """What the API server keeps in etcd."""

    etcd: Program
    apiserver: Program
    data: Path

    def snapshot(self, to: Path) -> None:
        """Copy all of it while etcd is stopped. The API server waits meanwhile."""
        self.etcd.stop()
        shutil.copytree(self.data, to)
        self.etcd.start()

    def restore(self, snapshot: Path) -> None:
        """Restore it as the manual says: API servers stop first and start last, since they cache the newer state."""
        self.apiserver.kill()
        self.etcd.stop()
        shutil.rmtree(self.data)
        shutil.copytree(snapshot, self.data)
        self.etcd.start()
        self.apiserver.start()


@dataclass(frozen=True)
class Cluster:
    """A cluster, started by the tests or by somebody else."""

    kubeconfig: Path
    folder: Path
    """The folder of kubectl's caches, so that it does not use those of the developer."""
    tool: Path
    audit_log: Path | None = None
    """The audit log: one JSON object per finished request. None if the tests do not run the API server."""
    network: Network | None = None
    """The network of the cluster; None if it can be reached from this process."""
    authority: ClusterAuthority | None = None
    apiserver: Program | None = None
    """The API server. A test may stop, start, restart, pause and resume it, and must undo that."""
    store: EtcdStore | None = None
    """The store. A test may restore an earlier state, on a cluster of its own."""

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Enter the network in which the cluster's addresses exist. Every method here does so itself."""
        with nullcontext() if self.network is None else self.network.inside():
            yield

    def kubectl(self, *arguments: str, stdin: str = "", timeout_s: float = 60, kubeconfig: Path | None = None) -> str:
        """What kubectl prints. Raises CommandRefused with its message if it fails."""
        return self._run(
            str(self.tool),
            f"--kubeconfig={kubeconfig or self.kubeconfig}",
            f"--cache-dir={self.folder / 'kubectl-cache'}",
            *arguments,
            stdin=stdin,
            timeout_s=timeout_s,
        )

    def helm(self, *arguments: str, timeout_s: float = 300) -> str:
        """What helm prints. Raises CommandRefused with its message if it fails."""
        helm = find("helm")
        assert helm is not None, "helm is not built: run make kube"
        homes = {f"HELM_{kind}_HOME": str(self.folder / f"helm-{kind.lower()}") for kind in ("CACHE", "CONFIG", "DATA")}
        return self._run(str(helm), *arguments, timeout_s=timeout_s, env={**homes, "KUBECONFIG": str(self.kubeconfig)})

    def get(self, *arguments: str) -> dict[str, Any]:
        """What `kubectl get` prints, without kubectl if `kubectl_get` can do it."""
        asked = read(*arguments) if self.authority is not None else None
        if asked is None:
            result: dict[str, Any] = json.loads(self.kubectl("get", *arguments, "--output=json"))
            return result
        try:
            return asked.shown(self.call("GET", asked.path))
        except OSError as error:  # fail like kubectl, for any error on the way
            raise CommandRefused(str(error)) from error

    def items(self, *arguments: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.get(*arguments)["items"]
        return found

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """The API server's answer, for tests that ask often: kubectl takes a twentieth of a second each time.

        Raises CommandRefused, or OSError if there is no answer.
        """
        content = None if body is None else json.dumps(body)
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        with self.inside():
            status, said = self._wire.ask(method, path, content, kind)
        if status >= 400:
            raise CommandRefused(_refusal(said))
        result: dict[str, Any] = json.loads(said)
        return result

    def close(self) -> None:
        self._wire.close()

    @cached_property
    def _wire(self) -> ApiConnection:
        address = urlsplit(yaml.safe_load(self.kubeconfig.read_text())["clusters"][0]["cluster"]["server"])
        assert self.authority is not None, "only our own cluster is read without kubectl"
        trust = ssl.create_default_context(cafile=str(self.authority.pair.certificate))
        pair = self.authority.client("motet-test:reader", "system:masters")
        trust.load_cert_chain(pair.certificate, pair.key)
        return ApiConnection(address.hostname or "", address.port or API_PORT, trust)

    def apply(self, *documents: dict[str, Any]) -> str:
        """Apply server-side, as the documentation does."""
        return self.kubectl("apply", "--server-side", "--filename=-", stdin=yaml.safe_dump_all(documents))

    def logs(self, pod: str, namespace: str, *arguments: str) -> str:
        return self.kubectl("logs", pod, f"--namespace={namespace}", *arguments)

    def wait_for(self, ask: Callable[[], T], what: str = "", *, within_s: float = 90) -> T:
        """Call it until it returns something true, and return that. An error, a missing field or a failed assertion
        counts as false."""
        began = time.monotonic()
        while True:
            said = ""
            try:
                with self.inside():
                    if answer := ask():
                        return answer
            except (CommandRefused, LookupError, AssertionError, OSError) as error:
                said = shortened(f"{type(error).__name__}: {error}")
            waited = time.monotonic() - began
            if waited >= within_s:
                with self.inside():
                    said = said or last_seen(ask)
                raise AssertionError(f"{what or 'the condition'}: not within {within_s} s; last: {said}")
            time.sleep(min(0.5, max(0.05, waited / 20)))

    def let_namespaces_go(self) -> None:
        """Wait before the API server stops. After a start it does not know our kinds at once. If a namespace is deleted
        then, its objects of these kinds are never deleted, and the operators of later tests see them."""
        self.wait_for(
            lambda: all(one["status"]["phase"] == "Active" for one in self.items("namespaces")),
            "the end of namespaces that are deleted",
        )

    def audit(self, user: str = "") -> list[dict[str, Any]]:
        """The requests so far, of one user if named."""
        assert self.audit_log is not None, "the audit log of somebody else's cluster cannot be read"
        lines = self.audit_log.read_bytes().splitlines()
        # Before they are parsed: at the end of a run there are tens of thousands, and tests look again and again.
        entries = [orjson.loads(line) for line in lines if user.encode() in line and line.endswith(b"}")]
        return [entry for entry in entries if not user or entry["user"].get("username") == user]

    def token_for(self, account: str, namespace: str, *arguments: str) -> str:
        """A token of a ServiceAccount, from TokenRequest."""
        return self.kubectl("create", "token", account, f"--namespace={namespace}", *arguments).strip()

    def kubeconfig_for(self, account: str, namespace: str) -> Path:
        """A kubeconfig for kubectl and clients to act as that ServiceAccount."""
        token = self.token_for(account, namespace)
        ours = yaml.safe_load(self.kubeconfig.read_text())
        cluster = next(entry["cluster"] for entry in ours["clusters"])
        return write_kubeconfig(self.folder / f"{namespace}-{account}.kubeconfig", cluster, {"token": token})

    def addresses(self, service: str, namespace: str) -> list[str]:
        """The addresses of the ready endpoints of a Service, as cluster DNS gives them in a pod."""
        slices = self.items(
            "endpointslices", f"--namespace={namespace}", f"--selector=kubernetes.io/service-name={service}"
        )
        return [
            address
            for one in slices
            for endpoint in one.get("endpoints") or ()
            if endpoint.get("conditions", {}).get("ready", True)
            for address in endpoint["addresses"]
        ]

    def _run(self, *command: str, stdin: str = "", timeout_s: float = 60, env: Mapping[str, str] | None = None) -> str:
        with self.inside():
            done = subprocess.run(
                command,
                input=stdin,
                capture_output=True,
                text=True,
                timeout=timeout_s,
                check=False,
                env={**os.environ, **(env or {})},
            )
        if done.returncode != 0:
            raise CommandRefused(done.stderr.strip())
        return done.stdout


def _refusal(said: bytes) -> str:
    """The object as kubectl names it."""
    try:
        status = json.loads(said)
        return f"Error from server ({status['reason']}): {status['message']}"
    except (ValueError, LookupError, TypeError):
        return said.decode(errors="replace")


def identity(authority: ClusterAuthority, folder: Path, user: str, group: str | None = None) -> Path:
    """A kubeconfig with a client certificate of that user. It contains everything, so the file alone is enough."""
    pair = authority.client(user, group)
    cluster = {
        "server": f"https://{CONTROL_PLANE}:{API_PORT}",
        "certificate-authority-data": _encoded(authority.pair.certificate),
    }
    who = {"client-certificate-data": _encoded(pair.certificate), "client-key-data": _encoded(pair.key)}
    return write_kubeconfig(folder / f"{user.replace(':', '-')}.kubeconfig", cluster, who)


def write_kubeconfig(path: Path, cluster: Mapping[str, str], user: Mapping[str, str]) -> Path:
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "motet-test", "cluster": dict(cluster)}],
        "users": [{"name": "user", "user": dict(user)}],
        "contexts": [{"name": "motet-test", "context": {"cluster": "motet-test", "user": "user"}}],
        "current-context": "motet-test",
    }
    path.touch(mode=0o600)
    path.write_text(yaml.safe_dump(document))
    return path


def _encoded(file: Path) -> str:
    return base64.b64encode(file.read_bytes()).decode()
