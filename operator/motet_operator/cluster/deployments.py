"""The objects of a pool in its namespace: a Deployment for each revision, and a PodDisruptionBudget. Pure.

A Deployment's pod template never changes: a change is a new revision with its own Deployment. The operator decides
which runners leave, so Kubernetes itself never does a rollout.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from motet.errors import SetupError
from motet.resources import EngineSpec, ServingPool
from motet_operator.cluster.kinds import BUDGETS, CLASS_LABEL, DEPLOYMENTS, POOL_LABEL, POOLS, Object
from motet_operator.cluster.object_parser import (
    CONTAINER,
    DRAIN_SECONDS,
    GROUP_LABEL,
    MODEL,
    MODEL_CACHE,
    REVISION_LABEL,
    VOLUMES,
    model_claim,
)
from motet_operator.environment import runner_environment
from motet_operator.reconcile import PoolObject, RunnerSet, RunnerTemplate
from motet_operator.reconcile.revisions import template_of

PRE_STOP_SECONDS = 5
"""How long it may take until all nodes know that the endpoints of an ending pod are gone."""

LAST_SECONDS = 15
"""Seconds after the drain, for the last reports and the end of the process."""

START_WITHIN_SECONDS = 3600


class PlatformTemplate:
    """The pod template that all runner pods share, as the chart renders it."""

    def __init__(self, template: Object, operator_class: str = "") -> None:
        """Raises ValueError if the template is not valid."""
        spec = template.get("spec")
        containers = (spec.get("containers") if isinstance(spec, dict) else None) or ()
        runners = [one for one in containers if isinstance(one, dict) and one.get("name") == CONTAINER]
        if len(runners) != 1:
            raise ValueError(f"spec.containers must have exactly one named {CONTAINER}")
        self._images: Object = template.get("images") or {}
        self.metadata: Object = template.get("metadata") or {}
        self.spec: Object = template["spec"]
        self.runner: Object = runners[0]
        self.sidecars: list[Object] = [one for one in containers if one is not self.runner]
        self.class_label = {CLASS_LABEL: operator_class} if operator_class else {}
        """On all objects of all pools: by it, operators of different classes tell theirs apart."""

    def image_for(self, engine: EngineSpec) -> str | None:
        """Of the runners with this engine; None if there is none."""
        if engine.backend in (None, "motet"):
            return str(self.runner.get("image", ""))
        found = self._images.get(engine.backend)
        return None if found is None else str(found)


def read_template(path: Path, operator_class: str = "") -> PlatformTemplate:
    """Raises SetupError if the file is missing or not valid."""
    try:
        content = yaml.safe_load(path.read_text())
        return PlatformTemplate(content if isinstance(content, dict) else {}, operator_class)
    except (OSError, yaml.YAMLError, ValueError) as error:
        raise SetupError(
            f"MOTET_CLUSTER_RUNNER_TEMPLATE: {path} is not a template for runner pods: {error}. "
            "Use the one that the chart renders."
        ) from None


def deployment_name(each: RunnerSet) -> str:
    return f"{each.pool.name}-{each.revision}"


def pool_labels(pool: str, group: str) -> dict[str, str]:
    """Labels of all objects of a pool. They do not contain the operator's version: an upgrade of the operator must not
    replace runners."""
    return {
        "app.kubernetes.io/name": "motet-runner",
        "app.kubernetes.io/instance": pool,
        "app.kubernetes.io/component": "runner",
        "app.kubernetes.io/part-of": "motet",
        "app.kubernetes.io/managed-by": "motet-operator",
        POOL_LABEL: pool,
        GROUP_LABEL: group,
    }


def owned_by(pool: str, uid: str) -> list[Object]:
    """An owner reference: the object is deleted with its pool."""
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


def labels_of(each: RunnerSet, template: RunnerTemplate) -> dict[str, str]:
    return pool_labels(each.pool.name, template.group.name) | {REVISION_LABEL: each.revision}


def selector_of(each: RunnerSet) -> dict[str, str]:
    return {POOL_LABEL: each.pool.name, REVISION_LABEL: each.revision}


def deployment(
    each: RunnerSet, template: RunnerTemplate, pool: ServingPool, uid: str, platform: PlatformTemplate
) -> Object:
    """The Deployment without `spec.replicas`, which another field manager writes."""
    return {
        "apiVersion": DEPLOYMENTS.api_version,
        "kind": DEPLOYMENTS.name,
        "metadata": {
            "name": deployment_name(each),
            "namespace": each.pool.namespace,
            "labels": template.pod.labels | labels_of(each, template) | platform.class_label,
            "annotations": {DRAIN_SECONDS: f"{each.drain_seconds:g}"},
            "ownerReferences": owned_by(each.pool.name, uid),
        },
        "spec": {
            "selector": {"matchLabels": selector_of(each)},
            "revisionHistoryLimit": 1,
            "progressDeadlineSeconds": START_WITHIN_SECONDS,
            "template": _pod_template(each, template, pool, platform),
        },
    }


def pod_digest(pool: PoolObject, platform: PlatformTemplate) -> str:
    """The digest of a runner's pod without its revision, which is computed from this digest."""
    spec = pool.resource.spec
    template = template_of(pool)
    each = RunnerSet(
        pool=pool.resource.object_name,
        revision="",
        template=template,
        replicas=0,
        drain_seconds=float(spec.drain_timeout_seconds),
    )
    content = json.dumps(_pod_template(each, template, pool.resource, platform), sort_keys=True, default=str)
    return hashlib.sha256(content.encode()).hexdigest()


