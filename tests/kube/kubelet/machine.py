"""The node that pods share: who it is, what it may ask the API, and what it hands out."""

import asyncio
import os
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.kube.api import Api, ApiError, Mirror, Object
from tests.kube.kubelet.faults import Faults
from tests.kube.kubelet.status import now
from tests.kube.kubelet.volumes import Objects
from tests.kube.network import node_address, pod_address


@dataclass
class Machine:
    name: str
    number: int
    folder: Path
    api: Api
    objects: Objects
    services: Mirror
    time_scale: float
    """Multiplies how long the kubelet waits of its own accord (back-off, probe periods), never how patient it is with
    others (time-outs, grace)."""
    gpus: int
    allocatable: Mapping[str, str]
    faults: Faults = field(default_factory=Faults)
    _cursor: int = 1
    _addresses: set[str] = field(default_factory=set)
    _gpus_taken: dict[str, list[int]] = field(default_factory=dict)
    _events: dict[tuple[str, str, str], Object] = field(default_factory=dict)
    _posting: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def address(self) -> str:
        return node_address(self.number)

    async def take_address(self) -> str:
        """In turn, so that one that was just given back is not the next."""
        for _ in range(253):
            self._cursor = self._cursor % 253 + 1
            address = pod_address(self.number, self._cursor + 1)
            if address not in self._addresses:
                self._addresses.add(address)
                await run(["ip", "address", "add", f"{address}/32", "dev", "lo"])
                return address
        raise OSError("this node has no address left")

    async def give_back_address(self, address: str) -> None:
        self._addresses.discard(address)
        await run(["ip", "address", "del", f"{address}/32", "dev", "lo"])

    def take_gpus(self, uid: str, count: int) -> list[int]:
        taken = {one for each in self._gpus_taken.values() for one in each}
        free = [one for one in range(self.gpus) if one not in taken]
        self._gpus_taken[uid] = self._gpus_taken.get(uid, []) + free[:count]
        return free[:count]

    def give_back_gpus(self, uid: str) -> None:
        self._gpus_taken.pop(uid, None)

    def event(self, pod: Object, reason: str, message: str, *, warning: bool = False) -> None:
        """Said once for each pod and message, and counted after that."""
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
                if said["count"] in (2, 3, 5) or said["count"] % 10 == 0:  # a kubelet is held back in the same way
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


async def ended(process: subprocess.Popen[bytes]) -> int:
    """Its exit status, without a thread that waits for it."""
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
    command: Sequence[str], *, env: Mapping[str, str] | None = None, timeout_s: float = 30
) -> tuple[int, str]:
    """Exit status and output. Killed, with all that it started, and TimeoutError when it takes longer."""
    process = subprocess.Popen(  # noqa: ASYNC220 - asyncio's own would wait in a thread
        command,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(timeout_s):
            code = await ended(process)
        os.set_blocking(process.stdout.fileno(), False)
        return code, (process.stdout.read(10_000) or b"").decode(errors="replace")
    finally:
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
            process.wait()
        process.stdout.close()
