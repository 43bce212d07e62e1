"""A GPU's kernels prove the adapters that they read, also those of 8-bit integers."""

from functools import partial
from pathlib import Path

import pytest

from motet.domain import Digest
from motet.errors import AdapterUnproved
from motet_runner.adapters.certification import certify
from motet_runner.adapters.proof import Proof, ProofOrder
from motet_runner.engine import Engine
from motet_runner.interface import ProofEnded
from testbed.proof_mutants import PLAIN, SCALED
from tests.gpu.devices import IN_A_SOAK, LAYERS
from tests.runner.engines import make_engine, run
from tests.runner.random_models import RandomAdapter, configs, save_adapter, save_base

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
proving_engine = partial(make_engine, prove_adapters=True)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = configs()["qwen2"]
    config.num_hidden_layers, config.layer_types = LAYERS, config.layer_types[:LAYERS]
    return save_base("qwen2", tmp_path_factory.mktemp("qwen2") / "base", config=config, biased=True)


@pytest.fixture(scope="module")
def adapter(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_adapter(base, "qwen2", RandomAdapter(6, 9), tmp_path_factory.mktemp("adapter") / "a", seed=1)


@pytest.fixture(scope="module")
def dora(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its scales take a tile more than its products."""
    spec = RandomAdapter(16, 24, dora=True, bias="lora_only", targets=("q_proj", "down_proj"))
    return save_adapter(base, "qwen2", spec, tmp_path_factory.mktemp("adapter") / "dora", seed=1)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("float32", "auto"), marks=IN_A_SOAK),
        pytest.param(("float16", "auto"), marks=IN_A_SOAK),
        ("float16", "int8"),
    ],
    ids="-".join,
)
def engine(base: Path, unjudged: None, request: pytest.FixtureRequest) -> Engine:
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


def test_what_scales_and_shifts_is_proved(engine: Engine, dora: Path) -> None:
    proof = outcome(engine, dora)
    assert isinstance(proof, Proof), proof


FEW = ("a neighbour's A", "one output of zeros", "a part of the slot stale")
"""The interpreter is slow, and the defects are none of the kernels: `tests/runner` has all of them."""


@pytest.mark.parametrize(
    "mutant", ["a scale that is 5 % too large", *(pytest.param(mutant, marks=IN_A_SOAK) for mutant in FEW)]
)
def test_no_defect_of_a_load_is_missed(engine: Engine, adapter: Path, mutant: str, monkeypatch) -> None:
    PLAIN[mutant](monkeypatch)
    assert isinstance(outcome(engine, adapter), AdapterUnproved)


@pytest.mark.parametrize(
    "mutant",
    [
        "what scales ignored",
        *(pytest.param(one, marks=IN_A_SOAK) for one in ("magnitudes ignored", "DoRA without the bias")),
    ],
)
def test_no_defect_of_what_scales_is_missed(engine: Engine, dora: Path, mutant: str, monkeypatch) -> None:
    SCALED[mutant](monkeypatch)
    assert isinstance(outcome(engine, dora), AdapterUnproved)
