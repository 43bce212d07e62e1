"""Log probabilities of answers: bounded, written while the tokens come, and sent in parts."""

import asyncio
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from starlette.types import Message

from motet.api.v1 import runner_pb2
from motet.errors import InvalidRequest
from motet_gateway.answers import choice as choice_module
from motet_gateway.answers import logprobs
from motet_gateway.answers.answer import AnswerResponse
from motet_gateway.answers.choice import MAX_UNREAD, ChoiceText
from motet_gateway.answers.completions import COMPLETIONS
from motet_gateway.answers.logprobs import ChatLogprobs, CompletionLogprobs
from motet_gateway.answers.parts import joined, scores, texts
from motet_gateway.answers.responses.api import RESPONSES
from motet_gateway.answers.responses.body import LOGPROBS, ResponsesBody
from motet_gateway.answers.score_limits import check_scores, limited_by_scores
from motet_gateway.answers.writer import WRITE_BYTES
from motet_gateway.generation import EndReason
from motet_gateway.identity.caller import ANONYMOUS
from motet_gateway.parameters import MAX_SCORES, Body, ChatBody, CompletionBody, parse
from motet_gateway.tokens.detokenizer import detokenizer
from motet_gateway.tokens.stop_strings import StopStrings
from testbed.fake_services import FakeServices
from tests.gateway.conftest import Served, serve
from tests.gateway.test_errors import error_of
from tests.gateway.test_logprobs import TEXTS

MODEL = TEXTS["byte level"]


def chat(**fields: Any) -> Body:
    return parse(ChatBody, orjson.dumps({"model": "m", "messages": [{"role": "user", "content": "x"}]} | fields))


def completion(**fields: Any) -> Body:
    return parse(CompletionBody, orjson.dumps({"model": "m", "prompt": "x"} | fields))


