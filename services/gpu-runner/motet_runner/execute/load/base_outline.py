"""What the check of an adapter needs to know of a base model, from the model's config.json alone where that says it.

A model that transformers can run without weights shows its linears by a run without numbers. Only if a model decides
something by its numbers, its weights are loaded.
"""

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from motet.digest import asset_digest
from motet.errors import MotetError
from motet_runner.adapters.certification import EngineLimits
from motet_runner.adapters.layout import WITH_VLLM
from motet_runner.execute.adapters.lora_linears import biased_modules, features, linears_with_lora
from motet_runner.execute.load.device import device_named
from motet_runner.execute.load.dtype import dtype_named
from motet_runner.execute.load.load_model import load, read_config, without_weights
from motet_runner.execute.load.text_model import text_config
from motet_runner.external.vllm.linears import linears_of
from motet_runner.external.vllm.reason import refusal_of
from motet_runner.interface import EngineConfig
from motet_runner.supported_models import stored_dtype

TOKENS = 21
"""Of the run without numbers"""


def limits_of(config: EngineConfig, *, with_vllm: bool = False) -> EngineLimits:
    """What an engine with this configuration would check adapters against. Raises ModelFolderError for a model that
    Motet does not serve. `with_vllm`: the engine is vLLM."""
    raw = read_config(config.model, with_vllm=with_vllm)
    if with_vllm:
        try:
            linears_of(config.model)
        except Exception as error:  # as the runner does
            raise refusal_of(error, config, raw) from error
    dtype = _dtype(config, raw)
    linears = _linears(config.model)
    if linears is None:
        linears = load(config.model, dtype, config.device).linears
    shapes = {path: shape for path, module in linears.items() if (shape := features(module)) is not None}
    no_scales = WITH_VLLM if with_vllm else ""
    limits = EngineLimits(shapes, config.max_lora_rank, dtype, no_scales, biased_modules(linears))
    return limits.with_base(config.model, asset_digest(config.model), _vocabulary(config.model))


def _vocabulary(folder: Path) -> int:
    """0: the config does not say it."""
    found = getattr(text_config(folder), "vocab_size", 0)
    return found if isinstance(found, int) else 0


def _dtype(config: EngineConfig, raw: dict[str, Any]) -> str:
    """Where an engine would measure which type is faster, the one with the smaller largest number."""
    device = device_named(config.device)
    if (config.dtype, device.type) == ("auto", "cpu"):
        return "bfloat16" if stored_dtype(raw) == "bfloat16" else "float32"
    return str(dtype_named(config.dtype, device, raw)).removeprefix("torch.")


def _linears(folder: Path) -> dict[str, nn.Module] | None:
    """None: the model cannot run without its weights."""
    rows: dict[str, list[int]] = defaultdict(list)

    def watch(path: str) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], None]:
        return lambda _, args: rows[path].append(args[0].shape[:-1].numel())

    try:
        model = without_weights(folder).eval()
        for path, module in model.named_modules():
            if features(module):
                module.register_forward_pre_hook(watch(path))
        with torch.device("meta"), torch.inference_mode():
            model(input_ids=torch.zeros(1, TOKENS, dtype=torch.long))
    except MotetError:
        raise
    except Exception:  # a model may do anything; if the model itself is wrong, `load` says how
        return None
    return linears_with_lora(model, rows, tokens=TOKENS)
