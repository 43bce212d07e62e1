"""What stands in the operator's way, what it cannot see, and what it cannot read; and what it does about it.

What it may not do or see is remembered until it may (`Denials`). Each round takes what is known of that and of what it
could read (`Doubts`): pools tell what hinders them, and what too little is known of stays as it is.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Self

from motet.domain import ObjectName
from motet.resources.fields import ALL_NAMESPACES
from motet.resources.status import Condition
from motet_operator.cluster.api import ApiRefused
from motet_operator.cluster.cache import ObjectKey, Snapshot
from motet_operator.cluster.deployments import deployment_name
from motet_operator.cluster.kinds import ADAPTERS, OWNED_KINDS, POOLS, Kind, Object
from motet_operator.cluster.object_parser import Unreadable, pool_of
from motet_operator.cluster.writes import NameTaken, WriteKey
from motet_operator.reconcile import AdapterObject, Event, Plan, PoolObject, PoolStatus, RunnerDrain, View
from motet_operator.reconcile.conditions import no, progress, with_transition_times

ReadPools = Mapping[ObjectKey, PoolObject | Unreadable[PoolObject]]
ReadAdapters = Mapping[ObjectKey, AdapterObject | Unreadable[AdapterObject]]


@dataclass(frozen=True, slots=True)
class Obstacle:
    """As a condition puts it."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Obstacles:
    """All that are known of now."""

    unseen_namespaces: frozenset[str] = frozenset()
    """Namespaces of pools in which we cannot see what runs: nothing may be concluded from what is not seen there."""

    forbidden_namespaces: Mapping[str, Obstacle] = field(default_factory=dict)
    """Namespaces in which we may not look at everything."""

    writes: Mapping[WriteKey, Obstacle] = field(default_factory=dict)


def permission(refused: ApiRefused) -> Obstacle:
    resource = f"{refused.kind.resource}/status" if refused.subresource else refused.kind.resource
    where = f"in namespace {refused.namespace}" if refused.namespace else "in all namespaces"
    return Obstacle(
        "PermissionDenied",
        f"the operator may not {refused.verb} {resource} {where}; grant that verb to its ServiceAccount",
    )


def refusal(refused: ApiRefused) -> Obstacle:
    """In the server's words: they are those of a quota, of a policy, of a schema, and name what to change."""
    return Obstacle("RunnersRefused", f"the API server refuses to {refused.verb} {refused.kind.resource}: {refused}")


def name_taken(found: NameTaken) -> Obstacle:
    return Obstacle(
        "NameTaken",
        f"{found} of this namespace was not created by the operator, but has the name that the operator needs for the "
        "pool; delete it, or give the pool another name",
    )


class ObstacleLog:
    def __init__(self) -> None:
        self._lists: dict[tuple[Kind, str], Obstacle] = {}
        self._writes: dict[WriteKey, Obstacle] = {}

    def note(self, refused: ApiRefused) -> None:
        """A list that is forbidden, until `clear`."""
        self._lists[refused.kind, refused.namespace] = permission(refused)

    def clear(self, kind: Kind, namespace: str) -> None:
        self._lists.pop((kind, namespace), None)

    def block_write(self, key: WriteKey, obstacle: Obstacle) -> bool:
        """A write that is not done, until `forget`. Whether that is news: one right may be missing for many."""
        news = obstacle not in self._writes.values()
        self._writes[key] = obstacle
        return news

    def forget(self, key: WriteKey) -> None:
        self._writes.pop(key, None)

    def standing(self, unseen: frozenset[str] = frozenset()) -> Obstacles:
        places = {namespace: why for (kind, namespace), why in self._lists.items() if kind in OWNED_KINDS}
        return Obstacles(unseen_namespaces=unseen, forbidden_namespaces=places, writes=dict(self._writes))

    def __len__(self) -> int:
        return len(self._lists) + len(self._writes)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialKnowledge:
    """Of one round."""

    obstacles: Obstacles

    unseen_groups: frozenset[ObjectName]
    """Groups with pools there: that no runner of theirs is seen does not mean that there is none."""

    unreadable_pools: frozenset[ObjectName]
    """Pools that cannot be read, or in part only."""

    unconfirmed_adapters: frozenset[ObjectName]
    """Adapters that we would accept, and perhaps only because of what we cannot read. What was accepted before we came
    stays so."""

    tenants: Mapping[ObjectName, frozenset[str]]
    """Of the groups of such pools: namespaces that they admitted before we came, as an accepted adapter of each shows.
    Nobody else is told to be admitted, whatever is understood."""

    @classmethod
    def about(
        cls, obstacles: Obstacles, view: View, pools: ReadPools, adapters: ReadAdapters, snapshot: Snapshot
    ) -> Self:
        unreadable = {
            ObjectName(*key): one.instead
            for key, one in pools.items()
            if isinstance(one, Unreadable) and (one.in_part or one.instead is None)
        }
        tenants: dict[ObjectName, set[str]] = {
            pool.resource.group: set() for pool in unreadable.values() if pool is not None
        }
        parts = {key for key, one in adapters.items() if isinstance(one, Unreadable) and one.in_part}
        unconfirmed = set()
        for each in view.adapters if tenants or parts else ():
            name, group = each.resource.object_name, each.resource.group
            key = (name.namespace, name.name)
            if group not in tenants and key not in parts:
                continue
            if not _was_accepted(snapshot[ADAPTERS][key]):
                unconfirmed.add(name)
            elif group in tenants:
                tenants[group].add(name.namespace)
        places = ((pool.resource.metadata.namespace, pool.resource.group) for pool in view.pools)
        return cls(
            obstacles=obstacles,
            unseen_groups=frozenset(group for namespace, group in places if namespace in obstacles.unseen_namespaces),
            unreadable_pools=frozenset(unreadable),
            unconfirmed_adapters=frozenset(unconfirmed),
            tenants={group: frozenset(names) for group, names in tenants.items()},
        )

    def leaves_alone(self, pool: ObjectName) -> bool:
        return pool.namespace in self.obstacles.unseen_namespaces or pool in self.unreadable_pools

    def unseen_reason(self, pool: ObjectName) -> Obstacle | None:
        """For a pool that can be read, and of which nobody can see what it has."""
        return self.obstacles.forbidden_namespaces.get(pool.namespace) if pool not in self.unreadable_pools else None

    def applied_to(self, plan: Plan, view: View, snapshot: Snapshot) -> Plan:
        """The plan in which pools say what hinders them, and without what would change runners to be left alone."""
        return self._without_unsafe_changes(
            _with_obstacles(plan, view, _obstacle_of_each_pool(plan, view, snapshot, self.obstacles)), view
        )

    def _without_unsafe_changes(self, plan: Plan, view: View) -> Plan:
        """One that drains already goes on draining, even
        where it seems to be wanted again."""
        if not (self.obstacles.unseen_namespaces or self.unreadable_pools or self.unconfirmed_adapters):
            return plan
        pools = {one.name: one.pool for one in view.instances}
        begun = (
            RunnerDrain(
                instance=one.name, pool=one.pool, revision=one.revision, deadline=one.draining_until, begun=True
            )
            for one in view.instances
            if one.draining_until is not None and self.leaves_alone(one.pool)
        )
        return replace(
            plan,
            runner_sets=tuple(each for each in plan.runner_sets if not self.leaves_alone(each.pool)),
            drains=(*(each for each in plan.drains if not self.leaves_alone(each.pool)), *begun),
            replacements=tuple(each for each in plan.replacements if not self.leaves_alone(pools[each.instance])),
            catalog=replace(
                plan.catalog,
                pools=tuple(
                    replace(each, tenants=_only(each.tenants, self.tenants[each.group]))
                    if each.group in self.tenants
                    else each
                    for each in plan.catalog.pools
                ),
                adapters=tuple(each for each in plan.catalog.adapters if each.name not in self.unconfirmed_adapters),
            ),
        )


