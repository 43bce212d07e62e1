"""Objects as the API server sends them, with good defaults."""

from typing import Any

from motet_operator.cluster.cache import Cache, Snapshot
from motet_operator.cluster.deployments import PlatformTemplate
from motet_operator.cluster.kinds import ADAPTERS, DEPLOYMENTS, NAMESPACES, PODS, POOLS, WATCHED, Kind, Object, key_of

PLATFORM = PlatformTemplate(
    {
        "metadata": {"annotations": {"example.com/team": "platform"}},
        "spec": {
            "serviceAccountName": "motet-runner",
            "containers": [
                {
                    "name": "runner",
                    "image": "motet/runner:1",
                    "env": [
                        {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
                        {"name": "MOTET_RUNNER_LISTEN", "value": "$(POD_IP):7110"},
                    ],
                    "volumeMounts": [{"name": "data", "mountPath": "/var/lib/motet"}],
                }
            ],
            "volumes": [{"name": "data", "emptyDir": {}}],
        },
    }
)


def made(kind: Kind, name: str, namespace: str = "", *, version: int = 1, uid: str = "", **more: Any) -> Object:
    metadata = {"name": name, "resourceVersion": str(version), "uid": uid or f"{namespace}/{name}", "generation": 1}
    metadata |= {"creationTimestamp": "2026-01-01T00:00:00Z"} | more.pop("metadata", {})
    if namespace:
        metadata["namespace"] = namespace
    return {"apiVersion": kind.api_version, "kind": kind.name, "metadata": metadata, **more}


def pool(name: str = "demo", namespace: str = "pools", *, version: int = 1, **spec: Any) -> Object:
    full = {"model": {"uri": "hf://acme/base"}, "allowedNamespaces": {"from": "All"}} | spec
    return made(POOLS, name, namespace, version=version, spec=full)


def adapter(name: str = "legal", namespace: str = "tenant", *, version: int = 1, **spec: Any) -> Object:
    full = {"poolRef": {"name": "demo", "namespace": "pools"}, "source": {"uri": f"hf://acme/{name}"}} | spec
    return made(ADAPTERS, name, namespace, version=version, spec=full)


def namespace(name: str, **labels: str) -> Object:
    return made(NAMESPACES, name, metadata={"labels": labels})


def child(kind: Kind, name: str, pool: str, revision: str, **more: Any) -> Object:
    labels = {"motet.dev/pool": pool, "motet.dev/revision": revision}
    metadata = {"labels": labels} | more.pop("metadata", {})
    return made(kind, name, "pools", metadata=metadata, **more)


def pod(
    name: str, revision: str, pool: str = "demo", *, ready: bool = True, node: str = "node-1", **metadata: Any
) -> Object:
    conditions = [{"type": "Ready", "status": "True" if ready else "False"}]
    labels = {"motet.dev/pool": pool, "motet.dev/revision": revision}
    status = {"phase": "Running", "conditions": conditions}
    owner = {"kind": "ReplicaSet", "name": f"{pool}-{revision}-6c58dbdb7f", "controller": True}
    metadata = {"labels": labels, "ownerReferences": [owner]} | metadata
    return made(PODS, name, "pools", metadata=metadata, spec={"nodeName": node}, status=status)


def deployment(
    revision: str, replicas: int, pool: str = "demo", *, up_to_date: bool = True, ours: bool = True
) -> Object:
    names = ("motet-operator", "motet-scaler") if ours else ("motet-operator",)
    managers = [{"manager": name, "operation": "Apply"} for name in names]
    status = {"observedGeneration": 1, "replicas": replicas} if up_to_date else {}
    return child(
        DEPLOYMENTS,
        f"{pool}-{revision}",
        pool,
        revision,
        metadata={
            "labels": {"motet.dev/pool": pool, "motet.dev/revision": revision},
            "managedFields": managers,
        },
        spec={"replicas": replicas},
        status=status,
    )


def snapshot(*objects: Object) -> Snapshot:
    """As the operator's cache gives them to a round: without the fields that it drops."""
    cache, by_name = Cache(), {kind.name: kind for kind in WATCHED}
    for it in objects:
        assert cache.put(by_name[it["kind"]], it), f"given twice: {key_of(it)}"
    return cache.snapshot()
