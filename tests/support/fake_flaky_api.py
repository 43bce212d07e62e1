"""A small API server with a Deployment controller and a kubelet. Writes of pods fail at random.

Each write reaches a cache later, as through a watch. So does a write that was done but whose answer was lost.
"""

import asyncio
import copy
import random
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from prometheus_client import CollectorRegistry

from motet.kube import Unreachable
from motet_operator.cluster.api import ApiRefused
from motet_operator.cluster.cache import Cache, ObjectKey
from motet_operator.cluster.kinds import DEPLOYMENTS, PODS, Kind, Object, key_of, uid_of
from motet_operator.cluster.obstacles import ObstacleLog
from motet_operator.cluster.write_executor import WriteExecutor
from motet_operator.metrics import ClusterMetrics

COST = "controller.kubernetes.io/pod-deletion-cost"


class FakeFlakyApi:
    def __init__(self, cache: Cache, chance: random.Random, *, failing: float, lost: float, lag: float = 0.02) -> None:
        """The share `failing` of the writes of pods fail, and the share `lost` of those is done nevertheless. A watch
        reports a write after at most `lag` seconds."""
        self.objects: dict[Kind, dict[ObjectKey, Object]] = {}
        self.failed = self.done = 0
        """How many writes of pods failed, and how many were done."""
        self.deleted: list[str] = []
        """The pods that were deleted, by the operator or by the controller."""
        self.written: Counter[str] = Counter()
        """How many requests that change something came, by kind."""
        self.made = 0
        """How many pods were created."""
        self._cache, self._chance = cache, chance
        self._failing, self._lost, self._lag = failing, lost, lag
        self._version = 100
        self._owned: dict[tuple[ObjectKey, str], set[str]] = {}
        """Annotations of pods, by their field manager."""

    # ------------------------------------------------------------------------------------------ what the operator asks

    async def apply(self, kind: Kind, document: Object, *, manager: str, subresource: str = "", **_: Any) -> Object:
        await asyncio.sleep(0)
        self.written[f"{kind.name} status" if subresource else kind.name] += 1
        answer_is_lost = False
        if kind is PODS:
            found = self.objects.get(PODS, {}).get(key_of(document))
            if found is None or uid_of(found) != uid_of(document):  # applied, it would be another pod of this name
                namespace = document["metadata"]["namespace"]
                raise ApiRefused("patch", PODS, namespace, status=409, message="the pod is gone")
            if self._chance.random() < self._failing:
                self.failed += 1
                answer_is_lost = self._chance.random() < self._lost
                if not answer_is_lost:
                    status = self._chance.choice((409, 422, 500, 503))
                    raise ApiRefused("patch", PODS, document["metadata"]["namespace"], status=status, message="not now")
            else:
                self.done += 1
        applied = self._apply(kind, document, manager, subresource)
        if answer_is_lost:
            raise Unreachable("the connection broke")
        return applied

    async def delete(self, kind: Kind, namespace: str, name: str, **_: Any) -> None:
        self.written[kind.name] += 1
        self._remove(kind, (namespace, name))

    async def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        return copy.deepcopy(self.objects.get(kind, {}).get((namespace, name)))

    async def list(
        self, kind: Kind, namespace: str = "", *, selector: str = "", fields: str = "", **_: Any
    ) -> tuple[list[Object], int]:
        labels = dict(one.split("=") for one in selector.split(",") if one)
        named = fields.removeprefix("metadata.name=")
        found = [
            copy.deepcopy(it)
            for (home, name), it in self.objects.get(kind, {}).items()
            if namespace in ("", home) and named in ("", name)
            if labels.items() <= (it["metadata"].get("labels") or {}).items()
        ]
        return found, self._version

    # ----------------------------------------------------------------------------------------------- what happens there

    def put(self, kind: Kind, it: Object, *, at_once: bool = False) -> Object:
        """Store it as a newer version, and let the watch report it."""
        self._version += 1
        it = copy.deepcopy(it)
        it["metadata"]["resourceVersion"] = str(self._version)
        self.objects.setdefault(kind, {})[key_of(it)] = it
        reported = copy.deepcopy(it)
        if at_once:
            self._cache.put(kind, reported)
        else:
            asyncio.get_running_loop().call_later(self._chance.uniform(0, self._lag), self._cache.put, kind, reported)
        return it

    def pods(self) -> dict[str, Object]:
        return {name: it for (_, name), it in self.objects[PODS].items()}

    def look(self, why_unready: Mapping[str, Callable[[], str]], new_pod: Callable[[str, str], Object]) -> None:
        """Do what the Deployment controller and the kubelet would do now. Pods without a process are never ready."""
        for deployment in list(self.objects.get(DEPLOYMENTS, {}).values()):
            self._scale(deployment, new_pod)
        for name, pod in self.pods().items():
            ready = name in why_unready and not why_unready[name]()
            condition = {"type": "Ready", "status": "True" if ready else "False"}
            if pod["status"]["conditions"] != [condition]:
                self.put(PODS, pod | {"status": pod["status"] | {"conditions": [condition]}})

    def _scale(self, deployment: Object, new_pod: Callable[[str, str], Object]) -> None:
        labels = deployment["metadata"]["labels"]
        pods = [pod for pod in self.pods().values() if labels.items() >= pod["metadata"]["labels"].items()]
        wanted = deployment["spec"]["replicas"]
        for _ in range(wanted - len(pods)):
            self.made += 1
            self.put(PODS, new_pod(f"new-{self.made}", labels["motet.dev/revision"]))
        for pod in sorted(pods, key=_goes_first)[: max(0, len(pods) - wanted)]:
            self._remove(PODS, key_of(pod))
        seen = {"observedGeneration": deployment["metadata"]["generation"], "replicas": wanted}
        if deployment.get("status") != seen:
            self.put(DEPLOYMENTS, deployment | {"status": seen})

    def _apply(self, kind: Kind, document: Object, manager: str, subresource: str) -> Object:
        key = key_of(document)
        found = self.objects.setdefault(kind, {}).get(key)
        if found is None:
            uid = f"{kind.name}/{key}/{self._version}"
            found = document | {"metadata": document["metadata"] | {"uid": uid, "generation": 1}}
            found["metadata"]["creationTimestamp"] = datetime.now(UTC).isoformat()
        if subresource:
            return self.put(kind, found | {"status": document["status"]})
        metadata, spec = dict(found["metadata"]), dict(found.get("spec") or {})
        if kind is PODS:
            applied = document["metadata"].get("annotations") or {}
            before = self._owned.get((key, manager), set())
            kept = {name: value for name, value in (metadata.get("annotations") or {}).items() if name not in before}
            metadata["annotations"] = kept | applied
            self._owned[key, manager] = set(applied)
        else:
            managers = [one for one in metadata.get("managedFields", ()) if one["manager"] != manager]
            metadata["managedFields"] = [*managers, {"manager": manager, "operation": "Apply"}]
            spec |= document.get("spec") or {}
        return self.put(kind, found | {"metadata": metadata, "spec": spec})

    def _remove(self, kind: Kind, key: ObjectKey) -> None:
        it = self.objects.get(kind, {}).pop(key, None)
        if it is not None:
            self._version += 1
            if kind is PODS:
                self.deleted.append(key[1])
            self._cache.remove(kind, it, self._version)


def _goes_first(pod: Object) -> tuple[bool, int, str]:
    """The order in which a ReplicaSet deletes pods: those that are not ready, then by cost, then the newest."""
    ready = any(one["type"] == "Ready" and one["status"] == "True" for one in pod["status"]["conditions"])
    cost = int((pod["metadata"].get("annotations") or {}).get(COST, "0"))
    return ready, cost, "" if pod["metadata"]["name"].startswith("new") else pod["metadata"]["name"]


def writer_to(api: FakeFlakyApi, cache: Cache) -> WriteExecutor:
    """The writer of an operator that always leads and waits for nothing."""
    return WriteExecutor(
        api,  # type: ignore[arg-type]
        cache,
        ObstacleLog(),
        ClusterMetrics(CollectorRegistry()),
        leading=lambda: True,
        written=lambda _: None,
        denied=lambda *_: None,
        time_scale=0.01,
    )
