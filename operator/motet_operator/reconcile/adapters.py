"""The conditions of an adapter, one for each step: accepted, fetched, checked, loaded, and therefore ready.

The message of a step says to the adapter's owner why the step is not done. It never names objects of other tenants.
"""

import difflib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import PurePosixPath

from motet.domain import ObjectName
from motet.plurals import counted
from motet.resources import AdapterVolume, LoRAAdapter, ServingPool
from motet.resources.chat import formats_of
from motet.resources.fields import PRIORITIES
from motet.resources.pool import TenantGrant
from motet.resources.status import MAX_RUNNERS, AdapterCounts, AdapterRevision
from motet_operator.reconcile.adapter_history import revisions_after
from motet_operator.reconcile.conditions import (
    ConditionResult,
    condition_of,
    no,
    not_evaluated,
    progress,
    unknown,
    with_transition_times,
    yes,
)
from motet_operator.reconcile.plan import AdapterEntry, AdapterStatus
from motet_operator.reconcile.pools import PoolRefusal, pools_keeping_runners
from motet_operator.reconcile.scaling import Scaling
from motet_operator.reconcile.seniority import by_seniority
from motet_operator.reconcile.view import AdapterObject, AdapterReplica, AdapterReport, PoolObject, View

_FAILURE_REASONS = {
    "adapter_fetch_failed": "FetchFailed",
    "adapter_incompatible": "FormatRejected",
    "adapter_unproved": "ProofFailed",
}
"""Reasons by error code (motet.errors), for failures that have no reason of their own."""

_CERTIFYING = frozenset(
    (
        "UnknownField",
        "UnmappedTensors",
        "ShapeMismatch",
        "NoEffect",
        "NotNumbers",
        "ProofFailed",
        "ReferenceMismatch",
        "ReadingsDiffer",
        "TokenizerDiffers",
        "RecordMissing",
    )
)
"""Failures of complete, well-formed files that do not fit the base model."""

