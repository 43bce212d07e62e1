"""vLLM's errors in one line, with the names of a pool's fields."""

import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from motet.errors import ModelFolderError
from motet_runner.interface import EngineConfig

FIELDS = {
    "max_model_len": "engine.maxModelLength",
    "kv-cache-memory-bytes, VLLM_CPU_KVCACHE_SPACE": "engine.kvCacheMiB",
    "gpu_memory_utilization": "engine.kvCacheMiB or engine.memoryUtilizationPercent",
    "GPU memory utilization": "engine.memoryUtilizationPercent",
    "max_num_seqs": "engine.maxConcurrentSequences",
    "max_loras": "engine.maxResidentAdapters",
    "max_lora_rank": "engine.maxLoraRank",
    "tensor_parallel_size": "engine.parallel.tensor",
    "tensor parallel size": "engine.parallel.tensor",
    "pipeline_parallel_size": "engine.parallel.stages",
    "pipeline parallel size": "engine.parallel.stages",
    "kv_cache_dtype": "engine.vllm.kvCacheDtype",
    "attention_backend": "engine.vllm.attentionBackend",
    "Selected backend": "engine.vllm.attentionBackend",
    "dtype` flag": "engine.dtype",
}
"""vLLM's words in its errors → ours"""


_LISTED = re.compile(r"\A\d+ validation errors? for \w+\n(?:\w+\n)?\s*(?:Value error, )?")
"""How pydantic begins the text of what it refuses"""
_AFTER = re.compile(r"\s*(?:\[type=|See https://|in CLI, for example|To allow overriding this maximum).*")
_MEMORY = re.compile(r"out of memory|can(?:'t|not) allocate memory|bad_alloc", re.IGNORECASE)
_OF_WORKER = re.compile(r"\AWorker failed with error '(.*)', please check the stack trace above", re.DOTALL)
_OF_OTHERS = "See stack trace for root cause"
"""A worker that fails as it starts says only in the log why."""
_FILE = re.compile(r"['<](/[^'>]*)['>]")
_FIELD = re.compile(rf"\bengine\.[a-z]+[A-Z]|{'|'.join(map(re.escape, FIELDS.values()))}")


def refusal_of(error: Exception, config: EngineConfig, raw: Mapping[str, Any]) -> ModelFolderError:
    """What a runner with vLLM says of a model that it cannot serve. `raw`: the model's config.json"""
    quantised = "quantization_config" in raw
    beside = " (quantised; not all builds compute adapters beside that)" if quantised else ""
    reason = reason_of(error).removesuffix(".")
    advice = advice_of(error, quantised=quantised, kv_by_share=config.kv_cache_mib is None)
    return ModelFolderError(f"vLLM cannot serve {config.model}{beside}: {reason}.{advice}")


def reason_of(error: Exception) -> str:
    text = str(error).strip()
    if (found := _OF_WORKER.match(text)) is not None:
        text = found[1].strip()
    text = _LISTED.sub("", text)
    first = _AFTER.sub("", text.partition("\n")[0]) or type(error).__name__
    return re.sub(rf"(?:`|--)?\b({'|'.join(FIELDS)})\b`?", lambda found: FIELDS[found[1]], first)


def lacks_memory(error: Exception) -> bool:
    """torch has kinds of its own for that."""
    return isinstance(error, MemoryError) or _MEMORY.search(str(error)) is not None


def in_temporary_folder(error: Exception, *, unnamed: bool) -> bool:
    """Whether it is about a file there. `unnamed`: the answer for an error that names no file"""
    named = _FILE.search(str(error))
    return unnamed if named is None else Path(named[1]).is_relative_to(tempfile.gettempdir())


def advice_of(error: Exception, *, quantised: bool, kv_by_share: bool) -> str:
    """What the owner of a pool may change. Empty: the reason names a field. `kv_by_share`: a GPU's KV is what is left
    of a share of its memory."""
    text = str(error)
    if lacks_memory(error):
        of_gpu = kv_by_share and "out of memory" in text
        kv = "engine.memoryUtilizationPercent" if of_gpu else "engine.kvCacheMiB"
        return f" Lower engine.maxResidentAdapters, engine.maxLoraRank or {kv}."
    if "No space left" in text:
        if in_temporary_folder(error, unnamed=False):
            return " The folder for temporary files (TMPDIR) is full."
        return " A disk or /dev/shm is full."
    if _OF_OTHERS in text:
        return " The log above has the cause."
    if _names_field(error):
        return ""
    return " Change model.uri." if quantised else " Change model.uri, or set engine.backend to motet."


def _names_field(error: Exception) -> bool:
    """Names of vLLM's modules begin like those of fields, and Motet's own words have neither."""
    own = isinstance(error, ModelFolderError) and "engine." in str(error)
    return own or _FIELD.search(reason_of(error)) is not None
