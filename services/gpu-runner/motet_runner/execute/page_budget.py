"""The memory that the pages of KV and adapters get: what is left beside weights and everything else, item by item."""

import structlog

from motet.domain import pages_for
from motet.errors import SetupError
from motet_runner.execute.activations import activation_bytes, sampler_bytes
from motet_runner.execute.device.adjustments import adjustment_bytes
from motet_runner.execute.device.rows import DeviceRows
from motet_runner.execute.device.worker import ROWS_OF_EACH
from motet_runner.execute.kernels import Kernels, LargestWork
from motet_runner.execute.lora import LoraLinears
from motet_runner.execute.model import LoadedModel
from motet_runner.interface import EngineConfig
from motet_runner.memory.gpu_memory import GpuMemory
from motet_runner.memory.host_pages import bytes_beside_pages

log = structlog.get_logger(__name__)

MIB = 1024 * 1024
CPU_KV_MIB = 512

RANK_RESERVED = 16
"""The usual rank. `max_resident_adapters` of this rank get memory beside the KV of a CPU's default."""


def copy_bytes_of(kernels: Kernels, linears: LoraLinears, config: EngineConfig) -> int:
    """What their back end takes beside the pages, for copies of adapters that compute together."""
    return config.max_resident_adapters * linears.run_bytes(RANK_RESERVED) if kernels.copies else 0


def whole_pages(loaded: LoadedModel, kernels: Kernels, linears: LoraLinears, config: EngineConfig) -> int:
    """The pages of the whole pool, which KV and adapters share. Raises SetupError if there is not even one."""
    page_bytes = loaded.shape.bytes_per_page()
    mib, copies = config.kv_cache_mib, copy_bytes_of(kernels, linears, config)
    beside = {"copies": copies}
    if loaded.device.type == "cuda":
        beside |= set_aside(loaded, kernels, linears, config)
        log.info("memory_set_aside", **{item: f"{size / MIB:.1f} MiB" for item, size in beside.items()})
        memory = GpuMemory.of(loaded.device)
        left = memory.left(config.memory_utilization_percent) - sum(beside.values())
        if mib is not None and mib * MIB > left:
            raise SetupError(
                f"engine.kvCacheMiB is {mib}, and of the GPU's {memory.total / MIB:.0f} MiB there are "
                f"{max(0, left) / MIB:.0f} for keys, values and adapters beside the model and its largest iteration "
                f"(engine.memoryUtilizationPercent: {config.memory_utilization_percent}). Set it to at most "
                f"{max(0, left) // MIB}, or leave it unset."
            )
        budget = left if mib is None else mib * MIB
    elif mib is not None:
        budget = mib * MIB
    else:
        of_each = -(-linears.run_bytes(RANK_RESERVED) // page_bytes) * page_bytes
        budget = CPU_KV_MIB * MIB + config.max_resident_adapters * of_each
    if budget < page_bytes:
        raise SetupError(
            f"{max(0, budget) / MIB:.2f} MiB are left for keys, values and adapters, and one page of this model takes "
            f"{page_bytes / MIB:.2f} MiB. Raise engine.kvCacheMiB or, where it is not set, "
            "engine.memoryUtilizationPercent; or lower engine.maxResidentAdapters, for which "
            f"{copies / MIB:.2f} MiB are set aside to compute with, or engine.prefillChunkTokens and "
            f"engine.maxConcurrentSequences, whose largest iteration takes "
            f"{(sum(beside.values()) - copies) / MIB:.2f} MiB."
        )
    return int(budget // page_bytes)


def set_aside(loaded: LoadedModel, kernels: Kernels, linears: LoraLinears, config: EngineConfig) -> dict[str, int]:
    """Bytes of a GPU's memory that something else than pages and copies of adapters takes sooner or later"""
    decodes, chunk = config.max_concurrent_sequences, config.prefill_chunk_tokens
    rows = decodes + chunk
    longest = config.max_model_length or loaded.max_positions
    work = LargestWork(
        rows, decodes, config.max_lora_rank, linears.groups, loaded.config.num_attention_heads, loaded.shape.head_dim
    )
    return {
        "largest_iteration": activation_bytes(loaded, chunk, decodes),
        "recorded_decodes": activation_bytes(loaded, 1, decodes) + decodes * loaded.vocabulary * loaded.dtype.itemsize,
        "sampler": sampler_bytes(loaded, decodes + 1),
        "adjustments": adjustment_bytes(ROWS_OF_EACH * decodes, loaded.vocabulary),
        "rows": DeviceRows.room_bytes(ROWS_OF_EACH * decodes, pages_for(longest)),
        "kernels": kernels.room_bytes(work),
        "swap": bytes_beside_pages(loaded.shape.bytes_per_page()),
    }
