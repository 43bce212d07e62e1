"""One round: from the API server's objects and the scheduler's reports to everything that should be written.

Pure, except for results of earlier rounds: they save work, and bound how often a pool starts a rollout.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

from motet.domain import ObjectName
from motet.resources.status import Condition
from motet.runner_info import BatchCap
from motet.sources import ADAPTER_SOURCES, FOLDER, prefixes
from motet_operator.cluster.cache import ObjectKey, Snapshot
from motet_operator.cluster.deployments import PlatformTemplate, budget, deployment, pod_digest
from motet_operator.cluster.kinds import (
    ADAPTERS,
    BUDGETS,
    DEPLOYMENTS,
    NAMESPACES,
    PODS,
    POOLS,
    Kind,
    Object,
    key_of,
    uid_of,
    version_of,
)
from motet_operator.cluster.object_parser import (
    DELETION_COST,
    DRAINING,
    LEAVING_COST,
    ObjectParser,
    Unreadable,
    annotations_of,
    conditions_of,
    drain_of_terminating_pod,
    has_failed,
    has_finished,
    is_live,
    is_runner,
    pool_of,
    read_adapter,
    read_failed,
    read_instance,
    read_labels,
    read_pool,
    read_runner_set,
    readable,
    renewed_adapter,
    renewed_pool,
    revision_of,
    with_leaving_node,
    with_scheduler_state,
)
from motet_operator.cluster.obstacles import Obstacle, Obstacles, PartialKnowledge
from motet_operator.cluster.residency import SampledResidency
from motet_operator.cluster.status_documents import (
    adapter_status,
    pool_status,
    unaccepted_status,
    unseen_status,
)
from motet_operator.cluster.writes import (
    DeploymentDeletion,
    OwnedObjectWrite,
    PodAnnotationWrite,
    PodDeletion,
    ScaleWrite,
    StatusWrite,
    Write,
    WriteKey,
    covers,
    made_by_us,
    scaled_by_us,
)
from motet_operator.earlier_status import pool_with_earlier_reports, unheard_adapters, with_earlier_checks
from motet_operator.reconcile import (
    AdapterObject,
    AdapterReport,
    AdapterStatus,
    Event,
    FailedRunner,
    Plan,
    PoolObject,
    ResultCache,
    RolloutLimiter,
    RunnerDrain,
    RunnerSet,
    ScalingAdvice,
    View,
    reconcile,
)
from motet_operator.sync import UnhealthyRunner

NO_FILES = {
    FOLDER.scheme: "name a claim of the pool's adapterVolumes under persistentVolumeClaim, or use "
    + prefixes(one for one in ADAPTER_SOURCES if one.network)
}
"""Runners may be on any node, so a path on one machine means nothing."""

NO_OBSTACLES = Obstacles()

Documents = dict[tuple[Kind, ObjectName], Object]
"""Statuses by object."""

VANISHED = "ghost"
"""Set on an object whose kind is no longer served: it stays in use, but its status cannot be written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerReports:
    """What the scheduler last reported."""

    known: Mapping[ObjectName, AdapterReport] = field(default_factory=dict)
    drained: Collection[str] = ()
    attached: Collection[str] = ()
    unhealthy: Mapping[str, UnhealthyRunner] = field(default_factory=dict)
    advice: Mapping[ObjectName, ScalingAdvice] = field(default_factory=dict)
    requests: Mapping[str, int] = field(default_factory=dict)
    slots: Mapping[str, int] = field(default_factory=dict)
    batch_caps: Mapping[str, BatchCap] = field(default_factory=dict)
    reported_groups: Collection[ObjectName] | None = None
    """The groups of which it has reported everything: of the others, adapters that it has not named may be served.
    None: all groups."""

    advice_is_awaited: bool = False
    """Advice that has not come yet may still come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    plan: Plan
    drains: Collection[RunnerDrain]
    """Runners that take no work: pods with a stored drain, and pods that are being deleted."""

    writes: Mapping[WriteKey, Write]
    due: float | None
    """Seconds until the next round is due without any change."""


class Decider:
    def __init__(
        self,
        pool_namespaces: Collection[str],
        unhealthy_grace: timedelta,
        rolling_pools: int | None = None,
        rollout_pause: timedelta = timedelta(0),
        *,
        replaced_at_once: int = 1,
        residency_interval: timedelta = timedelta(0),
    ) -> None:
        self._leaving: frozenset[str] = frozenset()
        self._pools = ObjectParser(
            POOLS, lambda it: read_pool(it, prepared=lambda name: name in pool_namespaces), renewed_pool
        )
        self._adapters = ObjectParser(ADAPTERS, read_adapter, renewed_adapter)
        self._labels = ObjectParser(NAMESPACES, read_labels)
        self._instances = ObjectParser(PODS, lambda it: read_instance(it, unhealthy_grace))
        self._failed = ObjectParser(PODS, read_failed)
        self._sets = ObjectParser(DEPLOYMENTS, read_runner_set)
        self._residency = SampledResidency(residency_interval)
        self._result_cache = ResultCache()
        self._limiter = RolloutLimiter(rollout_pause)
        self._documents: dict[ObjectName, tuple[AdapterStatus, Object]] = {}
        self._digested: dict[ObjectName, tuple[PoolObject, PlatformTemplate, PoolObject]] = {}
        self._unhealthy_grace = unhealthy_grace
        self._rolling_pools = rolling_pools
        self._replaced_at_once = replaced_at_once

    def decide(
        self,
        snapshot: Snapshot,
        reports: SchedulerReports,
        platform: PlatformTemplate,
        now: datetime,
        leaving_nodes: Collection[str] = (),
        *,
        obstacles: Obstacles = NO_OBSTACLES,
    ) -> Decision:
        """`leaving_nodes` are the names of nodes that are about to be emptied."""
        pools = self._pools(_declared(snapshot[POOLS]))
        adapters = self._adapters(_declared(snapshot[ADAPTERS]))
        snapshot = {**snapshot, **_of_ours(snapshot)}
        pods = {key: pod for key, pod in snapshot[PODS].items() if is_live(pod)}
        view = View(
            now=now,
            pools=tuple(self._with_digests(readable(pools), platform)),
            adapters=tuple(readable(adapters)),
            namespaces=dict(self._namespaces(snapshot)),
            namespace_uids={name: uid_of(it) for (_, name), it in snapshot[NAMESPACES].items()},
            runner_sets=tuple(readable(self._sets(snapshot[DEPLOYMENTS]))),
            instances=tuple(
                with_scheduler_state(
                    with_leaving_node(one, leaving_nodes),
                    reports.drained,
                    reports.attached,
                    reports.unhealthy.get(one.name),
                    self._unhealthy_grace,
                )
                for one in readable(self._instances(pods))
            ),
            failed=_last_of_each_pool(
                readable(self._failed({key: it for key, it in snapshot[PODS].items() if has_failed(it)}))
            ),
            adapter_reports=self._residency.sampled(reports.known, readable(adapters), now),
            scaling_advice=reports.advice,
            requests=reports.requests,
            leaving=self._leaving,
            slots=reports.slots,
            batch_caps=reports.batch_caps,
            rolling_pools=self._rolling_pools,
            replaced_at_once=self._replaced_at_once,
            refused_schemes=NO_FILES,
        )
        knowledge = PartialKnowledge.about(obstacles, view, pools, adapters, snapshot)
        plan = knowledge.applied_to(reconcile(view, self._result_cache, self._limiter), view, snapshot)
        self._leaving = frozenset(drain.instance for drain in plan.drains)
        documents = {
            **_pool_documents(plan, view, snapshot, knowledge, reports),
            **self._adapter_documents(plan, view, snapshot, knowledge, reports),
        }
        writes: list[Write] = [
            *_statuses(documents, [*_unreadable(POOLS, pools), *_unreadable(ADAPTERS, adapters)], plan, snapshot, now),
            *_owned_writes(plan, view, snapshot, knowledge, pods, platform),
            *_budgets(plan, view, snapshot, platform),
        ]
        return Decision(
            plan=plan,
            drains=tuple(_drains(plan, snapshot)),
            writes={write.key: write for write in writes},
            due=max(0.05, (plan.due - now).total_seconds()) if plan.due is not None else None,
        )

    def _with_digests(self, pools: Iterable[PoolObject], platform: PlatformTemplate) -> Iterable[PoolObject]:
        """Computed again only for a pool that has changed since the last round."""
        before, self._digested = self._digested, {}
        for pool in pools:
            name = pool.resource.object_name
            known = before.get(name)
            if known is None or known[0] is not pool or known[1] is not platform:
                known = (pool, platform, _on(pool, platform))
            self._digested[name] = known
            yield known[2]

    def _namespaces(self, snapshot: Snapshot) -> Iterable[tuple[str, Mapping[str, str]]]:
        for (_, name), labels in self._labels(snapshot[NAMESPACES]).items():
            if not isinstance(labels, Unreadable):
                yield name, labels

    def _adapter_documents(
        self, plan: Plan, view: View, snapshot: Snapshot, knowledge: PartialKnowledge, reports: SchedulerReports
    ) -> Documents:
        """Only for objects of which enough is known."""
        before, self._documents = self._documents, {}
        unheard = unheard_adapters(view, plan, reports)
        found: Documents = {}
        for adapter, status in zip(view.adapters, plan.adapters, strict=True):
            known = before.get(status.name)
            if known is None or known[0] is not status:
                known = (status, adapter_status(status))
            self._documents[status.name] = known
            if status.name in knowledge.unconfirmed_adapters:
                continue
            hidden = adapter.resource.group in knowledge.unseen_groups and _has_reason(
                status.conditions, "Ready", "WaitingForRunner"
            )
            it = snapshot[ADAPTERS][status.name.namespace, status.name.name]
            if (hidden or unheard.get(status.name)) and conditions_of(it):
                continue
            checked = with_earlier_checks(known[1], it.get("status") or {}) if status.name in unheard else known[1]
            found[ADAPTERS, status.name] = checked
        return found


def _of_ours(snapshot: Snapshot) -> Snapshot:
    """Only the runners and Deployments that the operator made. Objects of others with our labels are ignored."""
    return {
        DEPLOYMENTS: {key: it for key, it in snapshot[DEPLOYMENTS].items() if made_by_us(it)},
        PODS: {key: pod for key, pod in snapshot[PODS].items() if is_runner(pod)},
    }


def _last_of_each_pool(failed: Iterable[FailedRunner]) -> tuple[FailedRunner, ...]:
    """A node that refuses pods may leave thousands of them."""
    return tuple({one.pool: one for one in sorted(failed, key=lambda one: one.at)}.values())


def _declared(objects: Mapping[ObjectKey, Object]) -> Mapping[ObjectKey, Object]:
    """Without objects that are being deleted."""
    return {key: it for key, it in objects.items() if "deletionTimestamp" not in it["metadata"]}


def _has_reason(conditions: Iterable[Condition], type_: str, reason: str) -> bool:
    return any(one.type == type_ and one.reason == reason for one in conditions)


def _pool_documents(
    plan: Plan, view: View, snapshot: Snapshot, knowledge: PartialKnowledge, reports: SchedulerReports
) -> Documents:
    """Only for objects of which enough is known."""
    found: Documents = {}
    for declared, pool in zip(view.pools, plan.pools, strict=True):
        name, it = pool.name, snapshot[POOLS][pool.name.namespace, pool.name.name]
        if not knowledge.leaves_alone(name):
            document = pool_status(pool, it)
            found[POOLS, name] = pool_with_earlier_reports(document, it.get("status") or {}, declared, reports)
        elif (why := knowledge.unseen_reason(name)) is not None:
            found[POOLS, name] = unseen_status(why, it, view.now)
    return found


def _unreadable(
    kind: Kind, found: Mapping[ObjectKey, PoolObject | AdapterObject | Unreadable[Any]]
) -> Iterable[tuple[Kind, ObjectName, str]]:
    return ((kind, ObjectName(*key), one.message) for key, one in found.items() if isinstance(one, Unreadable))


def _statuses(
    documents: Documents,
    unreadable: Iterable[tuple[Kind, ObjectName, str]],
    plan: Plan,
    snapshot: Snapshot,
    now: datetime,
) -> Iterable[Write]:
    """Changed statuses, each with its events."""
    events: dict[tuple[str, ObjectName], list[Event]] = defaultdict(list)
    for event in plan.events:
        events[event.kind, event.name].append(event)
    for kind, name, message in unreadable:
        it = snapshot[kind][name.namespace, name.name]
        status: Object = documents.get((kind, name), it.get("status") or {})
        documents[kind, name] = unaccepted_status(Obstacle("Unreadable", message), it, status, now)
        news = not _has_reason(conditions_of(it), "Ready", "Unreadable")
        event = Event(kind=kind.name, name=name, type="Warning", reason="Unreadable", message=message)
        events[kind.name, name] = [event] if news else []
    for (kind, name), document in documents.items():
        it = snapshot[kind][name.namespace, name.name]
        before = it.get("status") or {}
        if VANISHED in it or before == document:
            continue
        # A new object needs no event that it is new, unless it is a warning.
        written_events = (one for one in events[kind.name, name] if before.get("conditions") or one.type == "Warning")
        yield StatusWrite(kind, key_of(it), uid_of(it), document, tuple(written_events))


# ------------------------------------------------------------------------------------------------------------- runners


def _owned_writes(  # noqa: PLR0917
    plan: Plan,
    view: View,
    snapshot: Snapshot,
    knowledge: PartialKnowledge,
    pods: Mapping[ObjectKey, Object],
    platform: PlatformTemplate,
) -> Iterable[Write]:
    members: dict[tuple[ObjectName, str], dict[str, Object]] = defaultdict(dict)
    pods = {key: pod for key, pod in pods.items() if not knowledge.leaves_alone(pool_of(pod))}
    for pod in pods.values():
        members[pool_of(pod), revision_of(pod)][pod["metadata"]["name"]] = pod
    existing = {
        (owner, revision_of(one)): one
        for one in snapshot[DEPLOYMENTS].values()
        if not knowledge.leaves_alone(owner := pool_of(one))
    }
    newest = {pool.name: pool.revision for pool in plan.pools}
    pools = {pool.resource.object_name: pool.resource for pool in view.pools}
    by_name = {pod["metadata"]["name"]: pod for pod in pods.values()}

    vanished = {ObjectName(*key) for key, it in snapshot[POOLS].items() if VANISHED in it}

    yield from _pod_annotations(plan, pods.values())
    wanted = set()
    for each in plan.runner_sets:
        wanted.add((each.pool, each.revision))
        if each.pool in vanished:
            continue  # an object without an owner would be garbage-collected at once
        found = existing.get((each.pool, each.revision))
        if each.template is not None and each.revision == newest.get(each.pool) and each.pool in pools:
            uid = uid_of(snapshot[POOLS][each.pool.namespace, each.pool.name])
            document = deployment(each, each.template, pools[each.pool], uid, platform)
            if found is None or not covers(found, document):
                # Without `replicas` there would be one pod until the scale is written.
                yield OwnedObjectWrite(DEPLOYMENTS, document, {"replicas": each.replicas})
        if found is not None:
            yield from _resize(each, found, members[each.pool, each.revision])
    # Failed pods count as gone: they stay until their Deployment goes.
    occupied = {(pool_of(pod), revision_of(pod)) for pod in snapshot[PODS].values() if not has_finished(pod)}
    for (pool, revision), old in existing.items():
        # An old revision without pods is not needed. The Deployments of a deleted pool are deleted with it.
        if (pool, revision) not in wanted | occupied and pool in newest:
            yield DeploymentDeletion(key_of(old), uid_of(old), pool.name, revision)
    for replacement in plan.replacements:
        if (unhealthy := by_name.get(replacement.instance)) is not None:
            yield PodDeletion(key_of(unhealthy), uid_of(unhealthy), version_of(unhealthy), replacement.why)


def _on(pool: PoolObject, platform: PlatformTemplate) -> PoolObject:
    installed = platform.image_for(pool.resource.spec.engine) is not None
    return replace(pool, pod_digest=pod_digest(pool, platform), backend_installed=installed)


def _budgets(plan: Plan, view: View, snapshot: Snapshot, platform: PlatformTemplate) -> Iterable[Write]:
    """A budget for each pool that has or may have runners. Runners of a refused pool get no replacement that an
    eviction could wait for."""
    run = {each.pool for each in plan.runner_sets}
    wanted = {
        status.name: status.replicas if _has_reason(status.conditions, "Accepted", "Valid") else 0
        for status in plan.pools
    }
    for pool in view.pools:
        name = pool.resource.object_name
        key = (name.namespace, name.name)
        owner = snapshot[POOLS][key]
        if name not in run or VANISHED in owner:
            continue
        document = budget(pool.resource, uid_of(owner), wanted[name], platform)
        found = snapshot[BUDGETS].get(key)
        if found is None or not covers(found, document):
            yield OwnedObjectWrite(BUDGETS, document)


def _resize(each: RunnerSet, found: Object, members: Mapping[str, Object]) -> Iterable[Write]:
    """Scales up at once. Scales down once exactly the leaving pods are annotated, so that Kubernetes removes these."""
    spec, key, uid = found["spec"], key_of(found), uid_of(found)
    leaving = [members[name] for name in each.leaving if name in members]
    sure = all((DELETION_COST in annotations_of(pod)) == (name in each.leaving) for name, pod in members.items())
    now = spec.get("replicas", 1)
    if each.replicas > now or (each.replicas < now and sure) or (now == each.replicas and not scaled_by_us(found)):
        yield ScaleWrite(key, uid, each.replicas)
        return
    status = found.get("status") or {}
    settled = status.get("observedGeneration") == found["metadata"].get("generation")
    if now == each.replicas and settled and status.get("replicas", 0) == now:
        # The number is right but they still exist: another pod was removed instead, or a replacement is wanted.
        for pod in leaving:
            yield PodDeletion(key_of(pod), uid_of(pod), version_of(pod), "its drain is over")


def _pod_annotations(plan: Plan, pods: Iterable[Object]) -> Iterable[Write]:
    """The annotations that each pod should have now, in every round, so that failed writes are repeated."""
    leaving, until = plan.leaving, plan.deadlines
    for pod in pods:
        name = pod["metadata"]["name"]
        marks = {DRAINING: until[name].isoformat()} if name in until else {}
        if name in leaving:
            marks[DELETION_COST] = LEAVING_COST
        if marks != annotations_of(pod):
            yield PodAnnotationWrite(key_of(pod), uid_of(pod), marks)


def _drains(plan: Plan, snapshot: Snapshot) -> Iterable[RunnerDrain]:
    yield from (drain for drain in plan.drains if drain.begun)
    yield from (drain for pod in snapshot[PODS].values() if (drain := drain_of_terminating_pod(pod)) is not None)
