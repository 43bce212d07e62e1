"""Loads a model into vLLM, tries what the plan relies on, and makes the engine."""

import json
import time

import structlog

from motet.errors import ModelFolderError
from motet_runner.external.vllm.engine import Engine
from motet_runner.external.vllm.grammar_package import withhold_package
from motet_runner.external.vllm.linears import by_kind, linears_of
from motet_runner.external.vllm.reason import advice_of, reason_of
from motet_runner.external.vllm.surface import Surface
from motet_runner.external.vllm.temporary_folders import remove_left
from motet_runner.external.vllm.trial import Trial
from motet_runner.interface import EngineConfig
from motet_runner.supported_models import eos_token_ids

log = structlog.get_logger(__name__)


def load_vllm(config: EngineConfig, *, grammars: bool = True) -> Engine:
    """`grammars`: whether this process has the service's package for them"""
    remove_left()
    raw = json.loads((config.model / "config.json").read_text())
    try:
        surface = Surface(config)
        began = time.monotonic()
        served = Trial(surface, linears_of(config.model), config.max_lora_rank).run()
    except Exception as error:  # vLLM says why it does not serve this model; a worker that fails is a bare Exception
        quantised = "quantization_config" in raw
        beside = " (quantised; not all builds compute adapters beside that)" if quantised else ""
        reason = reason_of(error).removesuffix(".")
        advice = advice_of(error, quantised=quantised, kv_by_share=config.kv_cache_mib is None)
        raise ModelFolderError(f"vLLM cannot serve {config.model}{beside}: {reason}.{advice}") from error
    facts = surface.facts
    log.info(
        "vllm_loaded",
        version=facts.version,
        blocks=facts.blocks,
        block_tokens=facts.block_tokens,
        dtype=facts.dtype,
        adapted=sorted(by_kind(served)),
        trial_seconds=round(time.monotonic() - began, 2),
    )
    if not grammars:
        withhold_package()
    eos = eos_token_ids(config.model, raw.get("eos_token_id"))
    return Engine(config, surface, target_modules=served, eos_token_ids=eos, clock=time.perf_counter)
