"""An engine proves an adapter before it serves: its results are right, and it acts."""

import platform
import shutil
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from motet.domain import Digest
from motet.errors import PROOF_FAILED, AdapterUnproved, MotetError
from motet_runner.adapters import expected_results
from motet_runner.adapters.certification import certify
from motet_runner.adapters.expected_results import ExpectedResults, fixed_rows
from motet_runner.adapters.host_load import HostLoad
from motet_runner.adapters.kept_proofs import ProofKey
from motet_runner.adapters.layout import AdapterLayout
from motet_runner.adapters.proof import Proof, ProofOrder
from motet_runner.cpu import cpu_name
from motet_runner.engine import Engine
from motet_runner.execute.adapters import adapter_uploads
from motet_runner.execute.batch.flat_batch import FlatBatch
from motet_runner.execute.proof import adapter_proof
from motet_runner.execute.proof.adapter_proof import AdapterProof, Prover
from motet_runner.interface import AdapterFailed, AdapterLoaded, Finish, ProofEnded
from motet_runner.machine import hardware_name, machine_identity
from motet_runner.settings import Settings
from testbed.compiled_kernels import needs_a_compiler
from testbed.proof_mutants import OF_SOME, PLAIN, SCALED, Plant, writes
from tests.runner.engines import EngineRun, ask, make_device_engine, make_engine, run, step_beside_load
from tests.runner.random_models import RandomAdapter, save_adapter, save_base
from tests.runner.random_models import llama as llama_config

