"""Manifests of small pods, for tests of pods themselves."""

import uuid
from typing import Any

from testbed.cluster.cluster import Cluster, CommandRefused


def pod(namespace: str, *containers: dict[str, Any], name: str = "", **spec: Any) -> dict[str, Any]:
    """A pod that ends within a second when asked, unless `spec` says otherwise."""
    metadata: dict[str, Any] = {"name": name or f"pod-{uuid.uuid4().hex[:6]}", "namespace": namespace}
    metadata |= {part: spec.pop(part) for part in ("labels", "annotations", "finalizers") if part in spec}
    named = [{"name": "main", **one} for one in containers]
    whole = {"containers": named, "terminationGracePeriodSeconds": 1, **spec}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": whole}


def shell(script: str, **more: Any) -> dict[str, Any]:
    """A container that runs a script of the shell; `exec` in it makes a program the first process."""
    return {"image": "busybox", "command": ["sh", "-c", script], **more}


def python(code: str, **more: Any) -> dict[str, Any]:
    """A container that runs a little Python, with everything this environment has."""
    return {"image": "python", "command": ["python", "-u", "-c", code], **more}


IDLE = "trap 'exit 0' TERM; sleep 600 & wait"
"""A script that runs until it is ended."""


class Pods:
    """The pods of one namespace."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self.cluster, self.namespace = cluster, namespace

    def run(self, *containers: dict[str, Any], **spec: Any) -> str:
        """The name of a new pod."""
        made = self.cluster.call("POST", self._path, pod(self.namespace, *containers, **spec))
        name: str = made["metadata"]["name"]
        return name

    @property
    def _path(self) -> str:
        return f"/api/v1/namespaces/{self.namespace}/pods"

    def path(self, name: str) -> str:
        """The name that a node uses."""
        return f"{self.namespace}/{name}"

    def get(self, name: str) -> dict[str, Any]:
        return self.cluster.call("GET", f"{self._path}/{name}")

    def status(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.get(name)["status"]
        return found

    def container(self, name: str, container: str = "main") -> dict[str, Any]:
        """Its entry in `containerStatuses` or `initContainerStatuses`."""
        status = self.status(name)
        every = [*status.get("containerStatuses", ()), *status.get("initContainerStatuses", ())]
        found: dict[str, Any] = {one["name"]: one for one in every}[container]
        return found

    def condition(self, name: str, kind: str) -> dict[str, Any]:
        found: dict[str, Any] = {one["type"]: one for one in self.status(name)["conditions"]}[kind]
        return found

    def events(self, name: str) -> list[dict[str, Any]]:
        path = f"/api/v1/namespaces/{self.namespace}/events?fieldSelector=involvedObject.name={name}"
        found: list[dict[str, Any]] = self.cluster.call("GET", path)["items"]
        return found

    def wait_ready(self, name: str) -> None:
        self.wait_condition(name, "Ready")

    def wait_condition(self, name: str, kind: str, status: str = "True") -> None:
        self.cluster.wait_for(lambda: self.condition(name, kind)["status"] == status, f"{name}: {kind} {status}")

    def wait_phase(self, name: str, phase: str) -> None:
        self.cluster.wait_for(lambda: self.status(name)["phase"] == phase, f"{name}: phase {phase}")

    def wait_gone(self, name: str) -> None:
        self.cluster.wait_for(lambda: self._is_gone(name), f"{name}: gone")

    def _is_gone(self, name: str) -> bool:
        try:
            self.get(name)
        except CommandRefused:
            return True
        return False

    def finish(self, *containers: dict[str, Any], **spec: Any) -> str:
        """Run it once, to its end. Returns its output."""
        name = self.run(*containers, **{"restartPolicy": "Never", **spec})
        self.cluster.wait_for(lambda: self.status(name)["phase"] in ("Succeeded", "Failed"), f"{name}: an end")
        return self.logs(name)

    def logs(self, name: str, *arguments: str) -> str:
        return self.cluster.logs(name, self.namespace, *arguments)

    def delete(self, name: str, *arguments: str) -> None:
        """Delete it and wait until it is gone."""
        self.cluster.kubectl("delete", "pod", name, f"--namespace={self.namespace}", *arguments)
