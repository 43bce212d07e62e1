"""The families of models that the tests prove: each with a small random configuration, and what an adapter changes.

`docs/models.md` has the same list for users.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)

from tests.runner.random_models import VOCABULARY, RandomAdapter
from tests.support.made_once import made_once

CONTEXT = 256
ENDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
SMALL = ENDS | {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": CONTEXT,
}  # fmt: skip
GROUPED = SMALL | {"num_key_value_heads": 2}
WINDOW = 24
"""Shorter than most prompts of the tests"""
TRAINED = 48
"""Tokens of the context with which a model was trained whose rope depends on lengths: many sequences of the tests are
longer, and some become longer"""
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
EVERY_LINEAR = "all-linear"
"""In PEFT's words: all but the head"""


@dataclass(frozen=True)
class Family:
    name: str
    """As the documentation has it"""
    config: PreTrainedConfig
    targets: str | tuple[str, ...] = EVERY_LINEAR
    """What the adapters of the tests change"""


FAMILIES = (
    Family("Llama", transformers.LlamaConfig(**GROUPED)),
    Family(
        "Llama 3, its own rope type",
        transformers.LlamaConfig(
            **GROUPED,
            rope_parameters={
                "rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
            },
        ),
    ),
    Family("Qwen 2", transformers.Qwen2Config(**GROUPED)),
    Family("Qwen 3", transformers.Qwen3Config(**GROUPED, head_dim=16)),
    Family("Mistral, sliding window", transformers.MistralConfig(**GROUPED, sliding_window=WINDOW)),
    Family("Gemma", transformers.GemmaConfig(**GROUPED, head_dim=16)),
    Family(
        "Gemma 2, soft caps and every other layer sliding",
        transformers.Gemma2Config(
            **GROUPED, head_dim=16, sliding_window=WINDOW, query_pre_attn_scalar=16,
            attn_logit_softcapping=0.5, final_logit_softcapping=3.0,
        ),
    ),
    Family(
        "Gemma 3, some layers sliding",
        transformers.Gemma3TextConfig(
            **GROUPED, head_dim=16, sliding_window=WINDOW, query_pre_attn_scalar=16,
            layer_types=["sliding_attention", "full_attention"],
        ),
    ),
    Family("Phi", transformers.PhiConfig(**SMALL)),
    Family("Phi 3", transformers.Phi3Config(**GROUPED)),
    Family(
        "Phi 3, longrope",
        transformers.Phi3Config(
            **GROUPED, original_max_position_embeddings=TRAINED,
            rope_parameters={
                "rope_type": "longrope", "rope_theta": 10000.0,
                "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.5, 2.5, 4.0, 5.0],
            },
        ),
    ),
    Family(
        "Llama, dynamic rope",
        transformers.LlamaConfig(
            **(GROUPED | {"max_position_embeddings": TRAINED}),
            rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
        ),
    ),
    Family("GPT-NeoX", transformers.GPTNeoXConfig(**SMALL)),
    Family(
        "GPT-J",
        transformers.GPTJConfig(
            vocab_size=VOCABULARY, n_embd=64, n_layer=2, n_head=4, n_positions=CONTEXT, rotary_dim=8, **ENDS
        ),
    ),
    Family(
        "GPT-2",
        transformers.GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=CONTEXT, **ENDS),
    ),
    Family(
        "OPT",
        transformers.OPTConfig(
            vocab_size=VOCABULARY, hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4,
            max_position_embeddings=CONTEXT, word_embed_proj_dim=32, **ENDS,
        ),
    ),
    Family(
        "Mixtral, a mixture of experts",
        transformers.MixtralConfig(**GROUPED, num_local_experts=4, sliding_window=None),
        ATTENTION,
    ),
    Family(
        "Qwen 3 MoE, a mixture of experts",
        transformers.Qwen3MoeConfig(
            **GROUPED, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True
        ),
        ATTENTION,
    ),
)  # fmt: skip
MORE = (
    Family("Apertus", transformers.ApertusConfig(**GROUPED)),
    Family("Arcee", transformers.ArceeConfig(**GROUPED)),
    Family("BioGPT", transformers.BioGptConfig(**SMALL)),
    Family("Cohere", transformers.CohereConfig(**GROUPED, logit_scale=1.0)),
    Family("Cohere 2, sliding window", transformers.Cohere2Config(
        **GROUPED, sliding_window=WINDOW, logit_scale=1.0)),
    Family("CTRL", transformers.CTRLConfig(
        vocab_size=VOCABULARY, n_embd=32, dff=64, n_layer=2, n_head=4, n_positions=CONTEXT, **ENDS)),
    Family("Ernie 4.5", transformers.Ernie4_5Config(**GROUPED, head_dim=16)),
    Family("EXAONE 4, some layers sliding", transformers.Exaone4Config(
        **GROUPED, sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"])),
    Family("GLM", transformers.GlmConfig(**GROUPED, head_dim=16)),
    Family("GLM 4", transformers.Glm4Config(**GROUPED, head_dim=16)),
    Family("GLM 4 MoE, a mixture of experts", transformers.Glm4MoeConfig(
        **GROUPED, head_dim=16, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
        first_k_dense_replace=1), ATTENTION),
    Family("GPT-BigCode", transformers.GPTBigCodeConfig(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=CONTEXT, **ENDS)),
    Family("Granite", transformers.GraniteConfig(**GROUPED)),
    Family("Granite MoE, a mixture of experts", transformers.GraniteMoeConfig(
        **GROUPED, num_local_experts=4, num_experts_per_tok=2), ATTENTION),
    Family("HunYuan", transformers.HunYuanDenseV1Config(**GROUPED, head_dim=16)),
    Family("Nemotron", transformers.NemotronConfig(**GROUPED)),
    Family("OLMo", transformers.OlmoConfig(**GROUPED)),
    Family("OLMo 2", transformers.Olmo2Config(**GROUPED)),
    Family("OLMo 3, sliding window", transformers.Olmo3Config(**GROUPED, sliding_window=WINDOW)),
    Family("OLMoE, a mixture of experts", transformers.OlmoeConfig(
        **GROUPED, num_experts=4, num_experts_per_tok=2), ATTENTION),
    Family("Persimmon", transformers.PersimmonConfig(**SMALL)),
    Family("Phi MoE, a mixture of experts", transformers.PhimoeConfig(**GROUPED, num_local_experts=4), ATTENTION),
    Family("Qwen 2 MoE, a mixture of experts", transformers.Qwen2MoeConfig(
        **GROUPED, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
        shared_expert_intermediate_size=32), ATTENTION),
    Family("Seed OSS", transformers.SeedOssConfig(**GROUPED, head_dim=16)),
    Family("SmolLM 3", transformers.SmolLM3Config(**GROUPED)),
    Family("StableLM", transformers.StableLmConfig(**GROUPED)),
    Family("StarCoder 2, sliding window", transformers.Starcoder2Config(**GROUPED, sliding_window=WINDOW)),
)  # fmt: skip
"""Those that only `make soak` and `make compat` prove"""


def _wrapped(
    kind: type[PreTrainedConfig], model_type: str, vision: dict[str, object], **others: object
) -> PreTrainedConfig:
    text = GROUPED | TEXTS.get(model_type, {}) | {"model_type": model_type}
    return kind(text_config=text, vision_config=SEES | vision, tie_word_embeddings=False, **others)


SEES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "image_size": 28, "patch_size": 14}  # fmt: skip
THREE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
TEXTS: dict[str, dict[str, object]] = {
    "gemma3_text": {
        "head_dim": 16,
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": 16,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "mistral": {"sliding_window": WINDOW},
    "qwen2_5_vl_text": {"rope_parameters": THREE},
    "qwen2_vl_text": {"rope_parameters": THREE},
    "qwen3_vl_text": {
        "head_dim": 16,
        "rope_parameters": THREE | {"mrope_section": [4, 2, 2], "mrope_interleaved": True},
    },
}
"""What a text model's config has beside `GROUPED`"""
CLIP, SIGLIP = {"model_type": "clip_vision_model"}, {"model_type": "siglip_vision_model"}
IMAGE = {"image_token_index": 500}
OF_QWEN = {"depth": 1, "num_heads": 2, "out_hidden_size": 32}
TOKENS_OF_QWEN = {
    "image_token_id": 500,
    "video_token_id": 501,
    "vision_start_token_id": 502,
    "vision_end_token_id": 503,
}
TEXT_LINEARS = r".*(language_model|model)\.layers\..*_proj"
WRAPPED = (
    Family(
        "Gemma 3",
        transformers.Gemma3Config(
            text_config=GROUPED | TEXTS["gemma3_text"], vision_config=SEES, mm_tokens_per_image=4, **IMAGE
        ),
        TEXT_LINEARS,
    ),
    Family("InternVL, around Qwen 2", _wrapped(
        transformers.InternVLConfig, "qwen2", {"image_size": [28, 28], "patch_size": [14, 14]}, image_token_id=500
    ), TEXT_LINEARS),
    Family("LLaVA, around Llama", _wrapped(transformers.LlavaConfig, "llama", CLIP, **IMAGE), TEXT_LINEARS),
    Family("LLaVA, around Mistral", _wrapped(transformers.LlavaConfig, "mistral", CLIP, **IMAGE), TEXT_LINEARS),
    Family("LLaVA-NeXT, around Llama", _wrapped(
        transformers.LlavaNextConfig, "llama", CLIP, **IMAGE), TEXT_LINEARS),
    Family("LLaVA-NeXT, around Mistral", _wrapped(
        transformers.LlavaNextConfig, "mistral", CLIP, **IMAGE), TEXT_LINEARS),
    Family("LLaVA-OneVision, around Qwen 2", _wrapped(
        transformers.LlavaOnevisionConfig, "qwen2", SIGLIP, **IMAGE), TEXT_LINEARS),
    Family("Mistral 3, around Mistral", _wrapped(
        transformers.Mistral3Config, "mistral", {"model_type": "pixtral", "head_dim": 16}, **IMAGE), TEXT_LINEARS),
    Family("Qwen 2.5 VL", _wrapped(
        transformers.Qwen2_5_VLConfig, "qwen2_5_vl_text", OF_QWEN, **TOKENS_OF_QWEN), TEXT_LINEARS),
    Family("Qwen 2 VL", _wrapped(
        transformers.Qwen2VLConfig, "qwen2_vl_text", OF_QWEN | {"embed_dim": 32}, **TOKENS_OF_QWEN), TEXT_LINEARS),
    Family("Qwen 3 VL", _wrapped(
        transformers.Qwen3VLConfig, "qwen3_vl_text", OF_QWEN | {"deepstack_visual_indexes": [0]}, **TOKENS_OF_QWEN
    ), TEXT_LINEARS),
)  # fmt: skip
"""Models of text and images, whose text is served"""
BY_NAME = {family.name: family for family in FAMILIES}

ADAPTERS = (RandomAdapter(4, 8), RandomAdapter(12, 24, rslora=True), RandomAdapter(3, 7))
"""Of mixed ranks"""


def _auto(config: PreTrainedConfig) -> type[AutoModelForCausalLM | AutoModelForImageTextToText]:
    return AutoModelForCausalLM if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModelForImageTextToText


def pretrained(folder: Path, **options: object) -> PreTrainedModel:
    """As transformers loads it in float32"""
    return _auto(AutoConfig.from_pretrained(folder)).from_pretrained(folder, dtype=torch.float32, **options)


def save_model(config: PreTrainedConfig, folder: Path, *, seed: int = 0) -> Path:
    """A base of random weights. Biases and norms are random too, so that one that is left out is noticed."""

    def make(into: Path) -> None:
        torch.manual_seed(seed)
        model = _auto(config).from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0, 0.15)
                else:
                    parameter.add_(torch.randn_like(parameter) * 0.05)
        model.save_pretrained(into)

    return made_once(("model", type(config), config.to_json_string(use_diff=False), seed), folder, make)


def save_adapters(base: Path, family: Family, folder: Path, specs: Sequence[RandomAdapter] = ADAPTERS) -> list[Path]:
    """What PEFT saves, with a B that is not zero."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from peft import LoraConfig, get_peft_model

        folders = []
        for number, spec in enumerate(specs):
            torch.manual_seed(number)
            targets = family.targets if isinstance(family.targets, str) else list(family.targets)
            adapted = get_peft_model(
                pretrained(base),
                LoraConfig(
                    r=spec.rank,
                    lora_alpha=spec.alpha,
                    use_rslora=spec.rslora,
                    target_modules=targets,
                    task_type="CAUSAL_LM",
                ),
            )
            with torch.no_grad():
                for name, parameter in adapted.named_parameters():
                    if "lora_" in name:
                        parameter.normal_(0, 0.1)
            adapted.save_pretrained(str(folder / str(number)))
            folders.append(folder / str(number))
    return folders
