"""Places pending pods, as far as tests need it: a pure policy, and a loop that binds.

It uses nodes that are ready, tolerated, selected, and have free resources. Of these, it chooses the one with the fewest
pods.
"""

import asyncio
import re
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

from testbed.cluster.api import Api, ApiError, Mirror, Object

_SUFFIXES = {"": 1.0, "n": 1e-9, "u": 1e-6, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_SUFFIXES |= {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50}


DEFAULT_SCHEDULER = "default-scheduler"


def quantity(text: object) -> float:
    """The number of a quantity such as `100m` or `1Gi`. Raises ValueError if it is not a quantity."""
    found = re.fullmatch(r"([0-9.]+(?:[eE][+-]?\d+)?)([numkMGTP]?i?)", str(text))
    if found is None or found[2] not in _SUFFIXES:
        raise ValueError(f"{text!r} is not a quantity")
    return float(found[1]) * _SUFFIXES[found[2]]


def requests(pod: Object) -> dict[str, float]:
    """The resources that a pod takes. Init containers run before the others, so the larger of the two sums counts."""

    def of(containers: Iterable[Object]) -> list[Mapping[str, float]]:
        return [
            {name: quantity(value) for name, value in (one.get("resources", {}).get("requests") or {}).items()}
            for one in containers
        ]

    needs: dict[str, float] = {"pods": 1}
    for one in of(pod["spec"]["containers"]):
        for name, value in one.items():
            needs[name] = needs.get(name, 0) + value
    for one in of(pod["spec"].get("initContainers") or ()):
        for name, value in one.items():
            needs[name] = max(needs.get(name, 0), value)
    return needs


@dataclass
class NodeCapacity:
    """A node and its free resources."""

    node: Object
    free: dict[str, float] = field(init=False)
    pods: int = 0

    def __post_init__(self) -> None:
        self.free = {name: quantity(value) for name, value in self.node["status"].get("allocatable", {}).items()}

    def take(self, needs: Mapping[str, float]) -> None:
        self.pods += 1
        for name, value in needs.items():
            self.free[name] = self.free.get(name, 0) - value

    def objection(self, pod: Object, needs: Mapping[str, float]) -> str:
        """Why the pod cannot run here, in the scheduler's words; empty if it can."""
        conditions = {one["type"]: one["status"] for one in self.node["status"].get("conditions") or ()}
        if conditions.get("Ready") != "True" or self.node["spec"].get("unschedulable"):
            return "node(s) were unschedulable"
        labels = self.node["metadata"].get("labels", {})
        if any(labels.get(name) != value for name, value in (pod["spec"].get("nodeSelector") or {}).items()):
            return "node(s) didn't match Pod's node affinity/selector"
        taints = self.node["spec"].get("taints") or ()
        for taint in taints:
            if taint["effect"] != "PreferNoSchedule" and not _tolerated(taint, pod["spec"].get("tolerations") or ()):
                return f"node(s) had untolerated taint(s) {{{taint['key']}: {taint.get('value', '')}}}"
        short = [name for name, value in needs.items() if value > self.free.get(name, 0)]
        return f"Insufficient {', '.join(sorted(short))}" if short else ""


def _tolerated(taint: Object, tolerations: Iterable[Object]) -> bool:
    return any(
        one.get("effect") in (None, taint["effect"])
        and (
            (one.get("operator") == "Exists" and one.get("key") in (None, taint["key"]))
            or (one.get("key") == taint["key"] and one.get("value", "") == taint.get("value", ""))
        )
        for one in tolerations
    )


def _is_ours(pod: Object) -> bool:
    if "deletionTimestamp" in pod["metadata"] or pod["spec"].get("schedulingGates"):
        return False
    return bool(pod["spec"].get("schedulerName", DEFAULT_SCHEDULER) == DEFAULT_SCHEDULER)


def place(pod: Object, rooms: Iterable[NodeCapacity]) -> NodeCapacity | str:
    """The node to use, or why there is none."""
    needs = requests(pod)
    objections: dict[str, int] = {}
    fitting = []
    for room in rooms:
        if objection := room.objection(pod, needs):
            objections[objection] = objections.get(objection, 0) + 1
        else:
            fitting.append(room)
    if fitting:
        return min(fitting, key=lambda room: (room.pods, room.node["metadata"]["name"]))
    said = ", ".join(f"{count} {text}" for text, count in sorted(objections.items()))
    return f"0/{sum(objections.values())} nodes are available: {said}."


class PodScheduler:
    def __init__(self, api: Api) -> None:
        self._api = api
        self._pods = Mirror(api, "/api/v1/pods")
        self._nodes = Mirror(api, "/api/v1/nodes")
        self._bound: dict[str, str] = {}
        """UID of a pod → the node to which it was bound, until the watch shows the binding."""

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._pods.run())
            tasks.create_task(self._nodes.run())
            await self._pods.synced.wait()
            await self._nodes.synced.wait()
            while True:
                try:
                    await self._round()
                except Exception:  # one invalid object must not prevent the placement of the others
                    traceback.print_exc()
                    await asyncio.sleep(1)
                    self._pods.changed.set()
                waits = [asyncio.ensure_future(one.changed.wait()) for one in (self._pods, self._nodes)]
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                for one in waits:
                    one.cancel()
                self._pods.changed.clear()
                self._nodes.changed.clear()

    async def _round(self) -> None:
        rooms = {node["metadata"]["name"]: NodeCapacity(node) for node in self._nodes.objects.values()}
        pending = []
        for pod in list(self._pods.objects.values()):
            if pod["status"].get("phase") in ("Succeeded", "Failed"):
                continue
            uid = pod["metadata"]["uid"]
            if node := pod["spec"].get("nodeName") or self._bound.get(uid):
                if pod["spec"].get("nodeName"):
                    self._bound.pop(uid, None)
                if node in rooms:
                    rooms[node].take(requests(pod))
            elif _is_ours(pod):
                pending.append(pod)
        for pod in sorted(
            pending, key=lambda one: (-one["spec"].get("priority", 0), one["metadata"]["creationTimestamp"])
        ):
            chosen = place(pod, rooms.values())
            try:
                if isinstance(chosen, str):
                    await self._say_no(pod, chosen)
                else:
                    await self._bind(pod, chosen)
            except (ApiError, OSError, TimeoutError):
                self._pods.changed.set()
                await asyncio.sleep(0.1)

    async def _bind(self, pod: Object, room: NodeCapacity) -> None:
        namespace, name, uid = (pod["metadata"][part] for part in ("namespace", "name", "uid"))
        node = room.node["metadata"]["name"]
        await self._api.create(
            f"/api/v1/namespaces/{namespace}/pods/{name}/binding",
            {
                "apiVersion": "v1",
                "kind": "Binding",
                "metadata": {"name": name, "namespace": namespace, "uid": uid},
                "target": {"apiVersion": "v1", "kind": "Node", "name": node},
            },
        )
        self._bound[uid] = node
        room.take(requests(pod))

    async def _say_no(self, pod: Object, why: str) -> None:
        said = [one for one in pod["status"].get("conditions") or () if one["type"] == "PodScheduled"]
        if said and said[0].get("message") == why:
            return
        condition = {
            "type": "PodScheduled",
            "status": "False",
            "reason": "Unschedulable",
            "message": why,
            "lastTransitionTime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        }
        namespace, name = pod["metadata"]["namespace"], pod["metadata"]["name"]
        await self._api.patch(
            f"/api/v1/namespaces/{namespace}/pods/{name}/status", {"status": {"conditions": [condition]}}
        )
