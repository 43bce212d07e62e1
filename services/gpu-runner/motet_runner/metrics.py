"""The metrics of a runner: Motet's names, and vLLM's names for values that existing dashboards show."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from motet.domain import ParkMethod
from motet.surroundings import WallClock
from motet_runner.interface import EngineReport

_LOAD_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_PAUSE_BUCKETS = (0.0, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
_FREE_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)


class Metrics:
    def __init__(self, registry: CollectorRegistry, *, wall: WallClock, names: int = 0) -> None:
        """`names`: the most adapters that a label names."""

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(name, text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, registry=registry, buckets=buckets)

        self.parks = counter(
            "motet_parks",
            "Requests parked, by what happened to their KV: swap (copied to host memory) or recompute (dropped).",
            "method",
        )
        self.resumes = counter("motet_resumes", "Parked requests that resumed, by how they had been parked.", "method")
        for method in ParkMethod:
            self.parks.labels(method)
            self.resumes.labels(method)
        self.self_parks = counter(
            "motet_self_parks",
            "Requests that the runner parked without an order: pages were short although a forecast or an overcommit"
            " had expected enough, or the supervisor was away or too slow.",
        )
        self.overflows = counter(
            "motet_overflows", "Sequences that came within one KV page of the end of their promise."
        )
        self.requests = counter(
            "motet_runner_requests", "Requests that ended on this runner, by how they ended.", "finish"
        )
        self.declines = counter("motet_runner_declines", "Requests that this runner declined, by error code.", "code")
        self.steps = counter(
            "motet_engine_steps",
            "Iterations of the engine. If this number stands still while sequences run, the engine hangs.",
        )
        self.engine = gauge("motet_engine_info", "The engine: 1, with its name and version.", "backend", "version")
        self.stopped_by_itself = counter(
            "motet_engine_preemptions",
            "Requests that the engine stopped although Motet had counted enough memory for them. More than 0 is a "
            "defect.",
        )
        self.step_seconds = gauge("motet_engine_step_seconds", "Median seconds of the latest iterations.")
        self.running = gauge("motet_sequences_running", "Sequences that are being computed.")
        self.waiting = gauge("motet_sequences_waiting", "Sequences that were submitted and are not computed yet.")
        self.parked = gauge("motet_sequences_parked", "Sequences that are parked.")
        self.batch_cap = gauge(
            "motet_batch_cap",
            "Sequences that may run at once so that a token takes no longer than the pool's slo.tpotMilliseconds. 0: "
            "the pool has none, or too few iterations were seen.",
        )
        self.token_seconds = gauge(
            "motet_token_seconds_at_cap", "Forecast mean seconds of a token while as many sequences run as may."
        )
        self.pages = gauge("motet_kv_pages", "KV pages that device memory has now beside the adapters in use.")
        self.pages_free = gauge("motet_kv_pages_free", "KV pages in device memory that are not in use.")
        self.pages_promised = gauge(
            "motet_kv_pages_promised", "KV pages in device memory that are promised to requests."
        )
        self.prefix_pages = gauge(
            "motet_prefix_cache_pages",
            "KV pages in the prefix cache. Pages that no request uses also count as free.",
        )
        self.prefix_queries = counter(
            "motet_prefix_cache_queries", "Tokens of requests that were looked up in the prefix cache."
        )
        self.prefix_hits = counter(
            "motet_prefix_cache_hits", "Tokens of requests that were found in the prefix cache and not computed."
        )
        self.kernels = gauge(
            "motet_kernels_since_seconds",
            "When the kernels that compute adapters and attention began to serve, in Unix seconds.",
            "serving",
        )
        self.host_bytes_free = gauge("motet_host_kv_bytes_free", "Bytes of host memory that are free for parked KV.")
        self.adapters = gauge("motet_adapters_on_device", "Adapters in device memory.")
        self.adapter_loads = counter("motet_adapter_loads", "Adapters loaded into device memory.")
        self.adapter_host_loads = counter(
            "motet_adapter_host_loads",
            "Adapters loaded into device memory from the host's memory: those of motet_adapter_loads without the disk.",
        )
        self.host_adapters = gauge(
            "motet_adapters_in_host_memory", "Adapters that the host's memory keeps for their next load."
        )
        self.host_adapter_bytes = gauge(
            "motet_host_adapter_bytes", "Bytes of the host's memory that adapters take, also on their way there."
        )
        self.adapter_evictions = counter(
            "motet_adapter_evictions",
            "Adapters removed from device memory. A high rate means that more adapters are in use than fit.",
        )
        self.adapter_failures = counter(
            "motet_adapter_failures", "Adapters that could not be fetched, checked or loaded."
        )
        self.adapter_load_seconds = histogram(
            "motet_adapter_load_seconds", "Seconds to load an adapter into device memory.", _LOAD_BUCKETS
        )
        self.adapter_pause_seconds = histogram(
            "motet_adapter_load_pause_seconds",
            "Seconds for which the other requests stood still while an adapter was loaded into device memory.",
            _PAUSE_BUCKETS,
        )
        self.adapter_fetch_seconds = histogram(
            "motet_adapter_fetch_seconds",
            "Seconds to fetch an adapter from its source to disk and to check it.",
            _LOAD_BUCKETS,
        )
        self.cancel_seconds = histogram(
            "motet_cancel_to_free_seconds",
            "Seconds from a request's cancellation until its KV pages are free.",
            _FREE_BUCKETS,
        )
        self.gateway_streams = gauge("motet_gateway_streams", "Gateways that are connected to this runner.")
        self.merged_steps = counter(
            "motet_merged_steps",
            "Iterations whose tokens went to a gateway together with an earlier iteration's tokens: the gateway "
            "reads slowly, or MOTET_RUNNER_STREAM_INTERVAL_SECONDS is set.",
        )

        self.vllm_running = gauge("vllm:num_requests_running", "Requests that are being computed.", "model_name")
        self.vllm_waiting = gauge(
            "vllm:num_requests_waiting", "Requests that wait, including parked requests.", "model_name"
        )
        self.vllm_kv_usage = gauge(
            "vllm:kv_cache_usage_perc", "Share of KV pages that are in use, 0 to 1.", "model_name"
        )
        self.vllm_lora = gauge(
            "vllm:lora_requests_info",
            "Names of adapters with requests, if MOTET_METRICS_NAMES is set. The value is the time of the report, in "
            "Unix seconds.",
            "max_lora",
            "waiting_lora_adapters",
            "running_lora_adapters",
        )
        self.vllm_prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens of submitted requests.", "model_name")
        self.vllm_generation_tokens = counter("vllm:generation_tokens", "Generated tokens.", "model_name")
        self.vllm_preemptions = counter(
            "vllm:num_preemptions", "Requests that were parked until pages are free.", "model_name"
        )
        self.vllm_prefix_queries = counter(
            "vllm:prefix_cache_queries", "Tokens that were looked up in the prefix cache.", "model_name"
        )
        self.vllm_prefix_hits = counter(
            "vllm:prefix_cache_hits", "Tokens that were found in the prefix cache.", "model_name"
        )
        self._steps_seen, self._stopped_seen = 0, 0
        self._queried_seen, self._hit_seen = 0, 0
        self._names = names
        self._wall = wall

    def on_report(self, report: EngineReport, *, model: str) -> None:
        self.steps.inc(max(0, report.steps - self._steps_seen))
        self._steps_seen = report.steps
        self.stopped_by_itself.inc(max(0, report.stopped_by_itself - self._stopped_seen))
        self._stopped_seen = report.stopped_by_itself
        self.step_seconds.set(report.step_seconds)
        self.running.set(report.running)
        self.waiting.set(report.waiting)
        self.parked.set(report.parked)
        if report.batch_cap is not None:
            self.batch_cap.set(report.batch_cap.sequences)
            self.token_seconds.set(report.batch_cap.token_seconds)
        self.pages.set(report.pages)
        self.pages_free.set(report.pages_free)
        self.pages_promised.set(report.pages_promised)
        self.prefix_pages.set(report.prefix_pages)
        queried = max(0, report.prefix_queried_tokens - self._queried_seen)
        hit = max(0, report.prefix_hit_tokens - self._hit_seen)
        self._queried_seen, self._hit_seen = report.prefix_queried_tokens, report.prefix_hit_tokens
        self.prefix_queries.inc(queried)
        self.prefix_hits.inc(hit)
        self.vllm_prefix_queries.labels(model).inc(queried)
        self.vllm_prefix_hits.labels(model).inc(hit)
        self.host_bytes_free.set(report.host_bytes_free)
        if report.kernels is not None:
            self.kernels.clear()
            self.kernels.labels(report.kernels.serving).set(report.kernels.since)
        self.host_adapters.set(report.host_adapters)
        self.host_adapter_bytes.set(report.host_adapter_bytes)
        self.adapters.set(sum(adapter.on_device for adapter in report.adapters))
        self.vllm_running.labels(model).set(report.running)
        self.vllm_waiting.labels(model).set(report.waiting + report.parked)
        self.vllm_kv_usage.labels(model).set(1 - report.pages_free / report.pages if report.pages else 0)

    def on_adapters(self, *, max_lora: int, waiting: set[str], running: set[str]) -> None:
        """Keeps a single series: adapter names are labels, as in vLLM, and each new set of names would add a series."""
        self.vllm_lora.clear()
        named = (",".join(sorted(names)[: self._names]) for names in (waiting, running))
        self.vllm_lora.labels(str(max_lora), *named).set(self._wall())
