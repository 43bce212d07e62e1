"""The engine as a library: what it answers is what transformers and PEFT answer, and nothing gets lost."""

import shutil
from collections.abc import Iterator
from itertools import count, islice, pairwise
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from structlog.testing import capture_logs
from transformers import AutoModelForCausalLM, AutoTokenizer

from motet.errors import AdapterIncompatible, ContextLengthExceeded, InvalidRequest
from motet_runner.interface import Finish
from motet_runner.offline import Answer, OfflineEngine, Request, Sampling
from testbed.compiled_kernels import CACHE
from testbed.tree import ROOT
from tests.docs.blocks import Python, blocks

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

BUNDLED = ROOT / "cli" / "motet_cli" / "bundled"
MODEL = BUNDLED / "model"
ADAPTERS = {name: BUNDLED / "adapters" / name for name in ("pirate", "json", "shouting")}
QUESTIONS = ("Who keeps the lighthouse of Brindle?", "Where does the ferry go?", "Who bakes the bread?")
SHORT = Sampling(max_tokens=24)


def offline(model: Path = MODEL, *, adapters: dict[str, Path] | None = None, **options: object) -> OfflineEngine:
    usual = {"kernels": "torch", "kernel_cache": CACHE, "dtype": "float32", "kv_cache_mib": 16}
    return OfflineEngine(model, adapters=ADAPTERS if adapters is None else adapters, **(usual | options))


@pytest.fixture(scope="module")
def engine() -> OfflineEngine:
    return offline()


def reference(adapter: str, prompt: str, tokens: int) -> str:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    if adapter:
        model = PeftModel.from_pretrained(model, str(ADAPTERS[adapter]))
    given = tokenizer(prompt, return_tensors="pt")
    answered = model.generate(given["input_ids"], max_new_tokens=tokens, do_sample=False)
    return str(tokenizer.decode(answered[0, given["input_ids"].shape[1] :], skip_special_tokens=True))


def texts(answers: list[Answer]) -> list[str]:
    assert [answer.error for answer in answers] == [None] * len(answers)
    return [answer.text for answer in answers]


def test_each_prompt_gets_what_transformers_and_peft_answer_with_its_adapter(engine: OfflineEngine) -> None:
    names = ["", *ADAPTERS]
    prompts = [QUESTIONS[index % 3] for index in range(len(names))]
    ours = texts(engine.generate(prompts, adapter=names, max_tokens=24))
    assert ours == [reference(name, prompt, 24) for name, prompt in zip(names, prompts, strict=True)]
    assert len(set(ours)) == len(names)


def test_messages_become_a_prompt_by_the_models_own_template(engine: OfflineEngine) -> None:
    messages = [{"role": "user", "content": QUESTIONS[0]}]
    written = engine.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    by_hand = engine.tokenizer(written, add_special_tokens=False)["input_ids"]
    first, second = engine.generate([messages, by_hand], adapter="pirate", max_tokens=24)
    assert first.text == second.text != ""
    assert first.prompt_tokens == len(by_hand)


def test_messages_for_an_adapter_with_a_template_become_a_prompt_by_it(tmp_path: Path) -> None:
    engine = offline()
    shutil.copytree(ADAPTERS["pirate"], own := tmp_path / "own")
    (own / "chat_template.jinja").write_text("<|user|>{{ messages[0].content }}!{{ eos_token }}<|assistant|>")
    engine.add_adapter("own", own)
    messages = [{"role": "user", "content": QUESTIONS[0]}]
    by_hand = f"<|user|>{QUESTIONS[0]}!<|end|><|assistant|>"
    first, second = engine.generate([messages, by_hand], adapter="own", max_tokens=8)
    assert first.text == second.text != ""
    assert first.prompt_tokens == second.prompt_tokens


def test_more_than_fits_into_memory_waits_and_keeps_its_order(engine: OfflineEngine) -> None:
    """Also with more adapters than may be on the device together."""
    small = offline(kv_cache_mib=1, host_kv_mib=1, max_resident_adapters=1, max_concurrent_sequences=6)
    prompts = [f"{QUESTIONS[index % 3]} {index}" for index in range(24)]
    names = [("", *ADAPTERS)[index % 4] for index in range(24)]
    assert sum(len(prompt) for prompt in prompts) > small.info.pages  # they cannot all be there
    crowded = small.generate(prompts, adapter=names, max_tokens=12)
    alone = [
        engine.generate([prompt], adapter=name, max_tokens=12)[0] for prompt, name in zip(prompts, names, strict=True)
    ]
    assert texts(crowded) == texts(alone)
    assert [answer.number for answer in crowded] == list(range(24))


