"""Decides how many runners of which revision a pool has, and in which order they start and leave.

A changed template is a new revision. Its runners start one at a time beside the old ones (surge). An old runner drains
once a new one is ready, so that the pool never serves with fewer runners than it should. An old runner counts until its
drain is over; then it leaves and its successor starts at the same time. Apart from leaving runners there are never more
than the update strategy allows.
Runners on nodes that are about to be emptied are replaced in the same way.
Each round decides again which runners drain. A draining runner takes work again if it is needed: because more replicas
are wanted, its node takes pods again, the template is changed back, or its successor fails.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from motet.domain import ObjectName
from motet.resources.chat import formats_of
from motet_operator.reconcile.conditions import condition_of, no
from motet_operator.reconcile.plan import PoolEntry, RunnerDrain, RunnerReplacement, RunnerSet
from motet_operator.reconcile.rollout_order import RolloutTarget
from motet_operator.reconcile.scaling import CONFLICT, Scaling, decide_replicas
from motet_operator.reconcile.seniority import by_seniority
from motet_operator.reconcile.view import PoolObject, RunnerInstance, RunnerTemplate, View


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """What happens to one pool's runners."""

    runner_sets: tuple[RunnerSet, ...]
    drains: tuple[RunnerDrain, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRefusal:
    """Why a pool may not have runners."""

    reason: str
    message: str
    keeps_runners: bool = False
    """It starts none, but those that it has go on serving."""


def refusals(pools: Sequence[PoolObject]) -> dict[ObjectName, PoolRefusal]:
    """Pools that may not have runners: the operator has no rights in their namespace or no image of their engine, or an
    older pool of their group serves another base model."""
    first: dict[ObjectName, PoolObject] = {}
    found: dict[ObjectName, PoolRefusal] = {}
    for pool in by_seniority(pools):
        name = pool.resource.object_name
        if not pool.namespace_prepared:
            found[name] = PoolRefusal(
                reason="NamespaceNotPrepared",
                message=f"the operator may not run pools in namespace {name.namespace}; add the namespace to the "
                "chart's value pools.namespaces and upgrade the release",
            )
            continue
        leader = first.setdefault(pool.resource.group, pool)
        if _model_of(pool) != _model_of(leader):
            found[name] = PoolRefusal(
                reason="ModelMismatch",
                message=f"all pools of a group have the same base model, and pool {leader.resource.object_name} "
                f"already serves {leader.resource.served_name} in group {pool.resource.group}; "
                "use the same spec.model, or create the pool again with another spec.group",
                keeps_runners=True,
            )
        elif not pool.backend_installed:
            backend = pool.resource.spec.engine.backend
            found[name] = PoolRefusal(
                reason="BackendNotInstalled",
                message=f"spec.engine.backend is {backend}, and this release names no image for it; build one, set the "
                f"chart's value runner.{backend}.image.repository and upgrade the release",
                keeps_runners=True,
            )
    return found


def pools_keeping_runners(view: View, refused: Mapping[ObjectName, PoolRefusal]) -> set[ObjectName]:
    """Refused pools whose runners go on serving"""
    return {one.pool for one in view.instances if one.pool in refused and refused[one.pool].keeps_runners}


def _held(view: View, pool: PoolObject) -> int | None:
    """How many runners the pool keeps until there is advice; None for a new pool. The status is written last, so
    after a change of the operator it may be the number of an earlier decision: runners that exist count, too. While
    one revision replaces another there may be more for a moment, so only those of one revision do."""
    name, advice = pool.resource.object_name, view.scaling_advice.get(pool.resource.object_name)
    sets = {one.revision: one.replicas for one in view.runner_sets if one.pool == name}
    if not sets or (advice is not None and not advice.stale):
        return pool.wanted
    leaving = Counter(one.revision for one in view.instances if one.pool == name and one.draining_until is not None)
    there = max(replicas - leaving[revision] for revision, replicas in sets.items())
    return max(there, pool.resource.spec.replicas if pool.wanted is None else pool.wanted)


def _model_of(pool: PoolObject) -> tuple[str, str, str | None, str | None]:
    model = pool.resource.spec.model
    return pool.model_uri, pool.resource.served_name, model.digest, model.revision


def scaling_of(view: View, pool: PoolObject, target: RolloutTarget) -> Scaling:
    name = pool.resource.object_name
    if view.runners_override is not None:
        return Scaling(
            replicas=view.runners_override,
            condition=no(
                "ScalingActive", "ScalingDisabled", f"--runners {view.runners_override} sets the number of runners"
            ),
        )
    found = decide_replicas(
        pool.resource,
        current=_held(view, pool),
        advice=view.scaling_advice.get(name),
        rolling_out=any(one.pool == name and one.revision != target.revision for one in view.instances),
        writers=pool.scale_writers,
    )
    before = condition_of(pool.conditions, "ScalingActive")
    now = found.condition
    if before is None or (before.status, before.reason, pool.wanted) != (now.status, now.reason, found.replicas):
        return found
    if now.reason == CONFLICT:  # its message names writers, who come and go rarely
        return found
    # The numbers in the message change with every request, and each change would cost a write. Keep the message of the
    # decision.
    return Scaling(replicas=found.replicas, condition=replace(now, message=before.message))


def roll_out(view: View, pool: PoolObject, target: RolloutTarget, wanted: int) -> Rollout:
    name = pool.resource.object_name
    revision = target.revision
    strategy = pool.resource.spec.update_strategy
    drain_seconds = float(pool.resource.spec.drain_timeout_seconds)
    members = [instance for instance in view.instances if instance.pool == name]
    new = [instance for instance in members if instance.revision == revision]
    old = [instance for instance in members if instance.revision != revision]

    settled = [instance for instance in new if not instance.node_is_leaving]
    others = [instance for instance in members if instance not in settled]
    surplus = _surplus(view, wanted, settled)
    # Other runners leave for ready ones. A rollout may also leave out `maxUnavailable`. A cordoned node is no reason to
    # have fewer runners: perhaps no other node has capacity. A drain of the node evicts as many as the budget allows.
    kept = [instance for instance in settled if instance not in surplus]
    keep = wanted - sum(instance.ready for instance in kept)
    going = _surplus(view, keep - strategy.max_unavailable if old else keep, others)
    if old and all(_may_leave(view, instance, going) for instance in old):
        # They leave now, and the rollout is over: nothing else drains for it, only to be taken back in the next round.
        going = [*old, *_surplus(view, keep, [instance for instance in others if instance not in old])]
    surplus += going

    there = [instance for instance in members if not _may_leave(view, instance, surplus)]
    if not any(instance in old for instance in there):
        # Only a rollout waits for draining runners. A runner that leaves a cordoned node does not take a place that
        # another runner could have.
        there = [instance for instance in members if instance not in surplus]
    surge = strategy.max_surge if old or others else 0
    add = max(0, min(wanted - len(kept), wanted + surge - len(there)))

    sets = [
        _runner_set(
            view, name, revision, drain_seconds, members=new, surplus=surplus, template=target.template, add=add
        ),
        *_only_scaled(view, name, drain_seconds, members=old, surplus=surplus),
    ]
    return Rollout(runner_sets=tuple(sets), drains=tuple(_drains(view, members, surplus, drain_seconds)))


def only_keep(view: View, name: ObjectName, keep: int) -> Rollout:
    """At most `keep` of the pool's runners stay, and none is started: the pool was refused, or deleted."""
    members = [instance for instance in view.instances if instance.pool == name]
    surplus = _surplus(view, keep, members)
    drain_seconds = max((each.drain_seconds for each in view.runner_sets if each.pool == name), default=0.0)
    sets = _only_scaled(view, name, drain_seconds, members=members, surplus=surplus)
    return Rollout(runner_sets=tuple(sets), drains=tuple(_drains(view, members, surplus, drain_seconds)))


def _surplus(view: View, keep: int, instances: Sequence[RunnerInstance]) -> list[RunnerInstance]:
    """The instances that leave if `keep` of them stay."""
    return _removal_order(view, instances)[: max(0, len(instances) - max(0, keep))]


def _removal_order(view: View, instances: Iterable[RunnerInstance]) -> list[RunnerInstance]:
    """First those that cannot serve, then those whose drain has begun, then those that have to leave their node, then
    those with the fewest requests, then the newest. Of whom nothing is known, they may have many."""
    most = max(view.requests.values(), default=0)

    def order(one: RunnerInstance) -> tuple[bool, bool, bool, int, int]:
        serves, stays = one.ready or one.attached, one.draining_until is None and one.name not in view.leaving
        return serves, stays, not one.node_is_leaving, view.requests.get(one.name, most), -one.ordinal

    return sorted(instances, key=order)


def _may_leave(view: View, instance: RunnerInstance, surplus: Sequence[RunnerInstance]) -> bool:
    if instance not in surplus:
        return False
    if instance.draining_until is None:
        return not instance.ready and not instance.attached  # serves nobody: nothing to drain
    # A draining runner is never ready, so readiness does not matter here.
    return instance.drained or view.now >= instance.draining_until


def _only_scaled(
    view: View,
    name: ObjectName,
    drain_seconds: float,
    *,
    members: Sequence[RunnerInstance],
    surplus: Sequence[RunnerInstance],
) -> list[RunnerSet]:
    """The sets of these runners. Nothing is added to them."""
    return [
        _runner_set(
            view,
            name,
            revision,
            drain_seconds,
            members=[instance for instance in members if instance.revision == revision],
            surplus=surplus,
        )
        for revision in sorted({instance.revision for instance in members})
    ]


def _runner_set(
    view: View,
    name: ObjectName,
    revision: str,
    drain_seconds: float,
    *,
    members: Sequence[RunnerInstance],
    surplus: Sequence[RunnerInstance],
    template: RunnerTemplate | None = None,
    add: int = 0,
) -> RunnerSet:
    leaving = [instance.name for instance in members if _may_leave(view, instance, surplus)]
    return RunnerSet(
        pool=name,
        revision=revision,
        template=template,
        replicas=len(members) - len(leaving) + add,
        drain_seconds=drain_seconds,
        leaving=tuple(sorted(leaving)),
    )


def _drains(
    view: View, members: Sequence[RunnerInstance], surplus: Sequence[RunnerInstance], drain_seconds: float
) -> Iterable[RunnerDrain]:
    for instance in members:
        if instance not in surplus:
            continue
        yield RunnerDrain(
            instance=instance.name,
            pool=instance.pool,
            revision=instance.revision,
            deadline=instance.draining_until or view.now + timedelta(seconds=drain_seconds),
            begun=instance.draining_until is not None,
        )


def with_drains_taken_back(view: View, drains: Collection[RunnerDrain]) -> View:
    """The view in which runners whose drain was cancelled do not drain."""
    draining = {drain.instance for drain in drains}
    return replace(
        view,
        instances=tuple(
            one
            if one.draining_until is None or one.name in draining
            else replace(one, draining_until=None, drained=False)
            for one in view.instances
        ),
    )


def replacements(view: View, *, leaving: Collection[str]) -> Iterable[RunnerReplacement]:
    """Unhealthy runners that did not recover in time. A draining one leaves at its deadline anyway.

    Of one pool at most `replaced_at_once` at a time: if all seem to hang, it is more probably the network, or whoever
    watches them.
    """
    due: dict[ObjectName, list[tuple[datetime, str, str]]] = {}
    for one in view.instances:
        if one.unhealthy and one.replace_at is not None and view.now >= one.replace_at and one.name not in leaving:
            due.setdefault(one.pool, []).append((one.replace_at, one.name, one.unhealthy))
    for pool, found in due.items():
        members = [one for one in view.instances if one.pool == pool]
        free = view.replaced_at_once - _coming(view, pool, members)
        for _, name, why in sorted(found)[: max(0, free)]:
            yield RunnerReplacement(instance=name, why=why)


def _coming(view: View, pool: ObjectName, members: Sequence[RunnerInstance]) -> int:
    """Runners of the pool that are on their way: starting, or not created yet. Nobody waits for one that fails again
    and again, takes too long or cannot be created."""
    there = Counter(one.revision for one in members)
    missing = sum(
        max(0, each.replicas - there[each.revision])
        for each in view.runner_sets
        if each.pool == pool and not each.trouble
    )
    starting = [
        one
        for one in members
        if not one.ready
        and not one.unhealthy
        and one.draining_until is None
        and one.failures <= 1
        and (one.starting_until is None or view.now < one.starting_until)
    ]
    return missing + len(starting)


def catalog_pools(
    view: View,
    refused: Mapping[ObjectName, PoolRefusal],
    scalings: Mapping[ObjectName, Scaling],
    groups: Mapping[ObjectName, PoolObject],
) -> tuple[PoolEntry, ...]:
    """`groups`: for each group the pool that decides who may use its adapters and the base model
    (`spec.allowedNamespaces`), what each gets (`spec.tenants`), and how answers are read (`spec.chat`)."""
    # With `motet up`, a tenant may have adapters and no Namespace object.
    known: dict[str, Mapping[str, str]] = {adapter.resource.metadata.namespace: {} for adapter in view.adapters}
    known |= view.namespaces
    tenants = {
        group: pool.resource.spec.allowed_namespaces.admitted(own=pool.resource.metadata.namespace, known=known)
        for group, pool in groups.items()
    }
    grants = {group: pool.resource.spec.granted.grants for group, pool in groups.items()}
    serving = pools_keeping_runners(view, refused)
    return tuple(
        PoolEntry(
            pool=pool.resource.object_name,
            group=pool.resource.group,
            served_name=pool.resource.served_name,
            model_uri=pool.model_uri,
            replicas=scalings[pool.resource.object_name].replicas,
            max_sequences=pool.resource.spec.engine.max_concurrent_sequences or 0,
            scaling="Disabled" if view.runners_override is not None else pool.resource.spec.autoscaling.mode,
            min_replicas=pool.resource.spec.autoscaling.min_replicas or 0,
            max_replicas=pool.resource.spec.autoscaling.max_replicas,
            scale_down_stabilization_seconds=pool.resource.spec.autoscaling.scale_down_stabilization_seconds,
            tenants=tenants[pool.resource.group],
            max_priorities={name: grant.max_priority for name, grant in grants[pool.resource.group].items()},
            limits={name: grant for name, grant in grants[pool.resource.group].items() if grant.limited},
            weights={name: grant.weight for name, grant in grants[pool.resource.group].items() if grant.weight},
            chat=formats_of(groups[pool.resource.group].resource.spec.chat),
            cold_wait_seconds=groups[pool.resource.group].resource.spec.admission.cold_wait_seconds or 0,
        )
        for pool in by_seniority(view.pools)  # of a group's entries the first one counts
        if pool.resource.object_name not in refused or pool.resource.object_name in serving
    )
