"""The operator's figures."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram


class _ReconcileMetrics:
    """What both operators count."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.reconciles = Counter("motet_reconciles_total", "Rounds of reconciliation.", registry=registry)
        self.reconcile_seconds = Histogram(
            "motet_reconcile_seconds",
            "Seconds that one round took.",
            buckets=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0),
            registry=registry,
        )
        self.objects = Gauge(
            "motet_declared_objects", "Objects that are declared, by kind.", ["kind"], registry=registry
        )
        self.ready_objects = Gauge("motet_ready_objects", "Those whose Ready is True.", ["kind"], registry=registry)


class LocalMetrics(_ReconcileMetrics):
    """Of the local operator."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        self.manifest_problems = Gauge(
            "motet_manifest_problems", "Things that are wrong in the manifests.", registry=registry
        )
        self.process_restarts = Gauge(
            "motet_process_restarts", "How often each process has been started again.", ["process"], registry=registry
        )


class ClusterMetrics(_ReconcileMetrics):
    """Of the operator on a cluster."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        self.leader = Gauge("motet_operator_leader", "1 while this replica is the one that writes.", registry=registry)
        self.listed = Gauge(
            "motet_operator_listed",
            "1 once pools, adapters and namespaces have been listed: before that nothing is done.",
            registry=registry,
        )
        self.queue_depth = Gauge(
            "motet_kubernetes_write_queue_depth", "Writes that wait for their turn.", registry=registry
        )
        self.writes = Counter(
            "motet_kubernetes_writes_total",
            "Writes by what they are and what came of them.",
            ["write", "outcome"],
            registry=registry,
        )
        self.api_requests = Counter(
            "motet_kubernetes_api_requests_total",
            "Requests to the API server, by HTTP status; `none`: no answer came.",
            ["verb", "resource", "code"],
            registry=registry,
        )
        self.api_seconds = Histogram(
            "motet_kubernetes_api_request_seconds",
            "Seconds until the API server answered.",
            ["verb", "resource"],
            buckets=(0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0),
            registry=registry,
        )
        self.watch_age = Gauge(
            "motet_watch_age_seconds",
            "Seconds since a watch last said anything; bookmarks come every minute.",
            ["resource"],
            registry=registry,
        )
        self.watch_restarts = Counter(
            "motet_watch_restarts_total",
            "Restarts of the watch layer inside the process.",
            ["engine"],
            registry=registry,
        )
        self.repairs = Counter(
            "motet_watch_cache_repairs_total",
            "Objects that a periodic list knew better than the watch.",
            ["resource", "repair"],
            registry=registry,
        )
        self.rewinds = Counter(
            "motet_kubernetes_store_rewinds_total",
            "Times that the API server's store had gone back to an earlier state: what was known was replaced.",
            ["resource"],
            registry=registry,
        )
        self.events = Counter(
            "motet_kubernetes_events_total",
            "Kubernetes Events, posted, merged into an earlier one, or dropped.",
            ["outcome"],
            registry=registry,
        )
