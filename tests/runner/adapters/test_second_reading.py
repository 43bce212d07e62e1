"""The second reading of an adapter is PEFT's, and it never differs from the first one where that is right.

What it finds where the first one is wrong: `tests/runner/test_proof_missed.py`.
"""

import json
import random
import re
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from motet.errors import AdapterIncompatible
from motet_runner.adapters import second_reading
from motet_runner.adapters.compatibility_check import check
from motet_runner.adapters.peft_config import CONFIG_NAME, REFUSED, WEIGHTS_NAME
from motet_runner.adapters.second_reading import Tensor, check_again
from motet_runner.adapters.tensor_names import Shapes

LAYERS = 12
OF_LAYER = {"self_attn.q_proj": (8, 8), "self_attn.k_proj": (8, 4), "mlp.up_proj": (8, 12), "mlp.down_proj": (12, 8)}
MODULES = {f"model.layers.{layer}.{path}": shape for layer in range(LAYERS) for path, shape in OF_LAYER.items()}
NAMES = ["q_proj", "k_proj", "up_proj", "down_proj"]
KEYS = (
    *NAMES, *OF_LAYER, "layers.1.self_attn.q_proj", "1.self_attn.q_proj", "^model.layers.2.mlp.up_proj", r"layers\.1.*",
    r"model\.layers\.[0-4]\..*_proj", r"layers\.(3|5)\.(mlp|self_attn)\.(up|q)_proj", "self.attn.q.proj", "proj",
    "xq_proj", "model.layers.11.mlp.down_proj",
)  # fmt: skip
VARIANTS = 80


class Model(torch.nn.Module):
    """Linears of a decoder, with biases"""

    def __init__(self) -> None:
        super().__init__()
        for path, (inputs, outputs) in MODULES.items():
            *parents, name = path.split(".")
            at: torch.nn.Module = self
            for part in parents:
                if not hasattr(at, part):
                    at.add_module(part, torch.nn.Module())
                at = getattr(at, part)
            at.add_module(name, torch.nn.Linear(inputs, outputs))


def patterns(chosen: random.Random, values: list[int]) -> dict[str, int]:
    """In the order in which PEFT saves them: only the first key that fits counts."""
    return {key: chosen.choice(values) for key in sorted(chosen.sample(KEYS, chosen.randint(0, 5)))}


def variant(seed: int) -> dict[str, Any]:
    """The fields of one config, of all kinds that are served"""
    chosen = random.Random(seed)
    targets = chosen.choice(
        [chosen.sample(NAMES, 2), NAMES, ["self_attn.q_proj", "model.layers.3.mlp.up_proj"], "all-linear",
         r".*\.(q|up)_proj", r"model\.layers\.\d\..*proj"]
    )  # fmt: skip
    fields: dict[str, Any] = {
        "r": chosen.choice([2, 3, 4]),
        "lora_alpha": chosen.choice([1, 6, 7.5, 16, -4]),
        "use_rslora": chosen.random() < 0.5,
        "rank_pattern": patterns(chosen, [1, 2, 3, 5]),
        "alpha_pattern": patterns(chosen, [1, 2, 9, 32, -3]),
        "target_modules": targets,
        "init_lora_weights": chosen.choice([True, False, "gaussian", "orthogonal"]),
    }
    if fields["init_lora_weights"] == "orthogonal":  # PEFT wants even ranks
        fields |= {"r": 4, "rank_pattern": dict.fromkeys(fields["rank_pattern"], 2)}
    more = chosen.choice(["dora", "lora_bias", "none", "none"])
    fields |= {} if more == "none" else {"use_dora": True} if more == "dora" else {"lora_bias": True}
    if chosen.random() < 0.4:
        fields["bias"] = chosen.choice(["all", "lora_only"])
    if isinstance(targets, list) and chosen.random() < 0.5:
        fields["layers_to_transform"] = chosen.choice([1, 0, [0, 3, 11], [1, 10]])
        fields["layers_pattern"] = chosen.choice([None, "layers", ["h", "layers"], r"\w+"])
    if chosen.random() < 0.4:
        fields["exclude_modules"] = chosen.choice([["k_proj"], ["layers.1.mlp.up_proj"], r".*layers\.[12]\..*", "proj"])
    return fields


