"""What the predictor counts."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from motet_predictor.versions import Why

_SECONDS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.1)


class Metrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.estimates = Counter(
            "motet_predictor_estimates", "Prompts whose output length was estimated.", registry=registry
        )
        self.predict_seconds = Histogram(
            "motet_predictor_predict_seconds",
            "Seconds to answer one Predict call.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.outcomes = Counter(
            "motet_predictor_outcomes",
            "Answers that the predictor learned from. censored: the answer was cut off, so that its full length"
            " is unknown.",
            ["censored"],
            registry=registry,
        )
        self.judged = Counter(
            "motet_predictor_judged", "Complete answers whose length a model had estimated.", registry=registry
        )
        self.covered = Counter(
            "motet_predictor_covered",
            "Complete answers that were no longer than the estimate. Divided by motet_predictor_judged_total it"
            " should be near the quantile.",
            ["quantile"],
            registry=registry,
        )
        self.scopes = Gauge(
            "motet_predictor_scopes", "Tenants and adapters that have statistics of their own.", registry=registry
        )
        self.samples_dropped = Counter(
            "motet_predictor_samples_dropped",
            "Training samples that were lost because too many waited for the database.",
            registry=registry,
        )
        self.rows_refused = Counter(
            "motet_predictor_rows_refused",
            "Rows that the database refuses for good and that are therefore not written, by table. The log names them.",
            ["table"],
            registry=registry,
        )
        self.features_ignored = Counter(
            "motet_predictor_features_ignored",
            "Prompts whose features were not used, because another version or another key made them than those that the"
            " weights were fitted to.",
            registry=registry,
        )
        self.refits = Counter(
            "motet_predictor_refits",
            "Times that the weights of prompts' features were fitted again. Outcomes: done; nothing: no sample has"
            " features; failed: the log has the reason, and the weights stay as they were.",
            ["outcome"],
            registry=registry,
        )
        self.version_changes = Counter(
            "motet_predictor_version_changes",
            "Times that the answers decided about a version. promoted: it serves now; rolled back: the one before it"
            " serves again; rejected: it is not better than the one that serves.",
            ["decision"],
            registry=registry,
        )
        self.weights_made = Gauge(
            "motet_predictor_weights_made_seconds",
            "When the weights that serve were fitted, in Unix seconds. 0: running statistics alone serve.",
            registry=registry,
        )
        self.store_up = Gauge(
            "motet_predictor_store_up", "1 if the last write to the database succeeded, else 0.", registry=registry
        )
        for outcome in ("done", "nothing", "failed"):
            self.refits.labels(outcome)
        for why in Why:
            self.version_changes.labels(why.value)
        for censored in ("true", "false"):
            self.outcomes.labels(censored)
        for quantile in ("0.5", "0.8", "0.9", "0.95"):
            self.covered.labels(quantile)
