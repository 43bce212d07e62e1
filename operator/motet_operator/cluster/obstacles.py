"""What the operator may not write, may not list, or cannot read, and how it behaves then.

`ObstacleLog` remembers refused lists and writes until they succeed. In each round `PartialKnowledge` combines them with
unreadable objects: pools report their obstacle in conditions, and objects of which too little is known stay unchanged.
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
    """As a condition reports it."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Obstacles:
    """All current obstacles."""

    unseen_namespaces: frozenset[str] = frozenset()
    """Pool namespaces whose runners cannot be listed: a runner that is not seen there may exist."""

    forbidden_namespaces: Mapping[str, Obstacle] = field(default_factory=dict)
    """Namespaces in which a list is forbidden, with the reason."""

    writes: Mapping[WriteKey, Obstacle] = field(default_factory=dict)


def permission(refused: ApiRefused) -> Obstacle:
    resource = f"{refused.kind.resource}/status" if refused.subresource else refused.kind.resource
    where = f"in namespace {refused.namespace}" if refused.namespace else "in all namespaces"
    return Obstacle(
        "PermissionDenied",
        f"the operator may not {refused.verb} {resource} {where}; grant that verb to its ServiceAccount",
    )


def refusal(refused: ApiRefused) -> Obstacle:
    """With the server's message: it names the quota, policy or schema, and what to change."""
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
        """Record a forbidden list, until `clear`."""
        self._lists[refused.kind, refused.namespace] = permission(refused)

    def clear(self, kind: Kind, namespace: str) -> None:
        self._lists.pop((kind, namespace), None)

    def block_write(self, key: WriteKey, obstacle: Obstacle) -> bool:
        """Record a blocked write, until `forget`. True if the obstacle is new: it may block many writes."""
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
    """What one round does not know, and what must therefore stay unchanged."""

    obstacles: Obstacles

    unseen_groups: frozenset[ObjectName]
    """Groups with pools in unseen namespaces: they may have runners that are not seen."""

    unreadable_pools: frozenset[ObjectName]
    """Pools that cannot be read, or only in part."""

    unconfirmed_adapters: frozenset[ObjectName]
    """Adapters that would be accepted, but perhaps only because a pool cannot be fully read. Others that were
    accepted before stay accepted."""

    tenants: Mapping[ObjectName, frozenset[str]]
    """For groups with unreadable pools: the namespaces that have an accepted adapter. No other namespace is admitted
    meanwhile."""

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
        """The obstacle of a readable pool whose runners cannot be listed."""
        return self.obstacles.forbidden_namespaces.get(pool.namespace) if pool not in self.unreadable_pools else None

    def applied_to(self, plan: Plan, view: View, snapshot: Snapshot) -> Plan:
        """The plan with obstacles in the pools' conditions, and without changes of runners that must be left alone."""
        return self._without_unsafe_changes(
            _with_obstacles(plan, view, _obstacle_of_each_pool(plan, view, snapshot, self.obstacles)), view
        )

    def _without_unsafe_changes(self, plan: Plan, view: View) -> Plan:
        """Without changes of unknown objects. Runners that drain already go on draining."""
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
    """At most one for each pool. A forbidden list comes before a blocked write, and both before a Deployment that
    cannot create pods."""
    found: dict[ObjectName, Obstacle] = {}
    revisions = {status.name: status.target_revision for status in plan.pools}
    for each in view.runner_sets:
        if each.trouble and revisions.get(each.pool) == each.revision:
            found[each.pool] = Obstacle("RunnersRefused", each.trouble)
    # An object that does not exist yet has no label; its name tells the pool.
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
    """The plan with the obstacles in the pools' conditions, and one event for each new obstacle."""
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
    """Conditions that are True in spite of the obstacle, such as Available, stay."""
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
    """Only an accepted adapter has `status.baseModel`, and it keeps it while it is unreadable."""
    return bool((adapter.get("status") or {}).get("baseModel"))
