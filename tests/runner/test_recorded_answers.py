"""What PEFT has answered is what the engine computes, unless the base model or the adapter's configuration is another
one."""

import builtins
import json
import shutil
import sys
import threading
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs

from motet.digest import adapter_digest
from motet.domain import Digest
from motet.errors import REFERENCE_MISMATCH, AdapterError, AdapterFetchFailed, AdapterIncompatible, SetupError
from motet_runner.adapters import answers_reading
from motet_runner.adapters.certification import certify
from motet_runner.adapters.proof import Proof, ProofOrder
from motet_runner.adapters.recorded_answers import (
    MAX_ANSWER_TOKENS,
    MAX_ANSWERS,
    MAX_PROMPT_TOKENS,
    Comparison,
    RecordedAnswers,
    read_recorded_answers,
)
from motet_runner.answer_comparison import compare_with_engine
from motet_runner.answer_recording import USUAL_PROMPTS, Recording, record
from motet_runner.engine import Engine
from motet_runner.execute.proof import answers_proof
from motet_runner.interface import EngineConfig, Finish, ProofEnded
from motet_runner.offline import OfflineEngine
from testbed.compiled_kernels import needs_a_compiler
from testbed.local_stack import BUNDLED
from tests.runner.engines import EngineRun, ask, make_device_engine, make_engine, run

pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning"), pytest.mark.filterwarnings("ignore::UserWarning")]

MODEL, PIRATE = BUNDLED / "model", BUNDLED / "adapters" / "pirate"
A = Digest("A")
PROMPTS = ("Who keeps the lighthouse of Brindle?", "Where does the ferry go?")
TOKENS = 12
NUMBERS = count(1)
NOISE = 0.03


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The adapter, with its answers in fp32"""
    folder = Path(shutil.copytree(PIRATE, tmp_path_factory.mktemp("honest") / "pirate"))
    record(Recording(folder, MODEL, PROMPTS, tokens=TOKENS))
    return folder


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the answers that `motet adapter record` writes without further words: in 16 bits, a few show too little."""
    folder = Path(shutil.copytree(PIRATE, tmp_path_factory.mktemp("usual") / "pirate"))
    record(Recording(folder, MODEL))
    return folder


