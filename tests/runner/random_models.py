"""Random base models and PEFT adapters on disk: small enough to make in a test, odd enough to notice mistakes."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen2Config,
)

from tests.support.made_once import content_of, made_once

VOCABULARY = 512


ENDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}


def llama(*, context: int = 512, layers: int = 3) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=context,
        tie_word_embeddings=False,
        **ENDS,
    )


def configs() -> dict[str, PreTrainedConfig]:
    return {
        "llama": llama(),
        "qwen2": Qwen2Config(
            vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=False, **ENDS,
        ),
        "gpt2": GPT2Config(
            vocab_size=VOCABULARY, n_embd=64, n_layer=3, n_head=4, n_positions=512, **ENDS
        ),
        "gpt_neox": GPTNeoXConfig(
            vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
            max_position_embeddings=512, **ENDS,
        ),
    }  # fmt: skip


TARGETS = {
    "llama": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "qwen2": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "gpt2": ["c_attn", "c_proj", "c_fc"],
    "gpt_neox": ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"],
}


def save_base(
    family: str, folder: Path, *, seed: int = 0, config: PreTrainedConfig | None = None, biased: bool = False
) -> Path:
    """A base of random weights, spread widely enough that its greedy choices are seldom near ties. `biased`: its biases
    are not zeros."""
    config = config or configs()[family]

    def make(into: Path) -> None:
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() > 1 or (biased and name.endswith("bias")):
                    parameter.normal_(0, 0.08)
        model.save_pretrained(into)

    return made_once(("base", type(config), config.to_json_string(use_diff=False), seed, biased), folder, make)


@dataclass(frozen=True)
class RandomAdapter:
    rank: int
    alpha: float
    rslora: bool = False
    targets: tuple[str, ...] | str | None = None
    rank_pattern: tuple[tuple[str, int], ...] = ()
    dora: bool = False
    lora_bias: bool = False
    bias: str = "none"


EIGHT = (
    RandomAdapter(4, 8),
    RandomAdapter(8, 16),
    RandomAdapter(8, 8, rslora=True),
    RandomAdapter(16, 16),
    RandomAdapter(12, 24, rslora=True),
    RandomAdapter(32, 16),
    RandomAdapter(3, 7),
    RandomAdapter(8, 16),
    RandomAdapter(16, 4, rslora=True),
)
"""Nine of them, in fact: eight may be in one iteration while another comes and goes."""


def save_adapter(base: Path, family: str, spec: RandomAdapter, folder: Path, *, seed: int) -> Path:
    """What PEFT saves, with a B that is not zero."""
    targets = spec.targets or TARGETS[family]
    key = "adapter", str(base), content_of(base), targets, spec, seed
    return made_once(key, folder, lambda into: _make_adapter(base, targets, spec, into, seed))


def _make_adapter(base: Path, targets: Sequence[str] | str, spec: RandomAdapter, folder: Path, seed: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        config = LoraConfig(
            r=spec.rank,
            lora_alpha=spec.alpha,
            use_rslora=spec.rslora,
            target_modules=targets if isinstance(targets, str) else list(targets),
            rank_pattern=dict(spec.rank_pattern),
            use_dora=spec.dora,
            lora_bias=spec.lora_bias,
            bias=spec.bias,
            task_type="CAUSAL_LM",
        )
        adapted = get_peft_model(model, config)
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if "lora_A" in name:
                    parameter.normal_(0, 0.1)
                if "lora_B" in name:
                    parameter.normal_(0, 0.05)
                if "magnitude" in name:
                    parameter.mul_(torch.empty_like(parameter).uniform_(0.7, 1.4))
                if name.endswith("bias") and parameter.requires_grad:
                    parameter.normal_(0, 0.1)
        adapted.save_pretrained(str(folder))
