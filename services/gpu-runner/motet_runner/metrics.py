"""What a runner counts. Names of our own, and vLLM's for the figures that dashboards already know."""

import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from motet.domain import ParkMethod
from motet_runner.interface import EngineReport

_LOAD_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_FREE_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)


class Metrics:
    def __init__(self, registry: CollectorRegistry, *, names: int = 0) -> None:
        """`names`: how many adapters may be named in a label."""

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(name, text, labels, registry=registry)

        self.parks = counter("motet_parks", "Requests parked.", "method")
        self.resumes = counter("motet_resumes", "Parked requests resumed.", "method")
        for method in ParkMethod:
            self.parks.labels(method)
            self.resumes.labels(method)
        self.self_parks = counter("motet_self_parks", "Requests parked without a supervisor's order.")
        self.overflows = counter("motet_overflows", "Requests that came within a page of their promise.")
        self.requests = counter("motet_runner_requests", "Requests that ended here.", "finish")
        self.declines = counter("motet_runner_declines", "Requests not taken in, by the error's code.", "code")
        self.steps = counter("motet_engine_steps", "Iterations of the engine.")
        self.step_seconds = gauge("motet_engine_step_seconds", "Median duration of the last iterations.")
        self.running = gauge("motet_sequences_running", "Sequences that take part in iterations.")
        self.waiting = gauge("motet_sequences_waiting", "Sequences submitted and not yet in an iteration.")
        self.parked = gauge("motet_sequences_parked", "Sequences parked.")
        self.pages = gauge("motet_kv_pages", "KV pages of the device.")
        self.pages_free = gauge("motet_kv_pages_free", "KV pages that hold nothing.")
        self.pages_promised = gauge("motet_kv_pages_promised", "KV pages promised to requests.")
        self.host_bytes_free = gauge("motet_host_kv_bytes_free", "Host memory left for parked KV.")
        self.adapters = gauge("motet_adapters_on_device", "Adapters on the device.")
        self.adapter_loads = counter("motet_adapter_loads", "Adapters brought to the device.")
        self.adapter_evictions = counter("motet_adapter_evictions", "Adapters that left the device for others.")
        self.adapter_failures = counter("motet_adapter_failures", "Adapters that could not be fetched or loaded.")
        self.adapter_load_seconds = Histogram(
            "motet_adapter_load_seconds", "From disk to device.", registry=registry, buckets=_LOAD_BUCKETS
        )
        self.adapter_fetch_seconds = Histogram(
            "motet_adapter_fetch_seconds", "From source to disk, checked.", registry=registry, buckets=_LOAD_BUCKETS
        )
        self.cancel_seconds = Histogram(
            "motet_cancel_to_free_seconds", "From a cancel's arrival to its pages being free.", registry=registry,
            buckets=_FREE_BUCKETS,
        )  # fmt: skip
        self.gateway_streams = gauge("motet_gateway_streams", "Gateways connected.")
        self.merged_steps = counter("motet_merged_steps", "Steps that reached a slow gateway together with another.")

        self.vllm_running = gauge("vllm:num_requests_running", "Requests in iterations.", "model_name")
        self.vllm_waiting = gauge("vllm:num_requests_waiting", "Requests waiting.", "model_name")
        self.vllm_kv_usage = gauge("vllm:kv_cache_usage_perc", "Share of KV pages in use, 0 to 1.", "model_name")
        self.vllm_lora = gauge(
            "vllm:lora_requests_info", "Adapters with requests, if MOTET_METRICS_NAMES is set; the value is the time.",
            "max_lora", "waiting_lora_adapters", "running_lora_adapters",
        )  # fmt: skip
        self.vllm_prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens taken in.", "model_name")
        self.vllm_generation_tokens = counter("vllm:generation_tokens", "Tokens generated.", "model_name")
        self.vllm_preemptions = counter("vllm:num_preemptions", "Requests parked.", "model_name")
        self._steps_seen = 0
        self._names = names

    def on_report(self, report: EngineReport, *, pages: int, model: str) -> None:
        self.steps.inc(max(0, report.steps - self._steps_seen))
        self._steps_seen = report.steps
        self.step_seconds.set(report.step_seconds)
        self.running.set(report.running)
        self.waiting.set(report.waiting)
        self.parked.set(report.parked)
        self.pages.set(pages)
        self.pages_free.set(report.pages_free)
        self.pages_promised.set(report.pages_promised)
        self.host_bytes_free.set(report.host_bytes_free)
        self.adapters.set(sum(adapter.on_device for adapter in report.adapters))
        self.vllm_running.labels(model).set(report.running)
        self.vllm_waiting.labels(model).set(report.waiting + report.parked)
        self.vllm_kv_usage.labels(model).set(1 - report.pages_free / pages if pages else 0)

    def on_adapters(self, *, max_lora: int, waiting: set[str], running: set[str]) -> None:
        """One series at a time: the names are labels, as vLLM has it, and must not pile up."""
        self.vllm_lora.clear()
        named = (",".join(sorted(names)[: self._names]) for names in (waiting, running))
        self.vllm_lora.labels(str(max_lora), *named).set(time.time())
