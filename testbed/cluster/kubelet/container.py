"""The lifecycle of one container of a pod: configured, started, probed, ended, restarted."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import orjson

from motet.processes.launch import last_log_line
from motet.processes.linux import ProcessIdentity, identity_of, send
from testbed.cluster.api import ApiError, Object
from testbed.cluster.kubelet import environment
from testbed.cluster.kubelet.actions import ActionFailed, act
from testbed.cluster.kubelet.images import Image, NotPullable, image, interpreter_folders
from testbed.cluster.kubelet.node_host import NodeHost, PodNetwork, ended, run, spawn
from testbed.cluster.kubelet.probes import RestartBackoff, verdicts
from testbed.cluster.kubelet.status import ContainerState, now, waiting
from testbed.cluster.kubelet.volumes import Volume
from testbed.cluster.network import API_PORT, CONTROL_PLANE

SANDBOX = Path(__file__).with_name("sandbox.py")
PREFIX, BASE = Path(sys.prefix), Path(sys.base_prefix)
PATH = f"{PREFIX / 'bin'}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
LEAST_GRACE_S = 2.0
"""After a hook that used the whole grace period."""


class CannotStart(Exception):
    """The container cannot start now. Its status has this reason and message, and it is tried again."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class PodContext(Protocol):
    """What a container needs of its pod."""

    machine: NodeHost
    folder: Path
    stopping: asyncio.Event
    volumes: Mapping[str, Volume]
    grace_s: float
    wire: PodNetwork | None

    @property
    def address(self) -> str: ...

    @property
    def pod(self) -> Object: ...
    def changed(self) -> None: ...
    async def rest(self, seconds: float) -> bool: ...


