"""Writes an adapter as a plain PEFT folder, from the layout of its check: vLLM never reads a file of a tenant.

One rank for all linears, alpha = rank, and the scale of each linear multiplied into its B. So a field of PEFT's config
that some version of vLLM does not know cannot change what an adapter computes.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from motet.errors import AdapterIncompatible
from motet_runner.adapters.layout import WITH_VLLM, AdapterLayout
from motet_runner.adapters.peft_config import CONFIG_NAME, WEIGHTS_NAME
from motet_runner.adapters.weight_reader import WeightReader, has_changed


def write_adapter(layout: AdapterLayout, folder: Path, note_read: Callable[[], object] = lambda: None) -> None:
    """`note_read` is called after each linear. Raises AdapterIncompatible for what scales or shifts a linear,
    AdapterFetchFailed if the file is not the one that was checked, and OSError if the folder can't be written."""
    try:
        linears = layout.linears
    except (OSError, ValueError) as error:
        raise has_changed(layout) from error
    halves = {}
    with WeightReader(layout) as matrices:
        for linear in linears:
            if linear.a is None or linear.b is None or linear.scales:
                raise AdapterIncompatible(
                    f"{linear.module} has DoRA, a bias on lora_B or a trained bias, which Motet does not serve "
                    f"{WITH_VLLM} yet."
                )
            halves[linear.module] = matrices.read(linear.a), matrices.read(linear.b).float() * linear.scale
            note_read()
    write_plain(halves, layout.rank, folder)


def write_plain(halves: Mapping[str, tuple[torch.Tensor, torch.Tensor]], rank: int, folder: Path) -> None:
    """`halves`: by linear, A [rank or less, in] and B [out, rank or less]"""
    tensors = {}
    for module, (a, b) in halves.items():
        tensors[f"base_model.model.{module}.lora_A.weight"] = _padded(a, rank, a.shape[1])
        tensors[f"base_model.model.{module}.lora_B.weight"] = _padded(b, b.shape[0], rank)
    save_file(tensors, folder / WEIGHTS_NAME)
    (folder / CONFIG_NAME).write_text(json.dumps(_config(rank, {module.rpartition(".")[2] for module in halves})))


def _config(rank: int, kinds: Iterable[str]) -> dict[str, object]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": sorted(kinds),
        "bias": "none",
        "lora_dropout": 0.0,
        "inference_mode": True,
    }


def _padded(matrix: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    padded = torch.zeros(rows, columns, dtype=torch.float32)
    padded[: matrix.shape[0], : matrix.shape[1]] = matrix
    return padded
