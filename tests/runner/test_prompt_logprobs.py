"""Log probabilities of prompts are those of transformers, however a prompt is computed."""

import dataclasses
from itertools import product
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from motet.domain import Digest, ParkMethod, RequestId
from motet.errors import InvalidRequest
from motet_runner.execute.batch import scored_rows
from motet_runner.execute.batch.flat_batch import FlatBatch
from motet_runner.interface import Finish, Logprobs
from motet_runner.offline import OfflineEngine, Request, Sampling
from tests.runner.engines import ask, load, make_engine, run
from tests.runner.random_models import VOCABULARY, save_base

X = Digest("sha256:x")
LONG = tuple(2 + (i * i * 13 + i * 7) % 500 for i in range(150))
PAGE = 16


def expected(model: torch.nn.Module, prompt: tuple[int, ...], top: int) -> list[Logprobs]:
    with torch.inference_mode():
        logs = model(torch.tensor([prompt])).logits[0].float().log_softmax(-1)
    best = logs.topk(top)
    return [
        Logprobs(
            float(logs[at - 1, token]),
            tuple(zip(best.indices[at - 1].tolist(), best.values[at - 1].tolist(), strict=True)),
        )
        for at, token in enumerate(prompt)
        if at
    ]


def agree(mine: list[Logprobs], theirs: list[Logprobs]) -> None:
    assert len(mine) == len(theirs)
    for one, other in zip(mine, theirs, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert [token for token, _ in one.top] == [token for token, _ in other.top]
        assert [value for _, value in one.top] == pytest.approx([value for _, value in other.top], abs=1e-4)


@pytest.fixture(scope="module")
def theirs(llama: Path) -> list[Logprobs]:
    return expected(AutoModelForCausalLM.from_pretrained(llama), LONG, 3)


CHUNKS, PRESETS, KERNELS = (16, 48, 512), ("paged-chunk", "ft-max", "orca"), ("torch", "cpp", "exact")
PAIRS = [
    (kernels, PRESETS[number], CHUNKS[(one + number) % 3]) for one, kernels in enumerate(KERNELS) for number in range(3)
]
"""Any two of them are together in one case, and all three in a soak."""
THREES = [one for one in product(KERNELS, PRESETS, CHUNKS) if one not in PAIRS]


@pytest.mark.parametrize(
    ("kernels", "preset", "chunk"), [*PAIRS, *(pytest.param(*one, marks=pytest.mark.soak) for one in THREES)]
)
def test_scores_are_those_of_transformers(
    llama: Path, theirs: list[Logprobs], chunk: int, preset: str, kernels: str
) -> None:
    engine = make_engine(llama, prefill_chunk_tokens=chunk, preset=preset, kernels=kernels)
    alone = run(engine, ask("plain", max_tokens=5)).tokens["plain"]
    ran = run(
        engine,
        ask("a", prompt=LONG, prompt_logprobs=3, max_tokens=5),
        ask("plain", max_tokens=5),
        ask("short", prompt=LONG[:7], prompt_logprobs=0, max_tokens=5),
        ask("one", prompt=LONG[:1], prompt_logprobs=1, max_tokens=5),
    )
    agree(ran.scores["a"], theirs)
    agree(ran.scores["short"], [Logprobs(one.logprob) for one in theirs[:6]])
    assert ran.scores.keys() == {"a", "short"}
    assert {len(tokens) for tokens in ran.tokens.values()} == {5}
    assert ran.tokens["plain"] == alone
    first = next(place for place, one in enumerate(ran.outputs) if one.request == "a" and one.tokens)
    assert not any(one.prompt_logprobs for one in ran.outputs[first:] if one.request == "a"), "before the answer"


def test_in_exact_mode_scores_are_the_same_bits_whatever_comes_beside(llama: Path, theirs: list[Logprobs]) -> None:
    def scores(chunk: int, others: int) -> list[Logprobs]:
        engine = make_engine(llama, kernels="exact", prefill_chunk_tokens=chunk)
        ran = run(engine, *(ask(f"r{i}", prompt=13 + i, max_tokens=9) for i in range(others)), steps=others)
        return run(engine, ask("a", prompt=LONG, prompt_logprobs=3, max_tokens=1), ran=ran).scores["a"]

    alone = scores(512, 0)
    agree(alone, theirs)
    assert scores(16, 3) == scores(48, 1) == alone


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox"])
def test_other_families_score_alike(family: str, tmp_path: Path) -> None:
    base = save_base(family, tmp_path / "base")
    ran = run(make_engine(base, prefill_chunk_tokens=64), ask("a", prompt=LONG, prompt_logprobs=2, max_tokens=1))
    agree(ran.scores["a"], expected(AutoModelForCausalLM.from_pretrained(base), LONG, 2))


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_an_adapter_changes_the_scores(llama: Path, adapters: list[Path], theirs: list[Logprobs]) -> None:
    from peft import PeftModel

    engine = make_engine(llama)
    load(engine, X, adapters[0])
    ran = run(engine, ask("a", prompt=LONG, adapter=X, prompt_logprobs=3), ask("b", prompt=LONG, prompt_logprobs=3))
    agree(ran.scores["b"], theirs)
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(llama), adapters[0])
    agree(ran.scores["a"], expected(adapted, LONG, 3))