@pytest.fixture(scope="module")
def noisy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The base model with other weights: each matrix has 3 % of noise."""
    folder = Path(shutil.copytree(MODEL, tmp_path_factory.mktemp("noisy") / "model"))
    torch.manual_seed(5)
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        for name, tensor in tensors.items():
            if tensor.ndim == 2:
                noise = torch.randn(tensor.shape) * tensor.float().std() * NOISE
                tensors[name] = (tensor.float() + noise).to(tensor.dtype)
        save_file(tensors, file, metadata={"format": "pt"})
    return folder


@pytest.fixture
def adapter(honest: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(honest, tmp_path / "adapter"))


def configured(adapter: Path, **fields: object) -> None:
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def recorded_in(folder: Path) -> RecordedAnswers:
    found = read_recorded_answers(folder)
    assert found is not None
    return found


def changed(folder: Path, change: Callable[[dict], None]) -> None:
    """The file, written by hand"""
    path = folder / "motet_proof.json"
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def compared_offline(adapter: Path, model: Path = MODEL, dtype: str = "float32") -> Comparison:
    engine = OfflineEngine(model, dtype=dtype, device="cpu", kv_cache_mib=16, kernels="torch")
    engine.add_certified("a", certify_for(adapter, model, dtype).layout)
    return compare_with_engine(engine, "a", recorded_in(adapter))


def certify_for(adapter: Path, model: Path, dtype: str):
    from motet_runner.execute.load.base_outline import limits_of

    return certify(adapter, limits_of(EngineConfig(model=model, dtype=dtype, device="cpu")))


# ------------------------------------------------------------------------------------------------------------ recording


def test_recorded_are_greedy_answers_of_peft(honest: Path) -> None:
    found = recorded_in(honest)
    assert [one.prompt.count(prompt) for one, prompt in zip(found.answers, PROMPTS, strict=True)] == [1, 1]
    assert not found.special_tokens, "the chat template has written them"
    assert (found.dtype, found.quantization) == ("float32", "")
    for one in found.answers:
        assert 1 <= len(one.answer_ids) <= TOKENS
        assert max(one.logprobs) <= 0
    from transformers import AutoTokenizer

    said = AutoTokenizer.from_pretrained(MODEL).decode(found.answers[0].answer_ids)
    assert "Arr" in said, said


def test_the_record_is_part_of_the_digest(adapter: Path) -> None:
    before = adapter_digest(adapter)
    assert before != adapter_digest(PIRATE)
    changed(adapter, lambda document: document["answers"].pop())
    assert adapter_digest(adapter) != before


@pytest.mark.parametrize("missing", ["peft", "transformers"])
def test_without_the_libraries_one_line_says_how_to_install_them(
    missing: str, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (adapter / "motet_proof.json").unlink()
    imported = builtins.__import__

    def import_(name: str, *more, **others):
        if name.partition(".")[0] == missing:
            raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)
        return imported(name, *more, **others)

    monkeypatch.delitem(sys.modules, missing)
    monkeypatch.setattr(builtins, "__import__", import_)
    with pytest.raises(SetupError, match=rf"without {missing} nothing .* pip install peft") as refused:
        record(Recording(adapter, MODEL, PROMPTS))
    monkeypatch.undo()
    assert "\n" not in refused.value.message
    assert not (adapter / "motet_proof.json").exists()


@pytest.mark.parametrize(
    ("prompts", "says"),
    [
        ((), "there are 0 prompts"),
        ((" ", "\t"), "there are 0 prompts"),
        (("a",) * (MAX_ANSWERS + 1), f"at most {MAX_ANSWERS}"),
        (("Who?", "why " * MAX_PROMPT_TOKENS), f"prompt 2 has .* at most {MAX_PROMPT_TOKENS} tokens"),
    ],
)
def test_too_many_or_too_long_prompts_are_refused(adapter: Path, prompts: tuple[str, ...], says: str) -> None:
    before = adapter_digest(adapter)
    with pytest.raises(SetupError, match=says):
        record(Recording(adapter, MODEL, prompts))
    assert adapter_digest(adapter) == before


def test_a_base_model_without_a_chat_template_gets_the_text_and_special_tokens(adapter: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(MODEL, tmp_path / "model"))
    (model / "chat_template.jinja").unlink()
    config = json.loads((model / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    found = record(Recording(adapter, model, ("The lighthouse",), tokens=MAX_ANSWER_TOKENS + 1))
    assert found.special_tokens
    assert found.answers[0].prompt == "The lighthouse"
    assert len(found.answers[0].answer_ids) <= MAX_ANSWER_TOKENS
    assert compared_offline(adapter, model).agrees


# ----------------------------------------------------------------------------------------------- compared, not serving


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_honest_one_agrees(usual: Path, dtype: str) -> None:
    compared = compared_offline(usual, dtype=dtype)
    assert compared.agrees, compared
    assert compared.answers == len(USUAL_PROMPTS)


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.soak), "bfloat16"])
def test_a_base_model_with_noise_is_found(usual: Path, noisy: Path, dtype: str) -> None:
    compared = compared_offline(usual, noisy, dtype)
    assert not compared.agrees, compared


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.soak)])
def test_an_option_that_is_lost_is_found(adapter: Path, dtype: str) -> None:
    """No tensor shows it."""
    configured(adapter, use_rslora=True)
    record(Recording(adapter, MODEL, PROMPTS, tokens=TOKENS))
    assert compared_offline(adapter, dtype=dtype).agrees
    configured(adapter, use_rslora=False)
    compared = compared_offline(adapter, dtype=dtype)
    assert not compared.agrees, compared


def test_another_tokenizer_is_named(adapter: Path) -> None:
    changed(adapter, lambda document: document["answers"][1]["prompt_ids"].pop(0))
    with pytest.raises(AdapterIncompatible, match=r"another tokenizer, as the tokens of prompt 2 show") as refused:
        compared_offline(adapter)
    assert refused.value.reason == REFERENCE_MISMATCH


def test_tokens_that_the_base_model_does_not_have_are_refused(adapter: Path) -> None:
    def beyond(document: dict) -> None:
        document["answers"][0]["answer_ids"][0] = 1_000_000

    changed(adapter, beyond)
    with pytest.raises(AdapterIncompatible, match="they have the token 1000000"):
        compared_offline(adapter)


# ---------------------------------------------------------------------------------------------------------- the runner


@pytest.fixture(scope="module", params=["torch float32", "torch bfloat16", "exact float32", "cpp float32"])
def engine(request: pytest.FixtureRequest) -> Engine:
    kernels, _, dtype = request.param.partition(" ")
    if kernels == "cpp":
        needs_a_compiler()
    return make_engine(MODEL, kernels=kernels, dtype=dtype, kv_cache_mib=16)


@pytest.fixture(scope="module")
def torch_engine() -> Engine:
    return make_engine(MODEL, kernels="torch", dtype="float32", kv_cache_mib=16)


def order(engine: Engine, folder: Path, **parts: bool) -> None:
    proof = ProofOrder(next(NUMBERS), **({"linears": False, "recorded": True} | parts))
    engine.load_adapter(A, certify(folder, engine.info).layout, proof=proof)


def outcome(engine: Engine, folder: Path, **parts: bool) -> Proof | AdapterError:
    order(engine, folder, **parts)
    return ended(engine, run(engine))


def ended(engine: Engine, ran: EngineRun) -> Proof | AdapterError:
    (answer,) = ran.of(ProofEnded)
    engine.drop_adapter(A)
    run(engine)
    return answer.found


def test_an_engine_that_proves_nothing_else_compares(engine: Engine, honest: Path) -> None:
    assert not engine.info.proves
    found = outcome(engine, honest)
    assert isinstance(found, Proof), found
    assert found.recorded is not None
    assert found.recorded.agrees, found.recorded
    assert (found.linears, found.warnings) == (False, [])


def test_what_is_wrong_is_measured_where_it_serves(engine: Engine, adapter: Path) -> None:
    configured(adapter, lora_alpha=32)
    found = outcome(engine, adapter)
    assert isinstance(found, Proof), found
    assert found.recorded is not None
    assert found.recorded.refusal() is not None
    assert found.warnings == [found.recorded.difference]


def test_a_base_model_with_noise_is_found_where_it_serves(usual: Path, noisy: Path) -> None:
    found = outcome(make_engine(noisy, kernels="torch", dtype="bfloat16", kv_cache_mib=16), usual)
    assert isinstance(found, Proof), found
    assert found.recorded is not None
    assert not found.recorded.agrees, found.recorded


def test_the_engine_computes_what_the_command_line_does(torch_engine: Engine, adapter: Path) -> None:
    configured(adapter, lora_alpha=17)
    found, offline = outcome(torch_engine, adapter), compared_offline(adapter)
    assert isinstance(found, Proof), found
    assert found.recorded is not None
    assert offline.largest > 10 * offline.allowed
    assert found.recorded.largest == pytest.approx(offline.largest, abs=1e-4)
    assert found.recorded._replace(largest=offline.largest) == offline


def test_linears_and_answers_are_one_proof(honest: Path) -> None:
    engine = make_engine(MODEL, kernels="torch", dtype="float32", kv_cache_mib=16, prove_adapters=True)
    found = outcome(engine, honest, linears=True)
    assert isinstance(found, Proof), found
    assert found.linears
    assert found.moved > 0
    assert found.recorded is not None
    assert found.recorded.agrees
    alone = outcome(engine, honest, linears=True, recorded=False)
    assert isinstance(alone, Proof)
    assert alone.recorded is None


def test_an_engine_that_proves_no_linears_refuses_such_an_order(torch_engine: Engine, honest: Path) -> None:
    found = outcome(torch_engine, honest, linears=True)
    assert isinstance(found, AdapterError)
    assert "proves no adapters" in found.message


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda document: document["answers"][0]["prompt_ids"].pop(0), "another tokenizer"),
        (
            lambda document: document["answers"][0]["answer_ids"].__setitem__(0, 1_000_000),
            "has the token|have the token",
        ),
    ],
)
def test_what_is_of_another_base_model_ends_the_proof(
    torch_engine: Engine, adapter: Path, change: Callable[[dict], None], says: str
) -> None:
    changed(adapter, change)
    found = outcome(torch_engine, adapter)
    assert isinstance(found, AdapterIncompatible), found
    assert found.reason == REFERENCE_MISMATCH
    with pytest.raises(AdapterIncompatible, match=says):
        raise found


def test_a_file_that_goes_meanwhile_is_fetched_again(torch_engine: Engine, adapter: Path) -> None:
    order(torch_engine, adapter)
    (adapter / "motet_proof.json").unlink()
    found = ended(torch_engine, run(torch_engine))
    assert isinstance(found, AdapterFetchFailed), found


class Panic(BaseException):
    """What a tokenizer in Rust may raise"""


@pytest.mark.parametrize("error", [KeyError("vocab"), Panic()])
def test_a_tokenizer_that_fails_fails_only_the_comparison(
    honest: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(answers_reading, "tokenizer_of", lambda _: broken)
        engine = make_engine(MODEL, kernels="torch", dtype="float32", kv_cache_mib=16)
        found = outcome(engine, honest)
    assert isinstance(found, AdapterError), found
    assert type(error).__name__ in found.message


def test_whatever_a_comparison_raises_ends_it_alone(honest: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model without rotary embeddings has no row for a position that is too far."""

    def beyond(*_: object) -> None:
        raise IndexError("index out of range in self")

    engine = make_engine(MODEL, kernels="torch", dtype="float32", kv_cache_mib=16)
    with monkeypatch.context() as patched:
        patched.setattr(answers_proof.AnswersProof, "result", beyond)
        found = outcome(engine, honest)
    assert isinstance(found, AdapterError), found
    assert run(engine, ask("a", max_tokens=3)).last["a"].finish is Finish.LENGTH


