"""The node that pods share: its identity, its API client, and its networks and processes."""

import asyncio
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from motet.processes.linux import reap_orphans
from testbed.cluster.api import Api, ApiError, Mirror, Object
from testbed.cluster.kubelet.faults import NodeFaults
from testbed.cluster.kubelet.status import now
from testbed.cluster.kubelet.volumes import NodeObjects
from testbed.cluster.network import CONTROL_PLANE, new_namespace, node_address, pod_address

COMPILE_SECONDS = 900


@dataclass
class NodeHost:
    name: str
    number: int
    folder: Path
    api: Api
    objects: NodeObjects
    services: Mirror
    time_scale: float
    """A factor on the kubelet's own waits: back-off, and the periods of startup and readiness probes. It does not
    change timeouts, grace periods, and how long it takes until a probe kills."""
    gpus: int
    allocatable: Mapping[str, str]
    faults: NodeFaults = field(default_factory=NodeFaults)
    _cursor: int = 1
    _addresses: set[str] = field(default_factory=set)
    _gpus_taken: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    _events: dict[tuple[str, str, str], Object] = field(default_factory=dict)
    _posting: set[asyncio.Task[None]] = field(default_factory=set)
    _kernels: asyncio.Task[tuple[int, str]] | None = None

    @property
    def address(self) -> str:
        return node_address(self.number)

    async def connect_pod(self) -> "PodNetwork":
        """A network for a pod. Addresses are used in turn, so that a freed one is not used again at once. Raises
        OSError."""
        for _ in range(253):
            self._cursor = self._cursor % 253 + 1
            address = pod_address(self.number, self._cursor + 1)
            if address not in self._addresses:
                self._addresses.add(address)
                wire = PodNetwork(address)
                await wire.connect()
                return wire
        raise OSError("this node has no address left")

    def disconnect_pod(self, wire: "PodNetwork") -> None:
        self._addresses.discard(wire.address)
        wire.cut()

    def take_gpus(self, uid: str, container: str, count: int) -> list[int]:
        """The GPUs of a container. All its runs have the same ones."""
        taken = {one for each in self._gpus_taken.values() for one in each}
        free = [one for one in range(self.gpus) if one not in taken]
        return self._gpus_taken.setdefault((uid, container), free[:count])

    def give_back_gpus(self, uid: str) -> None:
        self._gpus_taken = {key: taken for key, taken in self._gpus_taken.items() if key[0] != uid}

    async def compiled_kernels(self, user: int) -> Path | None:
        """A folder with what the runner's image has of them. None if this machine cannot make them.

        It belongs to the container's user, unlike that of an image: so the first runner of the node notes that they
        have passed their test, and those after it are spared two seconds of CPU time."""
        whole = self.folder.parent / "compiled-kernels"
        if self._kernels is None and not any(whole.glob("*.so")):
            command = [sys.executable, "-m", "testbed.cluster.kubelet.compiled_kernels", str(whole)]
            self._kernels = asyncio.create_task(run(command, timeout_s=COMPILE_SECONDS))
        if self._kernels is not None and (await asyncio.shield(self._kernels))[0]:
            return None
        own = self.folder / f"of-user-{user}" / "motet-kernels"
        if not own.exists():
            shutil.copytree(whole, own)
            os.chown(own, user, -1)
        return own

    def event(self, pod: Object, reason: str, message: str, *, warning: bool = False) -> None:
        """Write an Event once for each pod and message; after that, only its count changes."""
        task = asyncio.create_task(self._post(pod, reason, message, "Warning" if warning else "Normal"))
        self._posting.add(task)
        task.add_done_callback(self._posting.discard)

    async def _post(self, pod: Object, reason: str, message: str, kind: str) -> None:
        metadata = pod["metadata"]
        where = f"/api/v1/namespaces/{metadata['namespace']}/events"
        key = metadata["uid"], reason, message
        with suppress(ApiError, OSError, TimeoutError):
            if (said := self._events.get(key)) is not None:
                said["count"] += 1
                if said["count"] in (2, 3, 5) or said["count"] % 10 == 0:  # a real kubelet is limited in the same way
                    change = {"count": said["count"], "lastTimestamp": now()}
                    await self._api_patch(where, said["metadata"]["name"], change)
                return
            name = f"{metadata['name']}.{metadata['uid'][:8]}{len(self._events):x}"
            self._events[key] = said = {
                "apiVersion": "v1",
                "kind": "Event",
                "metadata": {"name": name, "namespace": metadata["namespace"]},
                "involvedObject": {
                    "apiVersion": "v1", "kind": "Pod", "name": metadata["name"], "namespace": metadata["namespace"],
                    "uid": metadata["uid"],
                },
                "type": kind,
                "reason": reason,
                "message": message[:1024],
                "source": {"component": "kubelet", "host": self.name},
                "reportingComponent": "kubelet",
                "reportingInstance": self.name,
                "firstTimestamp": now(),
                "lastTimestamp": now(),
                "count": 1,
            }  # fmt: skip
            await self.api.create(where, said)

    async def _api_patch(self, where: str, name: str, change: Object) -> None:
        await self.api.patch(f"{where}/{name}", change)


