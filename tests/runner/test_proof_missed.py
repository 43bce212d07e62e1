"""No defect of reading, of the layout or of loading is missed: the adapter is refused before it serves [proof_missed].

Each is planted in the product's own code, and the adapter goes through the check and the proof, as in a runner.
"""

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from motet.errors import AdapterIncompatible, AdapterUnproved, MotetError
from motet_runner.adapters import certification
from motet_runner.adapters.certification import certify
from motet_runner.adapters.peft_config import CONFIG_NAME, WEIGHTS_NAME
from motet_runner.adapters.proof import Proof, ProofOrder
from motet_runner.engine import Engine
from motet_runner.interface import AdapterFailed, ProofEnded
from tests.runner.engines import make_engine, run
from tests.runner.proof_mutants import OF_SOME, PLAIN, SCALED, Plant
from tests.runner.random_models import RandomAdapter, save_adapter, save_base
from tests.runner.reading_mutants import CONFIG, LAYOUT, Misread

READING = CONFIG | LAYOUT
LOADING = {name: Misread(plant, "loaded") for name, plant in PLAIN.items()}
LOADING |= {name: Misread(plant, "dora") for name, plant in SCALED.items()}
LOADING |= {name: Misread(plant, "some") for name, plant in OF_SOME.items()}
SPECS = {
    "plain": RandomAdapter(6, 9),
    "loaded": RandomAdapter(6, 9),
    "some": RandomAdapter(6, 9, targets=("q_proj", "up_proj")),
    "ranks": RandomAdapter(6, 9, rank_pattern=(("q_proj", 3), ("layers.1.mlp.up_proj", 2))),
    "negative": RandomAdapter(6, -9),
    "dora": RandomAdapter(6, 9, dora=True, bias="lora_only", targets=("q_proj", "k_proj", "v_proj")),
    "rich": RandomAdapter(6, 7.5, rslora=True, lora_bias=True, targets=("q_proj", "down_proj"),
                          rank_pattern=(("q_proj", 3),)),
}  # fmt: skip
ALPHAS = {"layers.1.self_attn.q_proj": 20, "q_proj": 5, "xdown_proj": 33}
"""Of "rich". The first key of two that fit counts, and the last one fits no name."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base("qwen2", tmp_path_factory.mktemp("base") / "base", biased=True)


@pytest.fixture(scope="module")
def engine(base: Path) -> Engine:
    return make_engine(base, kernels="torch", prove_adapters=True)


@pytest.fixture(scope="module")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    saved = {name: save_adapter(base, "qwen2", spec, folder / name, seed=1) for name, spec in SPECS.items()}
    changed(saved["rich"], saved["rich"], alpha_pattern=ALPHAS)
    saved["wide"] = Path(shutil.copytree(saved["plain"], folder / "wide"))
    tensors = load_file(saved["wide"] / WEIGHTS_NAME)
    save_file({name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}, saved["wide"] / WEIGHTS_NAME)
    return saved


def changed(folder: Path, to: Path, **fields: object) -> Path:
    if to != folder:
        shutil.copytree(folder, to)
    config = json.loads((folder / CONFIG_NAME).read_text())
    (to / CONFIG_NAME).write_text(json.dumps(config | fields))
    return to


def outcome(engine: Engine, folder: Path) -> Proof | MotetError:
    """Of the check and the proof, as a runner makes them"""
    try:
        layout = certify(folder, engine.info).layout
    except AdapterIncompatible as error:
        return error
    engine.load_adapter("A", layout, proof=ProofOrder(1))
    ran = run(engine)
    engine.drop_adapter("A")
    run(engine)
    failed = [one.error for one in ran.of(AdapterFailed)]
    return (failed or [one.found for one in ran.of(ProofEnded)])[0]


def planted(engine: Engine, folder: Path, *plants: Plant) -> Proof | MotetError:
    with pytest.MonkeyPatch.context() as monkeypatch:
        for plant in plants:
            plant(monkeypatch)
        return outcome(engine, folder)


def without_second_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certification, "check_again", lambda *_: None)


def test_what_is_right_is_proved(engine: Engine, adapters: dict[str, Path]) -> None:
    found = {name: outcome(engine, folder) for name, folder in adapters.items()}
    assert not {name: proof for name, proof in found.items() if not isinstance(proof, Proof)}


def test_proof_missed(engine: Engine, adapters: dict[str, Path], tmp_path: Path) -> None:
    """→ the figure `proof_missed`"""
    missed, said = [], {}
    assert not READING.keys() & LOADING.keys()
    for name, mutant in (READING | LOADING).items():
        folder = adapters[mutant.adapter]
        if mutant.fields:
            folder = changed(folder, tmp_path / name.replace(":", ""), **mutant.fields)
        found = planted(engine, folder, mutant.plant)
        by = "ReadingsDiffer" if name in READING else "ProofFailed"
        if not isinstance(found, AdapterIncompatible | AdapterUnproved) or found.reason != by:
            missed.append((name, found))
        else:
            said[name] = found.message
    print(f"proof_missed = {len(missed)} of {len(READING)} mutants of readers and {len(LOADING)} of loads")
    assert not missed, [name for name, _ in missed]
    assert len(CONFIG) >= 25, "mutants of the reader of the config"
    assert len(said) >= 65


@pytest.mark.parametrize("name", READING)
def test_without_a_second_reading_each_of_these_would_serve(
    engine: Engine, adapters: dict[str, Path], tmp_path: Path, name: str
) -> None:
    """So each changes what is served, and no other check finds it."""
    mutant = READING[name]
    folder = adapters[mutant.adapter]
    refused = partial(outcome, engine)
    if mutant.fields:
        folder = changed(folder, tmp_path / "changed", **mutant.fields)
        assert isinstance(refused(folder), AdapterIncompatible), "it is not an adapter that serves"
    found = planted(engine, folder, mutant.plant, without_second_reading)
    assert isinstance(found, Proof), found
