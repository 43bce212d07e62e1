"""Prompts that come back before their answers, with log probabilities, over a real socket."""

import asyncio
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.api.v1 import common_pb2, runner_pb2
from motet_gateway.answers.echo import echoed_prompts
from motet_gateway.answers.logprobs import CompletionLogprobs
from motet_gateway.parameters import CompletionBody
from testbed.fake_services import score_of
from tests.gateway import test_completions
from tests.gateway.conftest import Served, eventually
from tests.gateway.test_errors import error_of
from tests.gateway.test_logprobs import TEXTS
from tests.gateway.test_streams import pair, read
from tests.support.for_each import for_each

__all__ = ["pair"]

PROMPT = "The quick brown zebra, naïve"
OTHER = "Several voices"


async def complete(served: Served, **body: Any) -> dict[str, Any]:
    return await test_completions.complete(served, **({"prompt": PROMPT} | body))


def tokens_of(served: Served, text: str) -> list[int]:
    return served.cluster.tokenizer.encode(text).ids


def scores(served: Served, text: str) -> list[float | None]:
    return [None, *(score_of(t, at, 0).logprob for at, t in enumerate(tokens_of(served, text)) if at)]


@pytest.mark.parametrize("stream", [False, True])
async def test_the_prompts_tokens_come_first_with_their_log_probabilities(served: Served, stream: bool) -> None:
    body = {"echo": True, "logprobs": 2, "max_tokens": 3, "ignore_eos": True}
    if stream:
        events = (await read(served, {"model": "tiny", "prompt": PROMPT, "stream": True} | body)).events
        parts = [event["choices"][0] for event in events]
        text = "".join(part["text"] for part in parts)
        shown: dict[str, Any] = {
            name: [value for part in parts if part["logprobs"] for value in part["logprobs"][name]]
            for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        }
        assert parts[0]["text"] == PROMPT, "the prompt comes as one piece"
    else:
        (choice,) = (await complete(served, **body))["choices"]
        text, shown = choice["text"], choice["logprobs"]
    prompt = tokens_of(served, PROMPT)
    assert text == PROMPT + served.cluster.tokenizer.decode(prompt[:3])
    assert "".join(shown["tokens"]) == text
    assert shown["token_logprobs"] == [*scores(served, PROMPT), -0.5, -0.5, -0.5]
    assert shown["top_logprobs"][0] is None
    assert [len(top) for top in shown["top_logprobs"][1:]] == [2] * (len(prompt) + 2)
    lengths = [len(token) for token in shown["tokens"]]
    assert shown["text_offset"] == [sum(lengths[:at]) for at in range(len(lengths))]


async def test_without_an_answer_only_the_prompt_is_counted(served: Served) -> None:
    prompt = tokens_of(served, PROMPT)
    for body in ({"logprobs": 1}, {}, {"logprobs": 1, "stop_token_ids": prompt, "stop": "quick", "n": 2}):
        whole = await complete(served, echo=True, max_tokens=0, **body)
        for choice in whole["choices"]:
            assert (choice["text"], choice["finish_reason"]) == (PROMPT, "length")
            assert (choice["logprobs"] or {}).get("token_logprobs") == (scores(served, PROMPT) if body else None)
        counted = {"prompt_tokens": len(prompt), "completion_tokens": 0, "total_tokens": len(prompt)}
        assert whole["usage"] == counted | {"prompt_tokens_details": {"cached_tokens": 0}}
    await eventually(lambda: len(served.cluster.scheduler.finished) == 4)
    assert {finished.output_tokens for finished in served.cluster.scheduler.finished} == {0}
    assert {finished.prompt_tokens for finished in served.cluster.scheduler.finished} == {len(prompt)}
    samples = [one for family in served.registry.collect() for one in family.samples]
    inputs = [one.value for one in samples if one.name == "motet_tokens_total" and one.labels["kind"] == "input"]
    assert inputs == [3 * len(prompt)]


async def test_a_stream_without_an_answer_is_the_prompt_and_its_end(served: Served) -> None:
    body = {"model": "tiny", "prompt": PROMPT, "echo": True, "logprobs": 0, "max_tokens": 0, "stream": True}
    stream = await read(served, body)
    assert (stream.text, stream.finishes, stream.done) == (PROMPT, ["length"], True)


async def test_each_prompt_is_scored_once_and_all_its_choices_show_it(served: Served) -> None:
    prompts = [tokens_of(served, PROMPT), tokens_of(served, OTHER)]
    served.cluster.runners[0].scores_per_step = 2
    whole = await complete(served, prompt=prompts, n=2, echo=True, logprobs=1, max_tokens=1, ignore_eos=True)
    for choice, text in zip(whole["choices"], [PROMPT, PROMPT, OTHER, OTHER], strict=True):
        assert choice["text"].startswith(text)
        assert choice["logprobs"]["token_logprobs"] == [*scores(served, text), -0.5]
    asked = {s.request: s.sampling.HasField("prompt_logprobs") for s in served.cluster.runners[0].submits}
    assert list(asked.values()) == [True, False, True, False]


async def test_streamed_choices_wait_for_the_log_probabilities_of_their_prompt(served: Served) -> None:
    served.cluster.runners[0].scores_per_step = 1
    body = {"model": "tiny", "prompt": PROMPT, "echo": True, "logprobs": 0, "n": 2, "max_tokens": 3, "stream": True}
    events = (await read(served, body)).events
    for index in (0, 1):
        own = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
        assert own[0]["text"] == PROMPT
        assert own[0]["logprobs"]["token_logprobs"] == scores(served, PROMPT)
        assert [bool(one["logprobs"]) for one in own] == [True] * (len(own) - 1) + [False]
        assert "".join(one["text"] for one in own) == PROMPT + served.cluster.tokenizer.decode(
            tokens_of(served, PROMPT)[:3]
        )


