"""Computes a pod's status from its containers. Pure: the same containers give the same status."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from testbed.cluster.api import Object


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def waiting(reason: str, message: str = "") -> Object:
    return {"waiting": {"reason": reason, **({"message": message} if message else {})}}


@dataclass
class ContainerState:
    """What a pod's status is computed from, for one container."""

    name: str
    image: str
    restart_policy: str
    """Always, OnFailure or Never; `Always` of an init container makes it a sidecar."""
    is_init: bool = False
    state: Object = field(default_factory=lambda: waiting("ContainerCreating"))
    last_state: Object = field(default_factory=dict)
    restarts: int = 0
    started: bool = False
    ready: bool = False
    container_id: str = ""
    done: bool = False
    """It will not be started again."""

    @property
    def is_sidecar(self) -> bool:
        return self.is_init and self.restart_policy == "Always"

    @property
    def exit_code(self) -> int | None:
        return self.state["terminated"]["exitCode"] if "terminated" in self.state else None

    def as_status(self) -> Object:
        said: Object = {
            "name": self.name,
            "image": self.image,
            "imageID": self.image if self.container_id else "",
            "ready": self.ready,
            "started": self.started,
            "restartCount": self.restarts,
            "state": self.state,
            "lastState": self.last_state,
        }
        if self.container_id:
            said["containerID"] = self.container_id
        return said


def phase(containers: Sequence[ContainerState], init: Sequence[ContainerState]) -> str:
    """The phase of a pod: Pending until all containers have begun, then Running until none will run again."""
    if any(one.done and one.exit_code not in (0, None) for one in init if not one.is_sidecar):
        return "Failed"
    if any("waiting" in one.state and not one.last_state and not one.done for one in containers):
        return "Pending"
    if all(one.done for one in containers):
        return "Failed" if any(one.exit_code for one in containers) else "Succeeded"
    return "Running"


def conditions(
    pod: Object,
    containers: Sequence[ContainerState],
    init: Sequence[ContainerState],
    current: str,
    *,
    has_network: bool,
    said: Sequence[Object] | None = None,
) -> list[Object]:
    """The conditions, in the kubelet's order and words. A status that differs from `said` has a new transition time."""
    initialized = [one.name for one in init if not (one.started if one.is_sidecar else one.exit_code == 0)]
    unready = [one.name for one in [*(one for one in init if one.is_sidecar), *containers] if not one.ready]
    finished = current in ("Succeeded", "Failed")
    missing = f"containers with unready status: [{' '.join(unready)}]" if unready else ""
    ready_why = ("PodCompleted" if current == "Succeeded" else "PodFailed") if finished else "ContainersNotReady"
    gates = _gates(pod)
    met: dict[str, tuple[bool, str, str]] = {
        "PodReadyToStartContainers": (has_network, "", ""),
        "Initialized": (
            not initialized or current == "Succeeded",
            "ContainersNotInitialized",
            f"containers with incomplete status: [{' '.join(initialized)}]",
        ),
        "Ready": (
            not unready and not gates and not finished,
            ready_why if unready or finished else "ReadinessGatesNotReady",
            missing if unready or finished else "; ".join(gates),
        ),
        "ContainersReady": (not unready and not finished, ready_why, missing),
    }
    before = {one["type"]: one for one in said or pod["status"].get("conditions") or ()}
    return [_condition(before.get(kind), kind, *what) for kind, what in met.items()]


def _gates(pod: Object) -> list[str]:
    held = {one["type"]: one["status"] for one in pod["status"].get("conditions") or ()}
    gates = [one["conditionType"] for one in pod["spec"].get("readinessGates") or ()]
    return [
        f'corresponding condition of pod readiness gate "{gate}" '
        + ("does not exist." if gate not in held else 'is not "True".')
        for gate in gates
        if held.get(gate) != "True"
    ]


def _condition(before: Object | None, kind: str, met: bool, reason: str, message: str) -> Object:
    said: Object = {"type": kind, "status": str(met)}
    # A merge patch keeps fields that it does not contain.
    said |= {"reason": None, "message": None} if met else {"reason": reason or None, "message": message or None}
    same = before is not None and before["status"] == said["status"]
    said["lastTransitionTime"] = before["lastTransitionTime"] if same and before is not None else now()
    return said


def status(
    pod: Object,
    containers: Sequence[ContainerState],
    init: Sequence[ContainerState],
    *,
    started: str,
    host: str,
    address: str,
    over: Mapping[str, str],
    before: Sequence[Object] | None = None,
) -> Object:
    """`over` replaces phase, reason and message if the whole pod ended for its own reason. `before` has the conditions
    of the last status."""
    current = over.get("phase") or phase(containers, init)
    said: Object = {
        "phase": current,
        "hostIP": host,
        "hostIPs": [{"ip": host}],
        "startTime": started,
        "observedGeneration": pod["metadata"].get("generation", 1),
        "qosClass": pod["status"].get("qosClass", "BestEffort"),
        "conditions": conditions(pod, containers, init, current, has_network=bool(address), said=before),
        "containerStatuses": _all(containers),
        **{name: text for name, text in over.items() if name != "phase"},
    }
    if address:
        said |= {"podIP": address, "podIPs": [{"ip": address}]}
    if init:
        said["initContainerStatuses"] = _all(init)
    return said


def _all(containers: Iterable[ContainerState]) -> list[Object]:
    return [one.as_status() for one in containers]
