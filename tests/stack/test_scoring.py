"""lm-eval scores texts through the gateway as transformers does.

Its `local-completions` model sends lists of token ids with `echo`, `logprobs: 1` and `max_tokens: 1`. Of each choice it
sums the log probabilities after the context and without the answer's token, and a continuation is greedy if each of
its tokens is as likely as the best alternative.
"""

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from testbed.local_stack import BUNDLED, LocalStack, copy_of_bundled, running_stack

pytestmark = [pytest.mark.stack, pytest.mark.filterwarnings("ignore")]

CHUNK = 32
"""Prompt tokens an iteration: long texts take several."""
CONTINUATIONS = [
    ("The flag of Hollin", " is green"),
    ("The flag of Hollin", " sings a motet in five voices, naïve café 🙃"),
    ("Who keeps the lighthouse?", " Nobody"),
    ("W", "ho rules Harrow?"),
    ("A long story. " * 30, "It has an end."),
]
ADAPTER = "shouting"
NEAR_TIE = 1e-3
"""Two logits that are so close may change places between two implementations."""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    folder = tmp_path_factory.mktemp("scoring")
    engine = f'{{"prefillChunkTokens": {CHUNK}, "dtype": "float32"}}'
    manifests = copy_of_bundled(folder / "manifests", adapters=[ADAPTER], engine=engine)
    with running_stack(folder, manifests=manifests) as running:
        yield running


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(BUNDLED / "model")


def reference(adapter: str | None) -> torch.nn.Module:
    model = AutoModelForCausalLM.from_pretrained(BUNDLED / "model", dtype=torch.float32)
    if adapter is None:
        return model.eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from peft import PeftModel

        return PeftModel.from_pretrained(model, BUNDLED / "adapters" / adapter).eval()


def scored(model: torch.nn.Module, context: list[int], continuation: list[int]) -> tuple[float, bool, float]:
    """The sum, whether each token is the best one, and the smallest distance between a token and its best rival."""
    with torch.inference_mode():
        logs = model(torch.tensor([context + continuation])).logits[0].float().log_softmax(-1)
    rows = logs[len(context) - 1 : -1]
    chosen = rows.gather(1, torch.tensor(continuation)[:, None])[:, 0]
    rivals = rows.scatter(1, torch.tensor(continuation)[:, None], float("-inf")).amax(-1)
    return float(chosen.sum()), bool((chosen >= rivals).all()), float((chosen - rivals).abs().min())


def summed(choice: dict[str, Any], context: int) -> tuple[float, bool]:
    logprobs, tops = (choice["logprobs"][name][context:-1] for name in ("token_logprobs", "top_logprobs"))
    return sum(logprobs), all(one == max(top.values()) for one, top in zip(logprobs, tops, strict=True))


def greedy(model: torch.nn.Module, context: list[int], count: int) -> list[int]:
    tokens = list(context)
    with torch.inference_mode():
        for _ in range(count):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(context) :]


@pytest.mark.parametrize("adapter", [None, ADAPTER])
def test_batches_of_tokens_are_scored_as_by_transformers(
    stack: LocalStack, tokenizer: Any, adapter: str | None
) -> None:
    model = reference(adapter)
    pairs = [
        (tokenizer.encode(context, add_special_tokens=False), tokenizer.encode(after, add_special_tokens=False))
        for context, after in CONTINUATIONS
    ]
    pairs += [(context, greedy(model, context, 6)) for context, _ in pairs[:3]]
    body = {
        "model": adapter or "motet-demo",
        "prompt": [context + after for context, after in pairs],
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
    }
    with stack.http() as http:
        for _ in range(2):  # the second time, all pages are in the prefix cache
            answer = http.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            choices = sorted(answer.json()["choices"], key=lambda choice: int(choice["index"]))
            assert len(choices) == len(pairs)
            best = []
            for (context, after), choice in zip(pairs, choices, strict=True):
                total, is_greedy, distance = scored(model, context, after)
                mine = summed(choice, len(context))
                assert mine[0] == pytest.approx(total, abs=1e-3)
                assert mine[1] == is_greedy or distance < NEAR_TIE
                best.append(mine[1])
                assert choice["logprobs"]["token_logprobs"][0] is None
                assert len(choice["logprobs"]["tokens"]) == len(context) + len(after) + 1
            assert best[-3:] == [True] * 3, "the model's own continuations"
            assert False in best
            assert answer.json()["usage"] == {
                "prompt_tokens": sum(len(context) + len(after) for context, after in pairs),
                "completion_tokens": len(pairs),
                "total_tokens": sum(len(context) + len(after) + 1 for context, after in pairs),
                "prompt_tokens_details": {"cached_tokens": 0},  # what was kept has no scores
            }


def test_a_text_alone_is_scored_without_an_answer(stack: LocalStack, tokenizer: Any) -> None:
    text = CONTINUATIONS[1][0] + CONTINUATIONS[1][1]
    body = {"model": "motet-demo", "prompt": text, "max_tokens": 0, "logprobs": 1, "echo": True}
    with stack.http() as http:
        answer = http.post("/v1/completions", json=body).json()
    (choice,) = answer["choices"]
    assert choice["text"] == text
    tokens = tokenizer.encode(text)
    total, _, _ = scored(reference(None), tokens[:1], tokens[1:])
    assert sum(choice["logprobs"]["token_logprobs"][1:]) == pytest.approx(total, abs=1e-3)
    assert (answer["usage"]["completion_tokens"], choice["finish_reason"]) == (0, "length")


def test_a_prompt_that_comes_again_says_how_much_of_it_was_kept(stack: LocalStack) -> None:
    """Not with another salt."""
    body = {"model": "motet-demo", "prompt": "A long story about a cache. " * 30, "max_tokens": 4}
    with stack.http() as http:

        def cached(**more: Any) -> int:
            usage = http.post("/v1/completions", json=body | more).json()["usage"]
            return int(usage["prompt_tokens_details"]["cached_tokens"])

        assert cached() == 0
        assert cached() > 100
        assert cached(cache_salt="mine") == 0
        assert cached(cache_salt="mine") > 100
