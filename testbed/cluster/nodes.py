"""Nodes for tests, which can start them, break them and run commands in their pods."""

import json
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testbed.cluster.cluster import Cluster, identity
from testbed.cluster.network import node_address, pods_of
from testbed.cluster.programs import Program
from testbed.tree import ROOT

TIME_SCALE = 0.1
"""The kubelets of tests use a tenth of the usual back-off, and of the periods of startup and readiness probes (three
tenths while a container is ready)."""


@dataclass(frozen=True)
class ClusterNode:
    """A kubelet that runs pods. A pod is named as `namespace/name`. Without a container, the first one is meant."""

    name: str
    address: str
    pods: str
    """The addresses of its pods, for `Network.cut`."""
    folder: Path
    program: Program

    def kill(self, pod: str, container: str = "") -> None:
        """Send SIGKILL to all processes of a container."""
        self._signal(pod, container, 9)

    def out_of_memory(self, pod: str, container: str = "") -> None:
        """Kill it like the kernel when memory is exhausted, with the reason that a runtime reads from the cgroup."""
        self._signal(pod, container, 9, "OOMKilled")

    def pause(self, pod: str, container: str = "") -> None:
        """Send SIGSTOP: the processes live, keep their connections, and send nothing."""
        self._signal(pod, container, 19)

    def resume(self, pod: str, container: str = "") -> None:
        self._signal(pod, container, 18)

    def lie(self, pod: str, probe: str, says: bool | None) -> None:
        """Force the result of the pod's liveness, readiness or startup probe; None ends that."""
        self._ask(do="lie", pod=pod, probe=probe, says=says)

    def delay_starts(self, seconds: float) -> None:
        """How long each container waits before its start, from now on."""
        self._ask(do="delay", seconds=seconds)

    @contextmanager
    def silent(self) -> Iterator[None]:
        """The node runs its pods and reports nothing: no Lease, no status."""
        self._ask(do="silence", on=True)
        try:
            yield
        finally:
            with suppress(OSError):
                self._ask(do="silence", on=False)

    def lose(self) -> None:
        """A power cut: every process of the node ends at once. `program.start()` starts the node again."""
        self.program.kill()

    def execute(self, pod: str, *command: str, container: str = "", timeout_s: float = 20) -> tuple[int, str]:
        """Exit status and output of a command in a container, like `kubectl exec`."""
        code, said = self._ask(do="exec", pod=pod, container=container, command=command, timeout_s=timeout_s)
        return code, said

    def _signal(self, pod: str, container: str, number: int, reason: str = "") -> None:
        self._ask(do="signal", pod=pod, container=container, signal=number, reason=reason)

    def _ask(self, **asked: object) -> Any:
        """Send a command to the kubelet. If it refuses, raises AssertionError with its reason."""
        with socket.socket(socket.AF_UNIX) as wire:
            wire.settimeout(30)
            wire.connect(str(self.folder / "faults.sock"))
            wire.sendall(json.dumps(asked).encode() + b"\n")
            with wire.makefile("rb") as answers:
                answer = json.loads(answers.readline())
        assert "error" not in answer, answer["error"]
        return answer["ok"]


@contextmanager
def node(
    cluster: Cluster,
    name: str,
    number: int,
    *,
    gpus: int = 0,
    labels: dict[str, str] | None = None,
    time_scale: float = TIME_SCALE,
) -> Iterator[ClusterNode]:
    """One more ready node. Its pods end with it. `number` (1 to 99) must be unique and determines its addresses."""
    assert cluster.network is not None, "nodes are added to our own cluster only"
    assert cluster.authority is not None
    folder = cluster.folder / name
    folder.mkdir(exist_ok=True)
    address = node_address(number)
    serving = cluster.authority.serving(f"{name}-serving", [address, name])
    command = [
        sys.executable, "-m", "testbed.cluster.kubelet",
        f"--name={name}", f"--number={number}", f"--folder={folder}", f"--gpus={gpus}", f"--time-scale={time_scale}",
        f"--kubeconfig={identity(cluster.authority, cluster.folder, f'system:node:{name}', 'system:nodes')}",
        f"--certificate={serving.certificate}", f"--key={serving.key}",
        *(f"--label={label}={value}" for label, value in (labels or {}).items()),
    ]  # fmt: skip
    ready = folder / "ready"

    def is_ready() -> bool:
        return ready.exists() and ready.read_text() == str(program.pid)

    program = Program(command, cluster.folder / f"{name}.log", cluster.network, is_ready, cwd=ROOT)
    with program:
        cluster.kubectl("wait", "--for=condition=Ready", f"node/{name}", "--timeout=30s")
        # The controllers place no pods on a new node until they have seen that it is ready.
        cluster.wait_for(lambda: not cluster.get("node", name)["spec"].get("taints"), f"{name} without taints")
        try:
            yield ClusterNode(name, address, pods_of(number), folder, program)
        finally:  # first, no more pods may be placed here
            with suppress(Exception):
                cluster.kubectl("delete", "node", name, "--wait=false", "--ignore-not-found")


@contextmanager
def addons(cluster: Cluster) -> Iterator[Program]:
    """Run cluster DNS and the pod scheduler."""
    assert cluster.network is not None
    assert cluster.authority is not None
    ready = cluster.folder / "addons-ready"
    command = [
        sys.executable, "-m", "testbed.cluster.addons",
        f"--scheduler-kubeconfig={identity(cluster.authority, cluster.folder, 'system:kube-scheduler')}",
        f"--dns-kubeconfig={identity(cluster.authority, cluster.folder, 'motet-test:dns', 'system:masters')}",
        f"--ready-file={ready}",
    ]  # fmt: skip
    with ExitStack() as running:
        program = Program(command, cluster.folder / "addons.log", cluster.network, ready.exists, cwd=ROOT)
        yield running.enter_context(program)
