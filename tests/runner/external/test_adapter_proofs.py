"""What log probabilities prove, with a `FakeDriven` that gives them."""

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from motet.domain import Digest
from motet.errors import AdapterError, AdapterUnproved
from motet_runner.adapters.layout import AdapterLayout
from motet_runner.adapters.proof import Proof, ProofOrder
from motet_runner.adapters.recorded_answers import RecordedAnswer, RecordedAnswers
from motet_runner.external.vllm.driven import Ask, Produced
from motet_runner.external.vllm.engine import Engine
from motet_runner.interface import ProofEnded
from tests.contract.engines import Size, on_vllm
from tests.runner.engines import ask, run
from tests.runner.external.fake_driven import EOS, FakeDriven, facts

A = Digest("A")
TEXT = [5, 6, 7, 8]
ANSWER = [9, 10, 11]

LogprobOf = Callable[[Ask, int], float]


@dataclass
class Proving(FakeDriven):
    logprob_of: LogprobOf = lambda ask, place: -1.0 - ask.adapter - place / 100

    def prompt_logprobs_of(self, ask: Ask) -> tuple[float, ...]:
        return tuple(self.logprob_of(ask, place) for place in range(1, len(ask.tokens)))

    def step(self) -> list[Produced]:
        proofs = [name for name in self.running if name.startswith("proof")]
        assert not proofs or len(proofs) == len(self.running), "a proof has company of requests"
        return super().step()


def engine_with(driven: FakeDriven, **more: int) -> Engine:
    return on_vllm(driven, Size(**({"pages": 32} | more)), EOS)


def proof_of(layout: AdapterLayout, driven: FakeDriven, **parts: bool) -> Proof | AdapterError:
    engine = engine_with(driven)
    engine.load_adapter(A, layout, proof=ProofOrder(1, **parts))
    (ended,) = run(engine).of(ProofEnded)
    return ended.found


def recorded(logprobs: list[float]) -> RecordedAnswers:
    one = RecordedAnswer(prompt="?", prompt_ids=TEXT, answer_ids=ANSWER, logprobs=logprobs)
    return RecordedAnswers(
        version=1, recorded_by="", dtype="float32", quantization="", special_tokens=False, answers=[one]
    )


@pytest.fixture
def with_record(layout: AdapterLayout) -> Callable[[list[float]], AdapterLayout]:
    def written(logprobs: list[float]) -> AdapterLayout:
        (Path(layout.file).parent / "motet_proof.json").write_bytes(recorded(logprobs).encode())
        return layout

    return written


def test_an_adapter_that_moves_log_probabilities_is_proved(layout: AdapterLayout) -> None:
    found = proof_of(layout, Proving())
    assert isinstance(found, Proof), found
    assert (found.kernels, found.moved, found.composition, found.recorded) == ("vllm 0.32.0", 1.0, 0.0, None)


@pytest.mark.parametrize(
    ("logprob_of", "reason"),
    [
        (lambda ask, place: -1.0, "NoEffect"),
        (lambda ask, place: math.nan if ask.adapter else -1.0, "NotNumbers"),
        (lambda ask, place: -math.inf if ask.adapter and place == 3 else -1.0, "NotNumbers"),
        (lambda ask, place: math.nan, "ProofFailed"),
    ],
)
def test_one_that_moves_nothing_or_gives_no_numbers_is_refused(
    layout: AdapterLayout, logprob_of: LogprobOf, reason: str
) -> None:
    found = proof_of(layout, Proving(logprob_of=logprob_of))
    assert isinstance(found, AdapterUnproved), found
    assert found.reason == reason


def test_one_that_moves_less_than_its_neighbours_is_warned_about(layout: AdapterLayout) -> None:
    driven = Proving()
    driven.logprob_of = lambda ask, place: -1.0 - 0.01 * ask.adapter - 0.1 * (len(driven.running) > 0)
    found = proof_of(layout, driven)
    assert isinstance(found, Proof), found
    assert found.composition == pytest.approx(0.1)
    assert "hardly changes anything" in found.warning


