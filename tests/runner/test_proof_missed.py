"""No defect of reading, of the layout or of loading is missed: its adapter is refused before it serves [proof_missed].

`benchmarks.adapters` reports the figure.
"""

from pathlib import Path

import pytest

from motet.errors import AdapterIncompatible
from motet_runner.adapters import certification
from motet_runner.adapters.proof import Proof
from motet_runner.engine import Engine
from testbed.proof_missed import LOADING, MUTANTS, READING, changed, missed, outcome, save_adapters, save_base
from testbed.reading_mutants import CONFIG
from tests.runner.engines import make_engine


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def engine(base: Path) -> Engine:
    return make_engine(base, kernels="torch", prove_adapters=True)


@pytest.fixture(scope="module")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return save_adapters(base, tmp_path_factory.mktemp("adapters"))


def without_second_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certification, "check_again", lambda *_: None)


def test_what_is_right_is_proved(engine: Engine, adapters: dict[str, Path]) -> None:
    found = {name: outcome(engine, folder) for name, folder in adapters.items()}
    assert not {name: proof for name, proof in found.items() if not isinstance(proof, Proof)}


def test_proof_missed(engine: Engine, adapters: dict[str, Path], tmp_path: Path) -> None:
    assert not missed(engine, adapters, tmp_path)
    assert len(MUTANTS) == len(READING) + len(LOADING)
    assert len(CONFIG) >= 25, "mutants of the reader of the config"
    assert len(MUTANTS) >= 65


@pytest.mark.parametrize("name", READING)
def test_without_a_second_reading_each_of_these_would_serve(
    engine: Engine, adapters: dict[str, Path], tmp_path: Path, name: str
) -> None:
    """So each changes what is served, and no other check finds it."""
    mutant = READING[name]
    folder = adapters[mutant.adapter]
    if mutant.fields:
        folder = changed(folder, tmp_path / "changed", **mutant.fields)
        assert isinstance(outcome(engine, folder), AdapterIncompatible), "it is not an adapter that serves"
    found = outcome(engine, folder, [mutant.plant, without_second_reading])
    assert isinstance(found, Proof), found
