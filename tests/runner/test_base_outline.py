"""What a base model's config.json says of its linears is what an engine finds in the loaded model."""

import json
from pathlib import Path

import pytest

from motet.errors import ModelFolderError
from motet_runner.execute.adapters.lora_linears import features
from motet_runner.execute.load import base_outline
from motet_runner.execute.load.load_model import load
from motet_runner.interface import EngineConfig
from tests.runner.families import BY_NAME, FAMILIES, MORE, Family, save_model

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

LOADED = ("GPT-2", "Llama, dynamic rope", "BioGPT")
"""They decide something by their numbers, so their weights are read."""


@pytest.mark.parametrize(
    "family", [*FAMILIES, *(pytest.param(family, marks=pytest.mark.soak) for family in MORE)], ids=lambda one: one.name
)
def test_the_linears_are_those_of_the_loaded_model(family: Family, tmp_path: Path) -> None:
    folder = save_model(family.config, tmp_path / "model")
    linears = load(folder, "float32", "cpu").linears
    found = {path: features(module) for path, module in linears.items()}
    if family.name not in LOADED:
        for weights in folder.glob("*.safetensors"):
            weights.unlink()
    limits = base_outline.limits_of(EngineConfig(model=folder, max_lora_rank=7, device="cpu"))
    assert limits.target_modules == found
    assert limits.biased_modules == tuple(path for path, module in linears.items() if module.bias is not None)
    assert (limits.max_lora_rank, limits.dtype) == (7, "float32")


@pytest.mark.parametrize(
    ("stored", "asked", "checked"),
    [("bfloat16", "auto", "bfloat16"), ("float16", "auto", "float32"), ("float32", "float16", "float16")],
)
def test_numbers_are_checked_for_the_type_that_a_cpu_may_compute_in(
    stored: str, asked: str, checked: str, tmp_path: Path
) -> None:
    config = json.loads(BY_NAME["Llama"].config.to_json_string()) | {"dtype": stored}
    (tmp_path / "config.json").write_text(json.dumps(config))
    limits = base_outline.limits_of(EngineConfig(model=tmp_path, dtype=asked, device="cpu"))
    assert limits.dtype == checked


def test_a_model_that_is_not_served_says_why(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "new"}')
    with pytest.raises(ModelFolderError, match="has model_type 'new', which transformers"):
        base_outline.limits_of(EngineConfig(model=tmp_path, device="cpu"))