def test_recorded_answers_have_the_log_probabilities_of_their_own_tokens(
    with_record: Callable[[list[float]], AdapterLayout],
) -> None:
    driven = Proving()
    of_answer = [-1.0 - 1 - place / 100 for place in (4, 5, 6)]
    found = proof_of(with_record(of_answer), driven, recorded=True)
    assert isinstance(found, Proof), found
    assert found.recorded is not None
    assert (found.recorded.tokens, found.recorded.largest) == (3, pytest.approx(0.0, abs=1e-9))
    of_answer[1] -= 0.5
    found = proof_of(with_record(of_answer), Proving(), recorded=True, linears=False)
    assert isinstance(found, Proof), found
    assert found.recorded is not None
    assert (found.linears, found.recorded.largest) == (False, pytest.approx(0.5))
    assert found.recorded.refusal() is not None


def test_answers_with_a_token_that_vllm_does_not_have_are_another_models(
    with_record: Callable[[list[float]], AdapterLayout],
) -> None:
    found = proof_of(with_record([-1.0] * 3), Proving(facts=facts(vocabulary=10)), recorded=True)
    assert isinstance(found, AdapterError), found
    assert "they have the token 11" in found.message


@pytest.mark.parametrize("where", [(RecordedAnswers, "check_prompts"), (threading.Thread, "start")])
def test_what_a_tokenizer_raises_ends_its_proof_alone(
    with_record: Callable[[list[float]], AdapterLayout], monkeypatch: pytest.MonkeyPatch, where: tuple[type, str]
) -> None:
    layout, driven = with_record([-1.0] * 3), Proving()
    engine = engine_with(driven)
    engine.load_adapter(A, layout)
    run(engine)

    def deep(*_: object) -> None:
        raise RecursionError("deep")

    monkeypatch.setattr(*where, deep)
    engine.load_adapter(A, layout, proof=ProofOrder(1, recorded=True, linears=False))
    (ended,) = run(engine).of(ProofEnded)
    assert isinstance(ended.found, AdapterError), ended
    assert "deep" in ended.found.message


def test_nothing_stops_while_answers_are_being_read(
    with_record: Callable[[list[float]], AdapterLayout], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = threading.Event()
    monkeypatch.setattr(RecordedAnswers, "check_prompts", lambda *_: read.wait(20))
    layout, driven = with_record([-1.0] * 3), Proving()
    engine = engine_with(driven)
    ran = run(engine, ask("r", max_tokens=60), steps=5)
    engine.load_adapter(A, layout, proof=ProofOrder(1, recorded=True, linears=False))
    run(engine, ran=ran, steps=20)
    assert (driven.aborted, ran.of(ProofEnded)) == ([], [])
    read.set()
    run(engine, ran=ran)
    assert len(ran.of(ProofEnded)) == 1


def test_a_difference_on_what_vllm_quantizes_is_a_warning(
    with_record: Callable[[list[float]], AdapterLayout],
) -> None:
    found = proof_of(with_record([-5.0] * 3), Proving(facts=facts(quantization="fp8")), recorded=True)
    assert isinstance(found, Proof), found
    assert found.recorded is not None
    assert not found.recorded.wrong
    assert any("quantized by 'fp8'" in one for one in found.warnings)


def test_no_answer_is_as_long_as_what_vllm_takes(with_record: Callable[[list[float]], AdapterLayout]) -> None:
    """It computes one token more."""
    exact = proof_of(with_record([-1.0] * 3), Proving(facts=facts(max_model_length=8)), recorded=True)
    assert isinstance(exact, Proof), exact
    long = proof_of(with_record([-1.0] * 3), Proving(facts=facts(max_model_length=7)), recorded=True)
    assert isinstance(long, AdapterError), long
    assert "the base model takes 6" in long.message


def test_too_little_memory_for_a_proof_is_said(layout: AdapterLayout) -> None:
    found = proof_of(layout, Proving(facts=facts(blocks=4)))
    assert isinstance(found, AdapterError), found
    assert "engine.kvCacheMiB" in found.message


@pytest.mark.parametrize("prompt", [20, 170])
def test_requests_go_on_with_the_same_tokens_beside_a_proof(layout: AdapterLayout, prompt: int) -> None:
    asked = [ask(f"r{number}", prompt=prompt, max_tokens=60) for number in range(3)]
    alone = run(engine_with(FakeDriven(), pages=64), *asked)
    driven = Proving(budget=128)
    engine = engine_with(driven, pages=64)
    ran = run(engine, *asked, steps=5)
    engine.load_adapter(A, layout, proof=ProofOrder(1))
    run(engine, ran=ran)
    assert len(ran.of(ProofEnded)) == 1
    assert ran.tokens == alone.tokens
    assert not driven.running