def test_only_a_part_of_the_logits_is_in_memory_at_a_time(
    llama: Path, theirs: list[Logprobs], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scored_rows, "LOGITS_AT_ONCE", 20 * VOCABULARY)
    engine = make_engine(llama)
    seen: list[int] = []
    forward = type(engine.diagnostics.loaded).forward

    def watched(loaded: object, batch: FlatBatch) -> torch.Tensor:
        logits = forward(loaded, batch)
        seen.append(len(logits))
        return logits

    monkeypatch.setattr(type(engine.diagnostics.loaded), "forward", watched)
    ran = run(engine, ask("a", prompt=LONG, prompt_logprobs=3), ask("b", prompt=LONG[:30], prompt_logprobs=3))
    agree(ran.scores["a"], theirs)
    agree(ran.scores["b"], theirs[:29])
    assert max(seen) <= 20 + 2, "those that are sampled come beside"


def test_cached_pages_are_computed_again_for_their_logits(llama: Path, theirs: list[Logprobs]) -> None:
    engine = make_engine(llama)
    first = run(engine, ask("a", prompt=LONG, tenant="acme")).tokens["a"]
    ran = run(engine, ask("b", prompt=LONG, tenant="acme", prompt_logprobs=3))
    agree(ran.scores["b"], theirs)
    assert ran.tokens["b"] == first
    assert engine.report().prefix_hit_tokens == 0
    run(engine, ask("c", prompt=LONG, tenant="acme"))
    assert engine.report().prefix_hit_tokens == 9 * PAGE
    ran = run(engine, ask("d", prompt=LONG, tenant="acme", prompt_logprobs=3, scored=70))
    agree(ran.scores["d"], theirs[69:])
    assert engine.report().prefix_hit_tokens == (9 + 4) * PAGE, "the pages before the first token without a score"


@pytest.mark.parametrize(
    ("after", "method", "ahead"),
    [
        pytest.param(after, method, ahead, marks=() if (at + ahead) % 3 == number else pytest.mark.soak)
        for at, after in enumerate((1, 2, 4))
        for number, method in enumerate(ParkMethod)
        for ahead in (0, 1, 2)
    ],
)
def test_a_parked_prompt_is_scored_once(
    llama: Path, theirs: list[Logprobs], method: ParkMethod, after: int, ahead: int
) -> None:
    engine = make_engine(llama, host_kv_mib=4, prefill_chunk_tokens=32, plan_ahead=ahead)
    engine.set_supervised(True)
    ran = run(engine, ask("a", prompt=LONG, tenant="acme", prompt_logprobs=3), steps=after)
    promise = engine.report().sequences[0].promise
    for at_once in (True, False):
        assert engine.park(RequestId("a"), 1, promise, promise, method)
        ran = ran if at_once else run(engine, ran=ran)
        assert engine.resume(RequestId("a"), 1, promise)
        ran = run(engine, ran=ran, steps=3)
    ran = run(engine, ran=ran)
    agree(ran.scores["a"], theirs)
    assert len(ran.tokens["a"]) == 40


