"""The memory for the pages of KV and adapters: all that is left beside weights and other items."""

from collections.abc import Mapping

import structlog

from motet.domain import PAGE_TOKENS, pages_for
from motet.errors import SetupError
from motet_runner.execute.adapters.lora_linears import LoraLinears
from motet_runner.execute.forward.modules import LoadedModel
from motet_runner.execute.forward.rotation_table import rotation_bytes
from motet_runner.execute.gate.memory_needs import room_bytes
from motet_runner.execute.gate.texts import CROWD_TOKENS
from motet_runner.execute.kernels.roles import Kernels, LargestWork
from motet_runner.execute.memory_budget.activations import activation_bytes, sampler_bytes
from motet_runner.execute.pack.linear_packing import Packing, weight_of
from motet_runner.execute.sample.device_adjustments import adjustment_bytes
from motet_runner.execute.worker.device_rows import DeviceRows
from motet_runner.execute.worker.device_worker import ROWS_OF_EACH
from motet_runner.interface import EngineConfig
from motet_runner.memory.gpu_memory import GpuMemory
from motet_runner.memory.host_pages import bytes_beside_pages

log = structlog.get_logger(__name__)

MIB = 1024 * 1024
CPU_KV_MIB = 512

RANK_RESERVED = 16
"""The usual rank. A CPU's default adds memory for `max_resident_adapters` of this rank to its KV."""


def copy_bytes_of(kernels: Kernels, linears: LoraLinears, config: EngineConfig) -> int:
    """The back end's bytes for copies of adapters that compute together, beside the pages."""
    return config.max_resident_adapters * linears.run_bytes(RANK_RESERVED) if kernels.add_lora.copies else 0


def whole_pages(loaded: LoadedModel, kernels: Kernels, linears: LoraLinears, config: EngineConfig) -> int:
    """The pages of the whole pool, which KV and adapters share. Raises SetupError if no page fits."""
    page_bytes = loaded.shape.bytes_per_page()
    mib, copies = config.kv_cache_mib, copy_bytes_of(kernels, linears, config)
    beside = {"copies": copies}
    if loaded.device.type == "cuda":
        beside |= kept_bytes(loaded, kernels, linears, config)
        if mib is None:
            beside |= computing_bytes(loaded, kernels, config, beside)
        log.info("memory_set_aside", **{item: f"{size / MIB:.1f} MiB" for item, size in beside.items()})
        memory = GpuMemory.of(loaded.device)
        left = memory.left(config.memory_utilization_percent) - sum(beside.values())
        if mib is not None and mib * MIB > left:
            raise SetupError(
                f"engine.kvCacheMiB is {mib}, and of the GPU's {memory.total / MIB:.0f} MiB there are "
                f"{max(0, left) / MIB:.0f} for keys, values and adapters beside the model "
                f"(engine.memoryUtilizationPercent: {config.memory_utilization_percent}). Set it to at most "
                f"{max(0, left) // MIB}, or leave it unset: then iterations have their room, too."
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


def kept_bytes(loaded: LoadedModel, kernels: Kernels, linears: LoraLinears, config: EngineConfig) -> dict[str, int]:
    """GPU memory that is allocated once and kept, beside pages and copies of adapters"""
    decodes, longest = config.max_concurrent_sequences, config.max_model_length or loaded.max_positions
    pages, page_bytes = pages_for(longest, PAGE_TOKENS), loaded.shape.bytes_per_page()
    work = LargestWork(
        rows=decodes + config.prefill_chunk_tokens,
        decodes=decodes,
        max_rank=config.max_lora_rank,
        groups=linears.groups,
        heads=loaded.config.num_attention_heads,
        head_dim=loaded.shape.head_dim,
        layer_bytes=pages * page_bytes // loaded.shape.layers,
    )
    return {
        "rows": DeviceRows.room_bytes(ROWS_OF_EACH * decodes, pages),
        "kernels": kernels.room_bytes(work),
        "rotations": 0 if kernels.makes_forward is None else rotation_bytes(longest, loaded.shape.head_dim),
        "swap": 0 if config.host_kv_mib == 0 else bytes_beside_pages(page_bytes),
    }


def computing_bytes(
    loaded: LoadedModel, kernels: Kernels, config: EngineConfig, kept: Mapping[str, int]
) -> dict[str, int]:
    """GPU memory that iterations take. Without this memory, the engine computes iterations in parts."""
    decodes = config.max_concurrent_sequences
    items = {
        "largest_iteration": activation_bytes(loaded, config.prefill_chunk_tokens, decodes),
        "recorded_decodes": activation_bytes(loaded, 1, decodes) + decodes * loaded.vocabulary * loaded.dtype.itemsize,
        "sampler": sampler_bytes(loaded, decodes + 1),
        "adjustments": adjustment_bytes(ROWS_OF_EACH * decodes, loaded.vocabulary),
    }
    # The weights are packed, and then the forward pass is judged, before these items are allocated.
    free = sum(items.values()) + kept["kernels"]
    start = 0
    if kernels.packing is not None:
        judged = items["largest_iteration"] * CROWD_TOKENS // (config.prefill_chunk_tokens + decodes)
        start = max(_largest_group_bytes(loaded, kernels.packing), room_bytes(loaded) + judged)
    return items | {"start": max(0, start - free)}


def _largest_group_bytes(loaded: LoadedModel, packing: Packing) -> int:
    """The most bytes that packing takes for a moment beside the weights"""
    groups = [[weight_of(loaded.linears[path]) for path in group] for group in loaded.linear_groups]
    return max((packing.bytes_beside(group) for group in groups), default=0)