def test_requests_are_taken_when_there_is_room_and_forgotten_when_nobody_wants_answers() -> None:
    small, taken = offline(max_concurrent_sequences=4), count()

    def endless() -> Iterator[Request]:
        while True:
            yield Request(prompt=f"{QUESTIONS[0]} {next(taken)}", sampling=SHORT)

    answers = small.run(endless())
    assert len(list(islice(answers, 10))) == 10
    assert next(taken) <= 10 + 4 + 1
    answers.close()
    assert small.engine.report().sequences == []
    assert small.engine.report().pages_promised == 0


def test_choices_of_one_request_differ_and_a_seed_repeats_them(engine: OfflineEngine) -> None:
    hot = Sampling(max_tokens=16, temperature=1.5, ignore_eos=True)

    def drawn(seed: int) -> list[str]:
        answers = engine.run([Request(prompt=QUESTIONS[0], sampling=hot, seed=seed, choices=3)])
        return texts(sorted(answers, key=lambda answer: answer.choice))

    assert len(set(drawn(1))) == 3
    assert drawn(1) == drawn(1) != drawn(2)


def test_one_bad_request_fails_alone(engine: OfflineEngine) -> None:
    requests = [
        Request(prompt=QUESTIONS[0], sampling=SHORT),
        Request(prompt=[], sampling=SHORT),
        Request(prompt=QUESTIONS[0], adapter="nobody", sampling=SHORT),
        Request(prompt=QUESTIONS[0], sampling=Sampling(max_tokens=10**6)),
        Request(prompt=QUESTIONS[0], sampling=Sampling(max_tokens=4, temperature=float("nan"))),
        Request(prompt=QUESTIONS[1], adapter="pirate", sampling=SHORT),
    ]
    with capture_logs() as logs:
        answers = sorted(engine.run(requests), key=lambda answer: answer.number)
    assert [type(answer.error) for answer in answers] == [
        type(None), InvalidRequest, InvalidRequest, ContextLengthExceeded, InvalidRequest, type(None),
    ]  # fmt: skip
    assert [answer.finish for answer in answers[1:5]] == [Finish.FAILED] * 4
    assert "Known adapters: json, pirate, shouting" in str(answers[2].error)
    assert answers[0].text
    assert answers[5].text
    (said,) = [entry for entry in logs if entry["event"] == "answers_failed"]
    assert (said["failed"], said["answers"]) == (4, 6)


def test_answers_of_several_runs_may_be_taken_in_turns() -> None:
    small = offline(max_concurrent_sequences=3)
    asked = [[Request(prompt=one, sampling=SHORT) for one in (QUESTIONS, QUESTIONS[::-1])[run]] for run in (0, 1)]
    alone = [texts(sorted(small.run(requests), key=lambda answer: answer.number)) for requests in asked]
    first, second = (small.run(requests) for requests in asked)
    mixed = [[next(first)], [next(second)]]
    assert texts(small.generate([QUESTIONS[0]], max_tokens=24)) == [alone[0][0]]
    mixed[0] += first
    mixed[1] += second
    assert [texts(sorted(answers, key=lambda answer: answer.number)) for answers in mixed] == alone
    assert small.engine.report().sequences == []


def test_a_run_that_nobody_wants_any_more_leaves_the_others_alone() -> None:
    small = offline(max_concurrent_sequences=4)
    unwanted, wanted = (small.run([Request(prompt=one, sampling=SHORT) for one in QUESTIONS]) for _ in range(2))
    answers = [next(wanted)]
    next(unwanted)
    unwanted.close()
    assert len(texts([*answers, *wanted])) == 3
    assert small.engine.report().sequences == []


def test_bad_requests_are_answered_before_more_are_taken(engine: OfflineEngine) -> None:
    taken = count()
    bad = engine.run(Request(prompt=[], sampling=SHORT) for _ in taken)
    assert next(bad).error is not None
    assert next(taken) <= 3
    bad.close()


