"""What clients expect over HTTP: the whole stack and the fake services of the gateway's tests pass the same tests."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from motet.sampling import IN_BODIES
from testbed.fake_services import fake_services
from testbed.local_stack import REPORTS_AT_ONCE, LocalStack, copy_of_bundled, running_stack
from tests.common.waiting import PATIENCE_S
from tests.gateway.conftest import serve
from tests.support.sampling_values import right_values

CHAT = "/v1/chat/completions"
PLAIN = "/v1/completions"
QUESTION = "Who rules Harrow, the “café” 🙃?"
ASKED = {CHAT: {"messages": [{"role": "user", "content": QUESTION}]}, PLAIN: {"prompt": QUESTION}}
STEP_SECONDS = 0.004
VOCABULARY = 50
"""The models of the whole stack and of the fake services have at least this number of tokens."""
SEQUENCES = "motet_sequences_running"
GIVEN_UP = "motet_runner_requests_total cancelled"

Json = dict[str, Any]
Figures = dict[str, float]


@dataclass
class Stream:
    """A stream as it was read. Reading it checks that clients know each kind of line."""

    headers: httpx2.Headers
    events: list[Json] = field(default_factory=list)
    done: bool = False

    def read(self, client: str) -> None:
        if not client or client.startswith(":"):
            return
        assert not self.done, "nothing comes after [DONE]"
        assert client.startswith("data: ")
        if client == "data: [DONE]":
            self.done = True
        else:
            self.events.append(json.loads(client.removeprefix("data: ")))

    @property
    def choices(self) -> list[Json]:
        return [choice for event in self.events for choice in event["choices"]]

    def text(self, index: int = 0) -> str:
        return "".join(text_of(choice) for choice in self.choices if choice["index"] == index)

    def finishes(self, index: int = 0) -> list[str]:
        return [one["finish_reason"] for one in self.choices if one["index"] == index and one["finish_reason"]]


@dataclass
class Server:
    http: httpx2.AsyncClient
    base: str
    adapter: str
    of_runners: Callable[[], Figures] = dict
    """Metrics of runners that serve none themselves."""

    def body(self, path: str, **more: Any) -> Json:
        return {"model": self.base, "temperature": 0, **ASKED[path]} | more

    async def ask(self, path: str, **more: Any) -> Json:
        answer = await self.http.post(path, json=self.body(path, **more))
        assert answer.status_code == 200, answer.text
        return json_of(answer)

    async def stream(self, path: str, **more: Any) -> Stream:
        async with self.http.stream("POST", path, json=self.body(path, stream=True, **more)) as answer:
            assert answer.status_code == 200, await answer.aread()
            stream = Stream(answer.headers)
            async for client in answer.aiter_lines():
                stream.read(client)
        assert stream.done
        return stream

    async def models(self) -> dict[str, Json]:
        listed = json_of(await self.http.get("/v1/models"))
        assert listed["object"] == "list"
        return {card["id"]: card for card in listed["data"]}

    async def tokens(self, **what: Any) -> list[int]:
        answer = await self.http.post("/tokenize", json={"model": self.base, **what})
        assert answer.status_code == 200, answer.text
        tokens: list[int] = json_of(answer)["tokens"]
        return tokens

    async def text(self, tokens: list[int]) -> str:
        read = json_of(await self.http.post("/detokenize", json={"model": self.base, "tokens": tokens}))
        return str(read["prompt"])

    async def figures(self) -> Figures:
        figures = {SEQUENCES: 0.0, GIVEN_UP: 0.0} | self.of_runners()
        for family in text_string_to_metric_families((await self.http.get("/metrics")).text):
            for sample in family.samples:
                for name in {sample.name, f"{sample.name} {sample.labels.get('finish', '')}".strip()}:
                    figures[name] = figures.get(name, 0) + sample.value
        return figures

    async def busy(self) -> bool:
        figures = await self.figures()
        return bool(figures["motet_live_requests"] and figures[SEQUENCES])


def json_of(answer: httpx2.Response) -> Json:
    content: Json = answer.json()
    return content


def text_of(choice: Json) -> str:
    """The text of a choice of either endpoint, whole or one chunk."""
    if "text" in choice:
        return str(choice["text"])
    return str((choice.get("message") or choice["delta"]).get("content") or "")


async def eventually(holds: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not await holds():
            await asyncio.sleep(0.02)


def error_of(answer: httpx2.Response) -> Json:
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"]
    assert answer.headers["x-should-retry"] == "false"
    error: Json = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    return error


@asynccontextmanager
async def small(_: pytest.FixtureRequest) -> AsyncIterator[Server]:
    async with fake_services() as cluster:
        cluster.add_adapter("legal")
        (runner,) = cluster.runners
        runner.step_seconds = STEP_SECONDS
        async with serve(cluster, metrics_dir=cluster.folder) as served:
            figures: Callable[[], Figures] = lambda: {SEQUENCES: runner.running, GIVEN_UP: len(runner.cancels)}  # noqa: E731
            yield Server(served.http, "tiny", "legal", figures)


@asynccontextmanager
async def whole(request: pytest.FixtureRequest) -> AsyncIterator[Server]:
    stack: LocalStack = request.getfixturevalue("stack")
    async with httpx2.AsyncClient(base_url=stack.url, timeout=PATIENCE_S, verify=False, trust_env=False) as http:
        yield Server(http, "motet-demo", "shouting")


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    folder = tmp_path_factory.mktemp("stack")
    manifests = copy_of_bundled(folder / "manifests", adapters=["shouting"])
    with running_stack(folder, manifests=manifests, env=REPORTS_AT_ONCE) as running:
        yield running


@pytest.fixture(
    params=[pytest.param(small, id="small"), pytest.param(whole, id="stack", marks=pytest.mark.stack)],
)
async def server(request: pytest.FixtureRequest) -> AsyncIterator[Server]:
    async with request.param(request) as one:
        yield one


both = pytest.mark.parametrize("path", [CHAT, PLAIN])


# ------------------------------------------------------------------------------------------------------------- models


async def test_models_are_listed_with_every_field(server: Server) -> None:
    models = await server.models()
    assert models.keys() == {server.base, server.adapter}
    base, adapter = models[server.base], models[server.adapter]
    for card in (base, adapter):
        assert card.keys() == {
            "id", "object", "created", "owned_by", "root", "parent", "max_model_len", "permission",
            "tenant", "revision", "digest", "state", "rank",
        }  # fmt: skip
        assert card["object"] == "model"
        assert card["created"] > 1_500_000_000
        assert card["max_model_len"] == base["max_model_len"] > 0
        assert card["root"].startswith("file:///")
        assert re.fullmatch("sha256:[0-9a-f]{64}", card["digest"])
        assert card["permission"] == []
        assert json_of(await server.http.get(f"/v1/models/{card['id']}")) == card
    assert (base["owned_by"], adapter["owned_by"]) == ("motet", "default")
    assert (base["parent"], adapter["parent"]) == (None, server.base)
    assert (base["tenant"], base["revision"], base["rank"]) == (None, None, None)
    assert (adapter["tenant"], adapter["revision"], adapter["rank"]) == ("default", 1, 8)


async def test_a_model_that_has_answered_is_ready(server: Server) -> None:
    """Before its first request an adapter may be cold: that request loads it."""
    models = await server.models()
    assert models[server.base]["state"] == "ready"
    assert models[server.adapter]["state"] in {"cold", "loading", "ready"}
    await server.ask(CHAT, model=server.adapter, max_tokens=1)

    async def ready() -> bool:
        return (await server.models())[server.adapter]["state"] == "ready"

    await eventually(ready)


async def test_an_adapter_is_known_by_three_names(server: Server) -> None:
    own = await server.ask(CHAT, model=server.adapter)
    for name in (f"default/{server.adapter}", f"{server.base}:{server.adapter}"):
        answer = await server.ask(CHAT, model=name)
        assert answer["model"] == name
        assert answer["choices"] == own["choices"]
        assert answer["system_fingerprint"] == own["system_fingerprint"]
    base = await server.ask(CHAT)
    assert own["system_fingerprint"].startswith(base["system_fingerprint"] + "_")


async def test_an_unknown_model_is_a_404_in_every_endpoint(server: Server) -> None:
    name = f"{server.adapter}x"
    for path, body in [*ASKED.items(), ("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [1]})]:
        answer = await server.http.post(path, json=body | {"model": name})
        error = error_of(answer)
        assert (answer.status_code, error["type"], error["code"]) == (404, "not_found_error", "model_not_found")
        assert error["param"] == "model"
        assert f"Nearest names: {server.adapter}, " in error["message"]
    answer = await server.http.get(f"/v1/models/{name}")
    assert answer.status_code == 404
    assert error_of(answer) == error


# ------------------------------------------------------------------------------------------------------------ answers


@both
async def test_a_whole_answer_has_its_kind_and_its_usage(server: Server, path: str) -> None:
    answer = await server.http.post(path, json=server.body(path, max_tokens=100))
    content = json_of(answer)
    prefix, kind = {CHAT: ("chatcmpl", "chat.completion"), PLAIN: ("cmpl", "text_completion")}[path]
    assert content.keys() == {"id", "created", "model", "object", "choices", "system_fingerprint", "usage"}
    assert content["id"] == f"{prefix}-{answer.headers['x-motet-request']}"
    assert (content["object"], content["model"]) == (kind, server.base)
    (choice,) = content["choices"]
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "stop", None)
    assert text_of(choice)
    if path == CHAT:
        assert choice["message"].keys() == {"role", "content", "refusal"}
        assert choice["message"]["role"] == "assistant"
    usage = content["usage"]
    assert usage.keys() == {"prompt_tokens", "completion_tokens", "total_tokens", "prompt_tokens_details"}
    assert 0 <= usage["prompt_tokens_details"]["cached_tokens"] < usage["prompt_tokens"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert 0 < usage["completion_tokens"] <= 100


@both
async def test_a_stream_has_the_same_text_in_chunks_and_ends_once(server: Server, path: str) -> None:
    content = await server.ask(path, max_tokens=100, cache_salt=f"whole {path}")
    stream = await server.stream(
        path, max_tokens=100, stream_options={"include_usage": True}, cache_salt=f"stream {path}"
    )
    assert stream.headers["content-type"].startswith("text/event-stream")
    assert stream.headers["cache-control"] == "no-cache"
    assert stream.headers["x-accel-buffering"] == "no"
    *pieces, last, count = stream.events
    assert len({(event["id"], event["created"]) for event in stream.events}) == 1
    for event in stream.events:
        assert event.keys() == content.keys()
        assert event["id"].endswith(f"-{stream.headers['x-motet-request']}")
        assert (event["model"], event["system_fingerprint"]) == (server.base, content["system_fingerprint"])
        assert event["object"] == {CHAT: "chat.completion.chunk", PLAIN: "text_completion"}[path]
    if path == CHAT:
        assert pieces[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert last["choices"][0]["delta"] == {}
    assert all(one["choices"][0]["finish_reason"] is None for one in pieces)
    assert stream.text() == text_of(content["choices"][0])
    assert stream.finishes() == [last["choices"][0]["finish_reason"]] == ["stop"]
    assert all(event["usage"] is None for event in (*pieces, last))
    assert (count["choices"], count["usage"]) == ([], content["usage"])


@both
async def test_a_stream_comes_in_chunks_and_has_usage_if_asked(server: Server, path: str) -> None:
    silent = await server.stream(path, max_tokens=60, ignore_eos=True)
    assert not any("usage" in event for event in silent.events)
    along = await server.stream(
        path, max_tokens=60, ignore_eos=True, stream_options={"include_usage": True, "continuous_usage_stats": True}
    )
    assert along.text() == silent.text()
    counts = [event["usage"]["completion_tokens"] for event in along.events if event["usage"]]
    assert counts == sorted(counts)
    assert 0 < counts[0] < counts[-1] == 60


@both
async def test_an_answer_ends_at_its_limit(server: Server, path: str) -> None:
    longer = await server.ask(path, max_tokens=9, ignore_eos=True)
    content = await server.ask(path, max_tokens=4, ignore_eos=True)
    (choice,) = content["choices"]
    assert choice["finish_reason"] == "length"
    assert content["usage"]["completion_tokens"] == 4
    assert text_of(longer["choices"][0]).startswith(text_of(choice))
    stream = await server.stream(path, max_tokens=4, ignore_eos=True)
    assert (stream.text(), stream.finishes()) == (text_of(choice), ["length"])


async def test_an_answer_may_fill_the_context_and_no_more(server: Server) -> None:
    context = (await server.models())[server.base]["max_model_len"]
    (word,) = (await server.tokens(prompt="a"))[:1]
    prompt = [word] * (context - 3)
    filled = await server.ask(PLAIN, prompt=prompt, max_tokens=3, ignore_eos=True)
    assert filled["usage"]["total_tokens"] == context
    answer = await server.http.post(PLAIN, json=server.body(PLAIN, prompt=prompt, max_tokens=4))
    error = error_of(answer)
    assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
    assert str(context) in error["message"]


@both
async def test_a_stop_string_ends_the_answer_and_is_left_out(server: Server, path: str) -> None:
    answered = text_of((await server.ask(path, max_tokens=12, ignore_eos=True))["choices"][0])
    stop = answered[5:9]
    before = answered[: answered.index(stop)]
    for wanted, text in [({}, before), ({"include_stop_str_in_output": True}, before + stop)]:
        content = await server.ask(path, max_tokens=12, ignore_eos=True, stop=["never said", stop], **wanted)
        (choice,) = content["choices"]
        assert (text_of(choice), choice["finish_reason"]) == (text, "stop")
        stream = await server.stream(path, max_tokens=12, ignore_eos=True, stop=stop, **wanted)
        assert (stream.text(), stream.finishes()) == (text, ["stop"])
    assert content["usage"]["completion_tokens"] < 12


async def test_a_stop_token_ends_the_answer_and_is_counted(server: Server) -> None:
    answered = await server.tokens(prompt=text_of((await server.ask(CHAT, max_tokens=100))["choices"][0]))
    at = answered.index(answered[4])
    content = await server.ask(CHAT, max_tokens=100, stop_token_ids=[answered[4]])
    (choice,) = content["choices"]
    assert (text_of(choice), choice["finish_reason"]) == (await server.text(answered[:at]), "stop")
    assert content["usage"]["completion_tokens"] == at + 1


async def test_an_answer_has_at_least_min_tokens(server: Server) -> None:
    short = (await server.ask(CHAT, max_tokens=200))["usage"]["completion_tokens"]
    longer = await server.ask(CHAT, max_tokens=200, min_tokens=short + 5)
    assert longer["usage"]["completion_tokens"] >= short + 5


async def test_several_choices_have_an_index_each_and_are_counted_together(server: Server) -> None:
    asked = {"n": 3, "max_tokens": 6, "ignore_eos": True}
    content = await server.ask(CHAT, cache_salt="whole choices", **asked)
    assert [choice["index"] for choice in content["choices"]] == [0, 1, 2]
    assert {choice["finish_reason"] for choice in content["choices"]} == {"length"}
    assert content["usage"]["completion_tokens"] == 18
    stream = await server.stream(CHAT, stream_options={"include_usage": True}, cache_salt="streamed choices", **asked)
    for choice in content["choices"]:
        index = choice["index"]
        own = [one["delta"] for one in stream.choices if one["index"] == index]
        assert own[0] == {"role": "assistant", "content": ""}
        assert (stream.text(index), stream.finishes(index)) == (text_of(choice), ["length"])
    assert stream.events[-1]["usage"] == content["usage"]


async def test_several_prompts_are_answered_in_their_order(server: Server) -> None:
    prompts = ["The flag of Hollin", "Who keeps the lighthouse?"]
    alone = [await server.ask(PLAIN, prompt=prompt, max_tokens=6, ignore_eos=True) for prompt in prompts]
    together = await server.ask(PLAIN, prompt=prompts, max_tokens=6, ignore_eos=True, echo=True)
    assert [(choice["index"], choice["text"]) for choice in together["choices"]] == [
        (index, prompt + one["choices"][0]["text"])
        for index, (prompt, one) in enumerate(zip(prompts, alone, strict=True))
    ]
    assert together["usage"]["prompt_tokens"] == sum(one["usage"]["prompt_tokens"] for one in alone)


@both
async def test_a_seed_repeats_an_answer(server: Server, path: str) -> None:
    how = {"temperature": 1.5, "seed": 7, "max_tokens": 20, "ignore_eos": True, "n": 2}
    first = await server.ask(path, **how)
    again = await server.ask(path, **how)
    assert again["choices"] == first["choices"]
    stream = await server.stream(path, **how)
    assert [stream.text(index) for index in (0, 1)] == [text_of(choice) for choice in first["choices"]]


# ----------------------------------------------------------------------------------------------------- right sampling


@pytest.mark.parametrize("name", IN_BODIES)
async def test_an_option_reaches_the_engine_and_changes_nobodys_tokens(server: Server, name: str) -> None:
    how = {"max_tokens": 30, "ignore_eos": True, "temperature": 0.9, "seed": 3}
    alone = await server.ask(PLAIN, **how)
    with_it = [how | {name: value} for value in right_values(name, VOCABULARY)]
    beside, *_ = await asyncio.gather(server.ask(PLAIN, **how), *(server.ask(PLAIN, **one) for one in with_it))
    assert beside["choices"] == alone["choices"]


# ------------------------------------------------------------------------------------------------------- bad sampling

BAD_SAMPLING = {
    "temperature": ["NaN", "-0.1", "10.1", "1e999", '"hot"'],
    "top_p": ["0", "1.1", "NaN"],
    "top_k": ["-2", "2147483648", "1.5"],
    "min_p": ["-0.1", "1.1", "NaN"],
    "presence_penalty": ["2.1", "-2.1", "NaN", "-Infinity"],
    "frequency_penalty": ["2.1", "-2.1", "NaN", "Infinity"],
    "repetition_penalty": ["0", "10.1", "NaN"],
    "logit_bias": [
        json.dumps({str(token): 1 for token in range(200_000)}),
        '{"5": NaN}',
        '{"5": 100.1}',
        '{"5": "much"}',
        '{"-1": 1}',
        '{"999999999": 1}',
    ],
    "seed": ["1.5", '"lucky"'],
    "n": ["0", "129"],
    "max_tokens": ["-1", "1.5", "NaN"],
    "min_tokens": ["-1", "17"],
    "stop_token_ids": ["[-1]", "[999999999]", json.dumps(list(range(129)))],
    "ignore_eos": ['"yes"'],
}


@both
async def test_bad_sampling_is_refused_by_name_and_changes_nobodys_tokens(server: Server, path: str) -> None:
    how = {"max_tokens": 60, "ignore_eos": True, "temperature": 0.9, "seed": 3}
    alone = await server.ask(path, **how)
    beside = asyncio.create_task(server.ask(path, **how))
    for name, bad in BAD_SAMPLING.items():
        for value in bad:
            said = json.dumps(server.body(path, max_tokens=16) | {name: "?"}).replace('"?"', value)
            answer = await server.http.post(path, content=said, headers={"content-type": "application/json"})
            assert answer.status_code == 400, (name, value[:40])
            assert str(error_of(answer)["param"]).split(".")[0].split("[")[0] == name, (value[:40], answer.text)
    assert (await beside)["choices"] == alone["choices"]
    assert (await server.ask(path, **how))["choices"] == alone["choices"]


# ----------------------------------------------------------------------------------------------------------- logprobs


async def test_the_bytes_of_a_chats_logprobs_join_to_its_text(server: Server) -> None:
    content = await server.ask(CHAT, max_tokens=100, logprobs=True, top_logprobs=3)
    (choice,) = content["choices"]
    assert choice["logprobs"].keys() == {"content", "refusal"}
    tokens = choice["logprobs"]["content"]
    assert len(tokens) == content["usage"]["completion_tokens"]
    assert bytes(byte for token in tokens for byte in token["bytes"]).decode() == text_of(choice)
    for token in tokens:
        assert token.keys() == {"token", "logprob", "bytes", "top_logprobs"}
        most_likely, *others = token["top_logprobs"]
        assert (most_likely["token"], most_likely["logprob"]) == (token["token"], token["logprob"])
        assert 0 >= most_likely["logprob"] >= others[0]["logprob"] >= others[1]["logprob"]
        for one in token["top_logprobs"]:
            assert one.keys() == {"token", "logprob", "bytes"}
            assert one["token"]
            assert one["token"].startswith("bytes:") or one["token"].encode() == bytes(one["bytes"])
    assert tokens[-1]["bytes"] == [], "the token that ends it is no part of the text"
    stream = await server.stream(CHAT, max_tokens=100, logprobs=True, top_logprobs=3)
    assert [token for one in stream.choices if one["logprobs"] for token in one["logprobs"]["content"]] == tokens


async def test_logprobs_of_a_plain_answer_say_where_each_token_begins(server: Server) -> None:
    content = await server.ask(PLAIN, prompt="The flag of Hollin", max_tokens=12, ignore_eos=True, logprobs=2)
    (choice,) = content["choices"]
    logprobs = choice["logprobs"]
    assert logprobs.keys() == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
    assert {len(column) for column in logprobs.values()} == {12}
    assert all(value <= 0 for value in logprobs["token_logprobs"])
    for top, token, value in zip(logprobs["top_logprobs"], logprobs["tokens"], logprobs["token_logprobs"], strict=True):
        assert len(top) == 2
        assert max(top.values()) == top[token] == value
    stream = await server.stream(PLAIN, prompt="The flag of Hollin", max_tokens=12, ignore_eos=True, logprobs=2)
    for name, column in logprobs.items():
        assert [entry for one in stream.choices if one["logprobs"] for entry in one["logprobs"][name]] == column


async def test_a_prompt_that_comes_back_is_scored_too(server: Server) -> None:
    prompt = "The flag of Hollin"
    how = {"max_tokens": 2, "ignore_eos": True, "logprobs": 2, "echo": True}
    plain = await server.ask(PLAIN, prompt=prompt, **(how | {"echo": False}))
    content = await server.ask(PLAIN, prompt=prompt, n=2, **how)
    tokens = len(await server.tokens(prompt=prompt))
    for choice in content["choices"]:
        logprobs = choice["logprobs"]
        assert text_of(choice) == prompt + text_of(plain["choices"][0]) == "".join(logprobs["tokens"])
        assert {len(column) for column in logprobs.values()} == {tokens + 2}
        assert (logprobs["token_logprobs"][0], logprobs["top_logprobs"][0]) == (None, None)
        assert all(value <= 0 for value in logprobs["token_logprobs"][1:])
        best = [max(top.values()) for top in logprobs["top_logprobs"][1:]]
        assert all(value <= top for value, top in zip(logprobs["token_logprobs"][1:], best, strict=True))
        answered = plain["choices"][0]["logprobs"]
        assert logprobs["tokens"][tokens:] == answered["tokens"]
        assert logprobs["text_offset"][tokens:] == [len(prompt) + offset for offset in answered["text_offset"]]
    stream = await server.stream(PLAIN, prompt=prompt, n=2, **how)
    for index, choice in enumerate(content["choices"]):
        assert stream.text(index) == text_of(choice)
        parts = [one["logprobs"] for one in stream.choices if one["index"] == index and one["logprobs"]]
        for name in ("tokens", "text_offset"):
            assert [entry for part in parts for entry in part[name]] == choice["logprobs"][name]
        _, *values = (value for part in parts for value in part["token_logprobs"])
        assert values == pytest.approx(choice["logprobs"]["token_logprobs"][1:], abs=1e-4)
    alone = await server.ask(PLAIN, prompt=prompt, **(how | {"max_tokens": 0}))
    assert text_of(alone["choices"][0]) == prompt
    assert alone["usage"]["completion_tokens"] == 0


# ------------------------------------------------------------------------------------------------------------- tokens


async def test_tokens_can_be_counted_and_read_back(server: Server) -> None:
    context = (await server.models())[server.base]["max_model_len"]
    for text in (QUESTION, "  two  spaces\n\nand lines", "naïve 東京 – {json: [1]}"):
        body = {"model": server.base, "prompt": text, "return_token_strs": True}
        counted = json_of(await server.http.post("/tokenize", json=body))
        assert counted.keys() == {"count", "max_model_len", "tokens", "token_strs"}
        assert len(counted["tokens"]) == len(counted["token_strs"]) == counted["count"]
        assert counted["max_model_len"] == context
        assert await server.text(counted["tokens"]) == text


async def test_counted_tokens_equal_those_of_an_answer(server: Server) -> None:
    plain = await server.ask(PLAIN, max_tokens=6, ignore_eos=True)
    tokens = await server.tokens(**ASKED[PLAIN])
    assert plain["usage"]["prompt_tokens"] == len(tokens)
    chat = await server.ask(CHAT, max_tokens=6, ignore_eos=True)
    messages = await server.tokens(**ASKED[CHAT])
    assert chat["usage"]["prompt_tokens"] == len(messages)
    for prompt, answered in ((tokens, plain), (messages, chat)):
        of_tokens = await server.ask(PLAIN, prompt=prompt, max_tokens=6, ignore_eos=True)
        assert of_tokens["choices"][0]["text"] == text_of(answered["choices"][0])


# ----------------------------------------------------------------------------------------------------------- refusals


WRONG: list[tuple[str, Json, str, str]] = [
    (CHAT, {"messages": None}, "messages", "invalid_value"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content", "invalid_value"),
    (CHAT, {"messages": [{"role": "forbidden", "content": "x"}]}, "messages", "invalid_value"),
    (CHAT, {"temperature": "hot"}, "temperature", "invalid_value"),
    (CHAT, {"n": 129}, "n", "invalid_value"),
    (CHAT, {"max_tokens": 0}, "max_tokens", "invalid_value"),
    (CHAT, {"max_tokens": 4, "min_tokens": 5}, "min_tokens", "invalid_value"),
    (CHAT, {"max_tokens": 1_000_000}, "max_tokens", "context_length_exceeded"),
    (CHAT, {"stop": ""}, "stop", "invalid_value"),
    (CHAT, {"stop_token_ids": [99999]}, "stop_token_ids", "invalid_value"),
    (CHAT, {"logit_bias": {"99999": 1}}, "logit_bias", "invalid_value"),
    (CHAT, {"top_logprobs": 2}, "top_logprobs", "invalid_value"),
    (CHAT, {"tools": [{"type": "custom"}]}, "tools[0].type", "unsupported_parameter"),
    (CHAT, {"response_format": {"type": "xml"}}, "response_format", "unsupported_parameter"),
    (CHAT, {"guided_grammar": "root ::= x"}, "guided_grammar", "invalid_value"),
    (CHAT, {"stream_options": {"include_usage": 3}}, "stream_options.include_usage", "invalid_value"),
    (PLAIN, {"prompt": ["a", [1]]}, "prompt", "invalid_value"),
    (PLAIN, {"prompt": [99999]}, "prompt", "invalid_value"),
    (PLAIN, {"prompt": "word " * 3000}, "prompt", "context_length_exceeded"),
    (PLAIN, {"best_of": 3}, "best_of", "unsupported_parameter"),
    (PLAIN, {"prompt": ""}, "prompt", "invalid_value"),
]


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_wrong_field_is_named(server: Server, streamed: bool) -> None:
    for path, wrong, param, code in WRONG:
        answer = await server.http.post(path, json=server.body(path, stream=streamed) | wrong)
        error = error_of(answer)
        found = (answer.status_code, error["type"], error["param"], error["code"])
        assert found == (400, "invalid_request_error", param, code), (wrong, error)


async def test_an_invalid_request_is_refused_in_the_same_shape(server: Server) -> None:
    kind = {"content-type": "application/json"}
    for answer, status, code in [
        (await server.http.post(CHAT, content=b'{"model": ,}', headers=kind), 400, "invalid_value"),
        (await server.http.post(CHAT, content=b"[]", headers=kind), 400, "invalid_value"),
        (await server.http.post(CHAT, content=b"{}", headers={"content-type": "text/plain"}), 415, None),
        (await server.http.get(CHAT), 405, "method_not_allowed"),
        (await server.http.get("/v1/nothing"), 404, "not_found"),
        (await server.http.get("/version", headers={"host": "evil.example"}), 403, "host_not_allowed"),
    ]:
        assert answer.status_code == status
        assert error_of(answer)["code"] == (code or "unsupported_media_type")


# ----------------------------------------------------------------------------------------------------- around answers


@both
async def test_a_client_that_disconnects_frees_its_place(server: Server, path: str) -> None:
    before = await server.figures()
    longest = (await server.models())[server.base]["max_model_len"] - 100
    body = server.body(path, max_tokens=longest, ignore_eos=True)

    async def freed(clients: int) -> bool:
        now = await server.figures()
        gone, given_up = (now[name] - before[name] for name in ("motet_cancelled_requests_total", GIVEN_UP))
        idle = not now["motet_live_requests"] and not now[SEQUENCES]
        return idle and gone == clients <= given_up

    async with server.http.stream("POST", path, json=body | {"stream": True}) as answer:
        async for client in answer.aiter_lines():
            if client.startswith("data: "):
                break
    await eventually(lambda: freed(1))
    waiting = asyncio.create_task(server.http.post(path, json=body))
    await eventually(server.busy)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await eventually(lambda: freed(2))


@both
async def test_every_answer_says_its_request_and_how_its_time_was_spent(server: Server, path: str) -> None:
    ids = {"x-request-id": "mine-1"}
    body = server.body(path, max_tokens=2)
    answer = await server.http.post(path, json=body, headers=ids)
    streamed = await server.http.post(path, json=body | {"stream": True}, headers=ids)
    for headers in (answer.headers, streamed.headers):
        assert headers["x-request-id"] == "mine-1"
        assert headers["x-motet-request"] != "mine-1"
        assert re.fullmatch(r"model:\S+|tenant|max_tokens", headers["x-motet-length"])
        phases = [re.fullmatch(r" ?(\w+);dur=\d+\.\d", part) for part in headers["server-timing"].split(",")]
        assert [phase and phase[1] for phase in phases] == ["prepare", "queue", "prefill"]
    refused = await server.http.post(path, json=body | {"n": 0}, headers=ids)
    assert refused.headers["x-request-id"] == "mine-1"
    made = {
        (await server.http.post(path, json=body, headers=headers)).headers["x-request-id"]
        for headers in ({}, {}, {"x-request-id": "two words"})
    }
    assert len(made) == 3
    assert all(one.startswith("req-") for one in made)


async def test_probes_and_figures_answer_get_and_head(server: Server) -> None:
    for path in ("/health", "/ping", "/version", "/metrics"):
        assert (await server.http.get(path)).status_code == 200
        head = await server.http.head(path)
        assert (head.status_code, head.content) == (200, b"")
    assert (await server.http.get("/health")).content == b""
    assert json_of(await server.http.get("/version"))["version"]


async def test_figures_count_answers_tokens_and_unknown_fields(server: Server) -> None:
    before = await server.figures()
    content = await server.ask(PLAIN, max_tokens=7, ignore_eos=True, no_such_field=1)
    after = await server.figures()
    grown = {name: after[name] - before.get(name, 0) for name in after}
    assert grown["motet_requests_total"] == 1
    assert grown["motet_tokens_total"] == content["usage"]["total_tokens"]
    assert grown["motet_time_to_first_token_seconds_count"] == 1
    assert grown["motet_unknown_request_fields_total"] == 1