@pytest.mark.parametrize(
    ("body", "limits", "param", "named"),
    [
        (chat(n=8, max_tokens=4000, logprobs=True, top_logprobs=20), [4000], "top_logprobs", ["n: 8", "max_tokens"]),
        (
            chat(n=8, max_completion_tokens=70_000, logprobs=True),
            [70_000],
            "logprobs",
            ["max_completion_tokens: 70000"],
        ),
        (completion(max_tokens=500, logprobs=20), [500] * 60, "logprobs", ["max_tokens: 500", "prompts: 60"]),
    ],
)
def test_too_many_log_probabilities_are_refused(body: Body, limits: list[int], param: str, named: list[str]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_scores(body, [[1]] * len(limits), limits)
    assert caught.value.param == param
    for name in (*named, str(MAX_SCORES)):
        assert name in caught.value.message


@pytest.mark.parametrize(("logprobs", "of_prompt", "param"), [(20, 0, "logprobs"), (0, 20, "prompt_logprobs")])
def test_the_field_that_asks_for_most_of_a_prompt_is_named(logprobs: int, of_prompt: int, param: str) -> None:
    body = completion(echo=True, logprobs=logprobs, prompt_logprobs=of_prompt, max_tokens=1)
    with pytest.raises(InvalidRequest, match=f"lower {param} or n") as caught:
        check_scores(body, [[1] * 30_000], [1])
    assert caught.value.param == param


def test_as_many_log_probabilities_as_are_allowed_are_not_refused() -> None:
    most = MAX_SCORES // (8 * 21)
    check_scores(chat(n=8, max_tokens=most, logprobs=True, top_logprobs=20), [[1]], [most])
    check_scores(chat(n=8, max_tokens=100_000), [[1]], [100_000])
    check_scores(completion(max_tokens=0, echo=True, logprobs=20), [[1] * 1000], [1])


def test_an_answer_without_a_limit_of_the_client_ends_before_it_has_too_many() -> None:
    body = chat(n=8, logprobs=True, top_logprobs=20)
    limits = limited_by_scores(body, [1_000_000])
    assert limits == [MAX_SCORES // (8 * 21)]
    check_scores(body, [[1]], limits)
    assert limited_by_scores(chat(n=8), [1_000_000]) == [1_000_000]
    assert limited_by_scores(chat(max_tokens=1_000_000, logprobs=True), [1_000_000]) == [1_000_000]


async def test_a_request_for_too_many_names_its_fields(served: Served) -> None:
    body = {"model": "tiny", "prompt": [[5]] * 128, "max_tokens": 200, "logprobs": 20}
    answer = await served.http.post("/v1/completions", json=body)
    assert answer.status_code == 400
    assert error_of(answer)["param"] == "logprobs"
    assert "max_tokens: 200" in error_of(answer)["message"]


class _CountingDetokenizer:
    def __init__(self) -> None:
        self._text = detokenizer(MODEL.token_bytes)
        self.fed: list[int] = []

    def feed(self, tokens: Sequence[int]) -> str:
        self.fed.append(len(tokens))
        return self._text.feed(tokens)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._text, name)


def choice_of(
    text: _CountingDetokenizer, writer: ChatLogprobs | CompletionLogprobs | None, stops: StopStrings | None = None
) -> ChoiceText:
    nothing: Callable[..., None] = lambda *_: None  # noqa: E731
    return ChoiceText(
        0,
        text,
        stops,
        hidden_ids=frozenset(),
        min_tokens=0,
        logprobs=writer,
        on_placed=nothing,
        changed=nothing,
        stop_here=nothing,
        score=nothing,
    )


@pytest.mark.parametrize("kind", [ChatLogprobs, CompletionLogprobs])
def test_the_end_of_an_answer_has_nothing_left_to_write(
    kind: type[ChatLogprobs | CompletionLogprobs], monkeypatch: pytest.MonkeyPatch
) -> None:
    held = [0]
    writer = kind(MODEL.token_bytes, 5, hold=lambda size: held.append(held[-1] + size))
    text = _CountingDetokenizer()
    choice = choice_of(text, writer)
    one = runner_pb2.TokenLogprobs(logprob=-1, top_ids=range(1, 6), top_logprobs=[-1] * 5)
    for token in range(1, 2001):
        choice.deliver([token % 300], [one])
    text.fed.clear()
    nothing = SimpleNamespace(dumps=lambda _: pytest.fail("a token was written at the end"))
    monkeypatch.setattr(logprobs, "orjson", nothing)  # only there: tasks of other tests may end now
    choice.end(EndReason.STOP)
    (columns,) = scores(choice.take())
    assert sum(text.fed) < MAX_UNREAD
    pieces = writer.as_json(columns)
    assert held[-1] == sum(map(len, pieces)) - sum(map(len, writer.as_json()))
    writer.release(columns)
    assert held[-1] == 0
    shown = orjson.loads(b"".join(pieces))
    assert {len(column) for column in shown.values() if column} == {2000}


def test_the_text_of_a_long_answer_is_not_copied_for_each_token(monkeypatch: pytest.MonkeyPatch) -> None:
    choice = choice_of(_CountingDetokenizer(), None, StopStrings(["never"]))
    sizes: list[int] = []
    monkeypatch.setattr(choice_module, "joined", lambda parts: sizes.extend(map(len, parts)) or joined(parts))
    for _ in range(1000):
        choice.deliver([70], [])
    assert len("".join(texts(choice.take()))) >= 990
    assert max(sizes) < 20


class _Client:
    def __init__(self) -> None:
        self.messages: list[Message] = []

    async def receive(self) -> Message:
        return await asyncio.Future()

    async def send(self, message: Message) -> None:
        self.messages.append(message)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_long_response_is_sent_in_parts(served: Served, stream: bool) -> None:
    """The last event of a stream has all log probabilities again."""
    client = _Client()
    asked = {"max_output_tokens": 400, "include": [LOGPROBS], "top_logprobs": 20, "ignore_eos": True, "stream": stream}
    body = parse(ResponsesBody, orjson.dumps({"model": "tiny", "input": "The quick brown fox"} | asked))
    await AnswerResponse(served.gateway, ANONYMOUS, RESPONSES, body)({"type": "http"}, client.receive, client.send)
    _, *bodies = client.messages
    assert max(len(one["body"]) for one in bodies) <= WRITE_BYTES
    content = b"".join(one["body"] for one in bodies)
    assert len(content) > WRITE_BYTES
    if stream:
        *events, last, end = content.split(b"\n\n")
        assert not end
        deltas = [orjson.loads(one.partition(b"data: ")[2]) for one in events if b".output_text.delta" in one]
        response = orjson.loads(last.partition(b"data: ")[2])["response"]
    else:
        response = orjson.loads(content)
    (part,) = response["output"][0]["content"]
    assert len(part["logprobs"]) == 400
    assert "".join(bytes(one["bytes"]).decode(errors="ignore") for one in part["logprobs"]) in (part["text"], "")
    if stream:
        assert [one for event in deltas for one in event["logprobs"]] == part["logprobs"]


@pytest.mark.parametrize("echo", [False, True])
async def test_a_long_answer_is_sent_in_parts(served: Served, echo: bool) -> None:
    client = _Client()
    fields = {"n": 8, "max_tokens": 400, "logprobs": 20, "echo": echo, "ignore_eos": True}
    body = parse(CompletionBody, orjson.dumps({"model": "tiny", "prompt": "The quick brown fox" * 4} | fields))
    await AnswerResponse(served.gateway, ANONYMOUS, COMPLETIONS, body)({"type": "http"}, client.receive, client.send)
    start, *bodies = client.messages
    assert len(bodies) > 2
    assert max(len(one["body"]) for one in bodies) <= WRITE_BYTES
    content = b"".join(one["body"] for one in bodies)
    assert dict(start["headers"])[b"content-length"] == str(len(content)).encode()
    choices = orjson.loads(content)["choices"]
    prompt = len(served.cluster.tokenizer.encode("The quick brown fox" * 4).ids) if echo else 0
    for choice in choices:
        assert {len(column) for column in choice["logprobs"].values()} == {prompt + 400}
        assert choice["logprobs"]["text_offset"] == sorted(choice["logprobs"]["text_offset"])
        assert "".join(choice["logprobs"]["tokens"]) == choice["text"]


@pytest.mark.parametrize(
    "fields", [{"max_tokens": 200}, {"max_tokens": 1, "echo": True, "prompt": ["The quick brown fox" * 10] * 3}]
)
async def test_answers_that_hold_too_much_end(cluster: FakeServices, fields: dict[str, Any]) -> None:
    async with serve(cluster, max_bodies_bytes=50_000) as served:
        body = {"model": "tiny", "prompt": "The quick brown fox" * 10, "logprobs": 20, "ignore_eos": True}
        answer = await served.http.post("/v1/completions", json=body | fields)
        assert answer.status_code == 503
        assert served.gateway.bodies.held == 0
        assert (await served.http.post("/v1/completions", json=body | {"max_tokens": 2})).status_code == 200
        stream = await served.http.post("/v1/completions", json=body | {"max_tokens": 200, "stream": True})
        assert stream.text.endswith("data: [DONE]\n\n")
        assert "error" not in stream.text, "what is written is not held"
        assert served.gateway.bodies.held == 0