class PodNetwork:
    """The network of one pod: a namespace, and a veth pair from there to the node."""

    _NODE_END = "169.254.1.1"

    def __init__(self, address: str) -> None:
        self.address = address
        self.namespace = new_namespace()

    async def connect(self) -> None:
        """Raises OSError."""
        inside, name = f"/proc/{os.getpid()}/fd/{self.namespace}", f"pod{secrets.token_hex(4)}"
        outer = [
            f"link add {name} type veth peer name eth0 netns {inside}",
            f"address add {self._NODE_END}/32 dev {name}",
            f"link set {name} up",
            f"route replace {self.address}/32 dev {name} src {CONTROL_PLANE}",
        ]
        inner = [
            "link set lo up",
            f"address add {self.address}/32 dev eth0",
            "link set eth0 up",
            f"route add {self._NODE_END} dev eth0",
            f"route add default via {self._NODE_END} src {self.address}",
        ]
        await _batch(["ip", "-batch", "-"], outer)
        await _batch(["nsenter", f"--net={inside}", "ip", "-batch", "-"], inner)

    def cut(self) -> None:
        """The kernel removes the veth pair with the last process of the pod."""
        with suppress(OSError):
            os.close(self.namespace)


async def _batch(command: list[str], lines: list[str]) -> None:
    code, said = await run(command, stdin="\n".join(lines))
    if code != 0:
        raise OSError(f"{' '.join(command)}: {said.strip()}")


_own: set[int] = set()
"""Processes for which a task of this program waits. `reap` leaves them alone."""


def spawn(command: Sequence[str | Path], **how: Any) -> subprocess.Popen[bytes]:
    """Start it in a new session. asyncio is not used, since it waits in threads. Raises OSError."""
    process = subprocess.Popen(command, start_new_session=True, **how)
    _own.add(process.pid)
    return process


async def reap() -> None:
    """Collect orphaned processes until cancelled: a container ends only when all its processes are collected."""
    while True:
        reap_orphans(_own)
        await asyncio.sleep(0.1)


async def ended(process: subprocess.Popen[bytes]) -> int:
    """Wait for its exit status, without a thread."""
    try:
        return await _ended(process)
    finally:
        if process.returncode is not None:
            _own.discard(process.pid)


async def _ended(process: subprocess.Popen[bytes]) -> int:
    if process.poll() is not None:
        return process.returncode
    loop, over = asyncio.get_running_loop(), asyncio.Event()
    descriptor = os.pidfd_open(process.pid)
    try:
        loop.add_reader(descriptor, over.set)
        await over.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
    return process.wait()


async def run(
    command: Sequence[str], *, env: Mapping[str, str] | None = None, timeout_s: float = 30, stdin: str = ""
) -> tuple[int, str]:
    """Exit status and output. If it takes longer, it is killed with its children, and TimeoutError is raised."""
    process = spawn(
        command,
        env=env,
        stdin=subprocess.PIPE if stdin else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert process.stdout is not None
    try:
        if process.stdin is not None:
            process.stdin.write(stdin.encode())
            process.stdin.close()
        async with asyncio.timeout(timeout_s):
            code = await ended(process)
        os.set_blocking(process.stdout.fileno(), False)
        return code, (process.stdout.read(10_000) or b"").decode(errors="replace")
    finally:
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
            process.wait()
        _own.discard(process.pid)
        process.stdout.close()
