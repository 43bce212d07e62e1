"""How many runners of which revision a pool has, and in which order they come and go.

A changed template is a new revision. Its runners come one at a time beside the old ones (surge), and an old one drains
once a new one is ready, so that the pool never serves with fewer than it should. Until an old one is gone, drained or
not, it counts: there are never more runners than the update strategy allows.
Runners whose nodes are about to be emptied are replaced in the same way.
"""

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

from motet.model import ObjectName
from motet_operator.reconcile.conditions import Condition, named, no, progress, settle, unknown, yes
from motet_operator.reconcile.plan import AdapterCounts, CatalogPool, Drain, PoolStatus, Replacement, SlotCounts
from motet_operator.reconcile.scaling import Scaling, scale
from motet_operator.reconcile.view import Instance, PoolObject, RunnerSet, RunnerTemplate, View


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """What happens to one pool's runners."""

    runner_sets: tuple[RunnerSet, ...]
    drains: tuple[Drain, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why a pool gets no runners."""

    reason: str
    message: str


def template_of(pool: PoolObject, platform: str = "") -> RunnerTemplate:
    spec = pool.resource.spec
    secret = spec.model.credentials_secret_ref
    return RunnerTemplate(
        group=pool.resource.group,
        model_uri=pool.model_uri,
        model_digest=spec.model.digest or "",
        engine=spec.engine,
        model_revision=spec.model.revision or "",
        model_credentials=f"{pool.resource.metadata.namespace}/{secret.name}" if secret else "",
        volumes=tuple(spec.adapter_volumes),
        pod=spec.template,
        # Where runners are pods, how long one may drain is a part of it.
        platform=f"{platform} drains for {spec.drain_timeout_seconds} s" if platform else "",
    )


def revision_of(pool: ObjectName, template: RunnerTemplate) -> str:
    """Short, the same for the same template everywhere and always. Only what is set counts, so that a field added to
    the schema later does not restart every runner there is."""
    content = (
        f"{pool}\n{template.group}\n{template.model_uri}\n{template.model_digest}\n"
        f"{template.engine.model_dump_json(exclude_none=True)}"
    )
    # Who may read a volume is decided with each adapter; only what is mounted makes another pod.
    mounted = [f"{volume.claim_name}:{volume.sub_path or ''}" for volume in template.volumes]
    for name, value in (
        ("model revision", template.model_revision),
        ("model credentials", template.model_credentials),
        ("volumes", " ".join(mounted)),
        ("pod", template.pod.model_dump_json(exclude_defaults=True)),
        ("platform", template.platform),
    ):
        if value not in ("", "{}"):
            content += f"\n{name}: {value}"
    return hashlib.sha256(content.encode()).hexdigest()[:8]


def refusals(pools: Sequence[PoolObject]) -> dict[ObjectName, Refusal]:
    """Pools that get no runners: nobody may start them there, or they contradict the oldest of their group, since one
    group has one base model under one name."""
    first: dict[ObjectName, PoolObject] = {}
    found: dict[ObjectName, Refusal] = {}
    for pool in sorted(pools, key=lambda one: one.age):
        name = pool.resource.object_name
        if not pool.prepared:
            found[name] = Refusal(
                reason="NamespaceNotPrepared",
                message=f"the operator may not run anything in namespace {name.namespace}; "
                "add it to the chart's value pools.namespaces",
            )
            continue
        leader = first.setdefault(pool.resource.group, pool)
        if _model_of(pool) != _model_of(leader):
            found[name] = Refusal(
                reason="ModelMismatch",
                message=f"pools of one group share one base model; {leader.resource.object_name} already serves "
                f"{leader.resource.served_name} in group {pool.resource.group}. Use the same model or another group.",
            )
    return found


def _model_of(pool: PoolObject) -> tuple[str, str, str | None, str | None]:
    model = pool.resource.spec.model
    return pool.model_uri, pool.resource.served_name, model.digest, model.revision


def scaling_of(view: View, pool: PoolObject) -> Scaling:
    name = pool.resource.object_name
    if view.runners_override is not None:
        return Scaling(
            replicas=view.runners_override,
            condition=no("ScalingActive", "ScalingDisabled", f"--runners {view.runners_override} decides"),
        )
    revision = revision_of(name, template_of(pool, view.platform))
    found = scale(
        pool.resource,
        current=pool.wanted,
        advice=view.advice.get(name),
        rolling_out=any(one.pool == name and one.revision != revision for one in view.instances),
        writers=pool.scale_writers,
    )
    before = named(pool.conditions, "ScalingActive")
    now = found.condition
    if before is None or (before.status, before.reason, pool.wanted) != (now.status, now.reason, found.replicas):
        return found
    # Demand's figures change with every request. The sentence is about the decision, and costs a write each time.
    return Scaling(replicas=found.replicas, condition=replace(now, message=before.message))


def roll_out(view: View, pool: PoolObject, wanted: int) -> Rollout:
    name = pool.resource.object_name
    template = template_of(pool, view.platform)
    revision = revision_of(name, template)
    strategy = pool.resource.spec.update_strategy
    drain_seconds = float(pool.resource.spec.drain_timeout_seconds)
    members = [instance for instance in view.instances if instance.pool == name]
    new = [instance for instance in members if instance.revision == revision]
    old = [instance for instance in members if instance.revision != revision]

    staying = [instance for instance in members if instance.draining_until is None]
    settled = [instance for instance in staying if instance.revision == revision and not instance.moving]
    others = [instance for instance in staying if instance not in settled]
    surplus = _as_they_may_go(settled)[: max(0, len(settled) - wanted)]
    # The others make room for ready ones. A rollout may let some be missing besides; a cordoned node is no reason to
    # have fewer: maybe nothing fits elsewhere. Whoever empties it evicts as many as the pool's budget allows.
    missing = strategy.max_unavailable if old else 0
    keep = max(0, wanted - missing - sum(instance.ready for instance in settled))
    surplus += _as_they_may_go(others)[: max(0, len(others) - keep)]

    kept = sum(instance not in surplus for instance in settled)
    there = [instance for instance in members if not _may_leave(view, instance, surplus)]
    if not any(instance in old for instance in there):
        # Only in a rollout what drains is waited for. What leaves a cordoned node holds no place that another could
        # have, and more replicas are wanted at once.
        there = [instance for instance in staying if instance not in surplus]
    surge = strategy.max_surge if old or others else 0
    add = max(0, min(wanted - kept, wanted + surge - len(there)))

    sets = [
        _runner_set(view, name, revision, template, drain_seconds, members=new, surplus=surplus, add=add),
        *_others(view, name, revision, drain_seconds, members=old, surplus=surplus),
    ]
    return Rollout(runner_sets=tuple(sets), drains=tuple(_drains(view, members, surplus, drain_seconds)))


def retire(view: View, name: ObjectName) -> Rollout:
    """A pool that is no more: everything drains, then goes."""
    members = [instance for instance in view.instances if instance.pool == name]
    drain_seconds = max((each.drain_seconds for each in view.runner_sets if each.pool == name), default=0.0)
    surplus = [instance for instance in members if instance.draining_until is None]
    sets = _others(view, name, "", drain_seconds, members=members, surplus=surplus)
    return Rollout(runner_sets=tuple(sets), drains=tuple(_drains(view, members, surplus, drain_seconds)))


def _as_they_may_go(instances: Iterable[Instance]) -> list[Instance]:
    """What does not serve first, then what has to leave its node, then the newest."""
    return sorted(instances, key=lambda instance: (instance.ready, not instance.moving, -instance.ordinal))


def _may_leave(view: View, instance: Instance, surplus: Sequence[Instance]) -> bool:
    if instance.draining_until is not None:
        return instance.drained or not instance.ready or view.now >= instance.draining_until
    return instance in surplus and not instance.ready  # serves nobody: nothing to drain


def _others(
    view: View,
    name: ObjectName,
    revision: str,
    drain_seconds: float,
    *,
    members: Sequence[Instance],
    surplus: Sequence[Instance],
) -> list[RunnerSet]:
    """The sets of all revisions but one. Nothing is added to them, so a template that nobody remembers does no harm."""
    templates = {each.revision: each.template for each in view.runner_sets if each.pool == name}
    return [
        _runner_set(
            view,
            name,
            each,
            templates.get(each, RunnerTemplate(group=name, model_uri="")),
            drain_seconds,
            members=[instance for instance in members if instance.revision == each],
            surplus=surplus,
            add=0,
        )
        for each in sorted({instance.revision for instance in members} - {revision})
    ]


def _runner_set(
    view: View,
    name: ObjectName,
    revision: str,
    template: RunnerTemplate,
    drain_seconds: float,
    *,
    members: Sequence[Instance],
    surplus: Sequence[Instance],
    add: int,
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
    view: View, members: Sequence[Instance], surplus: Sequence[Instance], drain_seconds: float
) -> Iterable[Drain]:
    for instance in members:
        if instance.draining_until is None and instance not in surplus:
            continue
        deadline = instance.draining_until or view.now + timedelta(seconds=drain_seconds)
        yield Drain(instance=instance.name, pool=instance.pool, revision=instance.revision, deadline=deadline)


def replacements(view: View, *, leaving: Collection[str]) -> Iterable[Replacement]:
    """Condemned runners that had their chance. One that drains goes at its deadline anyway."""
    for instance in view.instances:
        due = instance.condemned and instance.replace_at is not None and view.now >= instance.replace_at
        if due and instance.name not in leaving:
            yield Replacement(instance=instance.name, why=instance.condemned)


# ------------------------------------------------------------------------------------------------------------ status


def pool_status(
    view: View, pool: PoolObject, refusal: Refusal | None, scaling: Scaling, adapters: AdapterCounts
) -> PoolStatus:
    name = pool.resource.object_name
    revision = revision_of(name, template_of(pool, view.platform))
    members = [instance for instance in view.instances if instance.pool == name]
    ready = [instance for instance in members if instance.ready and instance.draining_until is None]
    updated = [instance for instance in ready if instance.revision == revision]
    wanted = 0 if refusal else scaling.replicas
    steps = (
        _accepted(refusal),
        _available(wanted, ready, members),
        _progressing(wanted, updated, members, revision),
        _adapters_healthy(adapters),
        scaling.condition,
        _ready(wanted, ready, updated, members, refusal),
    )
    complete = len(updated) >= wanted and all(instance.revision == revision for instance in members)
    return PoolStatus(
        name=name,
        model=pool.resource.served_name,
        replicas=wanted,
        existing=len(members),
        ready=len(ready),
        updated=len(updated),
        draining=sum(instance.draining_until is not None for instance in members),
        revision=revision,
        current_revision=revision if complete or not pool.current_revision else pool.current_revision,
        conditions=settle((*steps, *_progress(steps)), pool.conditions, now=view.now, generation=pool.generation),
        observed_generation=pool.generation,
        adapters=adapters,
        slots=_slots(view, ready),
    )


def _accepted(refusal: Refusal | None) -> Condition:
    return no("Accepted", refusal.reason, refusal.message) if refusal else yes("Accepted", "Valid")


def _available(wanted: int, ready: Sequence[Instance], members: Sequence[Instance]) -> Condition:
    if ready:
        return yes("Available", "RunnersReady", f"{len(ready)} of {wanted} runners serve")
    if not members:
        return no("Available", "NoRunners", "no runner exists")
    return no("Available", "RunnersNotReady", _why(members))


def _progressing(wanted: int, updated: Sequence[Instance], members: Sequence[Instance], revision: str) -> Condition:
    if any(instance.failures > 1 for instance in members):
        return no("Progressing", "RunnerFailing", _why(members))
    old = sum(instance.revision != revision for instance in members)
    if old:
        return yes(
            "Progressing", "RollingOut", f"{len(updated)} of {wanted} runners have the new revision, {old} the old"
        )
    moving = sum(instance.moving for instance in members)
    if moving and wanted:
        return yes(
            "Progressing",
            "RunnersMoving",
            f"{moving} runners are on cordoned nodes; each leaves once another serves elsewhere",
        )
    if len(members) > wanted:
        return yes("Progressing", "ScalingDown", f"{len(members) - wanted} runners are leaving")
    if len(updated) < wanted:
        return yes("Progressing", "RunnersStarting", f"{len(updated)} of {wanted} runners are ready")
    return no("Progressing", "Complete", "nothing is left to do")


def _adapters_healthy(adapters: AdapterCounts) -> Condition:
    if not adapters.failed:
        return yes("AdaptersHealthy", "NoneFailed")
    return no(
        "AdaptersHealthy",
        "AdaptersFailed",
        f"{adapters.failed} of {adapters.registered} adapters cannot be served; their own conditions say why",
    )


def _ready(
    wanted: int,
    ready: Sequence[Instance],
    updated: Sequence[Instance],
    members: Sequence[Instance],
    refusal: Refusal | None,
) -> Condition:
    if refusal:
        return no("Ready", refusal.reason, refusal.message)
    if wanted == 0:
        return unknown("Ready", "ScaledToZero", "no runner is wanted now; a request or a larger replicas brings one")
    if len(updated) >= wanted:
        return yes("Ready", "AllRunnersReady", f"{len(updated)} of {wanted} runners are ready")
    if any(instance.failures > 1 for instance in members):
        return no("Ready", "RunnerFailing", _why(members))
    return no("Ready", "RunnersStarting", f"{len(ready)} of {wanted} runners are ready")


def _progress(steps: Sequence[Condition]) -> Iterable[Condition]:
    accepted, _, progressing, *_ = steps
    if not accepted.holds:
        return progress(stalled=accepted)
    return progress(working=progressing) if progressing.holds or progressing.reason == "RunnerFailing" else progress()


def _why(members: Sequence[Instance]) -> str:
    failed = next((instance for instance in members if instance.reason and not instance.ready), None)
    return (
        f"{failed.name}: {failed.reason}" if failed is not None else f"waiting for {len(members)} runners to be ready"
    )


def _slots(view: View, ready: Sequence[Instance]) -> SlotCounts:
    names = {instance.name for instance in ready}
    held = {
        (place.runner, place.digest)
        for known in view.known.values()
        for place in known.places
        if place.tier == "device" and place.runner in names
    }
    return SlotCounts(total=sum(view.slots.get(name, 0) for name in names), used=len(held))


def catalog_pools(
    view: View, refused: Mapping[ObjectName, Refusal], scalings: Mapping[ObjectName, Scaling]
) -> tuple[CatalogPool, ...]:
    return tuple(
        CatalogPool(
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
        )
        for pool in view.pools
        if pool.resource.object_name not in refused
    )