_ELSEWHERE = frozenset(("FetchFailed", "NoSpace"))
"""Failures that may pass without a change of the adapter, as long as the runner tries again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterContext:
    """What the conditions of all adapters depend on, computed once in each round."""

    groups: Mapping[ObjectName, PoolObject]
    """The first accepted pool of each group."""

    serving: Mapping[ObjectName, int]
    """Ready runners by group; a group without ready runners is absent."""

    names: Mapping[tuple[str, ObjectName, str], ObjectName]
    """The adapter that has a model name: by namespace, group and model name."""

    runners: frozenset[str] = frozenset()
    """Runners that exist. The scheduler also waits for runners that are gone: they may only be out of reach."""

    over_quota: Mapping[ObjectName, str] = field(default_factory=dict)
    """Adapters beyond `spec.admission.maxAdapters` of their pool."""

    asleep: frozenset[ObjectName] = frozenset()
    """Groups in which no pool wants a runner."""

    unserved: Mapping[ObjectName, tuple[ServingPool, PoolRefusal]] = field(default_factory=dict)
    """Groups without an accepted pool: the first pool of each, and why it is refused."""


def adapter_context(
    view: View, refused: Mapping[ObjectName, PoolRefusal], scalings: Mapping[ObjectName, Scaling]
) -> AdapterContext:
    groups: dict[ObjectName, PoolObject] = {}
    unserved: dict[ObjectName, tuple[ServingPool, PoolRefusal]] = {}
    for pool in by_seniority(view.pools):
        if (why := refused.get(pool.resource.object_name)) is None:
            groups.setdefault(pool.resource.group, pool)
        else:
            unserved.setdefault(pool.resource.group, (pool.resource, why))
    keeping = pools_keeping_runners(view, refused)
    for pool in by_seniority(view.pools):  # if no pool of the group is accepted, one whose runners go on decides
        if pool.resource.object_name in keeping:
            groups.setdefault(pool.resource.group, pool)
    group_of = {pool.resource.object_name: pool.resource.group for pool in view.pools}
    serving = Counter(
        group_of[instance.pool]
        for instance in view.instances
        if instance.ready and instance.draining_until is None and instance.pool in group_of
    )
    names: dict[tuple[str, ObjectName, str], ObjectName] = {}
    adapters = by_seniority(view.adapters)
    for adapter in adapters:
        resource = adapter.resource
        names.setdefault((resource.metadata.namespace, resource.group, resource.model_name), resource.object_name)
    runners = frozenset(instance.name for instance in view.instances)
    awake = {group_of[name] for name, scaling in scalings.items() if scaling.replicas and name not in refused}
    awake |= {group for group, pool in groups.items() if pool.resource.object_name in keeping}
    asleep = frozenset(groups.keys() - awake)
    context = AdapterContext(
        groups=groups,
        serving=serving,
        names=names,
        runners=runners,
        asleep=asleep,
        unserved={group: found for group, found in unserved.items() if group not in groups},
    )
    return replace(context, over_quota=_over_quota(view, adapters, context))


def _over_quota(view: View, adapters: Sequence[AdapterObject], context: AdapterContext) -> Mapping[ObjectName, str]:
    """Adapters that find no place on their pool, or among those that it grants to their namespace, and why."""
    free: dict[tuple[ObjectName, str], int] = {}
    over: dict[ObjectName, str] = {}
    bounded = {group: pool for group, pool in context.groups.items() if _has_bound(pool.resource)}
    for adapter in adapters if bounded else ():
        resource = adapter.resource
        pool = bounded.get(resource.group)
        if pool is None:
            continue
        own, all_of_it = _grant(resource, pool).max_adapters, pool.resource.spec.admission.max_adapters
        if (own is None and all_of_it is None) or not _accepted(view, adapter, context).holds:
            continue
        namespace = resource.metadata.namespace
        kept = [((resource.group, name), bound) for name, bound in ((namespace, own), ("", all_of_it)) if bound]
        left = {key: free.setdefault(key, bound) for key, bound in kept}
        if not all(left.values()):
            of_namespace = own is not None and not left[resource.group, namespace]
            over[resource.object_name] = _full(resource, (own if of_namespace else all_of_it) or 0, of_namespace)
            continue
        for key in left:
            free[key] -= 1
    return over


def _has_bound(pool: ServingPool) -> bool:
    granted = pool.spec.granted
    of_each = (granted.default, *granted.grants.values())
    return pool.spec.admission.max_adapters is not None or any(one.max_adapters is not None for one in of_each)


def _full(adapter: LoRAAdapter, bound: int, of_namespace: bool) -> str:
    whose = f" of namespace {adapter.metadata.namespace}" if of_namespace else ""
    field = "maxAdapters in the pool's spec.tenants" if of_namespace else "the pool's spec.admission.maxAdapters"
    return (
        f"pool {adapter.group} takes at most {counted(bound, 'adapter')}{whose}, and {counted(bound, 'other adapter')} "
        f"{'fills' if bound == 1 else 'fill'} it; delete one of them, or ask the platform team to raise {field}"
    )


@dataclass(frozen=True)
class AdapterResult:
    """The result for one adapter: its status, and its entry in the catalog."""

    status: AdapterStatus
    entry: AdapterEntry | None
    """None if the adapter is not to be served."""

    @cached_property
    def counted(self) -> tuple[int, int, int]:
        """What it adds to the counts of its group."""
        accepted, ready = (condition_of(self.status.conditions, type_) for type_ in ("Accepted", "Ready"))
        if accepted is None or not accepted.holds:
            return 0, 0, 0
        return 1, self.status.loaded > 0, ready is not None and ready.status == "False"


@dataclass(slots=True)
class ResultCache:
    """Results of the previous round, each with its inputs. A cluster may have ten thousand adapters, and in most rounds
    only one of them has changed."""

    _results: dict[ObjectName, tuple[tuple[object, ...], AdapterResult]] = field(default_factory=dict)
    _pools: tuple[ServingPool, ...] = ()
    """All pools that accept adapters."""

    _shared: tuple[object, ...] = ()

    def evaluate(self, view: View, context: AdapterContext) -> tuple[AdapterResult, ...]:
        before, self._results = self._results, {}
        pools = tuple(pool.resource for pool in context.groups.values())
        if not _same(pools, self._pools):
            self._pools = pools
        shared_before, self._shared = self._shared, _shared_inputs(view, context)
        as_before = self._shared == shared_before
        found = []
        for adapter in view.adapters:
            name = adapter.resource.object_name
            remembered = before.get(name)
            if not (as_before and remembered is not None and _is_of(remembered[0], adapter, view)):
                basis = _inputs(view, adapter, context, self._pools)
                if remembered is None or not _same(remembered[0], basis):
                    remembered = (basis, evaluate_adapter(view, adapter, context))
            self._results[name] = remembered
            found.append(remembered[1])
        return tuple(found)


def _shared_inputs(view: View, context: AdapterContext) -> tuple[object, ...]:
    """All that `_inputs` takes from elsewhere than an adapter and the report about it."""
    return (
        {group: pool.resource for group, pool in context.groups.items()},
        {group: pool for group, (pool, _) in context.unserved.items()},
        context.runners,
        context.serving,
        context.names,
        context.over_quota,
        context.asleep,
        view.namespaces,
        view.refused_schemes,
    )


def _is_of(inputs: tuple[object, ...], adapter: AdapterObject, view: View) -> bool:
    return inputs[0] is adapter and inputs[1] is view.adapter_reports.get(adapter.resource.object_name)


def _inputs(
    view: View, adapter: AdapterObject, context: AdapterContext, pools: tuple[ServingPool, ...]
) -> tuple[object, ...]:
    resource = adapter.resource
    pool = context.groups.get(resource.group)
    known = view.adapter_reports.get(resource.object_name)
    unserved = context.unserved.get(resource.group)
    return (
        adapter,
        known,
        sum(place.runner in context.runners for place in known.replicas) if known is not None else 0,
        # If the pool does not exist, the hint may name any other pool.
        pools if pool is None else pool.resource,
        unserved[0] if unserved is not None else None,  # why it is refused follows from it and from `pools`
        # More ready runners than it asks for change nothing.
        min(context.serving.get(resource.group, 0), max(1, resource.spec.placement.min_replicas)),
        context.names[resource.metadata.namespace, resource.group, resource.model_name],
        context.over_quota.get(resource.object_name),
        resource.group in context.asleep,
        view.namespaces.get(resource.metadata.namespace),
        view.refused_schemes,
    )


def _same(one: tuple[object, ...], other: tuple[object, ...]) -> bool:
    # Parts of a view stay the same objects until they change. Comparing values would cost more than evaluating again.
    if len(one) != len(other):
        return False
    for a, b in zip(one, other, strict=True):  # a loop: each round compares thousands
        if a is not b and not (isinstance(a, int | str | ObjectName) and a == b):
            return False
    return True


def evaluate_adapter(view: View, adapter: AdapterObject, context: AdapterContext) -> AdapterResult:
    entry = None
    try:
        accepted = _accepted(view, adapter, context)
        if accepted.holds and not adapter.resource.spec.suspend:
            entry = catalog_adapter(adapter, context)
        return AdapterResult(adapter_status(view, adapter, context, accepted), entry)
    except Exception as error:  # one adapter must not stop the others, and it is served if it can be
        return AdapterResult(_not_evaluated(view, adapter, error), entry)


def _not_evaluated(view: View, adapter: AdapterObject, error: Exception) -> AdapterStatus:
    return AdapterStatus(
        name=adapter.resource.object_name,
        model=adapter.model,
        conditions=not_evaluated(error, adapter.conditions, now=view.now, generation=adapter.generation),
        artifact=view.adapter_reports.get(adapter.resource.object_name, AdapterReport()).artifact,
        replicas=(),
        observed_generation=adapter.generation,
        loaded=adapter.loaded,
        last_load=adapter.last_load,
        revisions=adapter.revisions,
    )


def adapter_status(
    view: View, adapter: AdapterObject, context: AdapterContext, accepted: ConditionResult
) -> AdapterStatus:
    resource = adapter.resource
    known = _of_runners_that_exist(view.adapter_reports.get(resource.object_name, AdapterReport()), context)
    ready_runners = context.serving.get(resource.group, 0)
    has_runner = ready_runners > 0
    pool = context.groups.get(resource.group)
    artifact = _artifact(known, accepted=accepted, has_runner=has_runner)
    certified = _certified(known, artifact)
    loaded = _loaded(adapter, known, pool, accepted=accepted, ready_runners=ready_runners)
    asleep = not has_runner and resource.group in context.asleep
    ready = _ready(adapter, known, accepted, artifact, certified, has_runner=has_runner, asleep=asleep)
    holders = min(_runners_holding(known), MAX_RUNNERS)  # a status counts no further; Loaded has the number
    return AdapterStatus(
        name=resource.object_name,
        model=adapter.model,
        conditions=with_transition_times(
            (
                *(accepted, artifact, certified, loaded, ready),
                *_progress(adapter, known, accepted, (artifact, certified), loaded, asleep=asleep),
            ),
            adapter.conditions,
            now=view.now,
            generation=adapter.generation,
        ),
        artifact=known.artifact,
        replicas=_places_of_serving(known),
        observed_generation=adapter.generation,
        base_model=pool.resource.served_name if pool is not None and accepted.holds else "",
        desired=0 if resource.spec.suspend else _pinned(resource, pool),
        loaded=holders,
        last_load=view.now if holders > adapter.loaded else adapter.last_load,
        revisions=_revisions(view, adapter, known) if accepted.holds else adapter.revisions,
    )


def _revisions(view: View, adapter: AdapterObject, known: AdapterReport) -> tuple[AdapterRevision, ...]:
    return revisions_after(adapter, known, _failure(known), view.now)


def _of_runners_that_exist(known: AdapterReport, context: AdapterContext) -> AdapterReport:
    if all(place.runner in context.runners for place in known.replicas):
        return known
    return replace(known, replicas=tuple(place for place in known.replicas if place.runner in context.runners))


def _places_of_serving(known: AdapterReport) -> tuple[AdapterReplica, ...]:
    """Without those of a revision that was replaced, and that requests still use."""
    return tuple(place for place in known.replicas if place.digest in ("", known.serving_digest))


def _runners_holding(known: AdapterReport) -> int:
    return sum(place.tier == "device" for place in _places_of_serving(known))


def count_adapters(view: View, results: Iterable[AdapterResult]) -> dict[ObjectName, AdapterCounts]:
    """By group: accepted adapters, those that a runner holds, and those that cannot be served."""
    counts: dict[ObjectName, list[int]] = {}
    for adapter, result in zip(view.adapters, results, strict=True):
        if any(added := result.counted):
            count = counts.setdefault(adapter.resource.group, [0, 0, 0])
            for index, number in enumerate(added):
                count[index] += number
    return {
        group: AdapterCounts(registered=registered, loaded=loaded, failed=failed)
        for group, (registered, loaded, failed) in counts.items()
    }


def catalog_adapter(adapter: AdapterObject, context: AdapterContext) -> AdapterEntry:
    resource = adapter.resource
    source = resource.spec.source
    secret = source.credentials_secret_ref
    pool = context.groups[resource.group]
    volume = _volume_of(resource, pool.resource)
    verify = resource.spec.verify
    return AdapterEntry(
        name=resource.object_name,
        generation=adapter.generation,
        group=resource.group,
        model_name=resource.model_name,
        source=adapter.source,
        expected_digest=source.digest or "",
        max_class=resource.spec.priority,
        min_replicas=_pinned(resource, pool),
        max_replicas=resource.spec.placement.max_replicas,
        content_stamp=adapter.content_stamp,
        source_revision=source.revision or "",
        credentials=f"{resource.metadata.namespace}/{secret.name}" if secret else "",
        max_bytes=pool.resource.spec.admission.max_adapter_size_bytes or 0,
        volume=adapter.volume,
        folder=volume.folder_of(resource.metadata.namespace) if volume is not None else "",
        share=tuple(sorted(set(resource.spec.share))),
        limits=limits if (limits := resource.spec.limits) and limits.limited else None,
        chat=formats_of(resource.spec.chat),
        requires_record=verify is not None and verify.require == "Record",
        refuses_mismatch=verify is not None and verify.on_failure == "Refuse",
    )


def _pinned(adapter: LoRAAdapter, pool: PoolObject | None) -> int:
    """On how many runners the adapter stays resident: as many as it asks for and its namespace is granted."""
    asked = adapter.spec.placement.min_replicas
    return asked if pool is None else min(asked, _grant(adapter, pool).pinned_replicas)


def _grant(adapter: LoRAAdapter, pool: PoolObject) -> TenantGrant:
    return pool.resource.spec.granted.grant_to(adapter.metadata.namespace)


def _volume_of(adapter: LoRAAdapter, pool: ServingPool) -> AdapterVolume | None:
    """The pool's entry for the claim that the adapter names."""
    claim = adapter.spec.source.persistent_volume_claim
    return next((one for one in pool.spec.adapter_volumes if claim and one.claim_name == claim.claim_name), None)


