"""Every field of adapter_config.json is honoured, harmless, or refused by name."""

import dataclasses
import re
import warnings

import pytest

from motet.errors import AdapterIncompatible
from motet_runner.adapters.peft_config import IGNORED, REFUSED, SUPPORTED, parse_config

PLAIN = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
MODULE = "model.layers.1.self_attn.q_proj"


def test_scale_is_alpha_over_rank_or_over_its_root() -> None:
    assert parse_config(PLAIN).scale_of(MODULE) == 2
    assert parse_config(PLAIN | {"use_rslora": True, "r": 16}).scale_of(MODULE) == 4


def test_patterns_name_ends_of_paths_and_the_first_match_counts() -> None:
    config = parse_config(
        PLAIN
        | {
            "rank_pattern": {"layers.1.self_attn.q_proj": 4, "q_proj": 2, r"layers\.[02]\..*_proj": 16},
            "alpha_pattern": {"^model.layers.1.self_attn.q_proj": 32},
        }
    )
    assert config.rank_of(MODULE) == 4
    assert config.rank_of("model.layers.3.self_attn.q_proj") == 2
    assert config.rank_of("model.layers.2.self_attn.k_proj") == 16
    assert config.rank_of("model.layers.3.self_attn.xq_proj") == 8
    assert config.scale_of(MODULE) == 8


def test_ranks_and_scales_are_those_of_peft() -> None:
    """PEFT itself is asked, over patterns that could be read in more than one way."""
    warnings.simplefilter("ignore")
    import torch
    from peft import LoraConfig, get_peft_model

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj = torch.nn.Linear(8, 8)
            self.xq_proj = torch.nn.Linear(8, 8)

    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList([Block() for _ in range(12)])
    raw = {
        "r": 4,
        "lora_alpha": 6,
        "use_rslora": True,
        "target_modules": ["q_proj", "xq_proj"],
        "rank_pattern": {"layers.1.q_proj": 2, "1.xq_proj": 3, "q_proj": 5},
        "alpha_pattern": {r"layers\.(2|3)\..*": 9},
    }
    adapted = get_peft_model(model, LoraConfig(**raw))
    config = parse_config(PLAIN | raw)
    for path, module in adapted.base_model.model.named_modules():
        if hasattr(module, "lora_A"):
            assert config.rank_of(path) == module.r["default"], path
            assert config.scale_of(path) == pytest.approx(module.scaling["default"]), path


@pytest.mark.parametrize(
    "key",
    [
        "q_proj",
        "self.attn.q_proj",
        "1.self_attn.q_proj",
        MODULE,
        MODULE[1:],
        "xq_proj",
        ".q_proj",
        "q_proj.",
        "q.proj",
        "l.q_proj",
    ],
)
def test_a_plain_name_means_what_it_means_as_a_regular_expression(key: str) -> None:
    for module in (MODULE, "q_proj", "model.layers.11.self_attn.q_proj", "layersX1.self_attn.q_proj", "q.q_proj"):
        means = re.match(rf"(.*\.)?({key})$", module) is not None
        assert (parse_config(PLAIN | {"rank_pattern": {key: 3}}).rank_of(module) == 3) is means, module


def test_a_list_of_targets_names_ends_of_paths() -> None:
    config = parse_config(PLAIN | {"target_modules": ["q_proj", "layers.2.mlp"]})
    assert [config.targets(path) for path in (MODULE, "q_proj", "layers.2.mlp", "a.layers.2.mlp")] == [True] * 4
    assert not any(config.targets(path) for path in ("xq_proj", "layers.2.mlp.up", "blayers.2.mlp", "mlp"))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("peft_type", "LOHA"),
        ("use_dora", True),
        ("modules_to_save", ["lm_head"]),
        ("lora_bias", True),
        ("bias", "all"),
        ("init_lora_weights", "pissa"),
        ("init_lora_weights", "pissa_niter_16"),
        ("init_lora_weights", "olora"),
        ("init_lora_weights", "loftq"),
        ("init_lora_weights", "corda"),
        ("trainable_token_indices", [1, 2]),
        ("layer_replication", [[0, 2]]),
        ("alora_invocation_tokens", [5]),
        ("target_parameters", ["experts.gate_up_proj"]),
        ("use_qalora", True),
        ("task_type", "SEQ_CLS"),
        ("r", 0),
        ("r", None),
        ("lora_alpha", 0),
        ("target_modules", 7),
        ("target_modules", ["q_proj", ["k_proj"]]),
        ("a_field_from_the_future", {"x": 1}),
    ],
)
def test_an_unsupported_field_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(AdapterIncompatible) as caught:
        parse_config(PLAIN | {field: value})
    assert caught.value.param == field
    assert field in caught.value.message


@pytest.mark.parametrize("value", [None, False, [], {}])
def test_a_refused_field_that_is_off_does_not_matter(value: object) -> None:
    parse_config(PLAIN | dict.fromkeys(REFUSED, value))


@pytest.mark.parametrize("start", [True, False, "gaussian", "eva", "orthogonal"])
def test_initial_weights_that_keep_the_base_unchanged_are_accepted(start: object) -> None:
    parse_config(PLAIN | {"init_lora_weights": start})


def test_every_field_that_peft_writes_is_known() -> None:
    from peft import LoraConfig

    fields = {field.name for field in dataclasses.fields(LoraConfig)}
    assert fields - IGNORED - SUPPORTED - REFUSED.keys() == set()
