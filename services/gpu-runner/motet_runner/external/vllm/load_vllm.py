"""Loads a model into vLLM, tries what the plan relies on, and makes the engine."""

import time

import structlog

from motet.asset_fields import AssetFields
from motet_runner.external.vllm.engine import Engine
from motet_runner.external.vllm.grammar_package import withhold_package
from motet_runner.external.vllm.linears import by_kind, linears_of
from motet_runner.external.vllm.reason import refusal_of
from motet_runner.external.vllm.surface import Surface
from motet_runner.external.vllm.temporary_folders import remove_left
from motet_runner.external.vllm.trial import Trial
from motet_runner.interface import EngineConfig
from motet_runner.supported_models import read_supported_config

log = structlog.get_logger(__name__)


def load_vllm(config: EngineConfig, *, grammars: bool = True) -> Engine:
    """`grammars`: whether this process has the service's package for them"""
    remove_left()
    raw = read_supported_config(config.model, with_vllm=True)
    try:
        surface = Surface(config)
        began = time.monotonic()
        served = Trial(surface, linears_of(config.model), config.max_lora_rank).run()
    except Exception as error:  # vLLM says why it does not serve this model; a worker that fails is a bare Exception
        raise refusal_of(error, config, raw) from error
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
    eos = tuple(sorted(AssetFields(config.model).eos_ids))
    return Engine(config, surface, target_modules=served, eos_token_ids=eos, clock=time.perf_counter)