def _accepted(view: View, adapter: AdapterObject, context: AdapterContext) -> ConditionResult:
    resource = adapter.resource
    pool = context.groups.get(resource.group)
    namespace = resource.metadata.namespace
    labels = dict(view.namespaces.get(namespace, {}))

    def admits(pool: ServingPool) -> bool:
        return pool.spec.allowed_namespaces.admits(namespace, own=pool.metadata.namespace, labels=labels)

    unserved = context.unserved.get(resource.group)
    declared = pool.resource if pool is not None else unserved[0] if unserved is not None else None
    if declared is None:
        # Suggest only pools that this tenant may use: a typo must not reveal others.
        admitted = {group.name: group for group, other in context.groups.items() if admits(other.resource)}
        nearest = difflib.get_close_matches(resource.group.name, admitted, n=1)
        hint = f"did you mean {admitted[nearest[0]]}?" if nearest else "check spec.poolRef"
        return no("Accepted", "PoolNotFound", f"there is no pool {resource.group}; {hint}")
    if not admits(declared):
        return no(
            "Accepted",
            "NamespaceNotAllowed",
            f"pool {resource.group} does not admit namespace {namespace}; ask the platform team to add the "
            "namespace to the pool's spec.allowedNamespaces",
        )
    if pool is None:
        why = context.unserved[resource.group][1].message
        return no("Accepted", "PoolNotAccepted", f"nobody serves pool {resource.group}; ask the platform team: {why}")
    claim = resource.spec.base_model
    if claim is not None and claim != pool.resource.served_name:
        return no(
            "Accepted",
            "BaseModelMismatch",
            f"spec.baseModel is {claim}, but pool {resource.group} serves {pool.resource.served_name}; choose a pool "
            "with that model, or create the adapter again with another spec.baseModel",
        )
    denied = _against_policy(view, adapter, pool, labels)
    if denied:
        return no("Accepted", "PolicyDenied", denied)
    holder = context.names[namespace, resource.group, resource.model_name]
    if holder != resource.object_name:
        return no(
            "Accepted",
            "NameConflict",
            f"{holder} already has the model name {resource.model_name}; set another spec.modelName",
        )
    if resource.object_name in context.over_quota:
        return no("Accepted", "QuotaExceeded", context.over_quota[resource.object_name])
    return yes("Accepted", "Valid", _lowered(resource, pool))


