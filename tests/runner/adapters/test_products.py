"""Adapters whose weights are numbers and whose products are not are refused before anybody asks."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from motet.errors import AdapterIncompatible
from motet_runner.adapters.compatibility_check import check, map_tensors
from motet_runner.adapters.peft_config import WEIGHTS_NAME as WEIGHTS
from motet_runner.adapters.safetensors_header import read_header
from motet_runner.adapters.tensor_names import Shapes
from motet_runner.adapters.weight_check import check_products, check_values

V_PROJ = "model.layers.1.self_attn.v_proj"


def scaled(folder: Path, by: dict[str, float], dtype: torch.dtype = torch.float32) -> None:
    """Multiply the halves named in `by` of one linear, and save everything as `dtype`."""
    tensors = load_file(folder / WEIGHTS)
    factor = {name: next((f for half, f in by.items() if f"{V_PROJ}.{half}" in name), 1.0) for name in tensors}
    save_file({name: (tensor.double() * factor[name]).to(dtype) for name, tensor in tensors.items()}, folder / WEIGHTS)


def probe(folder: Path, shapes: Shapes, dtype: str) -> None:
    check_values(folder / WEIGHTS, map_tensors(read_header(folder / WEIGHTS), shapes))
    check_products(check(folder, shapes, max_rank=64).layout, dtype)


@pytest.mark.parametrize("served", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("saved", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_a_trained_adapter_passes_with_every_saved_and_served_type(
    folder: Path, shapes: Shapes, saved: torch.dtype, served: str
) -> None:
    scaled(folder, {}, saved)
    probe(folder, shapes, served)


@pytest.mark.parametrize(
    ("by", "saved", "served"),
    [
        ({"lora_A": 1e30, "lora_B": 1e30}, torch.float32, "float32"),
        ({"lora_A": 1e30, "lora_B": 1e30}, torch.bfloat16, "bfloat16"),
        ({"lora_A": 1e30}, torch.float32, "float32"),  # finite once, and not when it is squared
        ({"lora_B": 1e30}, torch.bfloat16, "float32"),
        ({"lora_A": 1e200}, torch.float64, "float32"),  # no float32 at all
        ({"lora_A": 1e6, "lora_B": 1e3}, torch.float32, "float16"),
        ({"lora_A": 1e6, "lora_B": 1e-6}, torch.float32, "float16"),  # on the way to it
    ],
)
def test_finite_weights_whose_products_overflow_are_refused_by_their_linear(
    folder: Path, shapes: Shapes, by: dict[str, float], saved: torch.dtype, served: str
) -> None:
    scaled(folder, by, saved)
    with pytest.raises(AdapterIncompatible, match=rf"{V_PROJ}.*{served}") as refused:
        probe(folder, shapes, served)
    assert refused.value.reason == "FormatRejected"


def test_the_bound_is_on_the_product_and_not_on_its_halves(folder: Path, shapes: Shapes) -> None:
    scaled(folder, {"lora_A": 1e15, "lora_B": 1e-15})
    probe(folder, shapes, "float32")


def test_the_probe_bounds_what_any_input_of_its_size_gives(folder: Path, shapes: Shapes) -> None:
    """Scaled until it just passes in float16, no input of ones and minus ones makes the product infinite there."""
    scaled(folder, {"lora_A": 140.0, "lora_B": 140.0})
    probe(folder, shapes, "float16")
    tensors = {name: tensor for name, tensor in load_file(folder / WEIGHTS).items() if V_PROJ in name}
    a, b = (next(tensor for name, tensor in tensors.items() if half in name) for half in ("lora_A", "lora_B"))
    for row in a.sign():
        assert (2 * b.half() @ (a.half() @ row.half())).isfinite().all()