A, B = map(Digest, "AB")
KERNELS = [
    ("torch", "float32"),
    ("torch", "bfloat16"),
    ("exact", "float32"),
    ("cpp", "float32"),
    ("cpp", "bfloat16"),
]
USUAL = ("cpp", "bfloat16")
proving_engine = partial(make_engine, prove_adapters=True)
NUMBERS = count(1)
UNLUCKY = 70
"""Percent of the roundings of an A"""


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With biases that are not zero"""
    return save_base("qwen2", tmp_path_factory.mktemp("qwen2") / "base", biased=True)


@pytest.fixture(scope="module")
def plain(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_adapter(llama, "llama", RandomAdapter(6, 9), tmp_path_factory.mktemp("plain") / "a", seed=1)


@pytest.fixture(scope="module")
def of_some(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = RandomAdapter(6, 9, targets=("q_proj", "up_proj"))
    return save_adapter(llama, "llama", spec, tmp_path_factory.mktemp("some") / "a", seed=1)


@pytest.fixture(scope="module")
def dora(qwen2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_adapter(qwen2, "qwen2", RandomAdapter(6, 9, dora=True), tmp_path_factory.mktemp("dora") / "a", seed=1)


@pytest.fixture(scope="module")
def engines() -> dict[tuple[Path, str, str], Engine]:
    """One for each model and its kernels, in whatever order tests run: its adapters are dropped after each proof."""
    return {}


@pytest.fixture
def engine_on(request: pytest.FixtureRequest, engines: dict[tuple[Path, str, str], Engine]):
    kernels, dtype = request.param
    if kernels == "cpp":
        needs_a_compiler()

    def engine_on(base: Path) -> Engine:
        if (base, kernels, dtype) not in engines:
            engines[base, kernels, dtype] = proving_engine(base, kernels=kernels, dtype=dtype)
        return engines[base, kernels, dtype]

    return engine_on


def order(engine: Engine, digest: Digest, folder: Path, *, meanwhile: bool = False) -> None:
    proof = ProofOrder(next(NUMBERS), serves_meanwhile=meanwhile)
    engine.load_adapter(digest, certify(folder, engine.info).layout, proof=proof)


def prove(engine: Engine, digest: Digest, folder: Path, **more) -> EngineRun:
    order(engine, digest, folder, **more)
    return run(engine)


def proofs(ran: EngineRun) -> list[Proof]:
    return [one.found for one in ran.of(ProofEnded) if isinstance(one.found, Proof)]


def outcome(engine: Engine, folder: Path) -> Proof | MotetError:
    ran = prove(engine, A, folder)
    engine.drop_adapter(A)
    run(engine)
    (ended,) = ran.of(ProofEnded)
    assert not ran.of(AdapterFailed)
    return ended.found


def on_kernels(name: str, cases: Collection[Any]) -> pytest.MarkDecorator:
    """Each case with the compiled kernels in bfloat16, and the cases in turn with one of the others. All of them run
    in a soak."""
    others = [one for one in KERNELS if one != USUAL]
    return pytest.mark.parametrize(
        ("engine_on", name),
        [
            pytest.param(
                kernels,
                case,
                id=f"{' '.join(kernels)}-{case if isinstance(case, str) else '-'.join(case)}",
                marks=() if kernels in (USUAL, others[number % len(others)]) else pytest.mark.soak,
            )
            for kernels in KERNELS
            for number, case in enumerate(cases)
        ],
        indirect=["engine_on"],
    )


on_all_kernels = pytest.mark.parametrize("engine_on", KERNELS, ids=" ".join, indirect=True)


@on_all_kernels
@pytest.mark.parametrize("case", [("llama", "plain"), ("llama", "of_some"), ("qwen2", "dora")])
def test_what_is_right_is_proved(engine_on, case: tuple[str, str], request: pytest.FixtureRequest) -> None:
    base, folder = map(request.getfixturevalue, case)
    proof = outcome(engine_on(base), folder)
    assert isinstance(proof, Proof), proof
    assert proof.moved > 100 * proof.composition
    assert proof.kernels == engine_on(base).report().kernels.serving
    assert proof.warning == ""


@on_kernels("mutant", PLAIN)
def test_no_defect_of_a_load_is_missed(engine_on, llama: Path, plain: Path, mutant: str, monkeypatch) -> None:
    refused(engine_on(llama), plain, PLAIN[mutant], monkeypatch)


@on_kernels("mutant", SCALED)
def test_no_defect_of_scales_is_missed(engine_on, qwen2: Path, dora: Path, mutant: str, monkeypatch) -> None:
    refused(engine_on(qwen2), dora, SCALED[mutant], monkeypatch)


@pytest.mark.parametrize("mutant", OF_SOME)
def test_no_linear_changes_that_the_adapter_does_not_name(llama: Path, of_some: Path, mutant: str, monkeypatch) -> None:
    """The torch back end computes with all of a run; others skip what an adapter does not name."""
    refused(proving_engine(llama, kernels="torch"), of_some, OF_SOME[mutant], monkeypatch)


@pytest.mark.parametrize("kernels", ["torch", "cpp"])
@pytest.mark.parametrize("width", [pytest.param(4096, marks=pytest.mark.soak), 14336])
def test_long_sums_in_fp32_are_proved_with_room_to_spare_and_one_lost_input_is_not(
    tmp_path: Path, width: int, kernels: str, monkeypatch
) -> None:
    """A model has hundreds of linears: what a few of them explain must leave room for the worst of all."""
    if kernels == "cpp":
        needs_a_compiler()
    config = llama_config()
    config.intermediate_size, config.num_hidden_layers = width, 1
    base = save_base("llama", tmp_path / "base", config=config)
    engine = proving_engine(base, kernels=kernels, kv_cache_mib=64, max_lora_rank=16)
    with monkeypatch.context() as half:
        half.setattr(adapter_proof, "ALLOWED", adapter_proof.ALLOWED / 2)
        half.setattr(adapter_proof, "OF_ONE", adapter_proof.OF_ONE / 2)
        for rank, seed in (1, 0), (1, 1), (1, 2), (16, 0):
            folder = save_adapter(base, "llama", RandomAdapter(rank, 2 * rank), tmp_path / f"{rank} {seed}", seed=seed)
            assert isinstance(found := outcome(engine, folder), Proof), (rank, seed, found)
    refused(
        engine, folder, writes(lambda layout, run, linear: layout.matrices(run, linear)[0][:, 7].zero_()), monkeypatch
    )


def test_rank_1_is_proved_though_the_rounding_of_a_moves_a_whole_row_alike(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for one adapter of thousands: most roundings of one A go the same way for one of the fixed rows."""
    engine = proving_engine(llama, kernels="torch", dtype="bfloat16")
    folder = save_adapter(llama, "llama", RandomAdapter(1, 2), tmp_path / "a", seed=1)
    weights = load_file(folder / "adapter_model.safetensors")
    name = next(one for one in weights if "q_proj.lora_A" in one)
    a = weights[name].bfloat16().float()
    half_a_step = 0.9 * 2.0 ** (torch.frexp(a).exponent - 9)
    alike = torch.arange(a.shape[1]) % 100 < UNLUCKY
    weights[name] = a + half_a_step * fixed_rows(a.shape[1], 1)[0].sign() * alike
    save_file(weights, folder / "adapter_model.safetensors")
    assert isinstance(found := outcome(engine, folder), Proof), found
    with monkeypatch.context() as narrow:
        narrow.setattr(adapter_proof, "ALLOWED", 2.0)
        assert isinstance(outcome(engine, folder), AdapterUnproved), "the adapter is that unlucky"
    refused(engine, folder, PLAIN["no scale"], monkeypatch)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("of_b", [1.0, -1.0, 0.25])
