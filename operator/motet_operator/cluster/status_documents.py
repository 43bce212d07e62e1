"""Decisions as documents for the status subresource. Pure."""

from collections.abc import Collection
from datetime import datetime

from motet.resources.status import MAX_RUNNERS, LoRAAdapterStatus, ServingPoolStatus, StatusModel
from motet_operator.cluster.kinds import POOL_LABEL, Object
from motet_operator.cluster.object_parser import conditions_of
from motet_operator.cluster.obstacles import Obstacle
from motet_operator.reconcile import AdapterStatus, ConditionResult, PoolStatus
from motet_operator.reconcile.conditions import no, progress, with_transition_times


def adapter_status(found: AdapterStatus) -> Object:
    return _document(
        LoRAAdapterStatus(
            observed_generation=found.observed_generation,
            conditions=found.conditions,
            model_name=found.model,
            base_model=found.base_model or None,
            artifact=found.artifact,
            revisions=found.revisions or None,
            desired_replicas=found.desired,
            loaded_replicas=found.loaded,
            placement_summary=f"{found.loaded}/{found.desired}" if found.desired else f"{found.loaded}",
            last_load_time=found.last_load,
        )
    )


UNSEEN = (
    "decidesForGroup",
    "desiredReplicas",
    "replicas",
    "stayingReplicas",
    "readyReplicas",
    "updatedReplicas",
    "drainingReplicas",
    "replicaSummary",
    "currentRevision",
)
"""What stays in the status of a pool whose namespace was taken from the operator. It no longer sees the runners there,
which go on; and the pool is as before once the operator gets the namespace back."""


def pool_status(found: PoolStatus, it: Object) -> Object:
    before = it.get("status") or {}
    taken = any(one.reason == "NamespaceNotPrepared" for one in found.conditions)
    adapters = found.adapters
    document = _document(
        ServingPoolStatus(
            observed_generation=found.observed_generation,
            conditions=found.conditions,
            served_name=found.model,
            desired_replicas=found.replicas,
            replicas=min(found.existing, MAX_RUNNERS),
            staying_replicas=min(found.staying, MAX_RUNNERS),
            ready_replicas=min(found.ready, MAX_RUNNERS),
            updated_replicas=min(found.updated, MAX_RUNNERS),
            draining_replicas=min(found.draining, MAX_RUNNERS),
            replica_summary=f"{found.ready}/{found.replicas}",
            selector=f"{POOL_LABEL}={found.name.name}",
            adapters=adapters.model_copy(update={"summary": f"{adapters.loaded}/{adapters.registered}"}),
            slots=found.slots,
            decides_for_group=found.decides,
            current_revision=found.current_revision or None,
            update_revision=found.revision,
        )
    )
    return document | {name: before[name] for name in UNSEEN if taken and name in before}


def with_earlier_advice(document: Object, it: Object) -> Object:
    """A pool's new status, in which it follows the advice of before as long as a new leader has not heard any."""
    before = it.get("status") or {}
    followed = {one["type"] for one in before.get("conditions") or () if _followed_advice(one, it)}
    held = {one["type"] for one in document["conditions"] if one["reason"] == "HoldingStaleAdvice"}
    return _with_conditions_of(before, document, held & followed)


def with_earlier_counts(document: Object, it: Object) -> Object:
    """A pool's new status with the counts of before, as long as a new leader has not heard of all its adapters."""
    before = it.get("status") or {}
    if _registered(before) != _registered(document):
        return document
    counts = {name: before[name] for name in ("adapters", "slots") if name in before}
    return _with_conditions_of(before, document, {"AdaptersHealthy"}) | counts


def with_earlier_checks(document: Object, it: Object) -> Object:
    """An adapter's new status with what was found in its files: without a runner it is not served, but they stay as
    they were."""
    before = it.get("status") or {}
    kept = {name: before[name] for name in ("artifact", "revisions") if name in before}
    return _with_conditions_of(before, document, {"ArtifactReady", "Certified"}) | kept


def _with_conditions_of(before: Object, document: Object, types: Collection[str]) -> Object:
    kept = {one["type"]: one for one in before.get("conditions") or () if one["type"] in types}
    return document | {"conditions": [kept.get(one["type"], one) for one in document["conditions"]]}


def _followed_advice(condition: Object, it: Object) -> bool:
    """Others say what has changed since then: a conflict that is over, another mode."""
    return bool(
        condition["status"] == "True" and condition.get("observedGeneration") == it["metadata"].get("generation", 1)
    )


def unaccepted_status(why: Obstacle, it: Object, status: Object, now: datetime) -> Object:
    """For an object of which the operator cannot tell the rest: `status` stays, with Accepted and Ready False."""
    accepted = no("Accepted", why.reason, why.message)
    return _restated(it, status, now, accepted, no("Ready", why.reason, why.message), *progress(stalled=accepted))


def _registered(status: Object) -> object:
    return (status.get("adapters") or {}).get("registered")


def unseen_status(why: Obstacle, it: Object, now: datetime) -> Object:
    """For a pool whose runners cannot be listed."""
    ready = no("Ready", why.reason, why.message)
    progressing = no("Progressing", why.reason, why.message)
    return _restated(it, it.get("status") or {}, now, progressing, ready, *progress(stalled=ready))


def _restated(it: Object, status: Object, now: datetime, *conditions: ConditionResult) -> Object:
    """`status` with these conditions. All other fields stay: an apply removes the fields that it leaves out."""
    generation = it["metadata"].get("generation", 1)
    types = {one.type for one in conditions} | {"Reconciling", "Stalled"}
    others = [one for one in conditions_of({"status": status}) if one.type not in types]
    found = with_transition_times((*others, *conditions), conditions_of(it), now=now, generation=generation)
    said = _document(LoRAAdapterStatus(observed_generation=generation, conditions=found))
    return {**status, **said}


def _document(report: StatusModel) -> Object:
    document: Object = report.model_dump(mode="json", by_alias=True, exclude_none=True)
    return document