def _lowered(adapter: LoRAAdapter, pool: PoolObject) -> str:
    """What the pool grants less of than the adapter asks for; empty: it grants all."""
    asked, granted = adapter.spec.priority, _grant(adapter, pool).max_priority
    if PRIORITIES.index(asked) >= PRIORITIES.index(granted):
        return ""
    return (
        f"spec.priority is {asked}, but pool {adapter.group} grants namespace {adapter.metadata.namespace} at most "
        f"{granted} (maxPriority in its spec.tenants)"
    )


def _against_policy(view: View, adapter: AdapterObject, pool: PoolObject, labels: dict[str, str]) -> str:
    """Why the pool refuses the adapter's source; empty if it accepts it."""
    resource, spec = adapter.resource, pool.resource.spec
    source, group = resource.spec.source, resource.group
    if source.scheme in view.refused_schemes:
        return f"the pool's runners cannot read {source.scheme}:// sources; {view.refused_schemes[source.scheme]}"
    allowed = spec.admission.allowed_schemes
    if source.address is not None and allowed is not None and source.scheme not in allowed:
        known = " or ".join(f"{scheme}://" for scheme in allowed) or "a volume of the pool's spec.adapterVolumes"
        return f"pool {group} takes no adapters from {source.scheme}://; use {known}"
    if spec.admission.require_digest and source.digest is None:
        return f"pool {group} takes only adapters with a digest; set spec.source.digest"
    claim = source.persistent_volume_claim
    if claim is None:
        return ""
    own, namespace = pool.resource.metadata.namespace, resource.metadata.namespace
    volume = _volume_of(resource, pool.resource)
    # The same message if the volume does not exist: tenants must not learn who may use which volume.
    if volume is None or not volume.allowed_namespaces.admits(namespace, own=own, labels=labels):
        return (
            f"pool {group} mounts no volume {claim.claim_name} for namespace {namespace}; ask the platform team to add "
            "the volume to the pool's spec.adapterVolumes"
        )
    folder = volume.folder_of(namespace)
    if PurePosixPath(claim.path).is_relative_to(folder):
        return ""
    return (
        f"pool {group} reads adapters of namespace {namespace} only from the folder {folder} of volume "
        f"{claim.claim_name}; move the adapter there, or ask the platform team to change the pool's spec.adapterVolumes"
    )


