"""What fetching counts."""

from prometheus_client import CollectorRegistry, Counter, Gauge


class FetchMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.bytes = Counter("motet_fetch_bytes", "Bytes fetched from hubs and the web.", ["what"], registry=registry)
        self.failures = Counter("motet_fetch_failures", "Fetches that failed.", ["what", "reason"], registry=registry)
        self.under_way = Gauge("motet_fetches_under_way", "Children that fetch.", ["what"], registry=registry)
        self.model_bytes = Gauge("motet_model_fetch_bytes", "Bytes of the base model that are here.", registry=registry)
        self.model_total = Gauge(
            "motet_model_fetch_total_bytes", "Bytes of its weights, where the source says.", registry=registry
        )
        for what in ("adapter", "model"):
            self.bytes.labels(what)
            self.under_way.labels(what)