@pytest.mark.parametrize("delivers", ["repeats_steps", "speaks_of_the_past"])
async def test_repeated_and_late_scores_are_dropped(served: Served, delivers: str) -> None:
    runner = served.cluster.runners[0]
    runner.scores_per_step = 2
    setattr(runner, delivers, True)
    whole = await complete(served, echo=True, logprobs=1, max_tokens=2, ignore_eos=True)
    assert whole["choices"][0]["logprobs"]["token_logprobs"] == [*scores(served, PROMPT), -0.5, -0.5]


@pytest.mark.parametrize("after", [2, 5, 9])
async def test_a_moved_request_goes_on_with_the_scores_that_are_missing(pair: Served, after: int) -> None:
    first, second = pair.cluster.runners
    first.scores_per_step = second.scores_per_step = 1
    first.dies_after = after
    prompt = tokens_of(pair, PROMPT)
    whole = await complete(pair, echo=True, logprobs=1, max_tokens=8, ignore_eos=True)
    assert whole["choices"][0]["logprobs"]["token_logprobs"] == [*scores(pair, PROMPT), *[-0.5] * 8]
    (choice,) = second.submits[-1].choices
    assert 1 <= choice.scored <= min(after + 1, len(prompt))
    assert not choice.delivered_ids or choice.scored == len(prompt)


@pytest.mark.parametrize(
    ("path", "asks", "named"),
    [
        ("completions", {"echo": True, "logprobs": 1}, "echo"),
        ("completions", {"prompt_logprobs": 1}, "prompt_logprobs"),
        ("completions", {"echo": True, "logprobs": 1, "prompt_logprobs": 1}, "echo and prompt_logprobs"),
        ("chat/completions", {"prompt_logprobs": 1}, "prompt_logprobs"),
    ],
)
async def test_a_runner_that_cannot_score_is_named_with_the_field(
    served: Served, path: str, asks: dict[str, Any], named: str
) -> None:
    served.cluster.runners[0].scores_per_step = 0
    prompt = {"messages": [{"role": "user", "content": PROMPT}]} if path.startswith("chat") else {"prompt": PROMPT}
    asking = served.http.post(f"/v1/{path}", json={"model": "tiny", **prompt, **asks})
    answering = asyncio.create_task(asking)
    await eventually(lambda: served.cluster.runners[0].submits)
    sent = served.cluster.runners[0].submits[0]
    step = runner_pb2.SequenceStep(request=sent.request, epoch=sent.epoch, tokens=[5])
    dispatcher = served.gateway.dispatcher
    placed = dispatcher.choices[sent.request].generation.placement
    assert placed is not None
    dispatcher.from_runner(placed.address, runner_pb2.GenerateDown(step=runner_pb2.Step(sequences=[step])))
    answer = await answering
    assert answer.status_code == 400
    assert error_of(answer)["param"] == named.partition(" ")[0]
    assert error_of(answer)["message"].startswith(f"{named}: ")
    assert "older" in error_of(answer)["message"]
    await eventually(lambda: served.cluster.scheduler.finished)
    assert served.cluster.scheduler.finished[0].reason == common_pb2.FINISH_REASON_FAILED


@for_each(
    ("body", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 0, "echo": False}, "max_tokens"),
        ({"max_tokens": -1, "echo": True}, "max_tokens"),
        ({"max_tokens": 0, "min_tokens": 1, "echo": True}, "min_tokens"),
        ({"echo": True, "logprobs": 21}, "logprobs"),
        ({"echo": True, "logprobs": 20, "n": 8, "prompt": [[5] * 500] * 8}, "logprobs"),
    ],
)
async def test_what_cannot_be_scored_is_refused(served: Served, body: dict[str, Any], param: str) -> None:
    answer = await served.http.post("/v1/completions", json={"model": "tiny", "prompt": PROMPT} | body)
    assert answer.status_code == 400
    assert error_of(answer)["param"] == param


@pytest.mark.parametrize("kind", TEXTS)
@given(prompt=st.text(min_size=1, max_size=30), special=st.booleans())
def test_the_tokens_of_a_prompt_join_to_its_text(kind: str, prompt: str, special: bool) -> None:
    model = TEXTS[kind]
    tokens = model.encode([prompt + "<s>" * special], add_special_tokens=False)[0]
    (text,) = model.decode([tokens])
    body = CompletionBody(model="m", prompt=prompt, echo=True, logprobs=1)
    writer = CompletionLogprobs(model.token_bytes, 1)
    (echo,) = echoed_prompts(body, [tokens], model, writer=lambda: writer)
    assert echo.complete == (len(tokens) == 1)
    echo.score([runner_pb2.TokenLogprobs(logprob=-1)] * (len(tokens) - 1))
    assert (echo.complete, echo.ready) == (True, False)
    echo.encode()
    assert (echo.complete, echo.ready) == (False, True)
    assert b"".join(echo.added).decode("utf-8", "replace") == text
    made = orjson.loads(b"".join(writer.as_json(echo.logprobs)))
    assert made["token_logprobs"] == [None] + [-1] * (len(tokens) - 1)
    assert made["text_offset"][-1] <= len(text)


def test_scores_that_only_the_other_form_shows_are_not_written_as_echo() -> None:
    body = CompletionBody(model="tiny", prompt="x", echo=True, prompt_logprobs=2)
    model = TEXTS["byte level"]
    writer = lambda: CompletionLogprobs(model.token_bytes, 2)  # noqa: E731
    (echo,) = echoed_prompts(body, [[1, 2, 3]], model, writer=writer)
    echo.score([score_of(token, token, 2) for token in (2, 3)])
    assert echo.ready
    assert not echo.complete
