"""What we know too little of to change it: it stays as it is until we know more. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

from motet.model import ObjectName
from motet_operator.cluster.cache import Key
from motet_operator.cluster.kinds import Object
from motet_operator.cluster.view import Unreadable
from motet_operator.reconcile import AdapterObject, Plan, PoolObject, View

ReadPools = Mapping[Key, PoolObject | Unreadable[PoolObject]]
ReadAdapters = Mapping[Key, AdapterObject | Unreadable[AdapterObject]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Caution:
    unseen: frozenset[str]
    """Namespaces in which we cannot see what runs."""

    hidden: frozenset[ObjectName]
    """Groups with pools there: that no runner of theirs is seen does not mean that there is none."""

    dim: frozenset[ObjectName]
    """Pools that cannot be read, or in part only."""

    unsure: frozenset[ObjectName]
    """Adapters that we would accept, and perhaps only because of what we cannot read. What was accepted before we came
    stays so."""

    @classmethod
    def about(
        cls, view: View, pools: ReadPools, adapters: ReadAdapters, stored: Mapping[Key, Object], unseen: frozenset[str]
    ) -> Self:
        """`stored` are the adapters as the API server has them."""
        dim = {
            ObjectName(*key): one.instead
            for key, one in pools.items()
            if isinstance(one, Unreadable) and (one.in_part or one.instead is None)
        }
        groups = {pool.resource.group for pool in dim.values() if pool is not None}
        parts = {key for key, one in adapters.items() if isinstance(one, Unreadable) and one.in_part}
        unsure = {
            name
            for each in (view.adapters if groups or parts else ())
            for name in (each.resource.object_name,)
            for key in ((name.namespace, name.name),)
            if (each.resource.group in groups or key in parts) and not _was_accepted(stored[key])
        }
        places = ((pool.resource.metadata.namespace, pool.resource.group) for pool in view.pools)
        return cls(
            unseen=unseen,
            hidden=frozenset(group for namespace, group in places if namespace in unseen),
            dim=frozenset(dim),
            unsure=frozenset(unsure),
        )

    def leaves_alone(self, pool: ObjectName) -> bool:
        return pool.namespace in self.unseen or pool in self.dim

    def restrain(self, plan: Plan, view: View) -> Plan:
        """Without what would change runners that are to be left alone. One that drains already goes on draining."""
        if not (self.unseen or self.dim or self.unsure):
            return plan
        pools = {one.name: one.pool for one in view.instances}
        begun = {one.name for one in view.instances if one.draining_until is not None}
        return replace(
            plan,
            runner_sets=tuple(each for each in plan.runner_sets if not self.leaves_alone(each.pool)),
            drains=tuple(
                each for each in plan.drains if each.instance in begun or not self.leaves_alone(pools[each.instance])
            ),
            replacements=tuple(each for each in plan.replacements if not self.leaves_alone(pools[each.instance])),
            catalog=replace(
                plan.catalog,
                adapters=tuple(each for each in plan.catalog.adapters if each.name not in self.unsure),
            ),
        )


def _was_accepted(adapter: Object) -> bool:
    """Only an adapter that is accepted is told what it is served with, and it keeps that while it is unreadable."""
    return bool((adapter.get("status") or {}).get("baseModel"))
