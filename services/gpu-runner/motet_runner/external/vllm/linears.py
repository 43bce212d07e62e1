"""The linears of a base model by their names in files, from a model without weights."""

from pathlib import Path

import torch
import transformers
from torch import nn
from transformers.pytorch_utils import Conv1D

from motet.errors import ModelFolderError


def linears_of(model: Path) -> dict[str, tuple[int, int]]:
    """Module path → (inputs, outputs), for all but the head. Raises ModelFolderError for a model that is more than
    one of text, and otherwise what transformers raises."""
    config = transformers.AutoConfig.from_pretrained(model, local_files_only=True, trust_remote_code=False)
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelFolderError(
            f"config.json has model_type {config.model_type!r}, and with vLLM Motet serves only models of text alone"
        )
    with torch.device("meta"):
        empty = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    head = empty.get_output_embeddings()
    found = {}
    for path, module in empty.named_modules():
        if module is head:
            continue
        if type(module) is nn.Linear:
            found[path] = module.in_features, module.out_features
        elif isinstance(module, Conv1D):
            found[path] = module.nx, module.nf
    return found


def by_kind(linears: dict[str, tuple[int, int]]) -> dict[str, list[str]]:
    """The last part of their names → their paths"""
    kinds: dict[str, list[str]] = {}
    for path in linears:
        kinds.setdefault(path.rpartition(".")[2], []).append(path)
    return kinds
