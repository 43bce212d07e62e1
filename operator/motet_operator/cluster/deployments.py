"""Runner sets as Deployments: one for each revision of a pool, in the pool's namespace. Pure.

A Deployment's pod template never changes, since a change is another revision with another Deployment; who leaves is
decided by us, so no rollout of Kubernetes' own ever happens.
"""

import hashlib
from collections.abc import Mapping
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from motet.errors import SetupError
from motet.resources import ServingPool
from motet_operator.cluster.kinds import DEPLOYMENTS, POOLS, Object
from motet_operator.cluster.view import (
    DELETION_COST,
    DRAIN_SECONDS,
    DRAINING,
    GROUP_LABEL,
    MODEL,
    POOL_LABEL,
    REVISION_LABEL,
    VOLUMES,
    model_claim,
)
from motet_operator.environment import runner_environment
from motet_operator.reconcile import RunnerSet

CONTAINER = "runner"
PRE_STOP_SECONDS = 5
"""How long the endpoints of a pod that ends may take to be known everywhere."""

LAST_SECONDS = 15
"""For what comes after the drain: the last reports, and the end."""

START_WITHIN_SECONDS = 3600
LEAVING_COST = "-1000"
"""Below any other: this pod goes first."""


class PlatformTemplate:
    """What every runner pod has whatever its pool says, as the chart renders it."""

    def __init__(self, template: Object) -> None:
        """Raises ValueError with what is wrong."""
        spec = template.get("spec")
        containers = spec.get("containers") if isinstance(spec, dict) else None
        names = [one.get("name") for one in containers or () if isinstance(one, dict)]
        if names != [CONTAINER]:
            raise ValueError(f"spec.containers must be exactly one, named {CONTAINER}")
        self.metadata: Object = template.get("metadata") or {}
        self.spec: Object = template["spec"]
        # Of the content, not of the file: another order or a comment makes no new revision. Another operator makes one,
        # since it may make other pods of the same template.
        content = f"{version('motet')} {_sorted(template)!r}"
        self.digest = hashlib.sha256(content.encode()).hexdigest()[:16]


def read_template(path: Path) -> PlatformTemplate:
    """Raises SetupError when there is none, or one that makes no pod."""
    try:
        content = yaml.safe_load(path.read_text())
        return PlatformTemplate(content if isinstance(content, dict) else {})
    except (OSError, yaml.YAMLError, ValueError) as error:
        raise SetupError(
            f"MOTET_CLUSTER_RUNNER_TEMPLATE: {path} is no template for runner pods: {error}. The chart renders one."
        ) from None


def _sorted(value: Any) -> Any:
    if isinstance(value, dict):
        return [(key, _sorted(value[key])) for key in sorted(value, key=str)]
    return [_sorted(one) for one in value] if isinstance(value, list) else value


def deployment_name(each: RunnerSet) -> str:
    return f"{each.pool.name}-{each.revision}"


def pool_labels(pool: str, group: str) -> dict[str, str]:
    """Of everything that the operator makes for a pool."""
    return {
        "app.kubernetes.io/name": "motet-runner",
        "app.kubernetes.io/instance": pool,
        "app.kubernetes.io/version": version("motet"),
        "app.kubernetes.io/component": "runner",
        "app.kubernetes.io/part-of": "motet",
        "app.kubernetes.io/managed-by": "motet-operator",
        POOL_LABEL: pool,
        GROUP_LABEL: group,
    }


def owned_by(pool: str, uid: str) -> list[Object]:
    """With its pool it goes."""
    return [
        {
            "apiVersion": POOLS.api_version,
            "kind": POOLS.name,
            "name": pool,
            "uid": uid,
            "controller": True,
            "blockOwnerDeletion": False,
        }
    ]


def labels_of(each: RunnerSet) -> dict[str, str]:
    return pool_labels(each.pool.name, each.template.group.name) | {REVISION_LABEL: each.revision}


def selector_of(each: RunnerSet) -> dict[str, str]:
    return {POOL_LABEL: each.pool.name, REVISION_LABEL: each.revision}


def deployment(each: RunnerSet, pool: ServingPool, uid: str, platform: PlatformTemplate) -> Object:
    """All but `spec.replicas`, which is written under a manager of its own."""
    return {
        "apiVersion": DEPLOYMENTS.api_version,
        "kind": DEPLOYMENTS.name,
        "metadata": {
            "name": deployment_name(each),
            "namespace": each.pool.namespace,
            "labels": labels_of(each),
            "annotations": {DRAIN_SECONDS: f"{each.drain_seconds:g}"},
            "ownerReferences": owned_by(each.pool.name, uid),
        },
        "spec": {
            "selector": {"matchLabels": selector_of(each)},
            "revisionHistoryLimit": 1,
            "progressDeadlineSeconds": START_WITHIN_SECONDS,
            "template": _pod_template(each, pool, platform),
        },
    }


