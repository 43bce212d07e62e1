"""Weights that are not numbers, or change nothing, are refused before anybody asks."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from motet.errors import AdapterIncompatible
from motet_runner.adapters.compatibility_check import map_tensors
from motet_runner.adapters.peft_config import WEIGHTS_NAME as WEIGHTS
from motet_runner.adapters.safetensors_header import read_header
from motet_runner.adapters.weight_check import check_values

TYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def save_as(folder: Path, dtype: torch.dtype, **changed: torch.Tensor) -> list[str]:
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(folder / WEIGHTS).items()}
    save_file(tensors | {name: tensor.to(dtype) for name, tensor in changed.items()}, folder / WEIGHTS)
    return list(tensors)


@pytest.mark.parametrize("dtype", TYPES)
def test_a_trained_adapter_passes_in_every_float_type(folder: Path, shapes, dtype: torch.dtype) -> None:
    save_as(folder, dtype)
    check_values(folder / WEIGHTS, map_tensors(read_header(folder / WEIGHTS), shapes))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_nan_is_refused_with_its_tensor(
    folder: Path,
    shapes,
    dtype: torch.dtype,
    value: float,
) -> None:
    tensors = load_file(folder / WEIGHTS)
    name = sorted(tensors)[3]
    broken = tensors[name].clone()
    broken[-1, -1] = value
    save_as(folder, dtype, **{name: broken})
    with pytest.raises(AdapterIncompatible, match=name) as refused:
        check_values(folder / WEIGHTS, map_tensors(read_header(folder / WEIGHTS), shapes))
    assert refused.value.reason == "FormatRejected"


def test_the_largest_and_smallest_finite_values_pass(folder: Path, shapes) -> None:
    tensors = load_file(folder / WEIGHTS)
    name = min(tensors)
    extreme = torch.full_like(tensors[name], torch.finfo(torch.float32).max)
    extreme[0, 0] = torch.finfo(torch.float32).smallest_normal / 2
    save_as(folder, torch.float32, **{name: extreme})
    check_values(folder / WEIGHTS, map_tensors(read_header(folder / WEIGHTS), shapes))


@pytest.mark.parametrize("half", ["lora_A", "lora_B"])
@pytest.mark.parametrize("sign", [0.0, -0.0])
def test_a_lora_of_zeros_would_answer_as_the_base(folder: Path, shapes, half: str, sign: float) -> None:
    zeros = {
        name: torch.full_like(tensor, sign) for name, tensor in load_file(folder / WEIGHTS).items() if half in name
    }
    save_as(folder, torch.float32, **zeros)
    with pytest.raises(AdapterIncompatible, match="changes nothing") as refused:
        check_values(folder / WEIGHTS, map_tensors(read_header(folder / WEIGHTS), shapes))
    assert refused.value.reason == "NoEffect"


def test_one_module_with_an_effect_is_enough(folder: Path, shapes) -> None:
    tensors = load_file(folder / WEIGHTS)
    first = next(name for name in tensors if "lora_B" in name)
    zeros = {name: torch.zeros_like(tensor) for name, tensor in tensors.items() if "lora_B" in name and name != first}
    save_as(folder, torch.float32, **zeros)
    assert len(map_tensors(read_header(folder / WEIGHTS), shapes)) == len(tensors)
    check_values(folder / WEIGHTS, map_tensors(read_header(folder / WEIGHTS), shapes))
