"""Every tensor has its place, or the adapter is refused with what stands in the way."""

import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from motet.adapter_template import MAX_SPECIAL_TOKEN_CHARACTERS
from motet.chat_environment import MAX_TEMPLATE_BYTES
from motet.domain import MAX_LORA_RANK
from motet.errors import AdapterIncompatible
from motet.resources.pool import EngineSpec
from motet_kernels.cpp import lora_backend as cpp_lora
from motet_kernels.gpu import lora_tiles
from motet_runner.adapters import compatibility_check, peft_config, recorded_answers, tensor_names, tokenizer_check
from motet_runner.adapters.certification import EngineLimits
from motet_runner.adapters.compatibility_check import CHECK_VERSION, check
from motet_runner.adapters.tensor_names import Shapes
from motet_runner.settings import Settings
from tests.runner.random_models import RandomAdapter, save_adapter, save_base

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"


RULES_OF_VERSION = (15, "8af7e6a6d0371a48")
"""The version of the checks, and the hash of the constants that decide."""


def test_who_changes_what_is_refused_raises_the_version_of_the_checks() -> None:
    rules = [
        sorted(peft_config.SUPPORTED),
        sorted(peft_config.IGNORED),
        sorted(peft_config.REFUSED),
        sorted(peft_config.STARTS),
        (peft_config.MIN_ALPHA, peft_config.MAX_ALPHA, peft_config.MAX_CONFIG_BYTES),
        peft_config.GENERATES,
        peft_config.BIASES,
        (tensor_names.PREFIXES, sorted(tensor_names.WRAPPERS), tensor_names.OUTER, tensor_names.TEXT_MODELS),
        compatibility_check.FLOATS,
        (compatibility_check.MAX_LINEAR_BYTES, compatibility_check.MAX_OTHER_BYTES),
        tensor_names.TENSOR_NAME.pattern,
        MAX_LORA_RANK,
        (recorded_answers.ALLOWED, recorded_answers.ALLOWED_IN_16_BITS, recorded_answers.LEAST_LOGPROB),
        (recorded_answers.MAX_ANSWERS, recorded_answers.MAX_PROMPT_TOKENS, recorded_answers.MAX_ANSWER_TOKENS),
        (MAX_TEMPLATE_BYTES, MAX_SPECIAL_TOKEN_CHARACTERS, tokenizer_check.CHANGE_IDS, tokenizer_check.FLAGS),
        (recorded_answers.MAX_PROMPT_CHARS, recorded_answers.MAX_WORD_CHARS, recorded_answers.MAX_RECORD_BYTES),
    ]
    now = (CHECK_VERSION, hashlib.sha256(json.dumps(rules).encode()).hexdigest()[:16])
    assert now == RULES_OF_VERSION, (
        "What decides over an adapter has changed. Raise CHECK_VERSION, so that adapters are checked again, "
        f"and set RULES_OF_VERSION to the new version and {now[1]!r}."
    )


def change(folder: Path, **fields: object) -> None:
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | fields))


def rename(folder: Path, old: str, new: str, *, only: str = "") -> None:
    tensors = load_file(folder / WEIGHTS)
    save_file({(n.replace(old, new) if only in n else n): t for n, t in tensors.items()}, folder / WEIGHTS)


def test_the_certificate_says_what_was_found(folder: Path, shapes: Shapes) -> None:
    certificate = check(folder, shapes, max_rank=64)
    assert len(certificate.tensors) == 42
    assert set(certificate.modules) == set(shapes)
    assert (certificate.rank, certificate.alpha, certificate.method) == (4, 8, "lora")
    assert certificate.layout.size == sum(tensor.nbytes for tensor in load_file(folder / WEIGHTS).values())


@pytest.mark.parametrize(
    "spec",
    [
        RandomAdapter(4, 8, targets=r".*\.layers\.[02]\.self_attn\.(q|v)_proj"),
        RandomAdapter(4, 8, targets="all-linear"),
        RandomAdapter(4, 8, rank_pattern=(("q_proj", 6), (r"layers\.1\.mlp\.down_proj", 2))),
    ],
    ids=["regex", "all-linear", "rank pattern"],
)
def test_ways_to_name_modules_are_understood(spec: RandomAdapter, llama: Path, shapes: Shapes, tmp_path: Path) -> None:
    folder = save_adapter(llama, "llama", spec, tmp_path / "adapter", seed=1)
    certificate = check(folder, shapes, max_rank=64)
    assert len(certificate.tensors) == 2 * len(certificate.modules)