def _artifact(known: AdapterReport, *, accepted: ConditionResult, has_runner: bool) -> ConditionResult:
    reason = _failure(known)
    if reason and reason not in _CERTIFYING:
        return no("ArtifactReady", reason, _failure_message(known))
    if reason:
        return yes("ArtifactReady", "Verified")
    if known.serving_digest:
        return yes("ArtifactReady", "Verified", known.serving_digest)
    if not accepted.holds:
        return unknown("ArtifactReady", accepted.reason, "the adapter is not fetched, because Accepted is False")
    if not has_runner:
        return unknown("ArtifactReady", "WaitingForRunner", "no runner is ready to fetch and check the adapter")
    return unknown("ArtifactReady", "Checking", "a runner is fetching and checking the adapter")


def _certified(known: AdapterReport, artifact: ConditionResult) -> ConditionResult:
    reason = _failure(known)
    if reason in _CERTIFYING:
        return no("Certified", reason, _failure_message(known))
    if reason:
        return unknown("Certified", reason, "the adapter is not checked, because ArtifactReady is False")
    if known.serving_digest:
        return yes("Certified", "FitsBaseModel", "; ".join(known.artifact.warnings) if known.artifact else "")
    return unknown("Certified", artifact.reason, artifact.message)


def _failure(known: AdapterReport) -> str:
    """The reason why the newest revision failed; empty if it did not."""
    if not known.failure_code:
        return ""
    return known.failure_reason or _FAILURE_REASONS.get(known.failure_code, "FetchFailed")


