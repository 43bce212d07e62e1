"""Loads a model into vLLM, tries what the plan relies on, and makes the engine."""

import json

from motet.errors import ModelFolderError
from motet_runner.external.vllm.engine import Engine
from motet_runner.external.vllm.linears import linears_of
from motet_runner.external.vllm.surface import Surface
from motet_runner.external.vllm.trial import Trial
from motet_runner.interface import EngineConfig
from motet_runner.supported_models import eos_token_ids


def load_vllm(config: EngineConfig) -> Engine:
    try:
        surface = Surface(config)
    except (ValueError, RuntimeError, OSError) as error:  # vLLM says why it does not serve this model
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelFolderError(f"vLLM cannot load {config.model}: {reason}") from error
    raw = json.loads((config.model / "config.json").read_text())
    trial = Trial(surface, linears_of(config.model))
    served = trial.run()
    return Engine(
        config, surface, target_modules=served, eos_token_ids=eos_token_ids(config.model, raw.get("eos_token_id"))
    )
