"""Per tenant: where the time of answers went, and how estimates and promises compare with them."""

from prometheus_client import CollectorRegistry, Counter

from motet.api.v1 import common_pb2
from motet.clock import Clock
from motet.promises import max_kv_tokens
from motet.telemetry import BoundedLabels, Labelled
from motet.time_split import PartSeconds
from motet_gateway.choice_record import ChoiceRecord

MAX_TENANTS = 50
"""How many tenants the labels of these metrics name at most, whatever MOTET_METRICS_NAMES allows."""

_QUANTILES = ("q50", "q80", "q90", "q95")


class AnswerMetrics:
    def __init__(self, registry: CollectorRegistry, *, clock: Clock, names: int = 0) -> None:
        """`names`: how many pairs of tenant and adapter may stand in labels."""

        def counter(name: str, text: str, *labels: str) -> Labelled[Counter]:
            return Labelled(Counter(name, text, ("tenant", *labels), registry=registry))

        self.seconds = counter(
            "motet_request_split_seconds",
            "Where the time of choices went, from the request's arrival to the choice's end. queue: it waited for a "
            "runner, its adapter or a batch; generation: a runner computed it; penalty: from a park, or from the loss "
            "of its runner, to the next token; overhead: all else, such as tokenising and messages.",
            "part",
        )
        self.judged = counter(
            "motet_estimates_judged",
            "Choices that ended by themselves, so that their estimate can be compared with their length. Those for "
            "which max_tokens stood in for an estimate are not counted.",
        )
        self.covered = counter(
            "motet_estimates_covered",
            "Of those that motet_estimates_judged_total counts, the ones no longer than this quantile of their "
            "estimate. The share should be near the quantile. Choices that were cut at max_tokens are not judged: "
            "where there are many, it is higher, because those that end by themselves are the shorter ones.",
            "quantile",
        )
        self.promised = counter(
            "motet_promised_tokens",
            "Tokens that these choices were promised when they were first placed, with their prompts.",
        )
        self.promises = counter("motet_promises", "Choices that were placed with a promise and got a token.")
        self.unused = counter(
            "motet_promise_unused_tokens", "Of motet_promised_tokens_total, those that their choices did not need."
        )
        self.exceeded = counter(
            "motet_promise_exceeded_tokens", "Tokens that choices needed beyond what they were promised first."
        )
        self.short = counter("motet_promises_exceeded", "Choices that needed more than they were promised first.")
        self.parks = Counter(
            "motet_request_parks",
            "Times that choices were parked, as their gateway heard.",
            ("tenant",),
            registry=registry,
        )
        of_estimates = (self.judged, self.covered)
        of_promises = (self.promises, self.promised, self.unused, self.exceeded, self.short)
        by_tenant = (self.seconds, self.parks, *of_estimates, *of_promises)
        self._tenants = BoundedLabels(min(names, MAX_TENANTS), ("tenant",), by_tenant, clock=clock)

    def count(
        self,
        tenant: str,
        record: ChoiceRecord,
        *,
        now: float,
        prompt_tokens: int,
        answer_tokens: int,
        estimate: common_pb2.Estimate | None,
    ) -> None:
        """A choice has ended. `estimate`: only if the answer's length says how good it was."""
        (name,) = self._tenants.of(tenant)
        split = record.split.until(now)
        for part, seconds in zip(PartSeconds._fields, split, strict=True):
            self.seconds.labels(name, part).inc(seconds)
        if record.parks:
            self.parks.labels(name).inc(record.parks)
        if record.promised_tokens and answer_tokens:
            beyond = max_kv_tokens(prompt_tokens, answer_tokens) - record.promised_tokens
            self.promises.labels(name).inc()
            self.promised.labels(name).inc(record.promised_tokens)
            self.unused.labels(name).inc(max(0, -beyond))
            self.exceeded.labels(name).inc(max(0, beyond))
            self.short.labels(name).inc(beyond > 0)
        if estimate is not None:
            self.judged.labels(name).inc()
            for quantile in _QUANTILES:
                self.covered.labels(name, quantile).inc(answer_tokens <= getattr(estimate, quantile))
