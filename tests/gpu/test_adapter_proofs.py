"""A GPU's kernels prove the adapters that they read, also those of 8-bit integers."""

from functools import partial
from pathlib import Path

import pytest

from motet.domain import Digest
from motet.errors import AdapterUnproved
from motet_runner.adapters.certification import certify
from motet_runner.adapters.layout import ON_A_GPU
from motet_runner.adapters.proof import Proof, ProofOrder
from motet_runner.engine import Engine
from motet_runner.interface import ProofEnded
from tests.gpu.devices import IN_A_SOAK, LAYERS
from tests.runner.engines import make_engine, run
from tests.runner.proof_mutants import PLAIN
from tests.runner.random_models import RandomAdapter, llama, save_adapter, save_base

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
proving_engine = partial(make_engine, prove_adapters=True)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base("llama", tmp_path_factory.mktemp("llama") / "base", config=llama(layers=LAYERS))


@pytest.fixture(scope="module")
def adapter(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_adapter(base, "llama", RandomAdapter(6, 9), tmp_path_factory.mktemp("adapter") / "a", seed=1)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("float32", "auto"), marks=IN_A_SOAK),
        pytest.param(("float16", "auto"), marks=IN_A_SOAK),
        ("float16", "int8"),
    ],
    ids="-".join,
)
def engine(base: Path, request: pytest.FixtureRequest) -> Engine:
    dtype, adapter_dtype = request.param
    return proving_engine(base, kernels="triton", dtype=dtype, adapter_dtype=adapter_dtype)


def outcome(engine: Engine, folder: Path) -> Proof | AdapterUnproved:
    digest = Digest("A")
    engine.load_adapter(digest, certify(folder, engine.info).layout, proof=ProofOrder(1))
    ran = run(engine)
    engine.drop_adapter(digest)
    run(engine)
    (found,) = [one.found for one in ran.of(ProofEnded)]
    return found


def test_what_is_right_is_proved(engine: Engine, adapter: Path) -> None:
    proof = outcome(engine, adapter)
    assert isinstance(proof, Proof), proof
    assert proof.kernels == "triton"
    assert proof.moved > 100 * proof.composition
    assert engine.info.no_scales == ON_A_GPU, "adapters that scale are refused before they could be proved"


FEW = ("a neighbour's A", "one output of zeros", "a part of the slot stale")
"""The interpreter is slow, and the defects are none of the kernels: `tests/runner` has all of them."""


@pytest.mark.parametrize(
    "mutant", ["a scale that is 5 % too large", *(pytest.param(mutant, marks=IN_A_SOAK) for mutant in FEW)]
)
def test_no_defect_of_a_load_is_missed(engine: Engine, adapter: Path, mutant: str, monkeypatch) -> None:
    PLAIN[mutant](monkeypatch)
    assert isinstance(outcome(engine, adapter), AdapterUnproved)
