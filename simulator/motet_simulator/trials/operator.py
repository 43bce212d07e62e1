"""The operator of a trial: what is declared, and the real rounds that make a catalog and statuses of it.

There is no API server. Of the runners, only who exists and who drains is told: a trial starts and ends them itself.
"""

import asyncio
from collections.abc import Callable, Collection
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from motet.domain import ObjectName
from motet.resources import LoRAAdapter, ServingPool
from motet.surroundings import Surroundings
from motet_operator.reconcile import (
    AdapterObject,
    AdapterStatus,
    PoolObject,
    ResultCache,
    RolloutLimiter,
    RunnerDrain,
    RunnerInstance,
    View,
    reconcile,
)
from motet_operator.sync import SchedulerSync
from motet_simulator.trials.plan import RUNNERS, AdapterChange, Grant

POOL = ObjectName("default", "demo")
TENANT = "acme"
"""Whose adapters they are. All tenants may use them."""

INSTANCES = tuple(f"runner-{number}" for number in range(RUNNERS))

ROUND_SECONDS = 0.2
"""Between a change and the next round."""

DRAIN_TIME = timedelta(seconds=2)


class DeclaredObjects:
    """What the API server has. It outlives the operator's processes."""

    def __init__(
        self,
        *,
        max_sequences: int,
        ready: Callable[[], Collection[str]],
        shrinks: bool = False,
        grants: Collection[Grant] = (),
    ) -> None:
        """`ready`: the runners that are."""
        scaling = {"mode": "External", "minReplicas": 1, "maxReplicas": RUNNERS}
        self.ready = ready
        self.draining: dict[str, datetime] = {}
        """Until when, by instance."""
        self.adapters: dict[str, AdapterObject] = {}
        self.statuses: dict[ObjectName, AdapterStatus] = {}
        self.history: dict[str, list[AdapterChange]] = {}
        """All that was ever declared about each adapter."""
        self.pool = PoolObject(
            resource=ServingPool.model_validate(
                {
                    "metadata": {"name": POOL.name, "namespace": POOL.namespace},
                    "spec": {
                        "model": {"uri": "file:///demo", "servedName": "demo"},
                        "replicas": RUNNERS,
                        "autoscaling": scaling if shrinks else {},
                        "engine": {"maxConcurrentSequences": max_sequences},
                        "allowedNamespaces": {"from": "All"},
                        "tenants": {
                            "default": {"maxPriority": "Interactive", "pinnedReplicas": RUNNERS},
                            "overrides": [grant.override for grant in grants],
                        },
                    },
                }
            ),
            model_uri="file:///demo",
        )

    def change(self, change: AdapterChange) -> None:
        history = self.history.setdefault(change.name, [])
        history.append(change)
        if change.deleted:
            self.adapters.pop(change.name, None)
            self.statuses.pop(ObjectName(TENANT, change.name), None)
            return
        before = self.adapters.get(change.name)
        self.adapters[change.name] = AdapterObject(
            resource=LoRAAdapter.model_validate(
                {
                    "metadata": {"name": change.name, "namespace": TENANT},
                    "spec": {
                        "poolRef": {"name": POOL.name, "namespace": POOL.namespace},
                        "source": {"uri": change.source},
                        "placement": {"minReplicas": change.min_replicas, "maxReplicas": change.max_replicas},
                        "priority": "Interactive",
                        "share": ["*"],
                    },
                }
            ),
            source=change.source,
            generation=1 if before is None else before.generation + 1,
            content_stamp=str(change.number) if change.in_place else "",
        )

    def with_status(self, adapter: AdapterObject) -> AdapterObject:
        status = self.statuses.get(adapter.resource.object_name)
        if status is None:
            return adapter
        return replace(adapter, conditions=status.conditions, last_load=status.last_load, loaded=status.loaded)


class TrialOperator:
    """One process of it."""

    def __init__(self, address: str, objects: DeclaredObjects, surroundings: Surroundings) -> None:
        self._objects = objects
        self._wall = surroundings.wall
        self._cache, self._limiter = ResultCache(), RolloutLimiter()
        self._round_due = False
        self.sync = SchedulerSync(address, self.changed, surroundings=surroundings)

    async def run(self) -> None:
        self._round()
        await self.sync.run()

    def changed(self) -> None:
        """Something was declared or reported."""
        if not self._round_due:
            self._round_due = True
            asyncio.get_running_loop().call_later(ROUND_SECONDS, self._round)

    def drain_deadline(self) -> datetime:
        return self._now() + DRAIN_TIME

    def _now(self) -> datetime:
        return datetime.fromtimestamp(self._wall(), UTC)

    def _round(self) -> None:
        self._round_due = False
        objects = self._objects
        plan = reconcile(self._view(), self._cache, self._limiter)
        objects.statuses = {status.name: status for status in plan.adapters}
        drains = [
            RunnerDrain(instance=name, pool=POOL, revision="", deadline=deadline, begun=True)
            for name, deadline in objects.draining.items()
        ]
        self.sync.send_state(plan.catalog, drains, INSTANCES)

    def _view(self) -> View:
        objects, ready = self._objects, self._objects.ready()
        return View(
            now=self._now(),
            pools=(objects.pool,),
            adapters=tuple(map(objects.with_status, objects.adapters.values())),
            instances=tuple(
                RunnerInstance(
                    name=name,
                    pool=POOL,
                    revision="",
                    ordinal=number,
                    ready=name in ready,
                    draining_until=objects.draining.get(name),
                )
                for number, name in enumerate(INSTANCES)
            ),
            adapter_reports=self.sync.adapter_reports,
            scaling_advice=self.sync.advice,
            slots=self.sync.slots,
        )