def _failure_message(known: AdapterReport) -> str:
    if known.serving_digest:
        return f"{known.failure_message.rstrip('.')}. The previous version keeps serving."
    return known.failure_message


def _loaded(
    adapter: AdapterObject,
    known: AdapterReport,
    pool: PoolObject | None,
    *,
    accepted: ConditionResult,
    ready_runners: int,
) -> ConditionResult:
    spec = adapter.resource.spec
    if spec.suspend:
        return no("Loaded", "Suspended", "spec.suspend is true; set it to false to load the adapter")
    if not accepted.holds:
        return no("Loaded", accepted.reason, "the adapter is not loaded, because Accepted is False")
    if not ready_runners:
        return unknown("Loaded", "WaitingForRunner", f"no runner of pool {adapter.resource.group} is ready")
    asked, granted = spec.placement.min_replicas, _pinned(adapter.resource, pool)
    if asked > granted:
        return no(
            "Loaded",
            "NotGranted",
            f"spec.placement.minReplicas asks for {counted(asked, 'runner')}, but pool {adapter.resource.group} grants "
            f"namespace {adapter.resource.metadata.namespace} {granted} for each adapter; lower "
            "spec.placement.minReplicas, or ask the platform team to raise pinnedReplicas in the pool's spec.tenants",
        )
    on_device, wanted = _runners_holding(known), granted
    if on_device < wanted and ready_runners < wanted:
        return no(
            "Loaded",
            "NoCapacity",
            f"spec.placement.minReplicas asks for {wanted} runners, but pool {adapter.resource.group} has only "
            f"{ready_runners} ready; raise the pool's replicas, or lower spec.placement.minReplicas",
        )
    if on_device < wanted:
        return no("Loaded", "Loading", f"the adapter is in device memory on {on_device} of {counted(wanted, 'runner')}")
    if on_device:
        return yes("Loaded", "Resident", f"the adapter is in device memory on {counted(on_device, 'runner')}")
    return yes("Loaded", "OnDemand", "the adapter is loaded at its next request")


