"""`python -m testbed.cluster.kubelet`: one node, whose pods are processes of this machine. Ends with all of them."""

import argparse
import asyncio
import ctypes
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

from motet.processes.linux import Stat, all_stats, become_subreaper, send
from testbed.cluster.api import Api, Mirror, Object
from testbed.cluster.kubelet import faults, logs
from testbed.cluster.kubelet.container import Container
from testbed.cluster.kubelet.node import Node
from testbed.cluster.kubelet.node_host import NodeHost, reap
from testbed.cluster.kubelet.pod import PodWorker
from testbed.cluster.kubelet.sandbox import CLONE_NEWNS, MS_PRIVATE, MS_REC
from testbed.cluster.kubelet.volumes import NodeObjects
from testbed.cluster.network import node_address


class Kubelet:
    def __init__(self, machine: NodeHost) -> None:
        self._machine = machine
        self._workers: dict[str, PodWorker] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def follow_pods(self) -> None:
        """Start a worker for each pod. A pod that was deleted by force ends, too."""
        selector = f"spec.nodeName={self._machine.name}"
        async for kind, pod in self._machine.api.follow("/api/v1/pods", fieldSelector=selector):
            if kind == "SYNCED":
                continue
            uid = pod["metadata"]["uid"]
            if kind == "DELETED":
                if (gone := self._workers.get(uid)) is not None:
                    gone.forgotten()
            elif uid in self._workers:
                self._workers[uid].update(pod)
            else:
                self._begin(uid, pod)

    def _begin(self, uid: str, pod: Object) -> None:
        # An ending pod of the same name keeps its folder and address: both belong to the UID.
        worker = self._workers[uid] = PodWorker(self._machine, pod)
        worker.update(pod)
        task = self._tasks[uid] = asyncio.create_task(worker.run())
        task.add_done_callback(lambda done: self._ended(uid, done))

    def _ended(self, uid: str, task: asyncio.Task[None]) -> None:
        self._workers.pop(uid, None)
        self._tasks.pop(uid, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            asyncio.get_running_loop().call_exception_handler({"message": f"pod {uid} failed", "exception": error})

    def find(self, namespace: str, pod: str, container: str = "") -> Container | None:
        for worker in reversed(list(self._workers.values())):
            metadata = worker.pod["metadata"]
            if (metadata["namespace"], metadata["name"]) == (namespace, pod):
                return next(
                    (
                        one
                        for one in worker.all
                        if container in ("", one.seen.name) and (container or one not in worker.init)
                    ),
                    None,
                )
        return None

    async def fault(self, asked: dict[str, Any]) -> object:
        """Do what a test asks for over the socket. Raises an error for unknown commands."""
        held = self._machine.faults
        match asked:
            case {"do": "silence", "on": on}:
                held.silent = on
            case {"do": "delay", "seconds": seconds}:
                held.start_delay_s = seconds
            case {"do": "lie", "pod": pod, "probe": probe, "says": None}:
                held.lies.pop((pod, probe), None)
            case {"do": "lie", "pod": pod, "probe": probe, "says": says}:
                held.lies[pod, probe] = says
            case {"do": "signal", "pod": pod, "container": name, "signal": number, "reason": reason}:
                container = self._running(pod, name)
                container.reason = reason
                return [stat.identity.pid for stat in _inside(container) if send(stat.identity, signal.Signals(number))]
            case {"do": "exec", "pod": pod, "container": name, "command": command, "timeout_s": timeout_s}:
                return await self._running(pod, name).execute(command, timeout_s)
            case _:
                raise ValueError(f"unknown fault: {asked}")
        return None

    def _running(self, pod: str, name: str) -> Container:
        namespace, _, pod_name = pod.partition("/")
        container = self.find(namespace, pod_name, name)
        if container is None or container.first is None:
            raise LookupError(f"{pod} runs no container {name}".rstrip())
        return container


def _inside(container: Container) -> list[Stat]:
    """All processes of a container; the first is the one with number 1."""
    assert container.first is not None
    own = Path(f"/proc/{container.first.pid}/ns/pid").readlink()

    def is_own(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/ns/pid").readlink() == own
        except OSError:
            return False

    found = [stat for stat in all_stats() if is_own(stat.identity.pid)]
    return sorted(found, key=lambda stat: stat.identity != container.first)


async def run(given: argparse.Namespace) -> None:
    async with Api(given.kubeconfig) as api, asyncio.TaskGroup() as tasks:
        allocatable = {"cpu": given.cpu, "memory": given.memory, "pods": "110", "ephemeral-storage": "100Gi"}
        allocatable |= {"nvidia.com/gpu": str(given.gpus)} if given.gpus else {}
        services = Mirror(api, "/api/v1/services")
        machine = NodeHost(
            name=given.name,
            number=given.number,
            folder=given.folder,
            api=api,
            objects=NodeObjects(api),
            services=services,
            time_scale=given.time_scale,
            gpus=given.gpus,
            allocatable=allocatable,
        )
        kubelet, node = Kubelet(machine), Node(machine, dict(one.split("=", 1) for one in given.label))
        await logs.serve(machine.address, given.certificate, given.key, api.authority, kubelet.find)
        await faults.serve(given.folder / "faults.sock", kubelet.fault)
        tasks.create_task(reap())
        tasks.create_task(services.run())
        await services.synced.wait()
        await node.register()
        tasks.create_task(node.stay_alive())
        tasks.create_task(kubelet.follow_pods())
        (given.folder / "ready").write_text(str(os.getpid()))


def isolate(folder: Path) -> None:
    """Only this process sees the mounts of pods, and they are removed when it ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    layers = folder / "layers"
    layers.mkdir(parents=True, exist_ok=True)
    if libc.unshare(CLONE_NEWNS) != 0 or libc.mount(b"", b"/", b"", MS_REC | MS_PRIVATE, b"") != 0:
        raise OSError(ctypes.get_errno(), "a kubelet needs the right to mount")
    if libc.mount(b"tmpfs", os.fsencode(layers), b"tmpfs", 0, b"") != 0:
        raise OSError(ctypes.get_errno(), f"no tmpfs at {layers}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m testbed.cluster.kubelet", description=__doc__)
    parser.add_argument("--name", required=True)
    parser.add_argument("--number", type=int, required=True, help="gives the node's address and those of its pods")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--kubeconfig", type=Path, required=True)
    parser.add_argument("--certificate", type=Path, required=True, help="of the server for kubectl logs")
    parser.add_argument("--key", type=Path, required=True)
    parser.add_argument("--time-scale", type=float, default=1.0)
    parser.add_argument("--cpu", default="64")
    parser.add_argument("--memory", default="256Gi")
    parser.add_argument("--gpus", type=int, default=0)
    parser.add_argument("--label", action="append", default=[], metavar="NAME=VALUE")
    given = parser.parse_args()
    isolate(given.folder)
    become_subreaper()
    subprocess.run(
        ["ip", "address", "add", f"{node_address(given.number)}/32", "dev", "lo"], check=False, capture_output=True
    )
    asyncio.run(run(given))


if __name__ == "__main__":
    main()
