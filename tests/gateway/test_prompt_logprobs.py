"""Log probabilities of prompts in vLLM's form, over a real socket."""

import tracemalloc
from typing import Any

import orjson
import pytest

from motet_gateway.answers.prompt_logprobs import ScoredPrompt
from motet_gateway.tokens.text_model import ModelTokenizer
from testbed.fake_services import byte_tokenizer, score_of
from tests.gateway.conftest import Served
from tests.gateway.test_completions import chat, complete, submitted
from tests.gateway.test_errors import error_of
from tests.gateway.test_streams import pair
from tests.support.for_each import for_each

__all__ = ["pair"]

PROMPT = "The quick brown zebra, naïve"
Json = dict[str, Any]


def checked(served: Served, shown: list[Json | None], prompt: list[int], top: int) -> None:
    """As the runner scored it: its token is the most likely one at every other place, and otherwise the second."""
    assert shown[0] is None
    assert len(shown) == len(prompt)
    for at, (token, one) in enumerate(zip(prompt, shown, strict=True)):
        if one is None:
            continue
        said = score_of(token, at, top)
        assert list(one) == list(dict.fromkeys(map(str, (token, *said.top_ids)))), "the token itself is the first"
        own = one[str(token)]
        assert (own["logprob"], own["rank"]) == (pytest.approx(said.logprob), said.rank)
        for rank, (other, value) in enumerate(zip(said.top_ids, said.top_logprobs, strict=True), start=1):
            assert (one[str(other)]["logprob"], one[str(other)]["rank"]) == (pytest.approx(value), rank)
        assert own["decoded_token"].strip() in served.cluster.tokenizer.decode([token])


@pytest.mark.parametrize("top", [0, 1])
async def test_each_choice_of_a_completion_has_those_of_its_prompt(served: Served, top: int) -> None:
    prompts = [served.cluster.tokenizer.encode(text).ids for text in (PROMPT, "Several voices")]
    served.cluster.runners[0].scores_per_step = 2
    whole = await complete(served, prompt=prompts, n=2, prompt_logprobs=top, max_tokens=2)
    for choice, prompt in zip(whole["choices"], [prompts[0], prompts[0], prompts[1], prompts[1]], strict=True):
        checked(served, choice["prompt_logprobs"], prompt, top)
        assert choice["logprobs"] is None
    assert "prompt_logprobs" not in whole
    asked = [one.sampling.HasField("prompt_logprobs") for one in served.cluster.runners[0].submits]
    assert asked == [True, False, True, False], "each prompt is scored once"


async def test_a_chat_has_those_of_its_prompt_beside_its_choices(served: Served) -> None:
    whole = await chat(served, PROMPT, prompt_logprobs=1, logprobs=True, n=2, max_tokens=2)
    checked(served, whole["prompt_logprobs"], list(submitted(served).prompt_ids), 1)
    assert all("prompt_logprobs" not in choice and choice["logprobs"] for choice in whole["choices"])
    assert "prompt_logprobs" not in await chat(served)


@pytest.mark.parametrize(("logprobs", "top"), [(0, 1), (2, 0)])
async def test_a_prompt_that_comes_back_may_have_both_forms(served: Served, logprobs: int, top: int) -> None:
    body = {"echo": True, "logprobs": logprobs, "prompt_logprobs": top, "max_tokens": 1, "ignore_eos": True}
    (choice,) = (await complete(served, prompt=PROMPT, **body))["choices"]
    prompt = served.cluster.tokenizer.encode(PROMPT).ids
    checked(served, choice["prompt_logprobs"], prompt, top)
    assert [len(one) for one in choice["logprobs"]["top_logprobs"][1:]] == [logprobs] * len(prompt)


@pytest.mark.parametrize("after", [2, 5])
async def test_a_moved_request_goes_on_with_those_that_are_missing(pair: Served, after: int) -> None:
    first, second = pair.cluster.runners
    first.scores_per_step = second.scores_per_step = 1
    first.dies_after = after
    (choice,) = (await complete(pair, prompt=PROMPT, prompt_logprobs=1, max_tokens=8, ignore_eos=True))["choices"]
    checked(pair, choice["prompt_logprobs"], pair.cluster.tokenizer.encode(PROMPT).ids, 1)
    assert second.submits[-1].choices[0].scored > 0


async def test_a_prompt_of_one_token_has_none(served: Served) -> None:
    (choice,) = (await complete(served, prompt=[5], prompt_logprobs=3, max_tokens=1))["choices"]
    assert choice["prompt_logprobs"] == [None]


@for_each(
    "body",
    [
        {"prompt_logprobs": 21},
        {"prompt_logprobs": -1},
        {"prompt_logprobs": 0, "stream": True},
        {"prompt_logprobs": 20, "n": 8, "prompt": [[5] * 500] * 8},
    ],
)
async def test_what_cannot_be_answered_is_refused_by_its_name(served: Served, body: Json) -> None:
    answer = await served.http.post("/v1/completions", json={"model": "tiny", "prompt": PROMPT} | body)
    assert answer.status_code == 400
    assert error_of(answer)["param"] == "prompt_logprobs"


def test_writing_those_of_a_long_prompt_takes_little_more_memory_than_their_text() -> None:
    model = ModelTokenizer(byte_tokenizer(), None, 400, 512)
    prompt = [at % 300 for at in range(2000)]
    scored = ScoredPrompt(prompt, model.token_bytes, 20)
    scored.score([score_of(token, at, 20) for at, token in enumerate(prompt)][1:])
    tracemalloc.start()
    try:
        scored.encode()
        (_, peak) = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(orjson.loads(scored.json)) == len(prompt)
    assert peak < 1.5 * len(scored.json)