def trained(fields: dict[str, Any], folder: Path) -> torch.nn.Module:
    """PEFT's model with the adapter that is saved in the folder. Raises ValueError if no module is selected."""
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(Model(), LoraConfig(**fields))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if parameter.requires_grad:
                parameter.uniform_(0.5, 1.0) if "magnitude" in name else parameter.normal_()
    adapted.save_pretrained(str(folder))
    return adapted.base_model.model


def read(folder: Path) -> dict[str, second_reading.Found]:
    raw = json.loads((folder / CONFIG_NAME).read_bytes())
    return second_reading._Reading(raw).linears(second_reading._tensors(folder / WEIGHTS_NAME))  # noqa: SLF001


@pytest.fixture(scope="module")
def variants(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, torch.nn.Module]:
    folder = tmp_path_factory.mktemp("variants")
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in range(VARIANTS):
            try:
                found[folder / str(seed)] = trained(variant(seed), folder / str(seed))
            except ValueError:  # PEFT finds no module for it
                continue
    assert len(found) > VARIANTS * 0.7
    return found


def test_random_variants_are_read_as_peft_reads_them(variants: dict[Path, torch.nn.Module]) -> None:
    """PEFT is asked which linears it changes, by what scale, and with which tensors."""
    seen: set[tuple[str, ...]] = set()
    for folder, model in variants.items():
        found = read(folder)
        weights = (folder / WEIGHTS_NAME).read_bytes()

        def values(tensor: Tensor | None, weights: bytes = weights) -> torch.Tensor | None:
            of = tensor and bytearray(weights[tensor.start : tensor.start + tensor.bytes])
            return of and torch.frombuffer(of, dtype=torch.float32).reshape(tensor.shape)

        for module, linear in ((name, one) for name, one in model.named_modules() if name in MODULES):
            of_peft = hasattr(linear, "lora_A")
            again = found.pop(module.removeprefix("model."), None)
            if again is None or again.a is None:
                assert not of_peft, (folder, module)
                continue
            assert linear.scaling["default"] == pytest.approx(again.scale), (folder, module)
            magnitude = linear.lora_magnitude_vector["default"].weight if linear.use_dora["default"] else None
            expected = {
                "a": linear.lora_A["default"].weight,
                "b": linear.lora_B["default"].weight,
                "magnitude": magnitude,
                "lora_bias": linear.lora_B["default"].bias,
                "bias": linear.base_layer.bias if again.bias is not None else None,
            }
            for field, theirs in expected.items():
                ours = values(getattr(again, field))
                assert (ours is None) == (theirs is None), (folder, module, field)
                assert ours is None or torch.equal(ours, theirs), (folder, module, field)
            seen.add(tuple(name for name, value in again._asdict().items() if value is not None))
        assert not found, folder
    assert len(seen) > 4, "adapters of many kinds"


def test_no_variant_of_peft_is_refused_for_what_the_readings_differ_in(variants: dict[Path, torch.nn.Module]) -> None:
    served = 0
    for folder in variants:
        check_again(folder, check(folder, MODULES, max_rank=64, biased=MODULES.keys()).layout.linears)
        served += 1
    assert served == len(variants)


@pytest.mark.parametrize(
    ("of_peft", "saved"),
    [
        ("base_model.model.", ""),
        ("base_model.model.", "base_model."),
        ("base_model.model.", "base_model.model._orig_mod."),
        ("base_model.model.", "_orig_mod.base_model.model."),
        ("base_model.model.", "module.module.base_model.model."),
        ("model.layers.", "_fsdp_wrapped_module.model.layers."),
        ("model.layers.", "model.language_model.layers."),
        ("model.layers.", "language_model.model.layers."),
        (".self_attn.", "._fsdp_wrapped_module.self_attn._checkpoint_wrapped_module."),
        (".lora_A.weight", ".lora_A.default.weight"),
        ("lora_magnitude_vector", "lora_magnitude_vector.default.weight"),
        ("base_layer.bias", "bias"),
    ],
)
def test_the_names_of_other_tools_are_read_alike(tmp_path: Path, of_peft: str, saved: str) -> None:
    folder = tmp_path / "adapter"
    fields = {"r": 2, "use_dora": True, "bias": "lora_only", "target_modules": NAMES, "rank_pattern": {"q_proj": 3}}
    trained(fields, folder)
    tensors = {name.replace(of_peft, saved): tensor for name, tensor in load_file(folder / WEIGHTS_NAME).items()}
    save_file(tensors, folder / WEIGHTS_NAME)
    layout = check(folder, MODULES, max_rank=64, biased=MODULES.keys()).layout
    assert len(layout.linears) == len(MODULES)
    check_again(folder, layout.linears)


