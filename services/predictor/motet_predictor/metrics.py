"""What the predictor counts."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.1)


class Metrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.estimates = Counter("motet_predictor_estimates", "Prompts estimated.", registry=registry)
        self.predict_seconds = Histogram(
            "motet_predictor_predict_seconds", "Time to answer one Predict call.", buckets=_SECONDS, registry=registry
        )
        self.outcomes = Counter(
            "motet_predictor_outcomes", "Finished answers learned from.", ["censored"], registry=registry
        )
        self.judged = Counter(
            "motet_predictor_judged", "Complete answers that had been estimated by a model.", registry=registry
        )
        self.covered = Counter(
            "motet_predictor_covered",
            "Of the judged answers, those no longer than the quantile; covered/judged should be near the quantile.",
            ["quantile"],
            registry=registry,
        )
        self.scopes = Gauge("motet_predictor_scopes", "Tenants and adapters with statistics.", registry=registry)
        self.samples_dropped = Counter(
            "motet_predictor_samples_dropped", "Samples lost while the database was away.", registry=registry
        )
        self.rows_refused = Counter(
            "motet_predictor_rows_refused",
            "Rows that the database never takes, put aside; the log names them.",
            ["table"],
            registry=registry,
        )
        self.store_up = Gauge("motet_predictor_store_up", "1 when the last write went through.", registry=registry)
        for censored in ("true", "false"):
            self.outcomes.labels(censored)
        for quantile in ("0.5", "0.8", "0.9", "0.95"):
            self.covered.labels(quantile)
