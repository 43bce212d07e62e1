"""vLLM's errors in one line, with the names of a pool's fields."""

import re

FIELDS = {
    "max_model_len": "engine.maxModelLength",
    "kv-cache-memory-bytes, VLLM_CPU_KVCACHE_SPACE": "engine.kvCacheMiB",
    "gpu_memory_utilization": "engine.kvCacheMiB or engine.memoryUtilizationPercent",
    "max_num_seqs": "engine.maxConcurrentSequences",
    "max_loras": "engine.maxResidentAdapters",
    "max_lora_rank": "engine.maxLoraRank",
    "tensor_parallel_size": "engine.parallel.tensor",
    "tensor parallel size": "engine.parallel.tensor",
    "pipeline_parallel_size": "engine.parallel.stages",
    "pipeline parallel size": "engine.parallel.stages",
    "kv_cache_dtype": "engine.vllm.kvCacheDtype",
    "attention_backend": "engine.vllm.attentionBackend",
}
"""vLLM's words in its errors → ours"""


_LISTED = re.compile(r"\A\d+ validation errors? for \w+\n(?:\w+\n)?\s*(?:Value error, )?")
"""How pydantic begins the text of what it refuses"""
_AFTER = re.compile(r"\s*(?:\[type=|See https://|To allow overriding this maximum).*")
_MEMORY = re.compile(r"out of memory|can't allocate memory", re.IGNORECASE)


def reason_of(error: Exception) -> str:
    text = _LISTED.sub("", str(error).strip())
    first = _AFTER.sub("", text.partition("\n")[0]) or type(error).__name__
    return re.sub(rf"(?:`|--)?\b({'|'.join(FIELDS)})\b`?", lambda found: FIELDS[found[1]], first)


def lacks_memory(error: Exception) -> bool:
    """torch has kinds of its own for that."""
    return isinstance(error, MemoryError) or _MEMORY.search(str(error)) is not None


def advice_of(error: Exception, *, quantised: bool) -> str:
    """What the owner of a pool may change. Empty: the reason names a field."""
    if lacks_memory(error):
        return " Lower engine.maxResidentAdapters, engine.maxLoraRank or engine.kvCacheMiB."
    if "No space left" in str(error):
        return " The folder for temporary files (TMPDIR) is full."
    if "engine." in reason_of(error):
        return ""
    return " Change model.uri." if quantised else " Change model.uri, or set engine.backend to motet."