def _ready(
    adapter: AdapterObject,
    known: AdapterReport,
    accepted: ConditionResult,
    artifact: ConditionResult,
    certified: ConditionResult,
    *,
    has_runner: bool,
    asleep: bool,
) -> ConditionResult:
    """Whether a request would be served now, else the first reason why not. True also for an adapter that is not served
    because somebody wants it so: tools that wait for an object would wait for ever otherwise."""
    if adapter.resource.spec.suspend:
        return yes("Ready", "Suspended", "spec.suspend is true; set it to false to serve the adapter")
    if not accepted.holds:
        return no("Ready", accepted.reason, accepted.message)
    for step in (artifact, certified):
        if not known.serving_digest and step.status == "False":
            return no("Ready", step.reason, step.message)
    if asleep:
        return yes(
            "Ready",
            "ScaledToZero",
            f"pool {adapter.resource.group} has no runner and needs none now; the adapter is served once it has one",
        )
    if not has_runner:
        return unknown("Ready", "WaitingForRunner", f"no runner of pool {adapter.resource.group} is ready")
    if not known.serving_digest:
        return unknown("Ready", artifact.reason, artifact.message)
    return yes("Ready", "Serving")


def _progress(
    adapter: AdapterObject,
    known: AdapterReport,
    accepted: ConditionResult,
    checks: Sequence[ConditionResult],
    loaded: ConditionResult,
    *,
    asleep: bool,
) -> Iterable[ConditionResult]:
    if adapter.resource.spec.suspend:
        return progress()
    if not accepted.holds:
        # The pool may be applied after the adapter; that is not an error.
        return progress(working=accepted) if accepted.reason == "PoolNotFound" else progress(stalled=accepted)
    for step in checks:
        if step.status == "False" and not (known.failure_passes and step.reason in _ELSEWHERE):
            return progress(stalled=step)
    if loaded.reason == "NotGranted":
        return progress(stalled=loaded)
    for step in () if asleep else (*checks, loaded):
        if not step.holds:
            return progress(working=step)
    return progress()