@pytest.mark.parametrize(
    ("of_peft", "saved"),
    [
        ("base_model.model.", ""),
        ("base_model.model.", "base_model.model._orig_mod."),
        ("base_model.model.", "_orig_mod.base_model.model."),
        ("base_model.model.", "module.base_model.model."),
        ("model.layers.", "_fsdp_wrapped_module.model.layers."),
        (".self_attn.", "._fsdp_wrapped_module.self_attn._checkpoint_wrapped_module."),
        (".lora_A.weight", ".lora_A.default.weight"),
    ],
    ids=["bare", "compiled base", "compiled", "data parallel", "sharded", "sharded layers", "adapter's name"],
)
def test_the_names_of_other_tools_find_their_place(folder: Path, shapes: Shapes, of_peft: str, saved: str) -> None:
    plain = check(folder, shapes, max_rank=64).layout.linears
    rename(folder, of_peft, saved)
    assert {one.module: one.scale for one in check(folder, shapes, max_rank=64).layout.linears} == {
        one.module: one.scale for one in plain
    }


@pytest.mark.parametrize("there", ["model.language_model.", "language_model.model."])
@pytest.mark.parametrize("text_alone", [True, False], ids=["of images, on text alone", "of text alone, on images"])
def test_adapters_of_models_of_text_and_of_images_serve_each_other(
    llama: Path, shapes: Shapes, tmp_path: Path, there: str, text_alone: bool
) -> None:
    """The config's patterns stay about the names of the adapter's own model."""
    spec = RandomAdapter(
        4, 8, targets=r"model\.layers\..*_proj", rank_pattern=((r"model\.layers\.1\.mlp\.down_proj", 2),)
    )
    folder = save_adapter(llama, "llama", spec, tmp_path / "adapter", seed=1)
    if text_alone:
        rename(folder, "model.layers.", f"{there}layers.")
        own = re.escape(there)
        change(
            folder, target_modules=rf"{own}layers\..*_proj", rank_pattern={rf"{own}layers\.1\.mlp\.down_proj": 2}, r=4
        )
    else:
        shapes = {there + module.removeprefix("model."): shape for module, shape in shapes.items()}
    found = check(folder, shapes, max_rank=64)
    (warning,) = found.warnings
    assert "of another kind of model, it serves as" in warning
    assert set(found.modules) == set(shapes)
    (narrow,) = [one for one in found.layout.linears if one.a.shape[0] == 2]
    assert narrow.module.endswith("layers.1.mlp.down_proj")
    assert narrow.scale == 4


def test_an_adapter_of_images_is_refused_where_only_text_is_served(folder: Path, shapes: Shapes) -> None:
    rename(folder, "model.layers.", "model.vision_tower.layers.", only="layers.1.")
    with pytest.raises(AdapterIncompatible, match=r"vision_tower.*Train with .*exclude_modules that leave it out"):
        check(folder, shapes, max_rank=64)


def test_trained_biases_of_a_model_without_biases_are_none(folder: Path, shapes: Shapes) -> None:
    """PEFT's `bias: all` trains what is there. Biases themselves are refused."""
    change(folder, bias="all")
    assert len(check(folder, shapes, max_rank=64).tensors) == 42
    change(folder, bias="some")
    with pytest.raises(AdapterIncompatible, match="bias"):
        check(folder, shapes, max_rank=64)


@pytest.mark.parametrize(
    ("tensor", "advice"),
    [
        ("base_model.model.model.norm.bias", "bias='none'"),
        ("base_model.model.lm_head.lora_A.weight", "output layer"),
        ("base_model.model.model.embed_tokens.lora_embedding_A", "LoRA on embeddings"),
        ("base_model.model.model.layers.1.mlp.experts.base_layer.lora_A.weight", "LoRA on experts"),
        ("base_model.model.model.layers.1.mlp.experts.3.up_proj.lora_A.weight", "LoRA on experts"),
        ("base_model.model.lm_head.weight", "save_embedding_layers=False"),
        ("base_model.model.model.embed_tokens.weight", "save_embedding_layers=False"),
        ("base_model.model.model.norm.modules_to_save.weight", "replaces a module"),
        ("model.layers.1.self_attn.q_proj.lora_a", "mlx_lm.fuse"),
    ],
)
def test_what_is_no_lora_of_a_linear_is_refused_with_what_to_do(
    folder: Path, shapes: Shapes, tensor: str, advice: str
) -> None:
    tensors = load_file(folder / WEIGHTS)
    save_file(tensors | {tensor: torch.ones(4, 4)}, folder / WEIGHTS)
    with pytest.raises(AdapterIncompatible) as refused:
        check(folder, shapes, max_rank=64)
    assert f"1 of 43 tensors belong to no linear of this base model, for example {tensor}. " in refused.value.message
    assert advice in refused.value.message
    assert "another model" not in refused.value.message


