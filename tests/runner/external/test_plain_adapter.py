"""The plain folder computes what the tenant's own does."""

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from motet.errors import AdapterFetchFailed
from motet_runner.adapters.certification import EngineLimits, certify
from motet_runner.adapters.layout import AdapterLayout
from motet_runner.external.vllm.linears import by_kind, linears_of
from motet_runner.external.vllm.plain_adapter import write_adapter
from tests.runner.random_models import EIGHT, RandomAdapter, save_adapter, save_base

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.filterwarnings("ignore::FutureWarning")]
PROMPT = torch.tensor([[5, 9, 14, 3, 77, 21]])


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base("llama", tmp_path_factory.mktemp("base") / "base")


def layout_of(base: Path, folder: Path) -> AdapterLayout:
    return certify(folder, EngineLimits(linears_of(base), 64, "float32")).layout


def logits(base: Path, adapter: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with torch.inference_mode():
        return PeftModel.from_pretrained(model, str(adapter)).eval()(PROMPT).logits


VARIANTS = (*EIGHT, RandomAdapter(8, 16, rank_pattern=((r"q_proj", 2),)))


@pytest.mark.parametrize("number", range(len(VARIANTS)))
def test_it_computes_what_the_tenants_own_does(base: Path, tmp_path: Path, number: int) -> None:
    theirs = save_adapter(base, "llama", VARIANTS[number], tmp_path / "theirs", seed=number)
    layout = layout_of(base, theirs)
    (plain := tmp_path / "plain").mkdir()
    write_adapter(layout, plain)
    torch.testing.assert_close(logits(base, plain), logits(base, theirs), atol=1e-5, rtol=0)
    config = json.loads((plain / "adapter_config.json").read_text())
    assert config["r"] == config["lora_alpha"] == layout.rank
    assert not config.keys() & {"rank_pattern", "alpha_pattern", "use_rslora", "use_dora", "modules_to_save"}


def test_a_file_that_has_changed_since_its_check_is_not_written(base: Path, tmp_path: Path) -> None:
    theirs = save_adapter(base, "llama", EIGHT[0], tmp_path / "theirs", seed=1)
    layout = layout_of(base, theirs)
    (plain := tmp_path / "plain").mkdir()
    (theirs / "adapter_model.safetensors").touch()
    with pytest.raises(AdapterFetchFailed, match="has changed since it was checked"):
        write_adapter(layout, plain)
    (theirs / "adapter_model.safetensors").unlink()
    with pytest.raises(AdapterFetchFailed, match="has changed since it was checked"):
        write_adapter(layout, plain)
    assert not list(plain.iterdir())


def test_the_linears_are_those_of_the_engine_without_its_head(base: Path) -> None:
    linears = linears_of(base)
    assert set(by_kind(linears)) == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert linears["model.layers.0.mlp.up_proj"][0] == linears["model.layers.0.mlp.down_proj"][1]
