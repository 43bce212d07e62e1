"""From what is to what should be done, without doing it: `reconcile(view) -> Plan`.

Pure and level-triggered: the same view gives the same plan, and a view in which a plan has been carried out gives a
plan that changes nothing. No processes, no Kubernetes, no clock, no I/O in this package.
"""

from collections.abc import Iterable

from motet.model import ObjectName
from motet_operator.reconcile.adapters import adapter_status, catalog_adapter, in_catalog, look_around
from motet_operator.reconcile.conditions import Condition
from motet_operator.reconcile.plan import AdapterStatus, Catalog, Drain, Event, Plan, PoolStatus, Replacement
from motet_operator.reconcile.pools import catalog_pools, conflicts, pool_status, replacements, retire, roll_out
from motet_operator.reconcile.view import (
    AdapterKnowledge,
    AdapterObject,
    Certificate,
    Instance,
    PoolObject,
    Residence,
    RunnerSet,
    RunnerTemplate,
    View,
)

__all__ = [
    "AdapterKnowledge",
    "AdapterObject",
    "AdapterStatus",
    "Catalog",
    "Certificate",
    "Condition",
    "Drain",
    "Event",
    "Instance",
    "Plan",
    "PoolObject",
    "PoolStatus",
    "Replacement",
    "Residence",
    "RunnerSet",
    "RunnerTemplate",
    "View",
    "reconcile",
]


def reconcile(view: View) -> Plan:
    refused = conflicts(view.pools)
    declared = {pool.resource.object_name for pool in view.pools if pool.resource.object_name not in refused}
    existing = {instance.pool for instance in view.instances}
    rollouts = [roll_out(view, pool) for pool in view.pools if pool.resource.object_name in declared]
    rollouts += [retire(view, name) for name in sorted(existing - declared)]

    pools = tuple(pool_status(view, pool, refused.get(pool.resource.object_name)) for pool in view.pools)
    around = look_around(view, refused)
    adapters = tuple(adapter_status(view, adapter, around) for adapter in view.adapters)
    accepted = [adapter for adapter, status in zip(view.adapters, adapters, strict=True) if in_catalog(status, adapter)]
    drains = tuple(drain for rollout in rollouts for drain in rollout.drains)
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
        catalog=Catalog(
            pools=catalog_pools(view, refused), adapters=tuple(catalog_adapter(adapter) for adapter in accepted)
        ),
    )


def _events(
    kind: str,
    objects: Iterable[PoolObject | AdapterObject],
    statuses: Iterable[PoolStatus | AdapterStatus],
) -> Iterable[Event]:
    """One event for each change of Ready, and for each new reason why it is not."""
    for item, status in zip(objects, statuses, strict=True):
        before = _ready_of(item.conditions)
        now = _ready_of(status.conditions)
        if now is None or (before is not None and (before.status, before.reason) == (now.status, now.reason)):
            continue
        yield Event(
            kind=kind,
            name=ObjectName(status.name.namespace, status.name.name),
            type="Warning"
            if now.status == "False" and now.reason not in ("RunnersStarting", "Suspended")
            else "Normal",
            reason=now.reason,
            message=now.message,
        )


def _ready_of(conditions: Iterable[Condition]) -> Condition | None:
    return next((condition for condition in conditions if condition.type == "Ready"), None)
