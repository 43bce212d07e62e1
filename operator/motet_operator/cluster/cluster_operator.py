"""The operator on a cluster: every replica watches; the leader makes the cluster match the declared objects."""

import asyncio
import os
import random
from collections.abc import Collection, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial

import structlog
from prometheus_client import CollectorRegistry

from motet.clock import monotonic
from motet.health import Health
from motet.kube import KubeApi, KubeCredentials
from motet.lease import Election
from motet.service_main import run_until
from motet.settings import Addresses, LeaseSettings, ProcessSettings
from motet.surroundings import Surroundings
from motet.task_group import run_together
from motet_operator.cluster.api import Api, RequestLimiter
from motet_operator.cluster.cache import Cache
from motet_operator.cluster.decision import Decider, Decision, SchedulerReports
from motet_operator.cluster.deployments import read_template
from motet_operator.cluster.events import EventWriter
from motet_operator.cluster.kinds import ADAPTERS, OWNED_KINDS, PODS, POOLS, Kind, Object
from motet_operator.cluster.kopf_watch import KopfWatch
from motet_operator.cluster.leaving_nodes import LeavingNodes
from motet_operator.cluster.object_parser import is_live
from motet_operator.cluster.obstacles import Obstacle, ObstacleLog
from motet_operator.cluster.resync import Resync
from motet_operator.cluster.vanished import VanishedObjects
from motet_operator.cluster.watch import Listener, Watch
from motet_operator.cluster.write_executor import WriteExecutor
from motet_operator.cluster.writes import StatusWrite, Write
from motet_operator.metrics import MAX_NAMED_POOLS, ClusterMetrics
from motet_operator.reconcile import AdapterStatus, PoolStatus
from motet_operator.settings import ClusterSettings
from motet_operator.sync import SchedulerSync

log = structlog.get_logger(__name__)

MIN_PAUSE_SECONDS = 0.02
PAUSE_PER_ROUND = 3.0
"""After a round that took t, pause for this many t: rounds use at most a quarter of a core."""

MAX_IDLE_SECONDS = 10.0
"""A round runs at least this often, also if nothing has changed."""

STALLED_SECONDS = 60.0
SILENT_SECONDS = 150.0
"""The API server sends a bookmark every minute, and a watch that is silent a little longer is reopened. One that is
silent this long is lost."""

