"""The gateway's figures, all under `motet_`. Tenants and adapters are labels only if the platform wants them."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from motet.clock import Clock
from motet.telemetry import BoundedLabels, Labelled
from motet_gateway.answers.metrics import AnswerMetrics

FIRST_TOKEN_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
"""vLLM's edges, so that dashboards made for it fit."""

TOKEN_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
"""vLLM's and three below: a small model on a CPU is faster than its first."""

DURATION_BUCKETS = (
    0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip


class Metrics:
    def __init__(self, registry: CollectorRegistry, *, clock: Clock, names: int = 0) -> None:
        """`names`: how many pairs of tenant and adapter may stand in labels."""
        who = ("tenant", "adapter")
        self.requests = Labelled(
            Counter(
                "motet_requests",
                "Requests for chat or text completions that have ended, by HTTP status. 499: the client was gone "
                "first.",
                (*who, "code"),
                registry=registry,
            )
        )
        self.tokens = Labelled(
            Counter(
                "motet_tokens",
                "Tokens of prompts (input) and answers (output) of requests that got at least one token, or wanted "
                "none.",
                (*who, "kind"),
                registry=registry,
            )
        )
        self.time_to_first_token = Labelled(
            Histogram(
                "motet_time_to_first_token_seconds",
                "Seconds from a request's arrival to its first token.",
                who,
                buckets=FIRST_TOKEN_BUCKETS,
                registry=registry,
            )
        )
        self.time_per_output_token = Labelled(
            Histogram(
                "motet_time_per_output_token_seconds",
                "Seconds between two tokens after the first one, averaged over a request.",
                who,
                buckets=TOKEN_BUCKETS,
                registry=registry,
            )
        )
        self.request_duration = Labelled(
            Histogram(
                "motet_request_duration_seconds",
                "Seconds from a request's arrival to its last byte.",
                who,
                buckets=DURATION_BUCKETS,
                registry=registry,
            )
        )
        self.queue_duration = Labelled(
            Histogram(
                "motet_request_queue_seconds",
                "Seconds that a request was in the queue before it was first placed on a runner, by its class: "
                "interactive, standard or batch.",
                ("class",),
                buckets=FIRST_TOKEN_BUCKETS,
                registry=registry,
            )
        )
        self.estimates = Labelled(
            Counter(
                "motet_length_estimates",
                "Estimates of output length, by what they come from: the predictor's model, statistics of the "
                "tenant, or max_tokens.",
                ("source",),
                registry=registry,
            )
        )
        self.outcomes_lost = Counter(
            "motet_length_outcomes_lost",
            "Finished answers whose length the predictor does not learn: too many waited for it, or it did not answer.",
            registry=registry,
        )
        self.live_requests = Gauge(
            "motet_live_requests",
            "Choices under way, waiting ones included: a request with n=3 counts three times.",
            registry=registry,
        )
        self.dropped = Counter(
            "motet_dropped_messages",
            "Messages of runners and schedulers that were ignored: they came too late, twice, or from another runner.",
            ("reason",),
            registry=registry,
        )
        self.replacements = Counter(
            "motet_requests_placed_again",
            "Requests that lost their runner and were sent back to the scheduler, to be placed again.",
            registry=registry,
        )
        self.cancelled = Counter(
            "motet_cancelled_requests",
            "Requests whose client closed the connection before the answer was complete.",
            registry=registry,
        )
        self.connections = Gauge(
            "motet_client_connections",
            "Open connections of HTTP clients.",
            registry=registry,
        )
        self.refused_connections = Counter(
            "motet_refused_connections",
            "Connections of HTTP clients that were closed, by the limit that they reached: all, address, or bytes.",
            ("limit",),
            registry=registry,
        )
        self.refused_callers = Counter(
            "motet_authentication_failures",
            "Requests refused because of their API key, by error code. invalid_api_key: a wrong key or none. "
            "Others: no key could be checked.",
            ("code",),
            registry=registry,
        )
        self.keys_read_age = Gauge(
            "motet_keys_read_age_seconds",
            "Seconds since API keys were last read. +Inf: not yet. 0: no keys are needed. If it grows, the "
            "gateway cannot read keys.",
            registry=registry,
        )
        self.unknown_fields = Counter(
            "motet_unknown_request_fields",
            "Fields of request bodies that the gateway does not know and has ignored.",
            registry=registry,
        )
        self.client_retries = Counter(
            "motet_client_retries",
            "Requests that an OpenAI client sent again after a failure (header x-stainless-retry-count).",
            registry=registry,
        )
        # What dashboards made for vLLM look for and only a gateway knows; runners have the rest.
        model = ("model_name",)
        self.vllm_time_to_first_token = Labelled(
            Histogram(
                "vllm:time_to_first_token_seconds",
                "Same as motet_time_to_first_token_seconds, by base model.",
                model,
                buckets=FIRST_TOKEN_BUCKETS,
                registry=registry,
            )
        )
        self.vllm_time_per_output_token = Labelled(
            Histogram(
                "vllm:request_time_per_output_token_seconds",
                "Same as motet_time_per_output_token_seconds, by base model.",
                model,
                buckets=TOKEN_BUCKETS,
                registry=registry,
            )
        )
        self.vllm_request_duration = Labelled(
            Histogram(
                "vllm:e2e_request_latency_seconds",
                "Same as motet_request_duration_seconds for requests that got a token, by base model.",
                model,
                buckets=DURATION_BUCKETS,
                registry=registry,
            )
        )
        self.vllm_success = Labelled(
            Counter(
                "vllm:request_success",
                "Choices that ended without an error, by finish reason.",
                (*model, "finished_reason"),
                registry=registry,
            )
        )
        self.answers = AnswerMetrics(registry, clock=clock, names=names)
        by_name = (
            self.requests,
            self.tokens,
            self.time_to_first_token,
            self.time_per_output_token,
            self.request_duration,
        )
        self._names = BoundedLabels(names, who, by_name, clock=clock)

    def who(self, tenant: str, adapter: str) -> tuple[str, ...]:
        """The labels of a request."""
        return self._names.of(tenant, adapter)