@pytest.mark.parametrize(
    ("saved", "fields"),
    [
        ("base_model.model._orig_mod.", {"alpha_pattern": {r"_orig_mod.model.layers.0.self_attn.q_proj": 32}}),
        ("base_model.model._orig_mod.", {"alpha_pattern": {r"^model.layers.0.self_attn.q_proj": 32}}),
        ("base_model.model._orig_mod.", {"target_modules": r"model\.layers\..*_proj"}),
        ("base_model.", {"alpha_pattern": {r"^layers.0.self_attn.q_proj": 32}}),
    ],
)
def test_a_pattern_that_depends_on_how_peft_called_a_linear_is_refused(
    folder: Path, shapes: Shapes, saved: str, fields: dict[str, object]
) -> None:
    """PEFT matches the names of the model that it got, compiled or without its head. The file does not say which."""
    rename(folder, "base_model.model.", saved)
    plain = check(folder, shapes, max_rank=64).layout.linears
    change(folder, alpha_pattern={"layers.0.self_attn.q_proj": 32})
    scales = {one.module: one.scale for one in check(folder, shapes, max_rank=64).layout.linears}
    assert {module for module, scale in scales.items() if scale != plain[0].scale} == {
        "model.layers.0.self_attn.q_proj"
    }
    change(folder, alpha_pattern={})
    change(folder, **fields)
    with pytest.raises(AdapterIncompatible, match=r"for the patterns in adapter_config.json, which say different"):
        check(folder, shapes, max_rank=64)


def test_halves_under_different_names_are_not_one_lora(folder: Path, shapes: Shapes) -> None:
    rename(folder, "base_model.model.", "base_model.model._orig_mod.", only="layers.1.self_attn.q_proj.lora_A")
    with pytest.raises(AdapterIncompatible, match="halves under different names"):
        check(folder, shapes, max_rank=64)


def test_what_may_not_be_meant_is_served_with_a_warning(folder: Path, shapes: Shapes) -> None:
    assert check(folder, shapes, max_rank=64).warnings == ()
    targets = json.loads((folder / CONFIG).read_text())["target_modules"]
    change(folder, task_type="SEQ_CLS", target_modules=[*targets, "score", "layers.9.self_attn.q_proj", "x" * 500])
    assert check(folder, shapes, max_rank=64).warnings == (
        "task_type is SEQ_CLS, so it was not trained to generate text",
        f"3 of target_modules have no tensors, for example layers.9.self_attn.q_proj, score, {'x' * 60}",
    )


def test_an_adapter_of_another_base_model_is_served_with_a_warning(folder: Path, shapes: Shapes) -> None:
    change(folder, base_model_name_or_path="meta-llama/Llama-3.1-8B-Instruct")
    assert check(folder, shapes, max_rank=64).warnings == ()
    assert check(folder, shapes, max_rank=64, base_name="Llama-3.1-8B").warnings == (
        "base_model_name_or_path is meta-llama/Llama-3.1-8B-Instruct, and this base model is Llama-3.1-8B",
    )


def test_the_config_of_mlx_is_refused_by_its_name(folder: Path, shapes: Shapes) -> None:
    (folder / CONFIG).write_text(json.dumps({"fine_tune_type": "lora", "lora_parameters": {"rank": 8, "scale": 20.0}}))
    with pytest.raises(AdapterIncompatible, match="form of MLX"):
        check(folder, shapes, max_rank=64)


def test_a_tensor_without_a_place_is_named_with_the_nearest_module(folder: Path, shapes: Shapes) -> None:
    rename(folder, "self_attn.q_proj", "self_attn.query_proj", only="layers.1.")
    with pytest.raises(AdapterIncompatible, match=r"2 of 42 tensors.*query_proj.*layers\.1\.self_attn"):
        check(folder, shapes, max_rank=64)


def test_another_models_adapter_is_refused(shapes: Shapes, tmp_path: Path) -> None:
    base = save_base("gpt2", tmp_path / "base")
    folder = save_adapter(base, "gpt2", RandomAdapter(4, 8), tmp_path / "adapter", seed=1)
    with pytest.raises(AdapterIncompatible, match="another model"):
        check(folder, shapes, max_rank=64)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"r": 5}, "rank 5"),
        ({"target_modules": ["k_proj"]}, "target_modules"),
        ({"exclude_modules": ["v_proj"]}, "v_proj has tensors, but exclude_modules"),
        ({"layers_to_transform": [0]}, r"layers\.1\..* has tensors, but layers_to_transform"),
        ({"use_dora": True}, "use_dora"),
    ],
)
def test_a_config_that_does_not_fit_its_tensors_is_refused(
    folder: Path, shapes: Shapes, fields: dict[str, object], says: str
) -> None:
    change(folder, **fields)
    with pytest.raises(AdapterIncompatible, match=says):
        check(folder, shapes, max_rank=64)