ANSWERED_SECONDS = 30.0
"""A silent watch counts as dead only while the API server answers other requests: an outage must not restart the
operator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorLiveness:
    """Whether the operator still works: for each part, how many seconds ago it was last active."""

    round: float
    answer: float
    watches: Mapping[str, float]
    """Seconds by watched path."""

    def dead_reason(self) -> str:
        """Why the process must be restarted; empty if it is healthy, or if a restart would not help."""
        if self.round > STALLED_SECONDS:
            return f"the work loop has not ticked for {self.round:.0f} s"
        if self.answer > ANSWERED_SECONDS:
            return ""
        path, silent = max(self.watches.items(), key=lambda one: one[1], default=("", 0.0))
        return f"the watch of {path} has sent nothing for {silent:.0f} s" if silent > SILENT_SECONDS else ""

    def unready_reason(self, resync_seconds: float) -> str:
        """`resync_seconds`: while nothing changes, the lists of the resync are the only requests."""
        if self.answer > ANSWERED_SECONDS + resync_seconds:
            return f"the API server has sent nothing for {self.answer:.0f} s"
        return ""


def reports_of(sync: SchedulerSync) -> SchedulerReports:
    """A copy: a round reads it in another thread."""
    return SchedulerReports(
        known=dict(sync.adapter_reports),
        drained=frozenset(sync.drained),
        attached=frozenset(sync.attached),
        unhealthy=dict(sync.unhealthy),
        advice=dict(sync.advice),
        requests=dict(sync.requests),
        slots=dict(sync.slots),
        batch_caps=dict(sync.batch_caps),
        reported_groups=sync.reported_groups,
        advice_is_awaited=sync.advice_is_awaited,
    )


class ClusterOperator:
    def __init__(
        self, process: ProcessSettings, settings: ClusterSettings, lease: LeaseSettings, surroundings: Surroundings
    ) -> None:
        self._around = surroundings
        self._process, self._settings, self._lease = process, settings, lease
        self._scale = process.time_scale
        self._wake = asyncio.Event()
        self._ticked = monotonic()
        self._leading = False
        self._election: Election | None = None
        self._obstacle_log = ObstacleLog()
        self._decider = Decider(
            settings.pool_namespaces,
            timedelta(seconds=settings.unhealthy_seconds * self._scale),
            settings.rolling_pools,
            timedelta(seconds=settings.rollout_seconds * self._scale),
            replaced_at_once=settings.replaced_at_once,
            residency_interval=timedelta(seconds=settings.residency_seconds * self._scale),
        )
        self._platform = read_template(settings.runner_template, settings.operator_class)

    async def run(self, stop: asyncio.Event, registry: CollectorRegistry, health: Health) -> None:
        """Raises SetupError for what a person has to put right."""
        settings = self._settings
        self._metrics = metrics = ClusterMetrics(registry)
        health.add_liveness_check(self._dead_reason)
        credentials = KubeCredentials(settings.kubeconfig, "MOTET_CLUSTER_KUBECONFIG")
        await credentials.configuration()
        limiter = RequestLimiter(settings.writes_per_second, settings.write_burst)
        self._api = Api(
            credentials, limiter, metrics, request_seconds=settings.request_seconds, may_write=self._may_write
        )
        self._cache = Cache(lambda _: self._wake.set())
        for kind, most in ((POOLS, MAX_NAMED_POOLS), (ADAPTERS, self._process.metrics_names)):
            metrics.object_conditions.follow(kind.name, most, partial(self._declared, kind))
        self._resync = Resync(
            self._api,
            self._cache,
            self._obstacle_log,
            metrics,
            settings.pool_namespaces,
            seconds=settings.resync_seconds,
            changed=self._wake.set,
            restart_watch=self._restart_watch,
            unwatchable=self._cannot_watch,
            operator_class=settings.operator_class,
            time_scale=self._scale,
        )
        self._leaving_nodes = LeavingNodes(
            self._api,
            self._obstacle_log,
            seconds=settings.cordon_seconds * self._scale,
            taints=settings.leaving_taints,
            hosts=self._hosts,
            changed=self._wake.set,
        )
        self._events = EventWriter(
            self._api,
            metrics,
            self._lease.pod_name or os.uname().nodename,
            per_second=settings.events_per_second,
            time_scale=self._scale,
        )
        self._writer = WriteExecutor(
            self._api,
            self._cache,
            self._obstacle_log,
            metrics,
            leading=self._may_write,
            written=self._written,
            denied=self._denied,
            time_scale=self._scale,
        )
        self._sync = SchedulerSync(
            Addresses().scheduler_address,
            self._wake.set,
            surroundings=self._around,
            leadership=lambda: self._election,
            time_scale=self._scale,
        )
        self._vanished = VanishedObjects(self._api, settings.vanished_seconds * self._scale)
        self._watch: Watch = KopfWatch(
            credentials,
            settings.pool_namespaces,
            Listener(
                seen=self._cache.put,
                deleted=self._cache.remove,
                opened=self._resync.watch_opened,
                restarted=self._watch_restarted,
            ),
            operator_class=settings.operator_class,
            time_scale=self._scale,
        )
        health.add_readiness_check(self._unready_reason)
        health.set_ready(True)
        try:
            await run_until(stop, self._resync.run(), self._follow(), self._lead(), self._publish_metrics())
        finally:
            await self._api.close()

    # ------------------------------------------------------------------------------------------------------- watching

    async def _follow(self) -> None:
        # A watch looks only once which kinds exist. A kind that is missing then is never watched.
        await self._resync.listed.wait()
        await self._watch.run()

    def _watch_restarted(self, name: str) -> None:
        self._metrics.watch_restarts.labels(name).inc()
        self._resync.request_now()

    def _hosts(self) -> set[str]:
        """Nodes with runners."""
        pods = self._cache.snapshot()[PODS].values()
        return {node for pod in pods if is_live(pod) and (node := (pod.get("spec") or {}).get("nodeName"))}

    def _cannot_watch(self, path: str) -> None:
        self._watch.forget(path)

    def _restart_watch(self, kind: Kind) -> None:
        self._watch.restart(kind)
        self._wake.set()

    # -------------------------------------------------------------------------------------------------------- leading

    async def _lead(self) -> None:
        async with AsyncExitStack() as stack:
            if self._lease.name:
                kube = await stack.enter_async_context(
                    KubeApi(self._lease.kubeconfig or self._settings.kubeconfig, "MOTET_LEASE_KUBECONFIG")
                )
                self._election = Election(kube, self._lease, time_scale=self._scale, surroundings=self._around)
                await stack.enter_async_context(self._election)
                await self._election.wait_until_leader()
            self._leading = True
            self._metrics.leader.set(1)
            await self._resync.listed.wait()
            await self._resync.once()  # the watch of a standby may have been behind
            await self._leaving_nodes.refresh()  # else the first round would treat runners on leaving nodes as staying
            log.info("operator_leading")
            await run_together(
                self._reconcile_for_ever(),
                self._writer.run(self._settings.writers),
                self._events.run(),
                self._sync.run(),
                self._leaving_nodes.run(),
            )

    def _may_write(self) -> bool:
        return self._leading and (self._election is None or self._election.is_leader_for_sure)

    async def _reconcile_for_ever(self) -> None:
        while True:
            self._wake.clear()
            began = monotonic()
            try:
                again = await self._round() if self._resync.of_one_state else MAX_IDLE_SECONDS
            except Exception:
                log.exception("reconcile_failed")
                again = 1.0
            took = monotonic() - began
            self._ticked = monotonic()
            self._metrics.reconciles.inc()
            self._metrics.reconcile_seconds.observe(took)
            # Handle changes that come together in one round, and leave time for other work on a large cluster.
            await asyncio.sleep(max(MIN_PAUSE_SECONDS, PAUSE_PER_ROUND * took))
            try:
                async with asyncio.timeout(min(again or MAX_IDLE_SECONDS, MAX_IDLE_SECONDS)):
                    await self._wake.wait()
            except TimeoutError:
                pass

    async def _round(self) -> float | None:
        """Returns the seconds until the next round is due without any change."""
        # Before the snapshot: an obstacle that ends in between must not be dropped too early.
        obstacles = self._obstacle_log.standing(self._resync.unseen)
        snapshot = await self._vanished.complete(self._cache.snapshot())
        now = datetime.now(UTC).replace(microsecond=0)
        reports = reports_of(self._sync)
        # In a thread: with ten thousand adapters a round takes long, and watches and the Lease must not wait.
        decision = await asyncio.to_thread(
            self._decider.decide, snapshot, reports, self._platform, now, self._leaving_nodes.nodes, obstacles=obstacles
        )
        self._update_metrics(decision, reports)
        if self._may_write():
            pods = (name for _, name in snapshot[PODS])
            self._sync.send_state(decision.plan.catalog, decision.drains, pods)
        self._writer.set_writes(decision.writes)
        due = [each for each in (decision.due, self._vanished.due(), self._sync.wait_ends_in) if each]
        return max(0.05, min(due)) if due else None

    def _written(self, write: Write) -> None:
        if isinstance(write, StatusWrite):
            for event in write.events:
                if (it := self._cache.get(write.kind, write.object)) is not None:
                    self._events.post(write.kind, it, event.type, event.reason, event.message)

    def _denied(self, write: Write, obstacle: Obstacle) -> None:
        """Posts an event on the object itself; obstacles of runners are in the conditions of their pool."""
        self._wake.set()
        kind, key = write.key.kind, write.key.object
        if kind in OWNED_KINDS or obstacle.reason != "PermissionDenied":
            return  # the pool's conditions report it, with their event
        if (it := self._cache.get(kind, key)) is not None:
            self._events.post(kind, it, "Warning", obstacle.reason, obstacle.message)

    def _update_metrics(self, decision: Decision, reports: SchedulerReports) -> None:
        self._metrics.count_resident(
            adapter.group
            for adapter in decision.plan.catalog.adapters
            if (report := reports.known.get(adapter.name)) is not None
            and any(replica.tier == "device" for replica in report.replicas)
        )
        kinds: tuple[tuple[str, tuple[PoolStatus, ...] | tuple[AdapterStatus, ...]], ...] = (
            ("ServingPool", decision.plan.pools),
            ("LoRAAdapter", decision.plan.adapters),
        )
        for kind, statuses in kinds:
            self._metrics.objects.labels(kind).set(len(statuses))
            ready = sum(one.type == "Ready" and one.holds for status in statuses for one in status.conditions)
            self._metrics.ready_objects.labels(kind).set(ready)

    def _declared(self, kind: Kind) -> Collection[Object]:
        """What the leader shows in metrics: of two replicas, one may be behind."""
        return self._cache.snapshot()[kind].values() if self._leading else ()

    # --------------------------------------------------------------------------------------------------------- health

    async def _publish_metrics(self) -> None:
        """Keeps the gauges of watches current."""
        while True:
            if not self._leading or not self._resync.listed.is_set():
                self._ticked = monotonic()  # a standby has no rounds that could hang
            self._metrics.watch_age.clear()  # some watches no longer exist
            for path, age in self._watch.ages().items():
                self._metrics.watch_age.labels(path).set(age)
            await asyncio.sleep(random.uniform(0.8, 1.0) * max(0.1, self._scale))  # noqa: S311

    def _unready_reason(self) -> str:
        """A standby is ready, too: it can take over at once."""
        return self._pulse().unready_reason(self._settings.resync_seconds * self._scale) or self._resync.waiting_for()

    def _dead_reason(self) -> str:
        return self._pulse().dead_reason()

    def _pulse(self) -> OperatorLiveness:
        now = monotonic()
        return OperatorLiveness(
            round=now - self._ticked, answer=now - self._api.answered_at, watches=self._watch.ages()
        )