def _pod_template(each: RunnerSet, template: RunnerTemplate, pool: ServingPool, platform: PlatformTemplate) -> Object:
    choice = template.pod
    base = platform.spec
    container = platform.runner
    volumes, mounts = _volumes(template, pool)
    spec = base | {
        "containers": [
            container
            | ({"image": image} if (image := platform.image_for(template.engine)) else {})
            | {
                "env": _merged(container.get("env"), _environment(each, template, pool)),
                "volumeMounts": [*(container.get("volumeMounts") or ()), *mounts],
                "resources": _without_nothing(choice.resources.model_dump(mode="json", by_alias=True))
                or container.get("resources")
                or {},
            },
            *platform.sidecars,
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
    if choice.affinity is not None:
        spec["affinity"] = choice.affinity.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    for field, value in (
        ("schedulerName", choice.scheduler_name),
        ("priorityClassName", choice.priority_class_name),
        ("runtimeClassName", choice.runtime_class_name),
        ("serviceAccountName", choice.service_account_name),
    ):
        if value is not None:
            spec[field] = value
    labels = {
        **choice.labels,
        **(platform.metadata.get("labels") or {}),
        **labels_of(each, template),
        **platform.class_label,
    }
    metadata: Object = {"labels": labels}
    if annotations := choice.annotations | (platform.metadata.get("annotations") or {}):
        metadata["annotations"] = annotations
    return {"metadata": metadata, "spec": spec}


def _environment(each: RunnerSet, template: RunnerTemplate, pool: ServingPool) -> list[Object]:
    ours = runner_environment(str(each.pool), each.revision, template) | {
        # A pod that is evicted drains by itself, within its termination grace.
        "MOTET_RUNNER_DRAIN_SECONDS": f"{each.drain_seconds:g}",
    }
    if pool.spec.model.cache is not None:
        ours["MOTET_RUNNER_MODEL_CACHE"] = MODEL_CACHE
    theirs = [_without_nothing(one.model_dump(mode="json", by_alias=True)) for one in template.pod.env]
    return _merged(theirs, [{"name": name, "value": value} for name, value in ours.items()])


def _merged(before: Any, after: list[Object]) -> list[Object]:
    """Merged by name; the later value wins, and the order stays: `$(POD_IP)` must come after the variable it uses."""
    later = {one["name"]: one for one in after}
    kept = [later.pop(one["name"], one) for one in before or ()]
    return [*kept, *later.values()]


def _volumes(template: RunnerTemplate, pool: ServingPool) -> tuple[list[Object], list[Object]]:
    claims: list[tuple[str, str, str, str]] = []
    if claim := model_claim(pool):
        claims.append(("model", claim, MODEL, ""))
    for index, volume in enumerate(template.volumes):
        claims.append((f"adapters-{index}", volume.claim_name, f"{VOLUMES}/{volume.claim_name}", volume.sub_path or ""))
    volumes: list[Object] = [
        {"name": name, "persistentVolumeClaim": {"claimName": claim, "readOnly": True}} for name, claim, _, _ in claims
    ]
    mounts: list[Object] = [
        {"name": name, "mountPath": path, "readOnly": True} | ({"subPath": sub} if sub else {})
        for name, _, path, sub in claims
    ]
    if (cache := pool.spec.model.cache) is not None:
        volumes.append({"name": "models", "persistentVolumeClaim": {"claimName": cache.claim_name}})
        mounts.append({"name": "models", "mountPath": MODEL_CACHE})
    return volumes, mounts


def _without_nothing(value: Mapping[str, Any]) -> Object:
    return {key: one for key, one in value.items() if one not in (None, {}, [], "")}


def budget(pool: ServingPool, uid: str, wanted: int, platform: PlatformTemplate) -> Object:
    """The PodDisruptionBudget of a pool: a drain of a node waits until the pool can spare the runners on it.

    It keeps `wanted` runners, less `maxUnavailable`.
    """
    name = pool.object_name
    return {
        "apiVersion": BUDGETS.api_version,
        "kind": BUDGETS.name,
        "metadata": {
            "name": name.name,
            "namespace": name.namespace,
            "labels": pool_labels(name.name, pool.group.name) | platform.class_label,
            "ownerReferences": owned_by(name.name, uid),
        },
        "spec": {
            # A number, not a percentage of one controller's replicas: a pool has a Deployment for each revision.
            "minAvailable": max(0, wanted - pool.spec.update_strategy.max_unavailable),
            "selector": {"matchLabels": {POOL_LABEL: name.name}},
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }


__all__ = [
    "CONTAINER",
    "PlatformTemplate",
    "budget",
    "deployment",
    "deployment_name",
    "owned_by",
    "pod_digest",
    "pool_labels",
    "read_template",
    "selector_of",
]