class Container:
    def __init__(
        self, home: PodContext, spec: Object, *, is_init: bool, restart_policy: str, before: Object | None
    ) -> None:
        self._home, self._machine, self.spec = home, home.machine, spec
        self.seen = ContainerState(spec["name"], spec["image"], restart_policy, is_init=is_init)
        if before is not None:  # the kubelet was restarted, and the container with it
            self.seen.restarts = before["restartCount"] + 1
            self.seen.last_state = before.get("state", {}) if "terminated" in before.get("state", {}) else {}
        self._backoff = RestartBackoff(self._machine.time_scale, at_once_first=True)
        self._process: subprocess.Popen[bytes] | None = None
        self._first: ProcessIdentity | None = None
        """The process that has number 1 inside the container."""
        self._env: dict[str, str] = {}
        self._over = asyncio.Event()
        """Whether the newest process has ended."""
        self._starts = 0
        self._began = 0.0
        self._deadline = 0.0
        self.reason = ""
        """Why it ended, if the exit status does not say it."""

    @property
    def folder(self) -> Path:
        return self._home.folder / str(self.spec["name"])

    @property
    def running(self) -> bool:
        return self._process is not None

    @property
    def first(self) -> ProcessIdentity | None:
        return self._first

    @property
    def _layers(self) -> Path:
        """The folder, in memory, of what it writes outside of its volumes."""
        return self._machine.folder / "layers" / f"{self._home.pod['metadata']['uid']}-{self.spec['name']}"

    def log(self, restart: int) -> Path:
        return self.folder / f"{restart}.log"

    async def run(self) -> None:
        """Run it until it will not be restarted."""
        retry = RestartBackoff(self._machine.time_scale, at_once_first=False)
        while not self._home.stopping.is_set():
            try:
                env, found = await self._configure()
                if self._machine.faults.start_delay_s and await self._home.rest(self._machine.faults.start_delay_s):
                    break
                await self._start(env, found)
            except CannotStart as error:
                self._machine.event(self._home.pod, "Failed", f"Error: {error}", warning=True)
                self._say(waiting(error.reason, str(error)))
                again = {"ErrImagePull": "ImagePullBackOff"}.get(error.reason, error.reason)
                if again != error.reason:
                    await self._home.rest(min(1.0, 10 * self._machine.time_scale))
                    self._say(waiting(again, f'Back-off pulling image "{self.spec["image"]}": {error}'))
                if await self._home.rest(retry.next(0.0)):
                    break
                continue
            await self._attend()
            if self._home.stopping.is_set() or not self._starts_again():
                break
            if wait := self._backoff.next(time.monotonic() - self._began):
                metadata = self._home.pod["metadata"]
                who = f"{self.spec['name']} pod={metadata['name']}_{metadata['namespace']}({metadata['uid']})"
                message = f"back-off {wait / self._machine.time_scale:g}s restarting failed container={who}"
                self._machine.event(
                    self._home.pod, "BackOff", f"Back-off restarting failed container {who}", warning=True
                )
                self.seen.last_state = self.seen.state
                self._say(waiting("CrashLoopBackOff", message))
                await self._home.rest(wait)
        self.seen.done = True
        if "waiting" in self.seen.state and self.seen.last_state:
            self.seen.state = self.seen.last_state
        self._home.changed()

    def _starts_again(self) -> bool:
        policy = self.seen.restart_policy
        return policy == "Always" or (policy == "OnFailure" and self.seen.exit_code != 0)

    def _say(self, state: Object) -> None:
        self.seen.state = state
        self._home.changed()

    async def _configure(self) -> tuple[dict[str, str], Image]:
        pod, spec = self._home.pod, self.spec
        try:
            found = image(spec["image"])
        except NotPullable as error:
            raise CannotStart("ErrImagePull", str(error)) from error
        namespace = pod["metadata"]["namespace"]
        links = environment.of_services(self._machine.services.objects, namespace)
        given = {
            "PATH": PATH,
            "HOSTNAME": pod["spec"].get("hostname") or pod["metadata"]["name"],
            "HOME": "/root" if self._user(found)[0] == 0 else "/",
            **found.env,
            **(links if pod["spec"].get("enableServiceLinks", True) else {}),
            # The real address: the Service's own address does not work here.
            "KUBERNETES_SERVICE_HOST": CONTROL_PLANE,
            "KUBERNETES_SERVICE_PORT": str(API_PORT),
            "KUBERNETES_SERVICE_PORT_HTTPS": str(API_PORT),
        }
        if self._machine.gpus:
            asked = (spec.get("resources", {}).get("limits") or {}).get("nvidia.com/gpu", "0")
            taken = self._machine.take_gpus(pod["metadata"]["uid"], spec["name"], int(asked))
            given["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, taken))
        served = {**pod, "nodeAllocatable": self._machine.allocatable}
        served["status"] = {
            **pod["status"],
            "podIP": self._home.address,
            "podIPs": [{"ip": self._home.address}],
            "hostIP": self._machine.address,
        }
        try:
            objects = {
                (kind, name): await self._machine.objects.get(kind, namespace, name, fresh=True)
                for kind, name in environment.wanted(spec)
            }
            env = environment.resolve(spec, served, objects, given)
        except (environment.ConfigError, ApiError, OSError, TimeoutError) as error:
            raise CannotStart("CreateContainerConfigError", str(error)) from error
        if self._context("runAsNonRoot") and self._user(found)[0] == 0:
            raise CannotStart("CreateContainerConfigError", "container has runAsNonRoot and image will run as root")
        return env, found

    def _context(self, name: str) -> object:
        own = self.spec.get("securityContext") or {}
        return own.get(name, (self._home.pod["spec"].get("securityContext") or {}).get(name))

    def _user(self, found: Image) -> tuple[int, int]:
        of_image, _, group = found.user.partition(":")
        user = self._context("runAsUser")
        if user is None and of_image and not of_image.isdigit():
            why = f"image has non-numeric user ({of_image}), cannot verify user is non-root"
            raise CannotStart("CreateContainerConfigError", f"container has runAsNonRoot and {why}")
        number = int(str(user)) if user is not None else int(of_image or 0)
        given = self._context("runAsGroup")
        return number, int(str(given)) if given is not None else int(group or (number if user is None else 0))

    async def _start(self, env: dict[str, str], found: Image) -> None:
        if "terminated" in self.seen.state:
            self.seen.last_state = self.seen.state
        if self._starts:
            self.seen.restarts += 1
        self._starts += 1
        self.folder.mkdir(parents=True, exist_ok=True)
        spec = self._sandbox_spec(env, found)
        kernels = await self._machine.compiled_kernels(spec["uid"]) if found.compiled_kernels else None
        spec["over"] = {} if kernels is None else {str(PREFIX / kernels.name): str(kernels)}
        file = self.folder / "sandbox.json"
        file.write_bytes(orjson.dumps(spec))
        read, write = os.pipe()
        try:
            with self.log(self.seen.restarts).open("ab") as output:
                process = spawn(
                    [sys.executable, "-I", "-S", SANDBOX, file, str(write)],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    pass_fds=[write, *([] if self._home.wire is None else [self._home.wire.namespace])],
                )
        finally:
            os.close(write)
        said = await asyncio.to_thread(_all_of, read)
        self._began, self._env, self.reason = time.monotonic(), env, ""
        number = said.split("\n")[0].removeprefix("pid ") if said.startswith("pid ") else ""
        problem = said.partition("error ")[2]
        if not number or problem:
            await ended(process)
            shutil.rmtree(self._layers, ignore_errors=True)
            self.seen.container_id = f"process://{process.pid}"
            self._finished(128, "StartError", f"failed to create containerd task: {problem or 'the sandbox ended'}")
            return
        self._first = identity_of(int(number))
        self._process = process
        self._over.clear()
        self.seen.container_id = f"process://{number}"
        self.seen.state = {"running": {"startedAt": now()}}
        self._machine.event(self._home.pod, "Started", f"Started container {self.spec['name']}")
        self._home.changed()

    def _sandbox_spec(self, env: dict[str, str], found: Image) -> Object:
        pod, spec = self._home.pod, self.spec
        context = spec.get("securityContext") or {}
        shutil.rmtree(self._layers, ignore_errors=True)
        self._layers.mkdir(parents=True)
        message = self.folder / f"{self.seen.restarts}.message"
        message.touch()
        message.chmod(0o666)
        mounts = [
            {"source": str(self._home.folder / name), "target": f"/etc/{name}", "readonly": False}
            for name in ("resolv.conf", "hosts", "hostname")
        ]
        mounts.append(
            {
                "source": str(message),
                "target": spec.get("terminationMessagePath", "/dev/termination-log"),
                "readonly": False,
            }
        )
        for mount in spec.get("volumeMounts") or ():
            volume = self._home.volumes[mount["name"]]
            source = volume.source
            sub = mount.get("subPath") or environment.expand(mount.get("subPathExpr", ""), env)
            if sub:
                source = source / sub
                if not source.exists():
                    source.mkdir(parents=True)
                source = source.resolve()
            readonly = volume.readonly or bool(mount.get("readOnly"))
            mounts.append({"source": str(source), "target": mount["mountPath"], "readonly": readonly})
        expanded = [environment.expand(one, env) for one in spec.get("command") or ()]
        arguments = [environment.expand(one, env) for one in spec.get("args") or ()]
        argv = (expanded or list(found.entrypoint)) + (arguments or ([] if expanded else list(found.command)))
        user, group = self._user(found)
        whole = pod["spec"].get("securityContext") or {}
        groups = {*whole.get("supplementalGroups", ()), *([whole["fsGroup"]] if "fsGroup" in whole else ())}
        capabilities = context.get("capabilities") or {}
        return {
            "layers": str(self._layers),
            "keep": interpreter_folders(PREFIX, BASE),
            "devices": [one.name for one in Path("/dev").glob("nvidia*") if one.is_char_device()],
            "mounts": mounts,
            "readonly": bool(context.get("readOnlyRootFilesystem")),
            "cwd": spec.get("workingDir") or found.folder,
            "hostname": env["HOSTNAME"][:63],
            "argv": argv,
            "env": env,
            "uid": user,
            "gid": group,
            "groups": sorted(groups),
            "privileged": bool(context.get("privileged")),
            "drop": capabilities.get("drop") or [],
            "add": capabilities.get("add") or [],
            "users": found.users,
            "network": None if self._home.wire is None else self._home.wire.namespace,
            "no_new_privileges": context.get("allowPrivilegeEscalation") is False,
        }

    async def _attend(self) -> None:
        """Run probes and hooks from the start of the process to its end."""
        if self._process is None:
            return
        health = asyncio.create_task(self._watch_health())
        # The pod may have been asked to end while this container started.
        late = asyncio.create_task(self.stop(self._home.grace_s)) if self._home.stopping.is_set() else None
        try:
            code = await ended(self._process)
        finally:
            for task in filter(None, (health, late)):
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
        self._process = self._first = None
        self._over.set()
        shutil.rmtree(self._layers, ignore_errors=True)
        if self.reason == "OOMKilled":
            code = 137
        self._finished(code, self.reason or ("Completed" if code == 0 else "Error"), self._last_message(code))

    def _finished(self, code: int, reason: str, message: str) -> None:
        began = self.seen.state.get("running", {}).get("startedAt") or now()
        ended_: Object = {"exitCode": code, "reason": reason, "startedAt": began, "finishedAt": now()}
        ended_["containerID"] = self.seen.container_id
        if message:
            ended_["message"] = message
        self.seen.ready = False
        self.seen.started = False
        self._say({"terminated": ended_})

    def _last_message(self, code: int) -> str:
        with suppress(OSError):
            if written := (self.folder / f"{self.seen.restarts}.message").read_bytes()[-4096:]:
                return written.decode(errors="replace")
        if code != 0 and self.spec.get("terminationMessagePolicy") == "FallbackToLogsOnError":
            return last_log_line(self.log(self.seen.restarts))
        return ""

    async def execute(self, command: list[str], timeout_s: float) -> tuple[int, str]:
        """Run a command in the container, as its user. Raises ActionFailed if it cannot run; TimeoutError as `run`."""
        if self._first is None:
            raise ActionFailed("container not running")
        spec = orjson.loads((self.folder / "sandbox.json").read_bytes())
        enter = [
            "nsenter",
            f"--target={self._first.pid}",
            "--mount",
            "--net",
            "--pid",
            "--uts",
            "--ipc",
            f"--wdns={spec['cwd']}",
        ]
        become = ["setpriv", f"--reuid={spec['uid']}", f"--regid={spec['gid']}"]
        groups = ",".join(map(str, spec["groups"]))
        become += [f"--groups={groups}" if groups else "--clear-groups", "--"]
        return await run([*enter, *become, *command], env=self._env, timeout_s=timeout_s)

    async def _watch_health(self) -> None:
        hooks = self.spec.get("lifecycle") or {}
        if "postStart" in hooks:
            try:
                await self._act(hooks["postStart"], 60)
            except ActionFailed as error:
                self._machine.event(self._home.pod, "FailedPostStartHook", str(error), warning=True)
                await self.stop(self._own_grace())
                return
        if "startupProbe" in self.spec:
            async for well in self._verdicts("startup", initially=None):
                if well:
                    break
                await self._unhealthy("startup")
        self.seen.started = True
        self.seen.ready = "readinessProbe" not in self.spec
        self._home.changed()
        async with asyncio.TaskGroup() as probes:
            if "livenessProbe" in self.spec:
                probes.create_task(self._stay_alive())
            if "readinessProbe" in self.spec:
                probes.create_task(self._follow_readiness())

    async def _stay_alive(self) -> None:
        async for well in self._verdicts("liveness", initially=True):
            if not well and not self._home.stopping.is_set():
                await self._unhealthy("liveness")

    async def _follow_readiness(self) -> None:
        async for well in self._verdicts("readiness", initially=False):
            if well != self.seen.ready:
                self.seen.ready = well
                self._home.changed()

    def _verdicts(self, kind: str, *, initially: bool | None) -> AsyncIterator[bool]:
        probe = self.spec[f"{kind}Probe"]

        async def ask() -> bool:
            metadata = self._home.pod["metadata"]
            lie = self._machine.faults.lies.get((f"{metadata['namespace']}/{metadata['name']}", kind))
            if lie is not None:
                return lie
            try:
                await self._act(probe, probe.get("timeoutSeconds", 1))
            except ActionFailed as error:
                message = f"{kind.capitalize()} probe failed: {error}"
                self._machine.event(self._home.pod, "Unhealthy", message, warning=True)
                return False
            return True

        # A probe that kills takes as long as its manifest says. Only other waits are shorter in tests.
        scale, patience = self._machine.time_scale, 1.0
        if kind == "liveness":
            scale = 1.0
        elif kind == "startup":
            patience = 1.0 / scale
        return verdicts(probe, ask, initially=initially, time_scale=scale, patience=patience)

    async def _act(self, action: Object, timeout_s: float) -> None:
        await act(action, self.spec, self._home.address, self.execute, timeout_s)

    async def _unhealthy(self, kind: str) -> None:
        name = self.spec["name"]
        message = f"Container {name} failed {kind} probe, will be restarted"
        self._machine.event(self._home.pod, "Killing", message)
        probe = self.spec[f"{kind}Probe"]
        await self.stop(probe.get("terminationGracePeriodSeconds", self._own_grace()))

    def _own_grace(self) -> float:
        grace: float = self._home.pod["spec"].get("terminationGracePeriodSeconds", 30)
        return grace

    def hurry(self, grace_s: float) -> None:
        """Shorten its grace period to this, from now on."""
        self._deadline = min(self._deadline, time.monotonic() + grace_s)

    async def stop(self, grace_s: float) -> None:
        """preStop, SIGTERM, and SIGKILL to processes that still run after the grace period."""
        process = self._process
        if process is None:
            return
        self._deadline = time.monotonic() + grace_s
        if self._home.stopping.is_set() and grace_s > 0:
            self._machine.event(self._home.pod, "Killing", f"Stopping container {self.spec['name']}")
        hook = (self.spec.get("lifecycle") or {}).get("preStop")
        if hook is not None and grace_s > 0:
            try:
                await self._act(hook, grace_s)
            except ActionFailed as error:
                self._machine.event(self._home.pod, "FailedPreStopHook", f"PreStopHook failed: {error}", warning=True)
            self._deadline = max(self._deadline, time.monotonic() + LEAST_GRACE_S)
        if self._first is not None and grace_s > 0:
            signum = (self.spec.get("lifecycle") or {}).get("stopSignal", "SIGTERM")
            send(self._first, signal.Signals[signum])
        while not self._over.is_set() and (left := self._deadline - time.monotonic()) > 0:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._over.wait(), min(0.5, left))  # the grace period may be shortened meanwhile
        if not self._over.is_set() and self._first is not None:
            send(self._first, signal.SIGKILL)


def _all_of(descriptor: int) -> str:
    with open(descriptor, "rb") as pipe:
        return pipe.read().decode(errors="replace")
