"""An adapter of a random Llama, and that Llama's linears."""

import shutil
from pathlib import Path

import pytest

from motet_runner.adapters.tensor_names import Shapes


@pytest.fixture(scope="module")
def shapes() -> Shapes:
    of_layer = {
        "self_attn.q_proj": (64, 64),
        "self_attn.k_proj": (64, 32),
        "self_attn.v_proj": (64, 32),
        "self_attn.o_proj": (64, 64),
        "mlp.gate_proj": (64, 128),
        "mlp.up_proj": (64, 128),
        "mlp.down_proj": (128, 64),
    }
    return {f"model.layers.{layer}.{path}": shape for layer in range(3) for path, shape in of_layer.items()}


@pytest.fixture
def folder(adapters: list[Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(adapters[0], tmp_path / "adapter"))
