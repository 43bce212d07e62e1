"""Weights in one file or in shards: each is loaded exactly, and files that do not fit together are refused by name."""

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from motet.errors import ModelFolderError
from motet_runner.execute.load import checkpoint_headers, checkpoint_reader
from motet_runner.execute.load.checkpoint_headers import TensorEntry
from motet_runner.execute.load.checkpoint_reader import CheckpointReader
from motet_runner.execute.load.load_model import load
from tests.runner.families import BY_NAME
from tests.runner.random_models import configs, llama, save_base

INDEX = "model.safetensors.index.json"
ALL = configs() | {name: family.config for name, family in BY_NAME.items()} | {
    "tied": transformers.LlamaConfig(**(llama().to_dict() | {"tie_word_embeddings": True})),
}  # fmt: skip
MIXTURE = "Mixtral, a mixture of experts"


def save_sharded(folder: Path, family: str = "llama", *, dtype: torch.dtype = torch.float32) -> list[str]:
    """A model in several files; returns their names."""
    save_base(family, folder, config=ALL[family])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="60KB")
    shards = sorted(path.name for path in folder.glob("*.safetensors"))
    assert len(shards) > 2
    return shards


def tensors_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))


def assert_as_transformers_loads(folder: Path, dtype: torch.dtype) -> torch.nn.Module:
    ours = load(folder, str(dtype).removeprefix("torch."), "cpu").model
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    expected, found = tensors_of(theirs), tensors_of(ours)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name
    return ours


@pytest.mark.parametrize("family", ALL)
def test_shards_give_the_tensors_that_transformers_gives(family: str, tmp_path: Path) -> None:
    save_sharded(tmp_path, family)
    assert_as_transformers_loads(tmp_path, torch.float32)


@pytest.mark.parametrize(("stored", "wanted"), [
    (torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.float32, torch.bfloat16),
    (torch.float16, torch.bfloat16), (torch.bfloat16, torch.bfloat16),
])  # fmt: skip
def test_weights_are_converted_to_the_engines_type(
    stored: torch.dtype, wanted: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_reader, "STAGING_BYTES", 1000)  # no tensor's size is a multiple of it
    save_sharded(tmp_path, dtype=stored)
    assert_as_transformers_loads(tmp_path, wanted)


def test_tied_weights_are_in_memory_once(tmp_path: Path) -> None:
    save_sharded(tmp_path, "tied")
    model = assert_as_transformers_loads(tmp_path, torch.float32)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_weights_without_the_head_models_prefix_are_found(tmp_path: Path) -> None:
    base = transformers.AutoModel.from_config(ALL["tied"])
    base.save_pretrained(tmp_path, max_shard_size="60KB")
    assert not any(name.startswith("model.") for name in json.loads((tmp_path / INDEX).read_text())["weight_map"])
    assert_as_transformers_loads(tmp_path, torch.float32)


def test_shards_are_read_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.core_model_loading.GLOBAL_WORKERS", 2)  # also on one core
    save_sharded(tmp_path)
    both = threading.Barrier(2)
    read, readers = os.preadv, set()

    def wait_for_another(*arguments) -> int:
        if threading.get_ident() not in readers:
            readers.add(threading.get_ident())
            both.wait(10)
        return read(*arguments)

    monkeypatch.setattr(os, "preadv", wait_for_another)
    load(tmp_path, "float32", "cpu")
    assert len(readers) == 2


def test_loading_says_how_far_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_reader, "PROGRESS_SECONDS", 0)
    shards = save_sharded(tmp_path)
    said: list[tuple[int, int]] = []
    load(tmp_path, "float32", "cpu", lambda *progress: said.append(progress))
    total = sum(tensor.nbytes for file in shards for tensor in load_file(tmp_path / file).values())
    assert said == sorted(set(said))
    assert said[-1] == (total, total)