@pytest.mark.parametrize("field", [*REFUSED, "init_lora_weights", "peft_type"])
def test_what_is_more_than_lora_of_linears_is_noticed_by_both(folder: Path, shapes: Shapes, field: str) -> None:
    """A reader that ignored one of these would serve another adapter than PEFT's."""
    linears = check(folder, shapes, max_rank=64).layout.linears
    check_again(folder, linears)
    config = json.loads((folder / CONFIG_NAME).read_text())
    for value in {"init_lora_weights": ["pissa", "PiSSA_niter_4", "loftq"], "peft_type": ["LOHA"]}.get(
        field, [[1], True]
    ):
        (folder / CONFIG_NAME).write_text(json.dumps(config | {field: value}))
        with pytest.raises(AdapterIncompatible, match=f"by {field} in adapter_config.json") as refused:
            check_again(folder, linears)
        assert refused.value.reason == "ReadingsDiffer"
        assert "merge_and_unload" in refused.value.message


def changed_linears(folder: Path, shapes: Shapes) -> Iterator[tuple[str, list[tuple[Any, ...]]]]:
    first, second, *rest = check(folder, shapes, max_rank=64).layout.linears
    assert first.a is not None
    yield "scale of", [first._replace(scale=first.scale * 1.001), second, *rest]
    yield "a of", [first._replace(a=second.a), second, *rest]
    yield "b of", [first._replace(b=first.a), second, *rest]
    yield "magnitude of", [first._replace(magnitude=first.a), second, *rest]
    yield "a of", [first._replace(a=first.a._replace(start=first.a.start + 4)), second, *rest]
    yield "a of", [first._replace(a=first.a._replace(dtype="F16")), second, *rest]
    yield "and the layout has none", [second, *rest]
    yield "has no tensors that PEFT loads", [first, second, *rest, first._replace(module="model.layers.9.a")]


def test_a_layout_that_differs_in_one_place_is_refused_by_its_name(folder: Path, shapes: Shapes) -> None:
    for says, linears in changed_linears(folder, shapes):
        with pytest.raises(
            AdapterIncompatible, match=f"Two readings of the adapter differ: .*{re.escape(says)}"
        ) as refused:
            check_again(folder, linears)
        assert refused.value.reason == "ReadingsDiffer"


def test_all_patterns_together_are_bounded(folder: Path, shapes: Shapes, monkeypatch: pytest.MonkeyPatch) -> None:
    linears = check(folder, shapes, max_rank=64).layout.linears
    monkeypatch.setattr(second_reading, "MAX_SECONDS", 0.05)
    config = json.loads((folder / CONFIG_NAME).read_text())
    for fields in (
        {"target_modules": "(.*)" * 14 + r"\1\2\3\4\5[!?]"},
        {"rank_pattern": {f"(.*)(.*)(.*){n}": 4 for n in range(5000)}},
    ):
        (folder / CONFIG_NAME).write_text(json.dumps(config | fields))
        with pytest.raises(AdapterIncompatible, match=r"take too long together\. Name the modules instead"):
            check_again(folder, linears)


def test_thousands_of_plain_keys_are_no_reason_to_refuse(folder: Path, shapes: Shapes) -> None:
    config = json.loads((folder / CONFIG_NAME).read_text())
    keys = {f"x{n}": 4 for n in range(10_000)} | {f"model.layers.{n}.self_attn.q_proj": 4 for n in range(200)}
    shutil.copy(folder / CONFIG_NAME, folder / "before")
    (folder / CONFIG_NAME).write_text(json.dumps(config | {"rank_pattern": keys}))
    check_again(folder, check(folder, shapes, max_rank=64).layout.linears)
