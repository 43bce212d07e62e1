"""What stands between a pool and its runners, and how the pool tells it. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime

from motet.model import ObjectName
from motet_operator.cluster.cache import Key
from motet_operator.cluster.deployments import deployment_name
from motet_operator.cluster.kinds import CHILDREN, POOLS, Kind, Object
from motet_operator.cluster.view import pool_of
from motet_operator.cluster.writes import WriteKey
from motet_operator.reconcile import Condition, Event, Plan, PoolStatus, View
from motet_operator.reconcile.conditions import no, progress, settle


@dataclass(frozen=True, slots=True)
class Obstacle:
    """As a condition puts it."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Obstacles:
    """All that are known of now."""

    unseen: frozenset[str] = frozenset()
    """Namespaces of pools in which we cannot see what runs: nothing may be concluded from what is not seen there."""

    places: Mapping[str, Obstacle] = field(default_factory=dict)
    """Namespaces in which we may not look at everything."""

    writes: Mapping[WriteKey, Obstacle] = field(default_factory=dict)


def hindered(
    plan: Plan, view: View, snapshot: Mapping[Kind, Mapping[Key, Object]], obstacles: Obstacles
) -> dict[ObjectName, Obstacle]:
    """One for each pool that has any: where we may not look before what we may not write, and both before what only
    keeps its pods from being made."""
    found: dict[ObjectName, Obstacle] = {}
    revisions = {status.name: status.revision for status in plan.pools}
    for each in view.runner_sets:
        if each.trouble and revisions.get(each.pool) == each.revision:
            found[each.pool] = Obstacle("RunnersRefused", each.trouble)
    # What is not there yet has its name, and no label.
    named: dict[Key, ObjectName] = {(pool.namespace, pool.name): pool for pool in revisions}
    named |= {(each.pool.namespace, deployment_name(each)): each.pool for each in plan.runner_sets}
    for key, obstacle in sorted(obstacles.writes.items(), key=lambda one: str(one[0]), reverse=True):
        if key.kind in CHILDREN:
            it = snapshot[key.kind].get(key.object)
            owner = pool_of(it) if it is not None else named.get(key.object)
            if owner is not None:
                found[owner] = obstacle
    found |= {pool: place for pool in revisions if (place := obstacles.places.get(pool.namespace)) is not None}
    return found


def told(plan: Plan, view: View, found: Mapping[ObjectName, Obstacle]) -> Plan:
    """The plan, in which pools say what stands in their way, each once by an event."""
    if not found:
        return plan
    before = {pool.resource.object_name: pool.conditions for pool in view.pools}
    pools = tuple(
        _overruled(status, found[status.name], before[status.name], view.now) if status.name in found else status
        for status in plan.pools
    )
    events = [event for event in plan.events if event.kind != POOLS.name or event.name not in found]
    events += [
        Event(kind=POOLS.name, name=name, type="Warning", reason=obstacle.reason, message=obstacle.message)
        for name, obstacle in found.items()
        if name in before and not _said(before[name], obstacle.reason)
    ]
    return replace(plan, pools=pools, events=tuple(events))


def _said(conditions: Iterable[Condition], reason: str) -> bool:
    return any(one.type == "Stalled" and one.reason == reason for one in conditions)


def _overruled(status: PoolStatus, why: Obstacle, before: Iterable[Condition], now: datetime) -> PoolStatus:
    """What holds all the same, as that runners serve, stays as it is."""
    problem = no("Progressing", why.reason, why.message)
    others = [
        replace(one, status="False", reason=why.reason, message=why.message)
        if one.type in ("Available", "Ready") and not one.holds
        else one
        for one in status.conditions
        if one.type not in ("Progressing", "Reconciling", "Stalled")
    ]
    found = (*others, problem, *progress(stalled=problem))
    return replace(status, conditions=settle(found, before, now=now, generation=status.observed_generation))