def leaving_marks(until: datetime | None) -> dict[str, str]:
    """The annotations of a pod that goes: when its Deployment shrinks, it is the one."""
    marks = {DELETION_COST: LEAVING_COST}
    if until is not None:
        marks[DRAINING] = until.isoformat()
    return marks


def _pod_template(each: RunnerSet, pool: ServingPool, platform: PlatformTemplate) -> Object:
    choice = each.template.pod
    base = platform.spec
    (container,) = base["containers"]
    volumes, mounts = _volumes(each, pool)
    spec = base | {
        "containers": [
            container
            | {
                "env": _merged(container.get("env"), _environment(each)),
                "volumeMounts": [*(container.get("volumeMounts") or ()), *mounts],
                "resources": _without_nothing(choice.resources.model_dump(mode="json", by_alias=True))
                or container.get("resources")
                or {},
            }
        ],
        "volumes": [*(base.get("volumes") or ()), *volumes],
        "terminationGracePeriodSeconds": PRE_STOP_SECONDS + int(each.drain_seconds) + LAST_SECONDS,
    }
    if choice.node_selector:
        spec["nodeSelector"] = (base.get("nodeSelector") or {}) | choice.node_selector
    if choice.tolerations:
        asked = [_without_nothing(one.model_dump(mode="json", by_alias=True)) for one in choice.tolerations]
        spec["tolerations"] = [*(base.get("tolerations") or ()), *asked]
    if choice.topology_spread_constraints:
        spec["topologySpreadConstraints"] = [
            _without_nothing(one.model_dump(mode="json", by_alias=True))
            | {"labelSelector": {"matchLabels": {POOL_LABEL: each.pool.name}}}
            for one in choice.topology_spread_constraints
        ]
    for field, value in (
        ("priorityClassName", choice.priority_class_name),
        ("runtimeClassName", choice.runtime_class_name),
        ("serviceAccountName", choice.service_account_name),
    ):
        if value is not None:
            spec[field] = value
    metadata: Object = {"labels": {**(platform.metadata.get("labels") or {}), **labels_of(each)}}
    if annotations := platform.metadata.get("annotations"):
        metadata["annotations"] = dict(annotations)
    return {"metadata": metadata, "spec": spec}


def _environment(each: RunnerSet) -> list[Object]:
    ours = runner_environment(str(each.pool), each.revision, each.template) | {
        # As long as the grace leaves room for; a pod that is evicted drains by itself.
        "MOTET_RUNNER_DRAIN_SECONDS": f"{each.drain_seconds:g}",
    }
    theirs = [_without_nothing(one.model_dump(mode="json", by_alias=True)) for one in each.template.pod.env]
    return _merged(theirs, [{"name": name, "value": value} for name, value in ours.items()])


def _merged(before: Any, after: list[Object]) -> list[Object]:
    """By name; the later wins, and everything keeps its place: `$(POD_IP)` needs what it names to stand before it."""
    later = {one["name"]: one for one in after}
    kept = [later.pop(one["name"], one) for one in before or ()]
    return [*kept, *later.values()]


def _volumes(each: RunnerSet, pool: ServingPool) -> tuple[list[Object], list[Object]]:
    claims: list[tuple[str, str, str, str]] = []
    if claim := model_claim(pool):
        claims.append(("model", claim, MODEL, ""))
    for index, volume in enumerate(each.template.volumes):
        claims.append((f"adapters-{index}", volume.claim_name, f"{VOLUMES}/{volume.claim_name}", volume.sub_path or ""))
    volumes: list[Object] = [
        {"name": name, "persistentVolumeClaim": {"claimName": claim, "readOnly": True}} for name, claim, _, _ in claims
    ]
    mounts: list[Object] = [
        {"name": name, "mountPath": path, "readOnly": True} | ({"subPath": sub} if sub else {})
        for name, _, path, sub in claims
    ]
    return volumes, mounts


def _without_nothing(value: Mapping[str, Any]) -> Object:
    return {key: one for key, one in value.items() if one not in (None, {}, [], "")}


__all__ = [
    "CONTAINER",
    "PlatformTemplate",
    "deployment",
    "deployment_name",
    "leaving_marks",
    "owned_by",
    "pool_labels",
    "read_template",
    "selector_of",
]
