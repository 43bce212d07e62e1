"""Whether check and proof refuse an adapter for each defect that is planted in the product's own code [proof_missed].

The adapters go through the check and the proof as in a runner. Each mutant is planted for one of them that shows it.
"""

import json
import shutil
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from motet.domain import Digest
from motet.errors import AdapterIncompatible, AdapterUnproved, MotetError
from motet_runner.adapters.certification import certify
from motet_runner.adapters.peft_config import CONFIG_NAME, WEIGHTS_NAME
from motet_runner.adapters.proof import Proof, ProofOrder
from motet_runner.engine import Engine
from motet_runner.interface import AdapterFailed, Event, ProofEnded
from testbed.proof_mutants import OF_SOME, PLAIN, SCALED, Plant
from testbed.reading_mutants import CONFIG, LAYOUT, Misread

READING = CONFIG | LAYOUT
LOADING = {name: Misread(plant, "loaded") for name, plant in PLAIN.items()}
LOADING |= {name: Misread(plant, "dora") for name, plant in SCALED.items()}
LOADING |= {name: Misread(plant, "some") for name, plant in OF_SOME.items()}
MUTANTS = READING | LOADING
REFUSED_BY = dict.fromkeys(READING, "ReadingsDiffer") | dict.fromkeys(LOADING, "ProofFailed")
"""Mutant → the reason of the refusal: another one would be luck"""

LORA = {"r": 6, "lora_alpha": 9, "target_modules": "all-linear"}
ADAPTERS: dict[str, dict[str, Any]] = {
    "plain": LORA,
    "loaded": LORA,
    "wide": LORA,
    "some": LORA | {"target_modules": ["q_proj", "up_proj"]},
    "ranks": LORA | {"rank_pattern": {"q_proj": 3, "layers.1.mlp.up_proj": 2}},
    "negative": LORA | {"lora_alpha": -9},
    "dora": LORA | {"use_dora": True, "bias": "lora_only", "target_modules": ["q_proj", "k_proj", "v_proj"]},
    "rich": LORA | {
        "lora_alpha": 7.5, "use_rslora": True, "lora_bias": True, "target_modules": ["q_proj", "down_proj"],
        "rank_pattern": {"q_proj": 3},
    },
}  # fmt: skip
"""In PEFT's words. "wide" is saved in bfloat16."""
ALPHAS = {"layers.1.self_attn.q_proj": 20, "q_proj": 5, "xdown_proj": 33}
"""Of "rich". The first key of two that fit counts, and the last one fits no name."""
DIGEST = Digest("A")


def save_base(folder: Path) -> Path:
    """Random weights, and biases that are not zeros"""
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=False, bos_token_id=0, eos_token_id=1,
        pad_token_id=0,
    )  # fmt: skip
    model = transformers.Qwen2ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 or name.endswith("bias"):
                parameter.normal_(0, 0.08)
    model.save_pretrained(folder)
    return folder


def save_adapters(base: Path, folder: Path) -> dict[str, Path]:
    """As PEFT saves them, with random numbers in all that is trained"""
    from peft import LoraConfig, get_peft_model

    for name, fields in ADAPTERS.items():
        torch.manual_seed(1)
        model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **fields))
            with torch.no_grad():
                for parameter_name, parameter in adapted.named_parameters():
                    if "magnitude" in parameter_name:
                        parameter.mul_(torch.empty_like(parameter).uniform_(0.7, 1.4))
                    elif parameter.requires_grad:
                        parameter.normal_(0, 0.05 if "lora_B" in parameter_name else 0.1)
            adapted.save_pretrained(str(folder / name))
    saved = {name: folder / name for name in ADAPTERS}
    changed(saved["rich"], saved["rich"], alpha_pattern=ALPHAS)
    wide = saved["wide"] / WEIGHTS_NAME
    save_file({name: tensor.to(torch.bfloat16) for name, tensor in load_file(wide).items()}, wide)
    return saved


def changed(folder: Path, to: Path, **fields: object) -> Path:
    """The same adapter with other fields in its config"""
    if to != folder:
        shutil.copytree(folder, to)
    config = json.loads((folder / CONFIG_NAME).read_text())
    (to / CONFIG_NAME).write_text(json.dumps(config | fields))
    return to


def outcome(engine: Engine, folder: Path, plants: Sequence[Plant] = ()) -> Proof | MotetError:
    """Of the check and the proof, as a runner makes them"""
    with pytest.MonkeyPatch.context() as monkeypatch:
        for plant in plants:
            plant(monkeypatch)
        try:
            layout = certify(folder, engine.info).layout
        except AdapterIncompatible as error:
            return error
        engine.load_adapter(DIGEST, layout, proof=ProofOrder(1))
        events = list(_events(engine))
        engine.drop_adapter(DIGEST)
        events += _events(engine)
    for one in events:
        if isinstance(one, AdapterFailed):
            return one.error
    return next(one.found for one in events if isinstance(one, ProofEnded))


def _events(engine: Engine) -> Iterator[Event]:
    while engine.has_work():
        yield from engine.step().events


def missed(engine: Engine, adapters: dict[str, Path], scratch: Path) -> dict[str, Proof | MotetError]:
    """Mutant → what came in place of its refusal"""
    found = {}
    for name, mutant in MUTANTS.items():
        folder = adapters[mutant.adapter]
        if mutant.fields:
            folder = changed(folder, scratch / name.replace(":", ""), **mutant.fields)
        result = outcome(engine, folder, [mutant.plant])
        if not isinstance(result, AdapterIncompatible | AdapterUnproved) or result.reason != REFUSED_BY[name]:
            found[name] = result
    return found
