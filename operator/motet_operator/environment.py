"""The environment variables of a runner, the same for a process and a pod."""

from collections.abc import Mapping

from motet.resources.pool import ParallelSpec, VllmSpec
from motet_operator.reconcile import RunnerTemplate, base_name


def runner_environment(pool: str, revision: str, template: RunnerTemplate) -> dict[str, str]:
    engine = template.engine
    parallel, vllm = engine.parallel or ParallelSpec(), engine.vllm or VllmSpec()
    named = {
        "POOL": pool,
        "GROUP": str(template.group),
        "REVISION": revision,
        "MODEL_URI": template.model_uri,
        "MODEL_DIGEST": template.model_digest,
        "MODEL_REVISION": template.model_revision,
        "MODEL_CREDENTIALS": template.model_credentials,
        "BACKEND": engine.backend,
        "PRESET": engine.preset,
        "CONTIGUOUS": engine.contiguous,
        "PROMISE_QUANTILE": engine.promise_quantile,
        "DTYPE": engine.dtype,
        "DEVICE": engine.device,
        "MAX_LORA_RANK": engine.max_lora_rank,
        "MAX_RESIDENT_ADAPTERS": engine.max_resident_adapters,
        "MAX_CACHED_ADAPTERS": engine.max_cached_adapters,
        "ADAPTER_DISK_MIB": engine.adapter_disk_mib,
        "HOST_ADAPTERS_MIB": engine.host_adapters_mib,
        "MAX_MODEL_LENGTH": engine.max_model_length,
        "MAX_CONCURRENT_SEQUENCES": engine.max_concurrent_sequences,
        "MEMORY_UTILIZATION_PERCENT": engine.memory_utilization_percent,
        "KV_CACHE_MIB": engine.kv_cache_mib,
        "PREFILL_CHUNK_TOKENS": engine.prefill_chunk_tokens,
        "PREFIX_CACHE": engine.prefix_cache,
        "TENSOR_PARALLEL": parallel.tensor,
        "STAGES": parallel.stages,
        "KV_CACHE_DTYPE": vllm.kv_cache_dtype,
        "ENFORCE_EAGER": vllm.enforce_eager,
        "ATTENTION_BACKEND": vllm.attention_backend,
        "TPOT_MILLISECONDS": template.tpot_milliseconds,
    }
    return {f"MOTET_RUNNER_{name}": str(value) for name, value in named.items() if value not in (None, "")}


def base_of(environment: Mapping[str, str]) -> str:
    """`RunnerTemplate.base` of the runners with this environment."""
    return base_name(*(environment.get(f"MOTET_RUNNER_MODEL_{name}", "") for name in ("URI", "DIGEST", "REVISION")))
