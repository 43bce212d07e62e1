"""A copy of the base model's embeddings or output layer beside an adapter is left out, and a changed one refused."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from motet.domain import Digest
from motet.errors import AdapterIncompatible
from motet_runner.adapters.certification import EngineLimits, certify
from motet_runner.adapters.equal_copies import CHUNK_BYTES
from tests.runner.random_models import RandomAdapter, save_adapter, save_base

BASE, WEIGHTS = "model.safetensors", "adapter_model.safetensors"
EMBEDDINGS, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("copies")
    base = save_base("llama", folder / "base")
    return base, save_adapter(base, "llama", RandomAdapter(4, 8), folder / "adapter", seed=1)


@pytest.fixture
def base(saved: tuple[Path, Path], tmp_path: Path) -> Path:
    return changed(saved[0], BASE, tmp_path / "base")


@pytest.fixture
def adapter(saved: tuple[Path, Path], tmp_path: Path) -> Path:
    return changed(saved[1], WEIGHTS, tmp_path / "adapter")


def changed(folder: Path, file: str, copy: Path, **more: torch.Tensor) -> Path:
    """A copy of the folder, with more tensors."""
    copy.mkdir(exist_ok=True)
    for one in folder.iterdir():
        (copy / one.name).write_bytes(one.read_bytes())
    save_file(load_file(copy / file) | more, copy / file)
    return copy


def limits(base: Path, adapter: Path) -> EngineLimits:
    shapes = {}
    for name, tensor in load_file(adapter / WEIGHTS).items():
        path, _, end = name.removeprefix("base_model.model.").partition(".lora_")
        inputs, outputs = shapes.get(path, (0, 0))
        shapes[path] = (tensor.shape[1], outputs) if end.startswith("A") else (inputs, tensor.shape[0])
    return EngineLimits(shapes, 64, "float32").with_base(base, Digest(""), 0)


def add(adapter: Path, name: str, tensor: torch.Tensor) -> None:
    changed(adapter, WEIGHTS, adapter, **{f"base_model.model.{name}": tensor.contiguous()})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [EMBEDDINGS, HEAD])
def test_an_equal_copy_changes_nothing(base: Path, adapter: Path, name: str, dtype: torch.dtype) -> None:
    known = limits(base, adapter)
    without = certify(adapter, known)
    matrix = load_file(base / BASE)[EMBEDDINGS].to(dtype)
    changed(base, BASE, base, **{EMBEDDINGS: matrix, HEAD: matrix.flip(0).contiguous()})
    for copy in (load_file(base / BASE)[name], load_file(base / BASE)[name].float()):
        add(adapter, name, copy)
        assert certify(adapter, known).certificate.target_modules == without.certificate.target_modules
        assert len(certify(adapter, known).layout.linears) == len(without.layout.linears)


def test_the_output_layer_may_be_the_embeddings(base: Path, adapter: Path) -> None:
    known = limits(base, adapter)
    tensors = load_file(base / BASE)
    tensors.pop(HEAD, None)
    save_file(tensors, base / BASE)
    add(adapter, HEAD, tensors[EMBEDDINGS])
    assert certify(adapter, known).layout.linears


def test_a_copy_is_found_in_one_of_several_files(base: Path, adapter: Path) -> None:
    known = limits(base, adapter)
    tensors = load_file(base / BASE)
    (base / BASE).unlink()
    save_file({EMBEDDINGS: tensors[EMBEDDINGS]}, base / "model-1.safetensors")
    listed = {EMBEDDINGS: "model-1.safetensors", "model.norm.weight": "model-2.safetensors"}
    (base / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))
    add(adapter, EMBEDDINGS, tensors[EMBEDDINGS])
    assert certify(adapter, known).layout.linears


@pytest.mark.parametrize("change", ["last number", "shape", "type", "no base"])
def test_what_is_not_equal_is_refused(base: Path, adapter: Path, change: str) -> None:
    known = limits(base, adapter)
    columns = 1 + CHUNK_BYTES // 4
    matrix = torch.arange(2.0 * columns).reshape(2, columns)
    changed(base, BASE, base, **{EMBEDDINGS: matrix})
    copy = matrix.clone()
    if change == "last number":
        copy[-1, -1] += 1
    elif change == "shape":
        copy = copy.reshape(columns, 2)
    elif change == "type":
        copy = copy.double()
    else:
        (base / BASE).unlink()
    add(adapter, EMBEDDINGS, copy)
    with pytest.raises(AdapterIncompatible, match=r"embed_tokens.*whole matrix of the base model"):
        certify(adapter, known)