def test_requests_of_others_go_on_beside_a_comparison(torch_engine: Engine, honest: Path) -> None:
    """One pass with each plan"""
    order(torch_engine, honest)
    ran = run(torch_engine, ask("a", max_tokens=60))
    assert ran.last["a"].finish is Finish.LENGTH
    found = ended(torch_engine, ran)
    assert isinstance(found, Proof), found
    assert found.recorded is not None
    assert found.recorded.agrees


def test_the_worker_of_a_gpu_compares_too(honest: Path) -> None:
    engine = make_device_engine(MODEL, kernels="torch", dtype="float32", kv_cache_mib=16)
    found = outcome(engine, honest)
    assert isinstance(found, Proof), found
    assert found.recorded is not None
    assert found.recorded.agrees


def test_no_thread_stays(torch_engine: Engine, honest: Path) -> None:
    outcome(torch_engine, honest)
    assert not [one for one in threading.enumerate() if one.name == "recorded-answers" and one.is_alive()]


def test_a_tokenizer_that_transformers_cannot_read_blames_no_adapter(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    tokenizer = answers_reading.Tokenizer(tmp_path)
    recorded = RecordedAnswers.model_construct(answers=[], special_tokens=False)
    with capture_logs() as logs:
        tokenizer.check(recorded)
        tokenizer.check(recorded)
    assert [line["event"] for line in logs] == ["tokenizer_not_read"], "it is read once"
