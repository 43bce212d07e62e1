"""One pod, from its assignment to this node until it is deleted from the API server."""

import asyncio
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from testbed.cluster.api import ApiError, Object
from testbed.cluster.kubelet.container import Container
from testbed.cluster.kubelet.node_host import NodeHost, PodNetwork
from testbed.cluster.kubelet.status import ContainerState, now, status, waiting
from testbed.cluster.kubelet.volumes import Volume, VolumeNotReady, Volumes
from testbed.cluster.network import CLUSTER_DOMAIN, DNS

REFRESH_S = 2.0
"""How often files from the API are read again."""


class PodWorker:
    def __init__(self, machine: NodeHost, pod: Object) -> None:
        self.machine, self._pod = machine, pod
        metadata = pod["metadata"]
        self.uid: str = metadata["uid"]
        self.folder: Path = machine.folder / "pods" / f"{metadata['namespace']}_{metadata['name']}_{self.uid}"
        self.wire: PodNetwork | None = None
        self.stopping = asyncio.Event()
        """Set when containers are being ended and no more are started."""
        self._deleted = asyncio.Event()
        """Set when the pod is being deleted, or when the API server no longer has it."""
        self.volumes: Mapping[str, Volume] = {}
        self._volumes = Volumes(machine.api, machine.objects, self.folder / "volumes")
        self._started_at = pod["status"].get("startTime") or now()
        self._over: dict[str, str] = {}
        self._dirty = asyncio.Event()
        self._finished = asyncio.Event()
        self._sent: Object = {}
        self._disputed = False
        self.grace_s: float = pod["spec"].get("terminationGracePeriodSeconds", 30)
        """The grace period of containers."""
        self.init, self.containers = self._make_containers()

    @property
    def pod(self) -> Object:
        return self._pod

    @property
    def address(self) -> str:
        if self._pod["spec"].get("hostNetwork"):
            return self.machine.address
        return "" if self.wire is None else self.wire.address

    @property
    def path(self) -> str:
        return f"/api/v1/namespaces/{self._pod['metadata']['namespace']}/pods/{self._pod['metadata']['name']}"

    @property
    def all(self) -> list[Container]:
        return [*self.init, *self.containers]

    def changed(self) -> None:
        self._dirty.set()

    async def rest(self, seconds: float) -> bool:
        """Wait. Returns True, at once, if the pod should end."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self.stopping.wait(), seconds)
        return self.stopping.is_set()

    def update(self, pod: Object) -> None:
        """Take over a new version of the pod's object."""
        self._pod = pod
        # The node controller marks the pods of a silent node as not ready, and leaves the rest to the kubelet.
        self._disputed |= bool(self._sent) and _is_ready(pod["status"]) != _is_ready(self._sent)
        self._dirty.set()
        if "deletionTimestamp" in pod["metadata"]:
            self._stop(pod["metadata"].get("deletionGracePeriodSeconds", 30))
            self._deleted.set()

    def forgotten(self) -> None:
        """The API server no longer has the pod, which may still run."""
        self._stop(0)
        self._deleted.set()

    def _stop(self, grace_s: float) -> None:
        self.grace_s = min(self.grace_s, grace_s) if self.stopping.is_set() else grace_s
        for one in self.all:
            one.hurry(grace_s)
        self.stopping.set()

    def _make_containers(self) -> tuple[list[Container], list[Container]]:
        spec, said = self._pod["spec"], self._pod["status"]
        policy = spec.get("restartPolicy", "Always")
        before = {
            one["name"]: one
            for kind in ("initContainerStatuses", "containerStatuses")
            for one in said.get(kind) or ()
            if one.get("containerID")
        }
        init = [
            Container(
                self,
                one,
                is_init=True,
                # An init container that succeeded is done, also if other containers restart.
                restart_policy=one.get("restartPolicy") or ("Never" if policy == "Never" else "OnFailure"),
                before=before.get(one["name"]),
            )
            for one in spec.get("initContainers") or ()
        ]
        main = [
            Container(self, one, is_init=False, restart_policy=policy, before=before.get(one["name"]))
            for one in spec["containers"]
        ]
        for one in (*init[1:], *(main if init else ())):
            one.seen.state = waiting("PodInitializing")
        return init, main

    async def run(self) -> None:
        """Run the pod until it has ended and the API server has its last status."""
        writer = asyncio.create_task(self._write_status())
        refresher = asyncio.create_task(self._refresh())
        try:
            self._dirty.set()
            await self._live()
        finally:
            refresher.cancel()
            self._clean_up()
        self._finished.set()
        self._dirty.set()
        await writer
        await self._deleted.wait()
        await self._let_go()
        if self.wire is not None:
            self.machine.disconnect_pod(self.wire)
        shutil.rmtree(self.folder / "volumes", ignore_errors=True)

    async def _live(self) -> None:
        if self._pod["status"].get("phase") in ("Succeeded", "Failed"):
            self._restore()
            return
        async with asyncio.TaskGroup() as tasks:
            stopper = tasks.create_task(self._end_in_time())
            deadline = tasks.create_task(self._end_when_late())
            await self._go_through(tasks)
            stopper.cancel()
            deadline.cancel()

    async def _go_through(self, tasks: asyncio.TaskGroup) -> None:
        sidecars: list[asyncio.Task[None]] = []
        if await self._prepare() and await self._initialize(tasks, sidecars):
            await asyncio.gather(*(one.run() for one in self.containers))
        for one in self.all if self.stopping.is_set() else self.containers:
            _settle(one.seen, ended_early=self.stopping.is_set())
        self.stopping.set()  # sidecars end last, in the reverse of their order
        for sidecar in reversed(self.init):
            await sidecar.stop(self.grace_s)
        await asyncio.gather(*sidecars)
        for one in self.init:
            _settle(one.seen)

    def _restore(self) -> None:
        """Take over a pod that had ended before this kubelet started."""
        said = self._pod["status"]
        self._over = {name: said[name] for name in ("phase", "reason", "message") if name in said}
        statuses = {
            one["name"]: one for kind in ("initContainerStatuses", "containerStatuses") for one in said.get(kind) or ()
        }
        for one in self.all:
            if (known := statuses.get(one.seen.name)) is not None:
                one.seen.state, one.seen.restarts, one.seen.done = known["state"], known["restartCount"], True

    async def _prepare(self) -> bool:
        """Prepare volumes, an address and files. False if the pod should end before that is done."""
        while not self.stopping.is_set():
            try:
                self.volumes = await self._volumes.prepare(self._pod)
                if not self._pod["spec"].get("hostNetwork"):
                    self.wire = await self.machine.connect_pod()
            except VolumeNotReady as error:
                self.machine.event(self._pod, "FailedMount", str(error), warning=True)
            except (ApiError, OSError, TimeoutError) as error:
                self.machine.event(self._pod, "FailedMount", f"MountVolume.SetUp failed: {error}", warning=True)
            else:
                self._write_files()
                self.changed()
                return True
            self.changed()
            await self.rest(0.3)
        return False

    def _write_files(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        metadata = self._pod["metadata"]
        search = f"{metadata['namespace']}.svc.{CLUSTER_DOMAIN} svc.{CLUSTER_DOMAIN} {CLUSTER_DOMAIN}"
        name = self._pod["spec"].get("hostname") or metadata["name"]
        (self.folder / "resolv.conf").write_text(f"search {search}\nnameserver {DNS}\noptions ndots:5 timeout:1\n")
        (self.folder / "hostname").write_text(f"{name}\n")
        aliases = "".join(
            f"{one['ip']}\t{' '.join(one['hostnames'])}\n" for one in self._pod["spec"].get("hostAliases") or ()
        )
        (self.folder / "hosts").write_text(f"127.0.0.1\tlocalhost\n::1\tlocalhost\n{self.address}\t{name}\n{aliases}")

    async def _initialize(self, tasks: asyncio.TaskGroup, sidecars: list[asyncio.Task[None]]) -> bool:
        """Run init containers one after the other; a sidecar only has to start. False if one has failed finally."""
        for one in self.init:
            if one.seen.is_sidecar:
                sidecars.append(tasks.create_task(one.run()))
                while not one.seen.started and not await self.rest(0.02):
                    pass
            else:
                await one.run()
            if self.stopping.is_set():
                return False
            if not one.seen.is_sidecar and one.seen.exit_code != 0:
                return False
        for one in self.containers:
            if one.seen.state == waiting("PodInitializing"):
                one.seen.state = waiting("ContainerCreating")
        return True

    async def _end_in_time(self) -> None:
        await self.stopping.wait()
        ending = [one for one in self.all if one.running and not one.seen.is_sidecar]
        await asyncio.gather(*(one.stop(self.grace_s) for one in ending))

    async def _end_when_late(self) -> None:
        limit = self._pod["spec"].get("activeDeadlineSeconds")
        if limit is None:
            return
        if not await self.rest(limit):
            message = "Pod was active on the node longer than the specified deadline"
            self._over = {"phase": "Failed", "reason": "DeadlineExceeded", "message": message}
            self._stop(self._pod["spec"].get("terminationGracePeriodSeconds", 30))

    async def _refresh(self) -> None:
        while True:
            await asyncio.sleep(REFRESH_S)
            if self.volumes:
                with suppress(VolumeNotReady, ApiError, OSError, TimeoutError):
                    await self._volumes.prepare(self._pod)

    def _clean_up(self) -> None:
        self._volumes.remove()
        self.machine.give_back_gpus(self.uid)

    def status(self) -> Object:
        return status(
            self._pod,
            [one.seen for one in self.containers],
            [one.seen for one in self.init],
            started=self._started_at,
            host=self.machine.address,
            address=self.address,
            over=self._over,
            before=self._sent.get("conditions"),
        )

    async def _write_status(self) -> None:
        """Send the newest status to the API server after each change, until it has the last one."""
        while True:
            await self._dirty.wait()
            self._dirty.clear()
            last = self._finished.is_set()
            said = self.status()
            disputed, self._disputed = self._disputed, False
            if (said != self._sent or disputed) and not await self._send(said):
                self._disputed |= disputed
                continue
            if last:
                return

    async def _send(self, said: Object) -> bool:
        if self.machine.faults.silent:
            await asyncio.sleep(0.2)
            self._dirty.set()
            return False
        try:
            await self.machine.api.patch(f"{self.path}/status", {"metadata": {"uid": self.uid}, "status": said})
        except ApiError as error:
            if error.status in (404, 409):
                return True  # the object is of another pod of this name, or is gone
            await asyncio.sleep(0.2)
        except (OSError, TimeoutError):
            await asyncio.sleep(0.2)
        else:
            self._sent = said
            return True
        self._dirty.set()
        return False

    async def _let_go(self) -> None:
        """The pod has ended: allow the deletion of its object."""
        while True:
            try:
                if not self.machine.faults.silent:
                    options = {
                        "apiVersion": "v1",
                        "kind": "DeleteOptions",
                        "gracePeriodSeconds": 0,
                        "preconditions": {"uid": self.uid},
                    }
                    await self.machine.api.delete(self.path, options)
                    return
            except ApiError as error:
                if error.status in (404, 409):
                    return
            except (OSError, TimeoutError):
                pass
            await asyncio.sleep(0.2)


def _is_ready(status: Object) -> bool:
    return any(one["type"] == "Ready" and one["status"] == "True" for one in status.get("conditions") or ())


def _settle(seen: ContainerState, *, ended_early: bool = False) -> None:
    """The status of an ended pod. A container that never began must not look as if it had succeeded."""
    if seen.is_sidecar and "running" in seen.state:
        return  # it still runs
    seen.ready = seen.started = False
    seen.done = True
    if "terminated" in seen.state:
        return
    if "terminated" in seen.last_state:
        seen.state = seen.last_state
    elif ended_early:
        message = "The container could not be located when the pod was terminated"
        seen.state = {"terminated": {"exitCode": 137, "reason": "ContainerStatusUnknown", "message": message}}