def test_a_moved_sequence_scores_what_the_client_does_not_have(llama: Path, theirs: list[Logprobs]) -> None:
    engine = make_engine(llama, prefill_chunk_tokens=32)
    for scored in (0, 1, 2, 33, 149):
        ran = run(engine, ask("a", prompt=LONG, prompt_logprobs=3, scored=scored, max_tokens=2))
        agree(ran.scores["a"], theirs[max(0, scored - 1) :])
    ran = run(engine, ask("a", prompt=LONG, prompt_logprobs=3, scored=150, delivered=(5, 6)))
    assert "a" not in ran.scores
    ran = run(engine, ask("a", prompt=LONG, prompt_logprobs=3, delivered=(5, 6)))
    agree(ran.scores["a"], theirs)
    assert ran.outputs[-1].index == 39


def test_scores_that_are_no_numbers_end_only_their_request(tmp_path: Path) -> None:
    base = save_base("llama", tmp_path / "base")
    engine = make_engine(base)
    with torch.no_grad():
        engine.diagnostics.loaded.model.get_input_embeddings().weight[7] = float("nan")
    prompt = (5, 6, 7, 8)
    ran = run(engine, ask("a", prompt=prompt, prompt_logprobs=1), ask("b", prompt=(5, 6, 8), prompt_logprobs=1))
    assert (ran.last["a"].finish, ran.last["b"].finish) == (Finish.FAILED, Finish.LENGTH)
    assert "a" not in ran.scores
    assert len(ran.scores["b"]) == 2


@pytest.mark.parametrize("asked", [-1, 21])
def test_too_many_alternatives_are_refused(llama: Path, asked: int) -> None:
    with pytest.raises(InvalidRequest, match="prompt_logprobs"):
        make_engine(llama).add(ask("a", prompt_logprobs=asked))


def test_the_library_gives_them_with_the_answer(llama: Path, theirs: list[Logprobs]) -> None:
    engine = OfflineEngine(llama, kv_cache_mib=4, kernels="torch")
    (answer,) = engine.generate([LONG], max_tokens=1, prompt_logprobs=3)
    agree(answer.prompt_logprobs, theirs)
    twice = list(engine.run([Request(prompt=LONG, choices=2, sampling=Sampling(max_tokens=2, prompt_logprobs=3))]))
    for choice in twice:
        agree(choice.prompt_logprobs, theirs)
    assert dataclasses.replace(twice[0], choice=0).tokens == twice[1].tokens


@pytest.mark.parametrize("kernels", KERNELS)
def test_ranks_are_places_among_all_tokens(llama: Path, kernels: str) -> None:
    """Up to the last digits of the logits."""
    model = AutoModelForCausalLM.from_pretrained(llama)
    with torch.inference_mode():
        logs = model(torch.tensor([LONG])).logits[0].float().log_softmax(-1)
    engine = make_engine(llama, kernels=kernels, prefill_chunk_tokens=64)
    scores = run(engine, ask("a", prompt=LONG, prompt_logprobs=3, max_tokens=1)).scores["a"]
    for before, token, one in zip(logs, LONG[1:], scores, strict=False):
        more, most = int((before > before[token] + 1e-4).sum()), int((before > before[token] - 1e-4).sum())
        assert more < one.rank <= most
    assert len({one.rank for one in scores}) > 50