@pytest.mark.parametrize("dtype", [torch.int32, torch.float8_e4m3fn])
def test_weights_that_are_no_common_floats_are_refused(folder: Path, shapes: Shapes, dtype: torch.dtype) -> None:
    tensors = load_file(folder / WEIGHTS)
    odd = sorted(tensors)[3]
    save_file(tensors | {odd: tensors[odd].to(dtype)}, folder / WEIGHTS)
    with pytest.raises(AdapterIncompatible, match=rf"{odd} has the type (I32|F8_E4M3), .* one of the types F32"):
        check(folder, shapes, max_rank=64)


def test_all_parts_take_ranks_up_to_the_same_one(llama: Path, shapes: Shapes, tmp_path: Path) -> None:
    """What a pool may allow, an adapter may have, and every kernel computes."""
    assert MAX_LORA_RANK == cpp_lora.MAX_RANK == lora_tiles.MAX_RANK
    for model in (Settings, EngineSpec):
        schema = model.model_json_schema(by_alias=False)["properties"]["max_lora_rank"]
        assert f"'maximum': {MAX_LORA_RANK}" in str(schema)
    folder = save_adapter(llama, "llama", RandomAdapter(MAX_LORA_RANK, 8), tmp_path / "adapter", seed=1)
    assert check(folder, shapes, max_rank=MAX_LORA_RANK).rank == MAX_LORA_RANK


def test_a_rank_above_the_pools_is_refused(folder: Path, shapes: Shapes) -> None:
    with pytest.raises(AdapterIncompatible, match="maxLoraRank"):
        check(folder, shapes, max_rank=2)


def test_an_a_without_its_b_is_refused(folder: Path, shapes: Shapes) -> None:
    tensors = load_file(folder / WEIGHTS)
    tensors.pop(next(name for name in tensors if "lora_B" in name))
    save_file(tensors, folder / WEIGHTS)
    with pytest.raises(AdapterIncompatible, match="no lora_B"):
        check(folder, shapes, max_rank=64)


def break_nothing_there(folder: Path) -> None:
    (folder / WEIGHTS).unlink()


def break_no_config(folder: Path) -> None:
    (folder / CONFIG).unlink()


def break_config(folder: Path) -> None:
    (folder / CONFIG).write_text("{")


def break_only_a_pickle(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "adapter_model.bin")


def break_cut_short(folder: Path) -> None:
    whole = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(whole[: len(whole) // 2])


def break_cut_to_nothing(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes(b"12")


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n"


def break_not_safetensors(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes(POINTER)


def break_config_into_a_pointer(folder: Path) -> None:
    (folder / CONFIG).write_bytes(POINTER)


@pytest.mark.parametrize(
    ("break_it", "named", "fix"),
    [
        (break_nothing_there, WEIGHTS, "Save the adapter there with PEFT's save_pretrained"),
        (break_no_config, CONFIG, "must name the folder that PEFT saved"),
        (break_config, CONFIG, "Save it again"),
        (break_only_a_pickle, "adapter_model.bin is a pickle", "safe_serialization=True"),
        (break_cut_short, WEIGHTS, "Save the adapter again"),
        (break_cut_to_nothing, WEIGHTS, "Save the adapter again"),
        (break_not_safetensors, WEIGHTS, "is a pointer of Git LFS, .* Run `git lfs pull`"),
        (break_config_into_a_pointer, CONFIG, "is a pointer of Git LFS, .* Run `git lfs pull`"),
    ],
)
def test_broken_folders_are_refused_with_the_file_and_what_to_do(
    folder: Path, shapes: Shapes, break_it, named: str, fix: str
) -> None:
    break_it(folder)
    with pytest.raises(AdapterIncompatible, match=f"{named}.*{fix}"):
        check(folder, shapes, max_rank=64)


def test_the_check_needs_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; import motet_runner.adapters.compatibility_check, motet_runner.plan"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_kept_check_counts_only_for_an_engine_that_adapts_the_same_linears() -> None:
    both = {"q_proj": (16, 16), "up_proj": (16, 32)}
    kept = str(EngineLimits(both, 64, "float32"))
    assert kept == str(EngineLimits(dict(reversed(both.items())), 64, "float32"))
    others = ({"q_proj": (16, 16)}, both | {"up_proj": (16, 64)})
    assert kept not in {str(EngineLimits(other, 64, "float32")) for other in others}
    assert kept != str(EngineLimits(both, 64, "float32", biased_modules=("q_proj",)))
    for rank in (0, 16):
        assert kept != str(EngineLimits(both, 64, "float32", max_device_rank=rank))