def test_ranks_with_one_row_of_a_are_proved_though_their_errors_are_equal(
    llama: Path, tmp_path: Path, dtype: str, of_b: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = proving_engine(llama, kernels="torch", dtype=dtype, max_lora_rank=64)
    folder = save_adapter(llama, "llama", RandomAdapter(64, 128), tmp_path / "a", seed=1)
    weights = load_file(folder / "adapter_model.safetensors")
    factors = of_b ** torch.arange(64).remainder(2)
    for name, tensor in weights.items():
        if "lora_A" in name:
            weights[name] = tensor[:1] / factors[:, None]
        else:
            weights[name] = tensor[:, :1] * factors / 64
    save_file(weights, folder / "adapter_model.safetensors")
    assert isinstance(found := outcome(engine, folder), Proof), found
    refused(engine, folder, PLAIN["no scale"], monkeypatch)


def refused(engine: Engine, folder: Path, plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as planted:
        plant(planted)
        found = outcome(engine, folder)
    assert isinstance(found, AdapterUnproved), found
    assert found.reason == PROOF_FAILED == "ProofFailed"
    assert "is wrong" in found.message
    assert isinstance(outcome(engine, folder), Proof), "only the defect was refused"


def with_b(folder: Path, to: Path, factor: float, of_a: float = 1.0) -> Path:
    shutil.copytree(folder, to)
    weights = {
        name: tensor * (factor if "lora_B" in name else of_a)
        for name, tensor in load_file(folder / "adapter_model.safetensors").items()
    }
    save_file(weights, to / "adapter_model.safetensors")
    return to


@on_all_kernels
def test_an_adapter_that_rounding_takes_away_is_refused(engine_on, llama: Path, plain: Path, tmp_path: Path) -> None:
    found = outcome(engine_on(llama), with_b(plain, tmp_path / "faint", 1e-14))
    assert isinstance(found, AdapterUnproved)
    assert "moves no logit" in found.message
    assert found.reason == "NoEffect"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dora_that_changes_little_beside_large_biases_is_proved(qwen2: Path, dora: Path, tmp_path: Path, dtype: str):
    """Of a bias and nearly the same bias only the difference is left, with the rounding of both."""
    base = shutil.copytree(qwen2, tmp_path / "base")
    with safe_open(base / "model.safetensors", "pt") as file:
        metadata = file.metadata()
    weights = load_file(base / "model.safetensors")
    for name in [one for one in weights if one.endswith("k_proj.bias")]:
        weights[name] *= 100 / weights[name].abs().mean()
    save_file(weights, base / "model.safetensors", metadata)
    folder = shutil.copytree(dora, tmp_path / "dora")
    changed = load_file(folder / "adapter_model.safetensors")
    for name in changed:
        if ".lora_magnitude_vector" in name:
            linear = name.removeprefix("base_model.model.").partition(".lora_magnitude_vector")[0]
            norms = weights[f"{linear}.weight"].float().norm(dim=1)
            off = torch.randn(norms.shape, generator=torch.Generator().manual_seed(3))
            changed[name] = (norms * (1 + 1e-3 * off)).reshape(changed[name].shape)
        elif "lora_B" in name:
            changed[name] *= 1e-3
    save_file(changed, folder / "adapter_model.safetensors")
    assert isinstance(found := outcome(proving_engine(base, kernels="torch", dtype=dtype), folder), Proof), found


@pytest.mark.parametrize("factor", [1e-2, 1e-3, 1e-4])
def test_an_adapter_of_the_smallest_numbers_of_fp16_is_proved(
    llama: Path, plain: Path, tmp_path: Path, factor: float
) -> None:
    engine = proving_engine(llama, kernels="torch", dtype="float16")
    assert isinstance(found := outcome(engine, with_b(plain, tmp_path / "faint", factor)), Proof), found


@pytest.mark.parametrize("factor", [1e-4, 1e-5, 1e-6])
def test_an_a_of_the_smallest_numbers_of_fp16_with_a_large_b_is_proved(
    llama: Path, plain: Path, tmp_path: Path, factor: float, monkeypatch
) -> None:
    engine = proving_engine(llama, kernels="torch", dtype="float16")
    folder = with_b(plain, tmp_path / "faint", 1e-3 / factor, of_a=factor)
    assert isinstance(found := outcome(engine, folder), Proof), found
    refused(engine, folder, PLAIN["the sign of A"], monkeypatch)


def test_an_adapter_that_moves_little_is_proved_with_a_warning() -> None:
    assert "hardly changes anything" in Proof("torch", moved=9e-5, composition=1e-5).warning
    assert Proof("torch", moved=1e-4, composition=1e-5).warning == ""
    assert Proof("torch", moved=1e-9, composition=0.0).warning == ""


def test_the_rows_beside_a_text_move_its_logits_by_what_is_found(llama: Path, plain: Path, monkeypatch) -> None:
    """As with kernels whose sums depend on the number of rows"""
    engine = proving_engine(llama)
    logits = Prover.logits
    monkeypatch.setattr(Prover, "logits", lambda self, batch: logits(self, batch) + 0.5 * (len(batch.line.rows) - 1))
    proof = outcome(engine, plain)
    assert isinstance(proof, Proof)
    assert proof.composition == pytest.approx(0.5)
    assert proof.warning


@pytest.mark.parametrize(("waits", "threads"), [(False, {1}), (True, {2})])
def test_a_proof_takes_one_thread_while_nobody_waits(
    llama: Path, plain: Path, monkeypatch, *, waits: bool, threads: set[int]
) -> None:
    """With more, each operator waits for a core that other processes want."""
    engine = proving_engine(llama, kernels="cpp", threads=2)
    if waits:
        engine.add(ask("base", max_tokens=400))
        run(engine, steps=1)
    seen = []
    compare = vars(AdapterProof)["_compare"]

    def noted(*given: object) -> object:
        seen.append(torch.get_num_threads())
        return compare(*given)

    monkeypatch.setattr(AdapterProof, "_compare", noted)
    order(engine, A, plain)
    run(engine, steps=60)
    assert set(seen) == threads
    assert torch.get_num_threads() == 2


def test_sequences_wait_for_the_proof_as_for_the_load_and_others_go_on(llama: Path, plain: Path, monkeypatch) -> None:
    monkeypatch.setattr(adapter_proof, "LINEARS_AT_ONCE", 1)
    monkeypatch.setattr(expected_results, "MAX_AT_ONCE", 1)
    engine = proving_engine(llama)
    ran = run(engine, ask("base", max_tokens=200), steps=1)
    order(engine, A, plain)
    engine.add(ask("tuned", adapter=A))
    linears = len(engine.info.target_modules)
    while "tuned" not in ran.tokens:
        before = len(ran.tokens["base"])
        step_beside_load(engine, ran)
        assert len(ran.tokens["base"]) == before + 1
    assert len(ran.tokens["base"]) > linears + 3, "one linear with each, and three forward passes"
    kinds = [type(event) for event in ran.events if isinstance(event, AdapterLoaded | ProofEnded)]
    assert kinds == [AdapterLoaded, ProofEnded]
    run(engine, ran=ran)
    alone = run(proving_engine(llama), ask("base", max_tokens=200))
    assert ran.tokens["base"] == alone.tokens["base"], "a proof changes nothing of the others"


def test_a_failed_proof_fails_the_sequences_that_wait_and_no_others(llama: Path, plain: Path, monkeypatch) -> None:
    engine = proving_engine(llama)
    with monkeypatch.context() as planted:
        PLAIN["no scale"](planted)
        order(engine, A, plain)
        ran = run(engine, ask("a", adapter=A), ask("base"))
    assert ran.last["a"].finish is Finish.FAILED
    assert isinstance(ran.last["a"].error, AdapterUnproved)
    assert len(ran.tokens["base"]) == 40
    assert engine.report().adapters == []
    with pytest.raises(AdapterUnproved):
        engine.add(ask("again", adapter=A))
    order(engine, A, plain)
    run(engine, ask("again", adapter=A), ran=ran)
    assert len(ran.tokens["again"]) == 40
    assert len(proofs(ran)) == 1


def test_a_later_proof_that_fails_ends_the_sequences_that_run(llama: Path, plain: Path, monkeypatch) -> None:
    engine = proving_engine(llama)
    engine.load_adapter(A, certify(plain, engine.info).layout)
    ran = run(engine, ask("a", adapter=A, max_tokens=200), ask("base"), steps=3)
    with monkeypatch.context() as planted:
        planted.setattr(adapter_proof, "ALLOWED", 0.0)
        order(engine, A, plain, meanwhile=True)
        run(engine, ran=ran)
    assert isinstance(ran.last["a"].error, AdapterUnproved)
    assert 3 <= len(ran.tokens["a"]) < 200
    assert len(ran.tokens["base"]) == 40
    assert engine.report().adapters == []


def test_a_proof_is_made_once_for_an_order(llama: Path, plain: Path, of_some: Path) -> None:
    engine = proving_engine(llama, max_resident_adapters=1)
    ran = prove(engine, A, plain)
    assert len(proofs(ran)) == 1
    engine.load_adapter(B, certify(of_some, engine.info).layout)
    for name, adapter in (("b", B), ("a", A), ("b2", B)):
        again = run(engine, ask(name, adapter=adapter))
        assert len(again.of(AdapterLoaded)) == 1, "it had left the device"
        assert not again.of(ProofEnded)


def test_the_text_of_a_proof_is_computed_as_requests_are(llama: Path, plain: Path, monkeypatch) -> None:
    engine, passes = proving_engine(llama), []
    loaded = vars(engine)["_loaded"]
    fused = loaded.fused
    monkeypatch.setattr(loaded, "fused", lambda batch: passes.append(batch.tokens) or fused(batch))
    assert isinstance(outcome(engine, plain), Proof)
    assert len(passes) == 3, "alone, with another text, and with the adapter"


def test_what_is_begun_by_one_kernel_is_proved_by_the_other_that_serves_then(
    llama: Path, plain: Path, monkeypatch
) -> None:
    needs_a_compiler()
    monkeypatch.setattr("motet_runner.execute.adapters.adapter_uploads.HURRY_SECONDS", 1e-9)
    engine = proving_engine(llama, kernels="torch")
    begun, begin = [], Prover.begin
    monkeypatch.setattr(Prover, "begin", lambda self, *of: begun.append(self.kernels) or begin(self, *of))
    compiled = proving_engine(llama, kernels="cpp").diagnostics.kernel_choice.serving
    choice = engine.diagnostics.kernel_choice
    order(engine, A, plain)
    ran = EngineRun()
    while not begun:
        ran.take(engine)
    assert not ran.of(ProofEnded)
    monkeypatch.setattr(vars(engine)["_loaded"], "fused", None)  # a forward pass changes together with its kernels
    monkeypatch.setattr(engine.diagnostics.kernel_change, "advance", lambda: choice.changed(compiled, "", seconds=0.0))
    engine.idle()
    run(engine, ran=ran)
    assert begun == ["torch", compiled.name]
    assert [one.kernels for one in proofs(ran)] == [compiled.name]
    assert len(ran.of(AdapterLoaded)) == 1


def test_other_kernels_prove_an_adapter_where_it_lies_beside_its_sequences(
    llama: Path, plain: Path, monkeypatch
) -> None:
    needs_a_compiler()
    engine = proving_engine(llama, kernels="torch")
    ran = prove(engine, A, plain)
    compiled = proving_engine(llama, kernels="cpp").diagnostics.kernel_choice.serving
    choice = engine.diagnostics.kernel_choice
    monkeypatch.setattr(vars(engine)["_loaded"], "fused", None)  # a forward pass changes together with its kernels
    monkeypatch.setattr(engine.diagnostics.kernel_change, "advance", lambda: choice.changed(compiled, "", seconds=0.0))
    engine.idle()
    order(engine, A, plain, meanwhile=True)
    again = run(engine, ask("a", adapter=A))
    assert not again.of(AdapterLoaded)
    (before,), (after,) = proofs(ran), proofs(again)
    assert (before.kernels, after.kernels) == ("torch", compiled.name)
    assert after.moved == pytest.approx(before.moved, rel=1e-3)


def test_a_part_of_a_proof_is_short_also_where_nobody_waits(llama: Path, plain: Path, monkeypatch) -> None:
    """A command waits for it: a request may come at any time."""
    monkeypatch.setattr("motet_runner.execute.adapters.adapter_uploads.HURRY_SECONDS", 0.02)
    compare = vars(AdapterProof)["_compare"]

    compared = []

    def slow(self: AdapterProof, *of):
        time.sleep(0.02)
        compared.append(compare(self, *of))
        return compared[-1]

    monkeypatch.setattr(AdapterProof, "_compare", slow)
    engine = proving_engine(llama)
    order(engine, A, plain)
    ran, steps = EngineRun(), 0
    while not ran.of(ProofEnded):
        ran.take(engine)
        steps += 1
    assert steps > len(compared) > 3


def end_of_expected_results(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set once their thread has ended. It has to wait: there are more than it may be ahead."""
    ended, work = threading.Event(), vars(ExpectedResults)["_run"]
    monkeypatch.setattr(ExpectedResults, "_run", lambda self: (work(self), ended.set()))
    monkeypatch.setattr(expected_results, "MAX_AHEAD", 1)
    return ended


def test_a_proof_that_is_given_up_leaves_no_thread(llama: Path, plain: Path, monkeypatch) -> None:
    ended = end_of_expected_results(monkeypatch)
    engine = proving_engine(llama)
    begun, begin = [], Prover.begin
    monkeypatch.setattr(Prover, "begin", lambda self, *of: begun.append(begin(self, *of)) or begun[-1])
    ran = run(engine, ask("base", max_tokens=60), steps=1)
    order(engine, A, plain)
    while not begun:
        step_beside_load(engine, ran)
    engine.drop_adapter(A)
    run(engine, ran=ran)
    assert ended.wait(5)
    assert proofs(ran) == []
    assert len(ran.of(ProofEnded)) == 1


def test_a_proof_that_cannot_begin_leaves_no_thread(llama: Path, plain: Path, monkeypatch) -> None:
    """Its recorded answers are to be read, and there are no more threads available."""
    ended = end_of_expected_results(monkeypatch)

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(adapter_proof, "AnswersReading", refuse)
    begun: list[ExpectedResults] = []
    monkeypatch.setattr(adapter_proof, "ExpectedResults", lambda *of: begun.append(ExpectedResults(*of)) or begun[-1])
    engine = proving_engine(llama)
    engine.load_adapter(A, certify(plain, engine.info).layout, proof=ProofOrder(next(NUMBERS), recorded=True))
    (answer,) = run(engine).of(ProofEnded)
    assert isinstance(answer.found, MotetError)
    assert not begun or ended.wait(5)


def computing_threads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the threads that have computed what is expected of changed linears"""
    threads, changed = [], vars(ExpectedResults)["_changed"]

    def noted(self: ExpectedResults, *of):
        threads.append(threading.current_thread().name)
        return changed(self, *of)

    monkeypatch.setattr(ExpectedResults, "_changed", noted)
    return threads


def test_no_sequence_waits_for_what_was_read_while_none_ran(llama: Path, plain: Path, monkeypatch) -> None:
    monkeypatch.setattr(expected_results, "MAX_AT_ONCE", 1)
    threads, advance, read = computing_threads(monkeypatch), AdapterProof.advance, vars(ExpectedResults)["_matrices"]
    several = threading.Event()

    def noted(self: ExpectedResults, some, *of):
        if some[0].module.startswith("model.layers.1."):
            several.set()
        return read(self, some, *of)

    def begins_alone(self: AdapterProof, placed, *, wait_seconds: float) -> bool:
        if self.parts < 3:  # forward passes
            return advance(self, placed, wait_seconds=wait_seconds)
        assert several.wait(10)
        return advance(self, placed, wait_seconds=0.0)

    monkeypatch.setattr(ExpectedResults, "_matrices", noted)
    monkeypatch.setattr(AdapterProof, "advance", begins_alone)
    assert isinstance(outcome(proving_engine(llama), plain), Proof)
    assert set(threads) == {"adapter-load"}


def test_no_request_waits_for_large_linears(llama: Path, plain: Path, monkeypatch) -> None:
    """It may come at any time."""
    threads = computing_threads(monkeypatch)
    monkeypatch.setattr(expected_results, "MAX_BYTES_AT_ONCE", 1)
    assert isinstance(outcome(proving_engine(llama), plain), Proof)
    assert set(threads) == {"adapter-load"}


def test_a_disk_that_does_not_answer_holds_up_the_proof_and_no_iteration(llama: Path, plain: Path, monkeypatch) -> None:
    answers, read = threading.Event(), vars(ExpectedResults)["_matrices"]

    def slow(self: ExpectedResults, *of):
        assert answers.wait(60)
        return read(self, *of)

    monkeypatch.setattr(ExpectedResults, "_matrices", slow)
    engine = proving_engine(llama)
    order(engine, A, plain)
    ran = run(engine, ask("tuned", adapter=A), ask("base"), steps=1)
    while not ran.last.get("base") or ran.last["base"].finish is None:
        ran.take(engine)
    assert "tuned" not in ran.tokens
    answers.set()
    run(engine, ran=ran)
    assert len(ran.tokens["tuned"]) == 40


def test_a_disk_that_does_not_answer_the_next_load_holds_up_no_proof(
    llama: Path, plain: Path, of_some: Path, monkeypatch
) -> None:
    answers, read = threading.Event(), vars(HostLoad)["_read_all"]

    def slow(self: HostLoad) -> None:
        if vars(self)["_adapter"].path.startswith(str(of_some)):
            assert answers.wait(120)
        read(self)

    monkeypatch.setattr(HostLoad, "_read_all", slow)
    engine = proving_engine(llama)
    order(engine, A, plain)
    ran = EngineRun()
    while not ran.of(AdapterLoaded):
        ran.take(engine)
    monkeypatch.setattr(adapter_uploads, "HURRY_SECONDS", 60.0)
    order(engine, B, of_some)
    began = time.monotonic()
    while not ran.of(ProofEnded):
        ran.take(engine)
    assert time.monotonic() - began < 50
    answers.set()
    run(engine, ran=ran)
    assert [one.digest for one in ran.of(ProofEnded)] == [A, B]


def test_a_file_that_changed_after_its_load_fails_the_proof_as_a_load(
    llama: Path, plain: Path, tmp_path: Path, monkeypatch
) -> None:
    folder = shutil.copytree(plain, tmp_path / "changed")
    begin = Prover.begin

    def changes(self: Prover, *of) -> AdapterProof:
        (folder / "adapter_model.safetensors").unlink()
        return begin(self, *of)

    monkeypatch.setattr(Prover, "begin", changes)
    (ended,) = prove(proving_engine(llama), A, folder).of(ProofEnded)
    assert ended.found.code == "adapter_fetch_failed"


def test_a_file_that_changes_during_the_proof_is_not_the_engines_fault(
    llama: Path, plain: Path, tmp_path: Path, monkeypatch
) -> None:
    folder, read = shutil.copytree(plain, tmp_path / "changed"), vars(ExpectedResults)["_matrices"]

    def changes(self: ExpectedResults, *of):
        (folder / "adapter_model.safetensors").touch()
        a, b = read(self, *of)
        return a, 3 * b

    monkeypatch.setattr(ExpectedResults, "_matrices", changes)
    (ended,) = prove(proving_engine(llama), A, folder).of(ProofEnded)
    assert ended.found.code == "adapter_fetch_failed"


def test_a_proof_for_which_a_disk_never_answers_is_given_up_and_says_so(llama: Path, plain: Path, monkeypatch) -> None:
    answers = threading.Event()
    monkeypatch.setattr(ExpectedResults, "_all", lambda _: iter([answers.wait(60)][:0]))
    monkeypatch.setattr("motet_runner.execute.adapters.adapter_uploads.MAX_SILENT_SECONDS", 0.05)
    engine = proving_engine(llama)
    order(engine, A, plain)
    ran = run(engine, ask("tuned", adapter=A), ask("base"))
    answers.set()
    (ended,) = ran.of(ProofEnded)
    assert ended.found.code == "adapter_fetch_failed"
    assert ran.last["tuned"].error is ended.found
    assert len(ran.tokens["base"]) == 40


def test_a_device_that_computes_by_itself_proves_as_well(llama: Path, plain: Path, monkeypatch) -> None:
    engine = make_device_engine(llama, prove_adapters=True)
    assert isinstance(outcome(engine, plain), Proof)
    refused(engine, plain, PLAIN["no scale"], monkeypatch)


def with_damaged_slab(engine: Engine, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AdapterLayout:
    """It is written as it is wrong, so its checksums are right."""
    layout = certify(shutil.copytree(plain, tmp_path / "adapter"), engine.info).layout
    layout = layout.with_slab("digest", engine.info.run_layout)
    slab = layout.file.with_name(layout.slab)
    with monkeypatch.context() as planted:
        PLAIN["no scale"](planted)
        engine.write_slab(1, layout)
        while not (written := engine.slabs_written()):
            assert engine.idle() is not None
    assert written[0].bytes == slab.stat().st_size
    return layout


def test_a_damaged_slab_refuses_no_adapter_and_is_removed(
    llama: Path, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = proving_engine(llama)
    layout = with_damaged_slab(engine, plain, tmp_path, monkeypatch)
    engine.load_adapter(A, layout, proof=ProofOrder(1))
    ran = run(engine, ask("a", adapter=A))
    assert len(ran.tokens["a"]) == 40
    assert len(proofs(ran)) == len(ran.of(ProofEnded)) == 1
    assert [one.lacks_slab for one in ran.of(AdapterLoaded)] == [False, True]
    wait_until(lambda: not layout.file.with_name(layout.slab).exists())


def test_an_adapter_that_is_wrong_without_its_slab_too_is_refused(
    llama: Path, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = proving_engine(llama)
    layout = with_damaged_slab(engine, plain, tmp_path, monkeypatch)
    PLAIN["no scale"](monkeypatch)
    engine.load_adapter(A, layout, proof=ProofOrder(1))
    ran = run(engine)
    (ended,) = ran.of(ProofEnded)
    assert isinstance(ended.found, AdapterUnproved)
    assert len(ran.of(AdapterLoaded)) == 2


def test_an_adapter_is_proved_from_its_slab(llama: Path, plain: Path, tmp_path: Path) -> None:
    engine = proving_engine(llama)
    layout = certify(shutil.copytree(plain, tmp_path / "adapter"), engine.info).layout
    layout = layout.with_slab("digest", engine.info.run_layout)
    engine.write_slab(1, layout)
    while not engine.slabs_written():
        assert engine.idle() is not None
    engine.load_adapter(A, layout, proof=ProofOrder(1))
    ran = run(engine)
    assert len(proofs(ran)) == 1
    assert not ran.of(AdapterLoaded)[0].lacks_slab


def wait_until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_an_engine_proves_only_if_it_is_told_to(llama: Path, plain: Path) -> None:
    engine = make_engine(llama)
    assert not engine.info.proves
    ran = prove(engine, A, plain)
    assert len(ran.of(AdapterLoaded)) == 1
    assert len(ran.of(ProofEnded)) == 1, "each order is answered"
    assert not proofs(ran)
    assert len(run(engine, ask("a", adapter=A)).tokens["a"]) == 40
    assert Settings().engine_config(llama).prove_adapters is None
    assert make_engine(llama, prove_adapters=None).info.proves is (engine.info.device == "cpu")
    assert Settings(prove_adapters=False).engine_config(llama).prove_adapters is False
    assert Settings(prove_adapters=True).engine_config(llama).prove_adapters is True


def test_numbers_that_are_none_are_wrong(llama: Path, plain: Path, monkeypatch) -> None:
    engine = proving_engine(llama)
    compare = vars(AdapterProof)["_compare"]

    def infected(self: AdapterProof, expected, backend, batch):
        class Broken:
            def add_lora(self, y: torch.Tensor, *_: object) -> None:
                y[0, 0] = torch.nan

        return compare(self, expected, Broken(), batch)

    monkeypatch.setattr(AdapterProof, "_compare", infected)
    assert isinstance(outcome(engine, plain), AdapterUnproved)


@pytest.mark.parametrize(
    ("broken", "reason", "said"),
    [
        ("base", "ProofFailed", "the base model's logits are not numbers on this runner, without any adapter"),
        ("company", "ProofFailed", "the base model's logits are not numbers on this runner, without any adapter"),
        ("adapter", "NotNumbers", "with the adapter, logits are not numbers, and without it they are"),
    ],
)
def test_whose_fault_it_is_that_logits_are_no_numbers(llama: Path, plain: Path, monkeypatch, *, broken, reason, said):
    engine = proving_engine(llama)
    logits = Prover.logits

    def infected(self: Prover, batch: FlatBatch) -> torch.Tensor:
        company, adapter = len(batch.line.rows) > 1, batch.lora is not None
        found = logits(self, batch)
        if broken == "base" or (broken == "company" and company) or (broken == "adapter" and adapter):
            found[0, 0] = torch.nan
        return found

    monkeypatch.setattr(Prover, "logits", infected)
    found = outcome(engine, plain)
    assert isinstance(found, AdapterUnproved)
    assert (found.reason, said in found.message.lower()) == (reason, True), found.message


def test_an_engine_tells_which_machine_and_device_compute(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A proof of another one is not believed: see `kept_proofs`."""
    engine = proving_engine(llama)
    assert cpu_name() in engine.info.hardware
    assert platform.node() in engine.info.machine
    found = ProofKey.of(engine.info, Digest("base"))
    assert (found.hardware, found.machine) == (engine.info.hardware, engine.info.machine)
    for other in ({"hardware": "another"}, {"machine": "another"}):
        assert found != ProofKey.of(replace(engine.info, **other), Digest("base"))
    monkeypatch.setattr("motet_runner.machine.MACHINE_ID", Path("/nowhere/machine-id"))
    assert hardware_name("H100") == "H100"
    assert "GPU-1" in machine_identity("GPU-1")
    assert machine_identity("GPU-1") != machine_identity("GPU-2")
