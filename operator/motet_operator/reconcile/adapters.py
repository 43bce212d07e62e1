"""The life of an adapter, one condition a step: accepted, its bytes ready, loaded where it should be, and so ready.

Each step says why it is not there yet in a sentence for the adapter's owner, who sees no other tenant's names.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from motet.model import ObjectName
from motet_operator.reconcile.conditions import Condition, no, settle, unknown, yes
from motet_operator.reconcile.plan import AdapterStatus, CatalogAdapter
from motet_operator.reconcile.view import AdapterKnowledge, AdapterObject, PoolObject, View

_FAILURE_REASONS = {
    "adapter_fetch_failed": "FetchFailed",
    "adapter_incompatible": "FormatRejected",
}
"""Where a failure brings no reason of its own: the reason for its code in motet.errors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What the conditions of every adapter depend on, worked out once."""

    groups: Mapping[ObjectName, PoolObject]
    """The first accepted pool of each group."""

    serving: frozenset[ObjectName]
    """Groups with a ready runner."""

    names: Mapping[tuple[str, ObjectName, str], ObjectName]
    """Which adapter has a model name of a tenant in a group."""


def look_around(view: View, refused: Mapping[ObjectName, str]) -> Surroundings:
    groups: dict[ObjectName, PoolObject] = {}
    for pool in view.pools:
        if pool.resource.object_name not in refused:
            groups.setdefault(pool.resource.group, pool)
    group_of = {pool.resource.object_name: pool.resource.group for pool in view.pools}
    serving = frozenset(
        group_of[instance.pool]
        for instance in view.instances
        if instance.ready and instance.draining_until is None and instance.pool in group_of
    )
    names: dict[tuple[str, ObjectName, str], ObjectName] = {}
    for adapter in sorted(view.adapters, key=lambda one: (one.age, one.resource.object_name)):
        resource = adapter.resource
        names.setdefault((resource.metadata.namespace, resource.group, resource.model_name), resource.object_name)
    return Surroundings(groups=groups, serving=serving, names=names)


def adapter_status(view: View, adapter: AdapterObject, around: Surroundings) -> AdapterStatus:
    resource = adapter.resource
    known = view.known.get(resource.object_name, AdapterKnowledge())
    has_runner = resource.group in around.serving
    accepted = _accepted(view, adapter, around)
    artifact = _artifact(known, accepted=accepted, has_runner=has_runner)
    loaded = _loaded(adapter, known, accepted=accepted, has_runner=has_runner)
    ready = _ready(adapter, known, accepted, artifact, has_runner=has_runner)
    return AdapterStatus(
        name=resource.object_name,
        model=f"{resource.metadata.namespace}/{resource.model_name}",
        conditions=settle(
            (accepted, artifact, loaded, ready), adapter.conditions, now=view.now, generation=adapter.generation
        ),
        certificate=known.certificate,
        resident=known.places,
        observed_generation=adapter.generation,
    )


def in_catalog(status: AdapterStatus, adapter: AdapterObject) -> bool:
    accepted = next(condition for condition in status.conditions if condition.type == "Accepted")
    return accepted.holds and not adapter.resource.spec.suspend


def catalog_adapter(adapter: AdapterObject) -> CatalogAdapter:
    resource = adapter.resource
    return CatalogAdapter(
        name=resource.object_name,
        generation=adapter.generation,
        group=resource.group,
        model_name=resource.model_name,
        source=adapter.source,
        expected_digest=resource.spec.source.digest or "",
        max_class=resource.spec.priority,
        min_replicas=resource.spec.placement.min_replicas,
        max_replicas=resource.spec.placement.max_replicas,
        content_stamp=adapter.content_stamp,
    )


def _accepted(view: View, adapter: AdapterObject, around: Surroundings) -> Condition:
    resource = adapter.resource
    pool = around.groups.get(resource.group)
    namespace = resource.metadata.namespace
    labels = dict(view.namespaces.get(namespace, {}))

    def admits(pool: PoolObject) -> bool:
        own = pool.resource.metadata.namespace
        return pool.resource.spec.allowed_namespaces.admits(namespace, own=own, labels=labels)

    if pool is None:
        # Only pools that this tenant may use: a misspelt name must not list the others.
        open_to_it = {group.name: group for group, other in around.groups.items() if admits(other)}
        nearest = difflib.get_close_matches(resource.group.name, open_to_it, n=1)
        hint = f"did you mean {open_to_it[nearest[0]]}?" if nearest else "check spec.poolRef"
        return no("Accepted", "PoolNotFound", f"there is no pool {resource.group}; {hint}")
    if not admits(pool):
        return no(
            "Accepted",
            "NamespaceNotAllowed",
            f"pool {resource.group} takes no adapters from namespace {namespace}; its spec.allowedNamespaces decides",
        )
    claim = resource.spec.base_model
    if claim is not None and claim != pool.resource.served_name:
        return no(
            "Accepted",
            "BaseModelMismatch",
            f"the adapter is for {claim}, pool {resource.group} serves {pool.resource.served_name}",
        )
    holder = around.names[namespace, resource.group, resource.model_name]
    if holder != resource.object_name:
        return no(
            "Accepted",
            "NameConflict",
            f"{holder} already has the model name {resource.model_name}; set another spec.modelName",
        )
    return yes("Accepted", "Valid")


def _artifact(known: AdapterKnowledge, *, accepted: Condition, has_runner: bool) -> Condition:
    if known.failure_code:
        reason = known.failure_reason or _FAILURE_REASONS.get(known.failure_code, "FetchFailed")
        message = known.failure_message
        if known.serving_digest:
            message = f"{message.rstrip('.')}. The version before it keeps serving."
        return no("ArtifactReady", reason, message)
    if known.serving_digest:
        return yes("ArtifactReady", "Verified", known.serving_digest)
    if not accepted.holds:
        return unknown("ArtifactReady", accepted.reason, "not fetched, because the adapter is not accepted")
    if not has_runner:
        return unknown("ArtifactReady", "WaitingForRunner", "a runner checks the adapter; none is ready")
    return unknown("ArtifactReady", "Checking", "a runner fetches and checks the adapter")


def _loaded(adapter: AdapterObject, known: AdapterKnowledge, *, accepted: Condition, has_runner: bool) -> Condition:
    spec = adapter.resource.spec
    if spec.suspend:
        return no("Loaded", "Suspended", "spec.suspend is true")
    if not accepted.holds:
        return no("Loaded", accepted.reason, "not loaded, because the adapter is not accepted")
    if not has_runner:
        return unknown("Loaded", "WaitingForRunner", "no runner is ready")
    on_device = sum(place.tier == "device" and place.digest in ("", known.serving_digest) for place in known.places)
    if on_device < spec.placement.min_replicas:
        return no("Loaded", "Loading", f"{on_device} of {spec.placement.min_replicas} runners hold it")
    if on_device:
        return yes("Loaded", "Resident", f"{on_device} runners hold it")
    return yes("Loaded", "OnDemand", "loads at its next request")


def _ready(
    adapter: AdapterObject, known: AdapterKnowledge, accepted: Condition, artifact: Condition, *, has_runner: bool
) -> Condition:
    """Would a request be served now? Where not, the first reason why not."""
    if adapter.resource.spec.suspend:
        return no("Ready", "Suspended", "spec.suspend is true; set it to false to serve")
    if not accepted.holds:
        return no("Ready", accepted.reason, accepted.message)
    if not known.serving_digest and artifact.status == "False":
        return no("Ready", artifact.reason, artifact.message)
    if not has_runner:
        return unknown("Ready", "WaitingForRunner", f"no runner of pool {adapter.resource.group} is ready")
    if not known.serving_digest:
        return unknown("Ready", artifact.reason, artifact.message)
    return yes("Ready", "Serving")
