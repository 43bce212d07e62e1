"""Every field of adapter_config.json is honoured, harmless, or refused by name."""

import dataclasses
import re
import typing
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest

from motet.errors import AdapterIncompatible
from motet_runner.adapters.peft_config import IGNORED, REFUSED, STARTS, SUPPORTED, parse_config, read_config

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
    paths = (MODULE, "q_proj", "layers.2.mlp", "a.layers.2.mlp")
    assert [config.unselected_by(path) for path in paths] == [None] * 4
    assert all(config.unselected_by(path) for path in ("xq_proj", "layers.2.mlp.up", "blayers.2.mlp", "mlp"))


def selections() -> list[dict[str, object]]:
    """Every form of every field that selects modules."""
    ends = {"target_modules": ["q_proj", "xq_proj", "layers.2.0"]}
    layers = (None, [], 0, 1, [1], [0, 3, 11], [1, 10])
    patterns = (None, "", [], "layers", "h", ["h", "layers"], ["layers", "nested"], "lay.*", r"\w+", "h|layers")
    exclusions = (
        [], "", ["q_proj"], ["layers.1.q_proj"], ["proj"], "q_proj", ".*layers.1.*", r".*\.q_proj", "(.*1)?.*q_proj",
    )  # fmt: skip
    whole = {"target_modules": ["model.layers.2.q_proj", "q_proj", "router"], "layers_to_transform": [1]}
    return [
        *(
            ends | {"layers_to_transform": which, "layers_pattern": pattern}
            for which in layers
            for pattern in patterns
            if not pattern or which is not None
        ),
        *(ends | {"exclude_modules": names} for names in exclusions),
        *(
            {"target_modules": names}
            for names in ("q_proj", r".*\.q_proj", r".*layers\.1\.x?q.*", "all-linear", "ALL-LINEAR")
        ),
        {"target_modules": "all-linear", "exclude_modules": ["q_proj"]},
        whole,
        whole | {"exclude_modules": ["model.layers.2.q_proj"]},
    ]


def test_the_modules_are_those_of_peft() -> None:
    warnings.simplefilter("ignore")
    import torch
    from peft import LoraConfig, get_peft_model

    def linear() -> torch.nn.Module:
        return torch.nn.Linear(2, 2)

    def model() -> torch.nn.Module:
        blocks = [
            torch.nn.ModuleDict(
                {"q_proj": linear(), "xq_proj": linear(), "nested": torch.nn.ModuleList([linear(), linear()])}
            )
            for _ in range(12)
        ]
        inner = torch.nn.ModuleDict({"layers": torch.nn.ModuleList(blocks), "router": linear()})
        return torch.nn.ModuleDict(
            {"model": inner, "h": torch.nn.ModuleList([torch.nn.ModuleDict({"q_proj": linear()})])}
        )

    paths = [path for path, module in model().named_modules() if isinstance(module, torch.nn.Linear)]
    selected = []
    for raw in selections():
        try:
            adapted = get_peft_model(model(), LoraConfig(r=2, **raw)).base_model.model
            loaded = {path for path, module in adapted.named_modules() if hasattr(module, "lora_A")}
        except ValueError:  # no module is selected
            loaded = set()
        config = parse_config(PLAIN | raw)
        assert {path for path in paths if config.unselected_by(path) is None} == loaded, raw
        selected.append(len(loaded))
    assert {0, 1, len(paths)} < set(selected), "the selections are of many kinds"


@pytest.mark.parametrize("field", ["layers_to_transform", "layers_pattern"])
def test_layers_are_refused_with_a_pattern_of_targets_as_in_peft(field: str) -> None:
    with pytest.raises(AdapterIncompatible, match=field):
        parse_config(PLAIN | {"target_modules": "q_proj", field: [1] if field == "layers_to_transform" else ["layers"]})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("peft_type", "LOHA"),
        ("use_dora", "yes"),
        ("modules_to_save", ["lm_head"]),
        ("lora_bias", 1),
        ("bias", "some"),
        ("init_lora_weights", "pissa"),
        ("init_lora_weights", "pissa_niter_16"),
        ("init_lora_weights", "olora"),
        ("init_lora_weights", "loftq"),
        ("init_lora_weights", "corda"),
        ("init_lora_weights", "lora_ga"),
        ("init_lora_weights", "one from the future"),
        ("init_lora_weights", ["gaussian"]),
        ("init_lora_weights", 2),
        ("alpha_pattern", {".*": 0}),
        ("alpha_pattern", {"q_proj": 8, "k_proj": 0.0}),
        ("alpha_pattern", {".*": float("nan")}),
        ("alpha_pattern", {".*": None}),
        ("alpha_pattern", {".*": 1e300}),
        ("alpha_pattern", {".*": 1e-300}),
        ("alpha_pattern", {".*": -1e9}),
        ("alpha_pattern", {".*": 10**400}),
        ("lora_alpha", float("inf")),
        ("lora_alpha", -1e300),
        ("lora_alpha", None),
        ("rank_pattern", {".*": 0}),
        ("rank_pattern", {".*": -4}),
        ("rank_pattern", {".*": 1.5}),
        ("trainable_token_indices", [1, 2]),
        ("layer_replication", [[0, 2]]),
        ("alora_invocation_tokens", [5]),
        ("target_parameters", ["experts.gate_up_proj"]),
        ("use_qalora", True),
        ("task_type", ["SEQ_CLS"]),
        ("r", 0),
        ("r", None),
        ("lora_alpha", 0),
        ("target_modules", 7),
        ("target_modules", None),
        ("exclude_modules", 7),
        ("exclude_modules", ["q_proj", 1]),
        ("layers_to_transform", "1"),
        ("layers_to_transform", True),
        ("layers_to_transform", [1, "2"]),
        ("layers_pattern", ["layers"]),
        ("layers_pattern", 7),
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


