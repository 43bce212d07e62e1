"""A corpus of adapters as PEFT saves them, on three families: each equals PEFT in fp32, or is refused by a tensor.

The families are a decoder with biases, a mixture of experts, and a model of text and images, of which the text model is
served, under another name.
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from motet.domain import Digest
from motet.errors import AdapterIncompatible
from motet_runner.adapters.certification import certify
from motet_runner.adapters.peft_config import WEIGHTS_NAME
from motet_runner.adapters.proof import Proof, ProofOrder
from motet_runner.engine import Engine
from motet_runner.interface import EngineConfig, ProofEnded
from tests.runner.engines import ask, run
from tests.runner.families import GROUPED, WINDOW, save_model
from tests.runner.peft_reference import Served, World, assert_equal, reference_logits

pytestmark = [pytest.mark.filterwarnings("ignore")]

DECODED = 4
LENGTHS = (3, 37)
GEMMA = GROUPED | {
    "head_dim": 16, "sliding_window": WINDOW, "query_pre_attn_scalar": 16,
    "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip
IMAGES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
          "image_size": 28, "patch_size": 14}  # fmt: skip


@dataclass(frozen=True)
class Kind:
    config: transformers.PreTrainedConfig
    targets: Any
    """What a training names that leaves out what Motet does not serve"""
    refused: Mapping[str, tuple[str, str]]
    """By variant: the tensor or field that the message names, and the fix"""


KINDS = {
    "dense": Kind(transformers.Qwen2Config(**GROUPED), ["q_proj", "k_proj", "v_proj", "o_proj", "down_proj"], {}),
    "experts": Kind(
        transformers.Qwen3MoeConfig(
            **GROUPED, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
            norm_topk_prob=True, attention_bias=True,
        ),
        ["q_proj", "k_proj", "v_proj", "o_proj"],
        {"all-linear": ("target_parameters", "Train the linears of the attention alone")},
    ),
    "images": Kind(
        transformers.Gemma3Config(
            text_config=GEMMA, vision_config=IMAGES, mm_tokens_per_image=4,
            image_token_index=500, boi_token_index=501, eoi_token_index=502,
        ),
        r".*language_model.*\.(?:[qkvo]|down)_proj",
        {
            "all-linear": (r"vision_tower\.", "leave it out"),
            "bias all": (r"vision_tower\.", "leave it out"),
        },
    ),
}  # fmt: skip

LORA = {"r": 6, "lora_alpha": 9}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rank 1": {"r": 1},
    "rsLoRA": {"use_rslora": True},
    "ranks by patterns": {"rank_pattern": {"layers.1.self_attn.v_proj": 2, "q_proj": 3}},
    "alphas by patterns, two of which fit": {"alpha_pattern": {"layers.1.self_attn.q_proj": 20, "q_proj": 5}},
    "expressions as patterns, rsLoRA": {
        "use_rslora": True, "rank_pattern": {r"layers\.0\..*": 3}, "alpha_pattern": {r".*\.(q|v)_proj": 7}
    },
    "a negative alpha": {"lora_alpha": -7.5},
    "targets by an expression": {"target_modules": r".*layers\.\d\.self_attn\.(q|o)_proj"},
    "targets by whole paths": {"target_modules": "PATHS"},
    "all-linear": {"target_modules": "all-linear"},
    "one layer": {"target_modules": ["q_proj", "o_proj"], "layers_to_transform": [1], "layers_pattern": "layers"},
    "linears left out": {"exclude_modules": ["v_proj", "layers.0.self_attn.o_proj"]},
    "DoRA": {"use_dora": True},
    "DoRA, rsLoRA and ranks": {"use_dora": True, "use_rslora": True, "rank_pattern": {"q_proj": 3}},
    "DoRA and biases": {"use_dora": True, "bias": "lora_only"},
    "biases of B": {"lora_bias": True},
    "bias lora_only": {"bias": "lora_only"},
    "bias all": {"bias": "all"},
    "orthogonal start values": {"init_lora_weights": "orthogonal"},
    "PiSSA, saved as LoRA": {"init_lora_weights": "pissa"},
    "in bfloat16": {},
    "in float16, DoRA": {"use_dora": True},
}  # fmt: skip
TYPES = {"in bfloat16": torch.bfloat16, "in float16, DoRA": torch.float16}


@dataclass
class Base:
    kind: Kind
    model: PreTrainedModel
    folder: Path
    """Of PEFT's"""
    engine: Engine
    logits: dict[str, list[torch.Tensor]]