def test_memory_of_tensors_that_are_not_kept_goes_back_at_once(tmp_path: Path) -> None:
    """Such as the experts of a layer once they are stacked."""
    mib = 1 << 20
    save_file({f"t{number}": torch.ones(mib // 4) for number in range(64)}, tmp_path / "model.safetensors")
    large = torch.ones(16 * mib, dtype=torch.uint8)  # once it is freed, malloc keeps the memory of smaller ones
    del large
    stored = checkpoint_headers.Checkpoint(tmp_path)
    with CheckpointReader(stored, torch.device("cpu"), checkpoint_reader.ignore_progress) as reader:
        read = [reader.read(entry, None) for entry in stored.tensors.values()]
    process = psutil.Process()
    before = process.memory_info().rss
    kept = read[::8]
    del read
    assert before - process.memory_info().rss > 50 * mib
    assert all(tensor.eq(1).all() for tensor in kept)


def tensors(file: Path) -> dict[str, torch.Tensor]:
    return load_file(file)


def _missing(folder: Path, shards: list[str]) -> None:
    (folder / shards[1]).unlink()


def _cut(folder: Path, shards: list[str]) -> None:
    os.truncate(folder / shards[1], (folder / shards[1]).stat().st_size - 100)


def _cut_in_its_header(folder: Path, shards: list[str]) -> None:
    os.truncate(folder / shards[1], 20)


def _empty(folder: Path, shards: list[str]) -> None:
    os.truncate(folder / shards[1], 0)


def _of_another_dtype(folder: Path, shards: list[str]) -> None:
    save_file({name: tensor.half() for name, tensor in tensors(folder / shards[1]).items()}, folder / shards[1])


def _quantised(folder: Path, shards: list[str]) -> None:
    changed = {name: tensor.to(torch.float8_e4m3fn) for name, tensor in tensors(folder / shards[1]).items()}
    save_file(changed, folder / shards[1])


def _of_integers(folder: Path, shards: list[str]) -> None:
    save_file({name: tensor.to(torch.int8) for name, tensor in tensors(folder / shards[1]).items()}, folder / shards[1])


def _of_another_shape(folder: Path, shards: list[str]) -> None:
    changed = {name: torch.cat([tensor, tensor]) for name, tensor in tensors(folder / shards[1]).items()}
    save_file(changed, folder / shards[1])


def _without_a_tensor_of_the_index(folder: Path, shards: list[str]) -> None:
    _first, *rest = tensors(folder / shards[1]).items()
    save_file(dict(rest), folder / shards[1])


def _with_a_tensor_of_another(folder: Path, shards: list[str]) -> None:
    extra = next(iter(tensors(folder / shards[0]).items()))
    save_file(dict([extra]) | tensors(folder / shards[1]), folder / shards[1])


BAD_SHARDS: dict[Callable[[Path, list[str]], None], str] = {
    _missing: "{shard} is missing, and .*index.json names it. Copy it there",
    _cut: "{shard} is damaged: .*. Copy it there again",
    _cut_in_its_header: "{shard} is damaged: .*. Copy it there again",
    _empty: "{shard} is damaged: .*. Copy it there again",
    _of_another_dtype: "{shard} has F16 weights and the other files have F32: .*. Copy {shard} there again",
    _quantised: "{shard} has .* as F8_E4M3. .*. Use the unquantised weights",
    _of_integers: "{shard} has .* as I8.*. Use the unquantised weights",
    _of_another_shape: r"{shard} has .* with other shapes than config.json says .*. Copy {shard} and config.json",
    _without_a_tensor_of_the_index: r"{shard} has the tensor .*, but {shard} does not have it.*: copy {shard} and",
    _with_a_tensor_of_another: "{first} and {shard} both have the tensor .*. Copy all files of one model there again",
}


def _workers() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if not thread.daemon}


@pytest.fixture
def nothing_left_behind(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before, files, reading = _workers(), set(Path("/proc/self/fd").iterdir()), set[threading.Thread]()
    read = CheckpointReader.read

    def watched(reader: CheckpointReader, entry: TensorEntry, dtype: torch.dtype | None) -> torch.Tensor:
        reading.add(threading.current_thread())
        time.sleep(0.01)  # long enough that others are still busy when one has failed
        return read(reader, entry, dtype)

    monkeypatch.setattr(CheckpointReader, "read", watched)
    yield
    reading.discard(threading.current_thread())
    assert not [thread for thread in reading if thread.is_alive()], "the load has returned, and its threads read on"
    assert set(Path("/proc/self/fd").iterdir()) <= files
    for thread in _workers() - before:  # of transformers' pool, and without work
        thread.join(5)
        assert not thread.is_alive()


@pytest.mark.usefixtures("nothing_left_behind")
@pytest.mark.parametrize("spoil", BAD_SHARDS, ids=lambda spoil: spoil.__name__.strip("_"))
def test_a_bad_shard_is_refused_by_its_name_with_what_to_do(
    spoil: Callable[[Path, list[str]], None], tmp_path: Path
) -> None:
    shards = save_sharded(tmp_path)
    spoil(tmp_path, shards)
    with pytest.raises(ModelFolderError, match=BAD_SHARDS[spoil].format(shard=shards[1], first=shards[0])):
        load(tmp_path, "float32", "cpu")


def test_a_shard_of_another_type_than_config_json_is_the_one_to_copy(tmp_path: Path) -> None:
    """All other shards are smaller, but config.json says which type is meant."""
    shards = save_sharded(tmp_path, dtype=torch.float16)
    for name in shards[1:]:
        _of_another_dtype(tmp_path, ["", name])
    save_file({name: tensor.float() for name, tensor in tensors(tmp_path / shards[0]).items()}, tmp_path / shards[0])
    with pytest.raises(ModelFolderError, match=f"{shards[0]} has F32 weights and the other files have F16"):
        load(tmp_path, "float32", "cpu")


def test_some_tensors_may_have_another_type_than_those_beside_them(tmp_path: Path) -> None:
    shards = save_sharded(tmp_path, dtype=torch.bfloat16)
    for shard in shards:
        changed = {
            name: tensor.float() if "norm" in name else tensor for name, tensor in tensors(tmp_path / shard).items()
        }
        save_file(changed, tmp_path / shard)
    assert_as_transformers_loads(tmp_path, torch.float32)


@pytest.mark.parametrize("index", ["{", "[]", '{"weight_map": []}', '{"weight_map": {"a": 1}}', "{}"])
def test_an_index_that_is_none_is_refused(index: str, tmp_path: Path) -> None:
    save_sharded(tmp_path)
    (tmp_path / INDEX).write_text(index)
    with pytest.raises(ModelFolderError, match=r"model\.safetensors\.index\.json"):
        load(tmp_path, "float32", "cpu")


def test_an_index_names_no_file_outside_of_the_folder(tmp_path: Path) -> None:
    (folder := tmp_path / "base").mkdir()
    shards = save_sharded(folder)
    (folder / shards[0]).rename(tmp_path / shards[0])
    text = (folder / INDEX).read_text()
    (folder / INDEX).write_text(text.replace(shards[0], f"../{shards[0]}"))
    with pytest.raises(ModelFolderError, match="which is not a file beside it"):
        load(folder, "float32", "cpu")


@pytest.mark.parametrize("family", ["llama", MIXTURE])
def test_weights_that_no_file_has_are_refused_and_not_made_up(family: str, tmp_path: Path) -> None:
    """Also not if the index lacks them, too."""
    save_sharded(tmp_path, family)
    index = json.loads((tmp_path / INDEX).read_text())
    lost = next(name for name in index["weight_map"] if "layers.1." in name and "norm" in name)
    shard = tmp_path / index["weight_map"].pop(lost)
    save_file({name: tensor for name, tensor in tensors(shard).items() if name != lost}, shard)
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(ModelFolderError, match=f"no weights for {lost}, .*Copy all files of the model there again"):
        load(tmp_path, "float32", "cpu")


@pytest.mark.usefixtures("nothing_left_behind")
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_weight_that_is_no_number_is_refused_by_its_name(value: float, stored: torch.dtype, tmp_path: Path) -> None:
    save_base("llama", tmp_path)
    held = {name: tensor.to(stored) for name, tensor in tensors(tmp_path / "model.safetensors").items()}
    name = "model.layers.1.mlp.down_proj.weight"
    held[name][3, 5] = value
    save_file(held, tmp_path / "model.safetensors")
    with pytest.raises(ModelFolderError, match=rf"model\.safetensors has numbers in {name} that are infinite or not"):
        load(tmp_path, "float32", "cpu")


def test_a_weight_that_the_chosen_type_cannot_hold_is_refused(tmp_path: Path) -> None:
    save_base("llama", tmp_path)
    held = tensors(tmp_path / "model.safetensors")
    held["model.layers.1.mlp.down_proj.weight"][3, 5] = 1e6
    save_file(held, tmp_path / "model.safetensors")
    with pytest.raises(ModelFolderError, match=r"too large for float16\. Set engine\.dtype to bfloat16 or float32"):
        load(tmp_path, "float16", "cpu")
    load(tmp_path, "bfloat16", "cpu")


@pytest.mark.usefixtures("nothing_left_behind")
@pytest.mark.parametrize("change", ["lost", "of another shape"])
def test_an_expert_that_is_lost_or_does_not_fit_is_refused(change: str, tmp_path: Path) -> None:
    """Transformers stacks the experts of a layer. It finds only then that one is missing."""
    save_base(MIXTURE, tmp_path, config=ALL[MIXTURE])
    held = tensors(tmp_path / "model.safetensors")
    expert = next(name for name in held if "layers.1." in name and "experts.2" in name)
    held[expert] = torch.cat([held[expert], held[expert]])
    if change == "lost":
        del held[expert]
    save_file(held, tmp_path / "model.safetensors")
    with pytest.raises(ModelFolderError, match=r"MixtralForCausalLM stacks .* experts, and one .* Copy all"):
        load(tmp_path, "float32", "cpu")


@pytest.mark.usefixtures("nothing_left_behind")
def test_a_shard_that_is_cut_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_reader, "PROGRESS_SECONDS", 0)
    shards = save_sharded(tmp_path)

    def cut(done: int, total: int) -> None:
        for name in shards:
            os.truncate(tmp_path / name, 0)

    with pytest.raises(ModelFolderError, match=r"model-0000.* is damaged: it was cut while it was read. Copy it"):
        load(tmp_path, "float32", "cpu", cut)


def test_weights_are_not_those_of_the_file_after_loading(tmp_path: Path) -> None:
    """A file that is written again under a running engine changes no answer and does not kill it."""
    shards = save_sharded(tmp_path)
    loaded = load(tmp_path, "float32", "cpu").model
    before = {name: tensor.clone() for name, tensor in tensors_of(loaded).items()}
    for name in shards:
        os.truncate(tmp_path / name, 0)
    assert all(torch.equal(tensor, before[name]) for name, tensor in tensors_of(loaded).items())
