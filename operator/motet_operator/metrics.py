"""The operator's figures."""

from collections import Counter as Counts
from collections.abc import Callable, Collection, Iterable, Mapping
from heapq import nsmallest
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from motet.domain import ObjectName


class _ReconcileMetrics:
    """What both operators count."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.reconciles = Counter(
            "motet_reconciles_total",
            "Rounds of reconciliation: each compares all objects with what is there, and decides.",
            registry=registry,
        )
        self.reconcile_seconds = Histogram(
            "motet_reconcile_seconds",
            "Seconds that one round of reconciliation took.",
            buckets=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0),
            registry=registry,
        )
        self.objects = Gauge(
            "motet_declared_objects", "ServingPools and LoRAAdapters that exist, by kind.", ["kind"], registry=registry
        )
        self.ready_objects = Gauge(
            "motet_ready_objects",
            "ServingPools and LoRAAdapters whose condition Ready is True, by kind.",
            ["kind"],
            registry=registry,
        )


class LocalMetrics(_ReconcileMetrics):
    """Of the local operator."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        self.manifest_problems = Gauge(
            "motet_manifest_problems", "Errors in the manifests. `motet status` shows them.", registry=registry
        )
        self.process_restarts = Gauge(
            "motet_process_restarts", "Restarts of each process.", ["process"], registry=registry
        )


MAX_NAMED_POOLS = 500
"""Each pool has about eight conditions, and each condition a series."""

ABSENT_MEANS_FALSE = ("Reconciling", "Stalled")
"""Conditions that an object has only while they are True."""


class ObjectConditions(Collector):
    """The conditions of pools and adapters as their statuses have them, read when somebody asks for metrics.

    At most `most` objects of a kind are named, those that are stalled first.
    """

    def __init__(self) -> None:
        self._kinds: dict[str, tuple[int, Callable[[], Collection[Mapping[str, Any]]]]] = {}

    def follow(self, kind: str, most: int, objects: Callable[[], Collection[Mapping[str, Any]]]) -> None:
        self._kinds[kind] = (most, objects)

    def collect(self) -> Iterable[GaugeMetricFamily]:
        family = GaugeMetricFamily(
            "motet_object_condition",
            "1 while a condition of a ServingPool or LoRAAdapter is True, else 0, as the leading operator knows them. "
            f"At most {MAX_NAMED_POOLS} pools, and as many adapters as MOTET_METRICS_NAMES says, stalled ones first.",
            labels=["kind", "namespace", "name", "type"],
        )
        for kind, (most, objects) in self._kinds.items():
            for it in nsmallest(most, objects(), key=_stalled_first):
                for type_, holds in _conditions(it).items():
                    family.add_metric([kind, it["metadata"]["namespace"], it["metadata"]["name"], type_], holds)
        return [family]


def _stalled_first(it: Mapping[str, Any]) -> tuple[bool, str, str]:
    return not _conditions(it)["Stalled"], it["metadata"]["namespace"], it["metadata"]["name"]


def _conditions(it: Mapping[str, Any]) -> dict[str, bool]:
    """By type. Another version may have stored a status that this one does not know: it must not hide all metrics."""
    stated = (it.get("status") or {}).get("conditions") or ()
    found = {one["type"]: one.get("status") == "True" for one in stated if "type" in one}
    return dict.fromkeys(ABSENT_MEANS_FALSE, False) | found


class ClusterMetrics(_ReconcileMetrics):
    """Of the operator on a cluster."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        self.object_conditions = ObjectConditions()
        registry.register(self.object_conditions)
        self.leader = Gauge(
            "motet_operator_leader", "1 while this replica of the operator leads and writes, else 0.", registry=registry
        )
        self.listed = Gauge(
            "motet_operator_listed",
            "1 once pools, adapters and namespaces have been listed. Before that the operator changes nothing.",
            registry=registry,
        )
        self.resident_adapters = Gauge(
            "motet_resident_adapters",
            "Adapters that are in device memory of a runner now, by group of pools. Statuses follow once a minute.",
            ["namespace", "group"],
            registry=registry,
        )
        self.queue_depth = Gauge(
            "motet_kubernetes_write_queue_depth",
            "Writes to the API server that wait in the operator's queue.",
            registry=registry,
        )
        self.writes = Counter(
            "motet_kubernetes_writes_total",
            "Writes to the API server, by what was written and how it ended: done, or why not.",
            ["write", "outcome"],
            registry=registry,
        )
        self.api_requests = Counter(
            "motet_kubernetes_api_requests_total",
            "Requests to the API server, by HTTP status. `none`: no answer came.",
            ["verb", "resource", "code"],
            registry=registry,
        )
        self.api_seconds = Histogram(
            "motet_kubernetes_api_request_seconds",
            "Seconds until the API server answered a request.",
            ["verb", "resource"],
            buckets=(0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0),
            registry=registry,
        )
        self.watch_age = Gauge(
            "motet_watch_age_seconds",
            "Seconds since a watch last brought anything. The API server sends a bookmark every minute: far "
            "above 60 the watch is broken.",
            ["resource"],
            registry=registry,
        )
        self.watch_restarts = Counter(
            "motet_watch_restarts_total",
            "Restarts of all watches inside the process, after a failure of the library that watches.",
            ["engine"],
            registry=registry,
        )
        self.repairs = Counter(
            "motet_watch_cache_repairs_total",
            "Objects that the watch had missed and a periodic list has corrected: added, changed or removed.",
            ["resource", "repair"],
            registry=registry,
        )
        self.rewinds = Counter(
            "motet_kubernetes_store_rewinds_total",
            "Times that the API server's store (etcd) had gone back to an earlier state, such as a backup, and "
            "the operator replaced what it knew.",
            ["resource"],
            registry=registry,
        )
        self.events = Counter(
            "motet_kubernetes_events_total",
            "Kubernetes Events, by outcome: posted, merged into an earlier one, or dropped because there were "
            "too many.",
            ["outcome"],
            registry=registry,
        )

    def count_resident(self, groups: Iterable[ObjectName]) -> None:
        """`groups`: of each adapter that is in device memory."""
        self.resident_adapters.clear()  # of groups that no longer exist
        for group, count in Counts(groups).items():
            self.resident_adapters.labels(group.namespace, group.name).set(count)
