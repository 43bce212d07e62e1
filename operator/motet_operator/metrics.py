"""The operator's figures."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram


class Metrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.reconciles = Counter("motet_reconciles_total", "Rounds of reconciliation.", registry=registry)
        self.reconcile_seconds = Histogram(
            "motet_reconcile_seconds",
            "Seconds that one round took.",
            buckets=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0),
            registry=registry,
        )
        self.objects = Gauge("motet_objects", "Objects that are declared, by kind.", ["kind"], registry=registry)
        self.ready_objects = Gauge("motet_ready_objects", "Those whose Ready is True.", ["kind"], registry=registry)
        self.manifest_problems = Gauge(
            "motet_manifest_problems", "Things that are wrong in the manifests.", registry=registry
        )
        self.process_restarts = Gauge(
            "motet_process_restarts", "How often each process has been started again.", ["process"], registry=registry
        )