def _obstacle_of_each_pool(
    plan: Plan, view: View, snapshot: Snapshot, obstacles: Obstacles
) -> dict[ObjectName, Obstacle]:
    """One for each pool that has any: where we may not look before what we may not write, and both before what only
    keeps its pods from being made."""
    found: dict[ObjectName, Obstacle] = {}
    revisions = {status.name: status.target_revision for status in plan.pools}
    for each in view.runner_sets:
        if each.trouble and revisions.get(each.pool) == each.revision:
            found[each.pool] = Obstacle("RunnersRefused", each.trouble)
    # What is not there yet has its name, and no label.
    named: dict[ObjectKey, ObjectName] = {(pool.namespace, pool.name): pool for pool in revisions}
    named |= {(each.pool.namespace, deployment_name(each)): each.pool for each in plan.runner_sets}
    for key, obstacle in sorted(obstacles.writes.items(), key=lambda one: str(one[0]), reverse=True):
        if key.kind in OWNED_KINDS:
            it = snapshot[key.kind].get(key.object)
            owner = pool_of(it) if it is not None else named.get(key.object)
            if owner is not None:
                found[owner] = obstacle
    found |= {
        pool: place for pool in revisions if (place := obstacles.forbidden_namespaces.get(pool.namespace)) is not None
    }
    return found


def _with_obstacles(plan: Plan, view: View, found: Mapping[ObjectName, Obstacle]) -> Plan:
    """The plan, in which pools say what stands in their way, each once by an event."""
    if not found:
        return plan
    before = {pool.resource.object_name: pool.conditions for pool in view.pools}
    pools = tuple(
        _with_obstacle(status, found[status.name], before[status.name], view.now) if status.name in found else status
        for status in plan.pools
    )
    events = [event for event in plan.events if event.kind != POOLS.name or event.name not in found]
    events += [
        Event(kind=POOLS.name, name=name, type="Warning", reason=obstacle.reason, message=obstacle.message)
        for name, obstacle in found.items()
        if name in before and not _already_reported(before[name], obstacle.reason)
    ]
    return replace(plan, pools=pools, events=tuple(events))


def _already_reported(conditions: Iterable[Condition], reason: str) -> bool:
    return any(one.type == "Stalled" and one.reason == reason for one in conditions)


def _with_obstacle(status: PoolStatus, why: Obstacle, before: Iterable[Condition], now: datetime) -> PoolStatus:
    """What holds all the same, as that runners serve, stays as it is."""
    problem = no("Progressing", why.reason, why.message)
    others = [
        no(one.type, why.reason, why.message) if one.type in ("Available", "Ready") and not one.holds else one
        for one in status.conditions
        if one.type not in ("Progressing", "Reconciling", "Stalled")
    ]
    found = (*others, problem, *progress(stalled=problem))
    return replace(
        status, conditions=with_transition_times(found, before, now=now, generation=status.observed_generation)
    )


def _only(admitted: Collection[str], known: Collection[str]) -> tuple[str, ...]:
    return tuple(sorted(name for name in known if name in admitted or ALL_NAMESPACES in admitted))


def _was_accepted(adapter: Object) -> bool:
    """Only an adapter that is accepted is told what it is served with, and it keeps that while it is unreadable."""
    return bool((adapter.get("status") or {}).get("baseModel"))
