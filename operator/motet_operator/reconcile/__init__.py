"""`reconcile(view) -> Plan`: compares what exists with what is declared, and decides what to do.

Pure and level-triggered: the same view gives the same plan, unless a pool changes too often (`RolloutLimiter`). Once a
plan has been carried out, the next plan changes nothing. This package has no processes, no Kubernetes, no clock and no
I/O.
"""

from collections.abc import Iterable
from datetime import datetime

from motet.domain import ObjectName
from motet.resources.status import AdapterCounts
from motet_operator.reconcile.adapters import ResultCache, adapter_context, count_adapters
from motet_operator.reconcile.conditions import ConditionResult, condition_of
from motet_operator.reconcile.plan import (
    AdapterStatus,
    CatalogSnapshot,
    Event,
    Plan,
    PoolStatus,
    RunnerDrain,
    RunnerReplacement,
    RunnerSet,
)
from motet_operator.reconcile.pool_status import pool_status
from motet_operator.reconcile.pools import (
    catalog_pools,
    only_keep,
    refusals,
    replacements,
    roll_out,
    scaling_of,
    with_drains_taken_back,
)
from motet_operator.reconcile.rollout_order import RolloutLimiter, rollout_targets
from motet_operator.reconcile.scaling import Scaling, ScalingAdvice
from motet_operator.reconcile.view import (
    AdapterObject,
    AdapterReplica,
    AdapterReport,
    ExistingSet,
    FailedRunner,
    PoolObject,
    RunnerInstance,
    RunnerTemplate,
    View,
    base_name,
)

__all__ = [
    "AdapterObject",
    "AdapterReplica",
    "AdapterReport",
    "AdapterStatus",
    "CatalogSnapshot",
    "ConditionResult",
    "Event",
    "ExistingSet",
    "FailedRunner",
    "Plan",
    "PoolObject",
    "PoolStatus",
    "ResultCache",
    "RolloutLimiter",
    "RunnerDrain",
    "RunnerInstance",
    "RunnerReplacement",
    "RunnerSet",
    "RunnerTemplate",
    "Scaling",
    "ScalingAdvice",
    "View",
    "base_name",
    "reconcile",
]


def reconcile(view: View, cache: ResultCache | None = None, limiter: RolloutLimiter | None = None) -> Plan:
    """Pass the same `cache` and `limiter` in every round: the cache keeps the results of unchanged adapters, and the
    limiter bounds how often a pool starts a rollout."""
    limiter = limiter if limiter is not None else RolloutLimiter()
    refused = refusals(view.pools)
    targets = rollout_targets(view, refused, limiter)
    scalings = {
        name: scaling_of(view, pool, targets[name]) for pool in view.pools for name in (pool.resource.object_name,)
    }
    declared = {pool.resource.object_name for pool in view.pools if pool.resource.object_name not in refused}
    existing = {instance.pool for instance in view.instances}
    rollouts = [
        roll_out(view, pool, targets[name], scalings[name].replicas)
        for pool in view.pools
        if (name := pool.resource.object_name) in declared
    ]
    kept = {name: scalings[name].replicas for name, why in refused.items() if why.keeps_runners}
    rollouts += [only_keep(view, name, kept.get(name, 0)) for name in sorted(existing - declared)]

    drains = tuple(drain for rollout in rollouts for drain in rollout.drains)
    view = with_drains_taken_back(view, drains)

    context = adapter_context(view, refused, scalings)
    results = (cache if cache is not None else ResultCache()).evaluate(view, context)
    adapters = tuple(one.status for one in results)
    counts = count_adapters(view, results)
    pools = tuple(
        pool_status(
            view,
            pool,
            targets[name],
            refused.get(name),
            scalings[name],
            counts.get(pool.resource.group, AdapterCounts()),
            decider=context.groups.get(pool.resource.group),
        )
        for pool in view.pools
        for name in (pool.resource.object_name,)
    )
    return Plan(
        runner_sets=tuple(each for rollout in rollouts for each in rollout.runner_sets),
        drains=drains,
        replacements=tuple(replacements(view, leaving={drain.instance for drain in drains})),
        pools=pools,
        adapters=adapters,
        events=(
            *_events("ServingPool", view.pools, pools),
            *_events("LoRAAdapter", view.adapters, adapters),
        ),
        catalog=CatalogSnapshot(
            pools=catalog_pools(view, refused, scalings, context.groups),
            adapters=tuple(one.entry for one in results if one.entry is not None),
            namespaces=tuple(sorted(view.namespace_uids.items())),
        ),
        due=_due(view, drains, limiter.due(targets)),
    )


def _due(view: View, drains: Iterable[RunnerDrain], others: Iterable[datetime]) -> datetime | None:
    moments = [*others, *(drain.deadline for drain in drains)]
    moments += [one.replace_at for one in view.instances if one.replace_at is not None]
    if any(one.unhealthy for one in view.instances):  # perhaps it waits for one that starts
        moments += [one.starting_until for one in view.instances if one.starting_until is not None]
    return min((at for at in moments if at > view.now), default=None)


def _events(
    kind: str,
    objects: Iterable[PoolObject | AdapterObject],
    statuses: Iterable[PoolStatus | AdapterStatus],
) -> Iterable[Event]:
    """One event for each change of Ready, and for each new reason why it is not True."""
    for item, status in zip(objects, statuses, strict=True):
        if item.conditions == status.conditions:
            continue  # mostly, of thousands of objects
        before = condition_of(item.conditions, "Ready")
        now = condition_of(status.conditions, "Ready")
        if now is None or (before is not None and (before.status, before.reason) == (now.status, now.reason)):
            continue
        yield Event(
            kind=kind,
            name=ObjectName(status.name.namespace, status.name.name),
            type="Warning"
            if now.status == "False" and now.reason not in ("RunnersStarting", "WaitingForTurn")
            else "Normal",
            reason=now.reason,
            message=now.message,
        )
