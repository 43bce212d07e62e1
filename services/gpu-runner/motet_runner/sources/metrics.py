"""The metrics of fetches."""

from prometheus_client import CollectorRegistry, Counter, Gauge


class FetchMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.bytes = Counter(
            "motet_fetch_bytes",
            "Bytes fetched from hubs and the web, for adapters and for the base model.",
            ["what"],
            registry=registry,
        )
        self.failures = Counter(
            "motet_fetch_failures",
            "Fetches that failed, by what was fetched and the reason of the error.",
            ["what", "reason"],
            registry=registry,
        )
        self.under_way = Gauge(
            "motet_fetches_under_way",
            "Fetches that run now. Each has a process of its own.",
            ["what"],
            registry=registry,
        )
        self.model_bytes = Gauge(
            "motet_model_fetch_bytes", "Bytes of the base model that have been fetched.", registry=registry
        )
        self.model_total = Gauge(
            "motet_model_fetch_total_bytes",
            "Bytes of the base model's weights, if the source says how many there are.",
            registry=registry,
        )
        for what in ("adapter", "model"):
            self.bytes.labels(what)
            self.under_way.labels(what)
