"""Writes the Node object and its Lease: what resources the node has, and that it is alive."""

import asyncio
from contextlib import suppress
from datetime import UTC, datetime

from testbed.cluster.api import Api, ApiError, Object
from testbed.cluster.kubelet.logs import PORT
from testbed.cluster.kubelet.node_host import NodeHost
from testbed.cluster.kubelet.status import now

LEASE_S = 40
RENEW_S = 2.0
"""The real values are 40 and 10. The controllers of the test cluster expect these shorter times."""


class Node:
    def __init__(self, machine: NodeHost, labels: dict[str, str]) -> None:
        self._machine, self._api = machine, machine.api
        self._labels = {
            "kubernetes.io/hostname": machine.name,
            "kubernetes.io/os": "linux",
            "kubernetes.io/arch": "amd64",
            **labels,
        }
        self._lease: Object = {}

    async def register(self) -> None:
        """Register the node, or take over its existing object. Raises the errors of the API."""
        name, address = self._machine.name, self._machine.address
        node: Object = {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": name, "labels": self._labels},
            "spec": {},
            "status": {
                "capacity": dict(self._machine.allocatable),
                "allocatable": dict(self._machine.allocatable),
                "addresses": [{"type": "InternalIP", "address": address}, {"type": "Hostname", "address": name}],
                "daemonEndpoints": {"kubeletEndpoint": {"Port": PORT}},
                "nodeInfo": await _info(self._api),
            },
        }
        with suppress(ApiError):
            await self._api.create("/api/v1/nodes", node)
        await self._api.patch(
            f"/api/v1/nodes/{name}/status", {"status": {**node["status"], "conditions": self._conditions()}}
        )

    def _conditions(self) -> list[Object]:
        good = {
            "MemoryPressure": ("False", "KubeletHasSufficientMemory", "kubelet has sufficient memory available"),
            "DiskPressure": ("False", "KubeletHasNoDiskPressure", "kubelet has no disk pressure"),
            "PIDPressure": ("False", "KubeletHasSufficientPID", "kubelet has sufficient PID available"),
            "Ready": ("True", "KubeletReady", "kubelet is posting ready status"),
        }
        return [
            {
                "type": kind,
                "status": said,
                "reason": reason,
                "message": message,
                "lastHeartbeatTime": now(),
                "lastTransitionTime": now(),
            }
            for kind, (said, reason, message) in good.items()
        ]

    async def stay_alive(self) -> None:
        """Renew the Lease until cancelled. If a controller has marked the node as not ready, mark it as ready."""
        while True:
            if not self._machine.faults.silent:
                with suppress(ApiError, OSError, TimeoutError):
                    await self._renew()
                    await self._contradict()
            await asyncio.sleep(RENEW_S)

    async def _renew(self) -> None:
        name = self._machine.name
        where = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
        spec = {
            "holderIdentity": name,
            "leaseDurationSeconds": LEASE_S,
            "renewTime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        }
        lease = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": name}, "spec": spec}
        try:
            await self._api.patch(f"{where}/{name}", {"spec": spec})
        except ApiError as error:
            if error.status != 404:
                raise
            await self._api.create(where, lease)

    async def _contradict(self) -> None:
        node = await self._api.get(f"/api/v1/nodes/{self._machine.name}")
        held = {one["type"]: one["status"] for one in node["status"].get("conditions") or ()}
        if held.get("Ready") != "True":
            await self._api.patch(
                f"/api/v1/nodes/{self._machine.name}/status", {"status": {"conditions": self._conditions()}}
            )


async def _info(api: Api) -> Object:
    version = (await api.get("/version"))["gitVersion"]
    unknown = ("machineID", "systemUUID", "bootID", "kernelVersion", "osImage", "containerRuntimeVersion")
    return {
        **dict.fromkeys(unknown, ""),
        "kubeletVersion": version,
        "kubeProxyVersion": version,
        "operatingSystem": "linux",
        "architecture": "amd64",
    }
