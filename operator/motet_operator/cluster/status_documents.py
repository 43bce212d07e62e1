"""Decisions as documents for the status subresource. Pure."""

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


def unaccepted_status(why: Obstacle, it: Object, status: Object, now: datetime) -> Object:
    """For an object of which the operator cannot tell the rest: `status` stays, with Accepted and Ready False."""
    accepted = no("Accepted", why.reason, why.message)
    return _restated(it, status, now, accepted, no("Ready", why.reason, why.message), *progress(stalled=accepted))


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