def starts_of_peft() -> list[str]:
    """Those that today's PEFT has a name for."""
    from peft import LoraConfig

    kinds = typing.get_args(typing.get_type_hints(LoraConfig)["init_lora_weights"])
    names = [name for kind in kinds if kind is not bool for name in typing.get_args(kind)]
    return [re.sub(r"\[.*\]", "4", name) for name in names]


@pytest.mark.parametrize("start", starts_of_peft())
def test_start_values_are_served_only_if_peft_leaves_the_base_as_it_is(start: str) -> None:
    """PEFT itself is asked, with all that its start values want to have prepared."""
    warnings.simplefilter("ignore")
    import torch
    from peft import LoraConfig, LoraGAConfig, get_peft_model

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj = torch.nn.Linear(16, 16, bias=False)

    torch.manual_seed(3)
    model = Model()
    model.q_proj._peft_loraga_grad = torch.randn(16, 16)  # noqa: SLF001
    model.q_proj.eigens = SimpleNamespace(U_WC=torch.randn(16, 4), S_WC=torch.rand(4) + 1, V_WC=torch.randn(16, 4))
    before = model.q_proj.weight.detach().clone()
    more = {"lora_ga_config": LoraGAConfig()} if start == "lora_ga" else {}
    try:
        config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"], init_lora_weights=start, **more)
        adapted = get_peft_model(model, config)
    except ImportError:
        unchanged = False  # LoftQ needs a library that is not here
    else:
        unchanged = torch.equal(adapted.base_model.model.q_proj.base_layer.weight, before)
    if unchanged:
        parse_config(PLAIN | {"init_lora_weights": start})
    else:
        with pytest.raises(AdapterIncompatible, match="path_initial_model_for_weight_conversion"):
            parse_config(PLAIN | {"init_lora_weights": start})


def test_an_adapter_with_any_start_values_that_are_served_has_its_files_weights(tmp_path: Path) -> None:
    """PEFT fills in the weights of the file, whatever the start values were, and leaves the base alone."""
    warnings.simplefilter("ignore")
    import torch
    from peft import LoraConfig, PeftModel, get_peft_model
    from safetensors.torch import load_file

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj = torch.nn.Linear(16, 16, bias=False)

    for start in sorted(STARTS):
        torch.manual_seed(3)
        weights = Model().state_dict()

        def base(weights: dict = weights) -> Model:
            model = Model()
            model.load_state_dict(weights)
            return model

        config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"], init_lora_weights=start)
        trained = get_peft_model(base(), config)
        with torch.no_grad():
            trained.base_model.model.q_proj.lora_A["default"].weight.normal_()
        trained.save_pretrained(str(tmp_path / start))
        read = read_config(tmp_path / start)
        file = load_file(tmp_path / start / "adapter_model.safetensors")
        first, second = (file[f"base_model.model.q_proj.lora_{name}.weight"] for name in "AB")
        loaded = PeftModel.from_pretrained(base(), str(tmp_path / start))
        given = torch.randn(3, 16)
        ours = given @ weights["q_proj.weight"].T + given @ first.T @ second.T * read.scale_of("q_proj")
        assert torch.allclose(loaded.base_model.model.q_proj(given), ours, atol=1e-5), start


@pytest.mark.parametrize("start", [True, False, "gaussian", "eva", "orthogonal", "mica"])
def test_initial_weights_that_keep_the_base_unchanged_are_accepted(start: object) -> None:
    parse_config(PLAIN | {"init_lora_weights": start})


def test_every_field_that_peft_writes_is_known() -> None:
    from peft import LoraConfig

    fields = {field.name for field in dataclasses.fields(LoraConfig)}
    assert fields - IGNORED - SUPPORTED - REFUSED.keys() == set()