def test_a_prompt_that_makes_no_tokens_fails_alone(engine: OfflineEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        engine.tokenizer,
        "chat_template",
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
        "{{ m.content + m.name }}{% endfor %}",
    )
    prompts = [
        [{"role": "tool", "content": "x", "name": "y"}],
        [{"role": "user", "content": "x"}],
        ["not", "a", "token"],
        [{"role": "user", "content": "Who keeps the lighthouse ", "name": "of Brindle?"}],
        QUESTIONS[0],
    ]
    rejected, undefined, words, *good = engine.generate(prompts, max_tokens=8)  # type: ignore[arg-type]
    assert "no tools here" in str(rejected.error)
    assert "name" in str(undefined.error)
    assert isinstance(words.error, InvalidRequest)
    assert all(texts(good))


def test_a_call_that_names_an_unknown_adapter_computes_nothing(engine: OfflineEngine) -> None:
    with pytest.raises(InvalidRequest, match="There is no adapter 'nobody'"):
        engine.generate(QUESTIONS, adapter=["", "nobody", ""])
    with pytest.raises(InvalidRequest, match="3 prompts and 2 adapters"):
        engine.generate(QUESTIONS, adapter=["", "pirate"])
    assert engine.engine.report().sequences == []


def test_an_adapter_that_cannot_be_used_says_why(engine: OfflineEngine, tmp_path: Path) -> None:
    with pytest.raises(AdapterIncompatible, match="adapter_config"):
        engine.add_adapter("empty", tmp_path)
    with pytest.raises(InvalidRequest, match="'pirate'"):
        engine.add_adapter("pirate", ADAPTERS["pirate"])
    assert engine.adapters == tuple(ADAPTERS)


def test_a_model_without_a_tokenizer_takes_tokens(llama: Path) -> None:
    engine = offline(llama, adapters={}, kv_cache_mib=4)
    (answer,) = engine.generate([[5, 6, 7]], max_tokens=4, ignore_eos=True)
    assert (len(answer.tokens), answer.text, answer.finish) == (4, "", Finish.LENGTH)
    (refused,) = engine.generate(["five"], max_tokens=4)
    assert "Give prompts as tokens" in str(refused.error)
    (refused,) = engine.generate([[5]], max_tokens="much")
    assert str(refused.error) == "max_tokens must be an integer from 1, not 'much'."


def test_without_a_compiler_torch_serves(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    engine = offline(adapters={}, kernels="auto", compiler="no-such-compiler", kernel_cache=tmp_path)
    assert engine.generate(QUESTIONS[:1], max_tokens=4)[0].text
    captured = capsys.readouterr()
    assert "no-such-compiler" in captured.err
    assert captured.out == ""


@pytest.mark.parametrize("kernels", ["torch", "cpp"])
def test_a_program_may_have_any_default_type_of_numbers(kernels: str) -> None:
    """transformers also sets torch's default for a moment, while it makes a model on another thread."""
    engine = offline(kernels=kernels)
    adjusted = Sampling(
        max_tokens=16, temperature=0.9, top_p=0.9, min_p=0.01, repetition_penalty=1.2, logit_bias={9: 1}
    )
    requests = [Request(prompt=f"{QUESTIONS[0]} {n}", adapter="pirate", sampling=adjusted, seed=n) for n in range(4)]
    usual = {answer.number: answer.tokens for answer in engine.run(requests)}
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert {answer.number: answer.tokens for answer in engine.run(requests)} == usual
        again = offline(kernels=kernels)
        assert {answer.number: answer.tokens for answer in again.run(requests)} == usual
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_bar_shows_the_progress(engine: OfflineEngine, capsys: pytest.CaptureFixture[str]) -> None:
    engine.generate(QUESTIONS, max_tokens=4, progress=True)
    assert "3/3" in capsys.readouterr().err
    engine.generate(QUESTIONS, max_tokens=4)  # stderr is no terminal here
    assert capsys.readouterr().err == ""


def test_the_guide_does_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    page, python = blocks(ROOT / "docs" / "guides" / "offline.md"), Python()
    for block, following in pairwise([*page, None]):
        assert block is not None
        if block.kind == "python":
            python.run(block, shown=following.text if following is not None and following.kind == "text" else "")