@pytest.fixture(scope="module", params=KINDS)
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Base:
    kind, folder = KINDS[request.param], tmp_path_factory.mktemp(request.param)
    trained_on = save_model(kind.config, folder / "base")
    model = AutoModelForCausalLM.from_pretrained(trained_on, dtype=torch.float32)
    logits: dict[str, list[torch.Tensor]] = {}

    def keep(requests: list[str], rows: torch.Tensor) -> None:
        for one, row in zip(requests, rows, strict=True):
            logits.setdefault(one, []).append(row.clone())

    config = EngineConfig(model=trained_on, kernels="torch", device="cpu", kv_cache_mib=4, prove_adapters=True)
    return Base(kind, model, trained_on, Engine(config, on_logits=keep), logits)


def trained(base: Base, variant: str, folder: Path) -> Path:
    """As PEFT saves it, with random numbers in all that is trained"""
    from peft import LoraConfig, get_peft_model

    fields = LORA | {"target_modules": base.kind.targets} | VARIANTS[variant]
    if fields["target_modules"] == "PATHS":
        decoder = [name for name, _ in base.model.named_modules() if name.endswith("self_attn.q_proj")]
        fields["target_modules"] = [name for name in decoder if "vision" not in name]
    model = AutoModelForCausalLM.from_pretrained(base.folder, dtype=torch.float32)
    if isinstance(fields["target_modules"], list) and hasattr(model.model, "vision_tower"):
        fields |= {"exclude_modules": r".*vision_tower.*"}
    elif variant == "targets by an expression" and hasattr(model.model, "vision_tower"):
        fields["target_modules"] = r"model\.language_model\.layers\.\d\.self_attn\.(q|o)_proj"
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **fields))
        before = {}
        if variant == "PiSSA, saved as LoRA":
            adapted.peft_config["default"].init_lora_weights = True
            adapted.save_pretrained(str(folder / "start"))
            adapted.peft_config["default"].init_lora_weights = "pissa"
            before = {"path_initial_model_for_weight_conversion": str(folder / "start")}
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if "magnitude" in name:
                    parameter.mul_(torch.empty_like(parameter).uniform_(0.7, 1.4))
                elif parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
        adapted.save_pretrained(str(folder), **before)
    if dtype := TYPES.get(variant):
        tensors = {name: one.to(dtype) for name, one in load_file(folder / WEIGHTS_NAME).items()}
        save_file(tensors, folder / WEIGHTS_NAME, {"format": "pt"})
    return folder


@pytest.mark.parametrize("variant", VARIANTS)
def test_each_variant_equals_peft_or_is_refused_by_name(base: Base, variant: str, tmp_path: Path) -> None:
    engine, adapter = base.engine, Digest(f"sha256:{variant}")
    folder = trained(base, variant, tmp_path / "adapter")
    if variant in base.kind.refused:
        named, fix = base.kind.refused[variant]
        with pytest.raises(AdapterIncompatible, match=rf"{named}.*{fix}"):
            certify(folder, engine.info)
        return
    engine.load_adapter(adapter, certify(folder, engine.info).layout, proof=ProofOrder(1))
    asked = [ask(f"{variant} {length}", adapter=adapter, prompt=length, max_tokens=DECODED) for length in LENGTHS]
    ran = run(engine, *asked)
    engine.drop_adapter(adapter)
    run(engine)
    (ended,) = ran.of(ProofEnded)
    assert isinstance(ended.found, Proof), ended.found
    served = [
        Served(one.request, adapter, one.prompt, ran.tokens[one.request], base.logits.pop(one.request)) for one in asked
    ]
    print(assert_equal(served, reference_logits(World("", base.folder, {adapter: folder}), served)))


def test_the_corpus_has_twenty_variants_on_each_of_three_families() -> None:
    assert len(KINDS) == 3
    assert all(len(VARIANTS.keys() - kind.refused.keys()) >= 20 for kind in KINDS.values())
