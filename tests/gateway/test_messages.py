"""Anthropic's Messages API: its unmodified client, over a real socket. The runner writes what the user says."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import pytest

from motet.errors import TABLE, InvalidRequest, MotetError
from motet_gateway.answers.messages.body import CountedMessages, MessagesBody
from motet_gateway.answers.messages.conversation import chat_messages
from motet_gateway.answers.messages.errors import ERROR_TYPES, messages_error
from motet_gateway.answers.messages.writer import SIGNATURE
from motet_gateway.parameters import parse
from testbed.fake_services import FakeServices, fake_services, model_assets
from tests.gateway.conftest import Heard, Served, eventually, hear_nothing, serve
from tests.gateway.test_reasoning import reasoning
from tests.support.for_each import for_each

Json = dict[str, Any]

HELLO: list[Any] = [{"role": "user", "content": "The quick brown fox"}]
SCHEMA = {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]}
TOOLS: list[Any] = [{"name": "look_up", "input_schema": SCHEMA}, {"name": "send", "input_schema": {"type": "object"}}]
CALLS = (
    'So: <tool_call>\n{"name": "look_up", "arguments": {"q": "a b"}}\n</tool_call>\n'
    '<tool_call>{"name": "send", "arguments": {}}</tool_call>'
)


@pytest.fixture
async def hermes() -> AsyncIterator[Served]:
    template = (
        "{#- <tool_call> -#}{{ messages[-1].content }}{% if tools and messages[-1].content == 'Yes' %} I can{% endif %}"
    )
    async with fake_services(assets=model_assets(template=template)) as cluster, serve(cluster) as served:
        yield served


def says(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


async def read(served: Served, heard: Heard = hear_nothing, **body: Any) -> tuple[list[str], list[Json]]:
    """The names of a stream's events, and the events."""
    asked = {"model": "tiny", "max_tokens": 60, "messages": HELLO} | body
    events = await served.typed_events("/v1/messages", asked, heard)
    return [event["type"] for event in events], events


async def test_the_client_gets_a_message(served: Served) -> None:
    answer = await served.anthropic.messages.create(model="legal", max_tokens=60, messages=HELLO)
    assert [block.text for block in answer.content if block.type == "text"] == ["The quick brown fox "]
    assert (answer.role, answer.type, answer.model) == ("assistant", "message", "legal")
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    assert answer.usage.input_tokens == answer.usage.output_tokens - 1
    assert answer._request_id  # noqa: SLF001 - as its documentation says
    explained = await served.http.get(f"/motet/requests/{answer.id}")
    assert explained.json()["http_id"] == answer._request_id  # noqa: SLF001


async def test_the_client_streams_the_same_message(served: Served) -> None:
    whole = await served.anthropic.messages.create(model="legal", max_tokens=60, messages=HELLO)
    async with served.anthropic.messages.stream(model="legal", max_tokens=60, messages=HELLO) as stream:
        text = "".join([piece async for piece in stream.text_stream])
        streamed = await stream.get_final_message()
    assert text == "The quick brown fox "
    other = {"id": "", "stop_details": None}  # the client adds the details to what it has read of a stream
    assert streamed.to_dict() | other == whole.to_dict() | other


async def test_the_events_come_in_their_order(served: Served) -> None:
    names, events = await read(served)
    middle = names[2:-3]
    assert names[:2] == ["message_start", "content_block_start"]
    assert set(middle) == {"content_block_delta"}
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert events[0]["message"]["stop_reason"] is None
    assert events[0]["message"]["usage"]["input_tokens"] > 0
    assert events[-2]["usage"]["output_tokens"] == events[0]["message"]["usage"]["input_tokens"] + 1


async def test_calls_of_tools_arrive_whole_and_streamed(hermes: Served) -> None:
    said: Json = {"model": "tiny", "max_tokens": 200, "messages": says(CALLS), "tools": TOOLS}
    whole = await hermes.anthropic.messages.create(**said)
    assert whole.stop_reason == "tool_use"
    assert [block.type for block in whole.content] == ["text", "tool_use", "tool_use"]
    assert [(one.name, one.input) for one in whole.content[1:] if one.type == "tool_use"] == [
        ("look_up", {"q": "a b"}),
        ("send", {}),
    ]
    async with hermes.anthropic.messages.stream(**said) as stream:
        streamed = await stream.get_final_message()
    plain = [[block.to_dict() | {"id": ""} for block in message.content] for message in (whole, streamed)]
    assert plain[0] == plain[1]
    assert streamed.stop_reason == "tool_use"


@pytest.mark.parametrize("step", [1, 3, 1000])
async def test_blocks_of_a_stream_never_overlap(hermes: Served, step: int) -> None:
    hermes.cluster.runners[0].tokens_per_step = step
    text = CALLS + " and then some" + CALLS
    _, events = await read(hermes, messages=says(text), tools=TOOLS, max_tokens=300)
    open_block, seen = None, -1
    for event in events:
        match event["type"]:
            case "content_block_start":
                assert open_block is None
                open_block = event["index"]
                assert open_block == seen + 1
                seen = open_block
            case "content_block_delta":
                assert event["index"] == open_block
            case "content_block_stop":
                assert event["index"] == open_block
                open_block = None
    inputs = [
        "".join(e["delta"]["partial_json"] for e in events if e["type"] == "content_block_delta" and e["index"] == at)
        for at, e in enumerate(one for one in events if one["type"] == "content_block_start")
        if e["content_block"]["type"] == "tool_use"
    ]
    assert [json.loads(one) for one in inputs] == [{"q": "a b"}, {}] * 2


@pytest.mark.parametrize(
    ("choice", "must", "parallel", "tools"),
    [
        ({"type": "auto"}, False, True, 2),
        ({"type": "auto", "disable_parallel_tool_use": True}, False, False, 2),
        ({"type": "any"}, True, True, 2),
        ({"type": "any", "disable_parallel_tool_use": True}, True, False, 2),
        ({"type": "tool", "name": "send"}, True, False, 1),
    ],
)
def test_each_tool_choice_becomes_that_of_a_chat(choice: Json, must: bool, parallel: bool, tools: int) -> None:
    body = MessagesBody(model="m", max_tokens=5, messages=HELLO, tools=TOOLS, tool_choice=choice)
    body.refuse_unsupported()
    offered = body.tools_offered
    assert offered is not None
    assert (offered.must, offered.parallel, len(offered.schemas)) == (must, parallel, tools)
    assert offered.said[0] == {"type": "function", "function": {"name": "look_up", "parameters": SCHEMA}}


async def test_a_choice_of_no_tool_hides_them(hermes: Served) -> None:
    for choice, text in (({"type": "auto"}, "Yes I can"), ({"type": "none"}, "Yes")):
        answer = await hermes.anthropic.messages.create(
            model="tiny", max_tokens=20, messages=says("Yes"), tools=TOOLS, tool_choice=choice
        )
        assert [block.text for block in answer.content if block.type == "text"] == [text]


async def test_a_call_that_is_cut_has_what_came_of_its_input(hermes: Served) -> None:
    text = '<tool_call>{"name": "look_up", "arguments": {"q": "a b", "n": [1, 2], "s": "abcdef"}}</tool_call>'
    most = len(hermes.cluster.tokenizer.encode(text[: text.index("abcdef") + 3]).ids)
    said: Json = {"model": "tiny", "max_tokens": most, "messages": says(text), "tools": TOOLS}
    whole = await hermes.anthropic.messages.create(**said)
    async with hermes.anthropic.messages.stream(**said) as stream:
        streamed = await stream.get_final_message()
    for answer in (whole, streamed):
        assert answer.stop_reason == "max_tokens"
        assert answer.content[-1].type == "tool_use"
        assert answer.content[-1].input == {"q": "a b", "n": [1, 2]}


@pytest.mark.parametrize("step", [1, 3, 500])
async def test_thinking_is_a_block_if_it_is_asked_for(step: int) -> None:
    said: Json = {"model": "tiny", "max_tokens": 200, "messages": says("<think>a b</think>So.")}
    async with reasoning(step=step) as served:
        for kind in ("enabled", "adaptive", "disabled", None):
            thinking = {} if kind is None else {"thinking": {"type": kind, "budget_tokens": 1024}}
            whole = await served.anthropic.messages.create(**said, **thinking)
            async with served.anthropic.messages.stream(**said, **thinking) as stream:
                streamed = await stream.get_final_message()
            wanted = [{"type": "text", "text": "So."}]
            if kind in ("enabled", "adaptive"):
                wanted.insert(0, {"type": "thinking", "thinking": "a b", "signature": SIGNATURE})
            assert [[one.to_dict() for one in answer.content] for answer in (whole, streamed)] == [wanted] * 2


async def test_the_template_is_told_whether_to_think() -> None:
    template = "{{ enable_thinking }} {{ reasoning_effort }}"
    async with reasoning(template) as served:
        for thinking, text in ((None, "False none"), ({"type": "adaptive"}, "True high")):
            body = {"thinking": thinking, "output_config": {"effort": "high"}, "messages": HELLO}
            answer = await served.http.post("/v1/messages", json={"model": "tiny", "max_tokens": 60} | body)
            assert [one["text"] for one in answer.json()["content"]] == [text]


def call_of(arguments: str) -> str:
    return f'<tool_call>{{"name": "send", "arguments": {arguments}}}</tool_call>'


@pytest.mark.parametrize("arguments", [r'{"q": "tmp/\ud83d"}', '{"q": "x",}', "{q: 1}", r'{"q": "a\qb"}'])
async def test_arguments_that_are_no_object_are_an_error(hermes: Served, arguments: str) -> None:
    said: Json = {"model": "tiny", "max_tokens": 200, "messages": says(call_of(arguments)), "tools": TOOLS}
    client = hermes.anthropic.with_options(max_retries=0)
    with pytest.raises(anthropic.InternalServerError, match="no JSON object"):
        await client.messages.create(**said)
    with pytest.raises(anthropic.APIStatusError, match="no JSON object"):
        async with client.messages.stream(**said) as stream:
            await stream.get_final_message()


async def test_a_long_integer_of_a_call_is_exact_and_may_be_sent_back(hermes: Served) -> None:
    number = 123456789012345678901234567890
    said: Json = {"model": "tiny", "max_tokens": 200, "messages": says(call_of(f'{{"q": {number}}}')), "tools": TOOLS}
    whole = await hermes.anthropic.messages.create(**said)
    async with hermes.anthropic.messages.stream(**said) as stream:
        streamed = await stream.get_final_message()
    for answer in (whole, streamed):
        (call,) = answer.content
        assert call.type == "tool_use"
        assert call.input == {"q": number}
    made = chat_messages(None, [{"role": "assistant", "content": [USE | {"input": {"q": [number, 1]}}]}, *HELLO])
    assert made[0]["tool_calls"][0]["function"]["arguments"] == {"q": [str(number), 1]}


async def test_a_stop_sequence_is_named(served: Served) -> None:
    for stop in (["brown", "fox"], ["fox", "brown fox"]):
        answer = await served.anthropic.messages.create(
            model="tiny", max_tokens=60, messages=HELLO, stop_sequences=stop
        )
        assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", stop[0] if "brown" in stop else stop[1])
        _, events = await read(served, stop_sequences=stop)
        assert events[-2]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": answer.stop_sequence}


async def test_an_answer_may_fill_the_context_though_the_limit_is_larger(served: Served) -> None:
    body: Json = {"extra_body": {"ignore_eos": True}}
    short = await served.anthropic.messages.create(model="tiny", max_tokens=7, messages=HELLO, **body)
    assert (short.stop_reason, short.usage.output_tokens) == ("max_tokens", 7)
    full = await served.anthropic.messages.create(model="tiny", max_tokens=32_000, messages=HELLO, **body)
    assert full.stop_reason == "model_context_window_exceeded"
    assert full.usage.input_tokens + full.usage.output_tokens == 512
    with pytest.raises(anthropic.BadRequestError, match="context is 512 tokens"):
        await served.anthropic.messages.create(model="tiny", max_tokens=5, messages=says("fox " * 600))


async def test_the_assistants_last_message_is_continued(cluster: FakeServices) -> None:
    template = (
        "{% for one in messages %}[{{ one.role }}]{{ one.content }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    async with fake_services(assets=model_assets(template=template)) as other, serve(other) as served:
        asked: list[Any] = [*says("Count."), {"role": "assistant", "content": "One, "}]
        answer = await served.anthropic.messages.create(model="tiny", max_tokens=60, messages=asked, system="Be brief.")
        (block,) = answer.content
        assert block.type == "text"
        assert block.text == "[system]Be brief.[user]Count.[assistant]One, "


@pytest.mark.parametrize("content", ["", [], [{"type": "text", "text": ""}]])
async def test_an_empty_last_message_of_the_assistant_is_left_out(cluster: FakeServices, content: Any) -> None:
    async with serve(cluster) as served:
        said = [*HELLO, {"role": "assistant", "content": content}]
        answers = [
            await served.anthropic.messages.create(model="tiny", max_tokens=60, messages=one) for one in (said, HELLO)
        ]
    assert answers[0].content == answers[1].content
    assert answers[0].usage == answers[1].usage


async def test_the_schema_of_output_config_is_the_grammar(served: Served) -> None:
    form = {"type": "json_schema", "schema": SCHEMA}
    await served.anthropic.messages.create(
        model="tiny", max_tokens=20, messages=HELLO, output_config={"format": form, "effort": "low"}
    )
    (submit,) = served.cluster.runners[0].submits
    assert json.loads(submit.sampling.json_schema) == SCHEMA


async def test_parameters_reach_the_runner_and_unknown_fields_are_named(served: Served) -> None:
    asked = {"top_k": 3, "top_p": 0.5, "temperature": 0.25, "metadata": {"user_id": "u"}, "colour": "red"}
    answer = await served.http.post(
        "/v1/messages",
        json={"model": "tiny", "max_tokens": 9, "messages": HELLO, "thinking": {"type": "disabled"}} | asked,
        headers={"anthropic-version": "2023-06-01"},
    )
    assert answer.status_code == 200
    assert answer.headers["x-motet-ignored"] == "colour"
    assert answer.headers["request-id"] == answer.headers["x-request-id"]
    assert "prefill;dur=" in answer.headers["server-timing"]
    (submit,) = served.cluster.runners[0].submits
    sampling = submit.sampling
    assert (sampling.top_k, sampling.top_p, sampling.temperature, sampling.max_tokens) == (3, 0.5, 0.25, 9)


async def test_tokens_are_counted_as_they_are_used(hermes: Served) -> None:
    said: Json = {"messages": says("Yes"), "system": "Be brief.", "tools": TOOLS}
    counted = await hermes.anthropic.messages.count_tokens(model="tiny", **said)
    answer = await hermes.anthropic.messages.create(model="tiny", max_tokens=20, **said)
    assert counted.input_tokens == answer.usage.input_tokens
    with pytest.raises(anthropic.BadRequestError, match="not declared to reason"):
        await hermes.anthropic.messages.count_tokens(
            model="tiny", messages=HELLO, thinking={"type": "enabled", "budget_tokens": 1024}
        )
    unnamed = await hermes.http.post("/v1/messages/count_tokens", json=said | {"stop_sequences": ["never"]})
    assert unnamed.json() == {"input_tokens": counted.input_tokens}
    with pytest.raises(anthropic.BadRequestError, match=r"tools\[0\].name"):
        await hermes.anthropic.messages.count_tokens(model="tiny", messages=HELLO, tools=[{"input_schema": {}}])


# ------------------------------------------------------------------------------------------------------- conversations


def test_a_conversation_becomes_messages_of_a_chat() -> None:
    made = chat_messages(
        [
            {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "Rhyme."},
        ],
        [
            {"role": "user", "content": "Look up a b."},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "x"},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "text", "text": "I do."},
                    {"type": "tool_use", "id": "t1", "name": "look_up", "input": {"q": "a b"}},
                    {"type": "tool_use", "id": "t2", "name": "send", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": "found"},
                    {"type": "tool_result", "tool_use_id": "t2", "content": [{"type": "text", "text": "sent"}]},
                    {"type": "text", "text": "And now?"},
                ],
            },
            {"role": "system", "content": "It is late."},
            {"role": "user", "content": [{"type": "text", "text": "Go on."}]},
        ],
    )
    calls = [
        {"id": "t1", "type": "function", "function": {"name": "look_up", "arguments": {"q": "a b"}}},
        {"id": "t2", "type": "function", "function": {"name": "send", "arguments": {}}},
    ]
    assert made == [
        {"role": "system", "content": "Be brief.\nRhyme."},
        {"role": "user", "content": "Look up a b."},
        {"role": "assistant", "content": "I do.", "tool_calls": calls, "reasoning": "hm", "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "t1", "content": "found"},
        {"role": "tool", "tool_call_id": "t2", "content": "sent"},
        {"role": "user", "content": "And now?\nIt is late.\nGo on."},
    ]


def test_results_of_calls_are_counted_as_messages() -> None:
    results = [{"type": "tool_result", "tool_use_id": "t"}] * 4096
    assert len(chat_messages(None, [{"role": "user", "content": results}])) == 4096
    with pytest.raises(InvalidRequest, match="at most 4096"):
        chat_messages(None, [{"role": "user", "content": [*results, results[0]]}])


def block(**said: Any) -> list[Json]:
    return [{"role": "user", "content": [said]}]


USE = {"type": "tool_use", "id": "t", "name": "n", "input": {}}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([{"role": "tool", "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": []}], "messages[0].content"),
        ([*HELLO, {"role": "assistant", "content": "Hello"}, {"role": "user", "content": []}], "messages[2].content"),
        ([*HELLO, {"role": "assistant", "content": [USE]}, {"role": "user", "content": ""}], "messages[2].content"),
        ([{"role": "assistant", "content": []}], "messages"),
        (block(type="text"), "messages[0].content[0].text"),
        (block(**IMAGE), "messages[0].content[0].type"),
        (block(type="document", source={}), "messages[0].content[0].type"),
        (block(**USE), "messages[0].content[0].type"),
        (block(type="tool_result", content="x"), "messages[0].content[0].tool_use_id"),
        (block(type="tool_result", tool_use_id="t", content=[IMAGE]), "messages[0].content[0].content[0].type"),
        ([{"role": "assistant", "content": [USE]}], "messages[0].content[0]"),
        ([{"role": "assistant", "content": [USE | {"input": "{}"}]}, *HELLO], "messages[0].content[0].input"),
        ([{"role": "assistant", "content": [{"type": "server_tool_use"}]}, *HELLO], "messages[0].content[0].type"),
    ],
)
def test_a_wrong_message_is_named(messages: list[Json], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat_messages(None, messages)
    assert caught.value.param == field
    assert caught.value.message.startswith(f"{field}: ") or field == "messages"


@for_each(
    ("body", "field"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        ({"thinking": {"type": "deep"}}, "thinking.type"),
        ({"thinking": "on"}, "thinking"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "a b"}]}, "tools[0].name"),
        ({"tools": [{"name": "a", "input_schema": {"type": "string"}}]}, "tools[0].input_schema.type"),
        ({"tools": [{"name": "a"}, {"name": "a"}]}, "tools[1].name"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice.name"),
        ({"tools": TOOLS, "tool_choice": {"type": "required"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"output_config": {"format": {"type": "json_object"}}}, "output_config.format.type"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        (
            {
                "messages": [*HELLO, {"role": "assistant", "content": "{"}],
                "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
            },
            "output_config.format",
        ),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"stop": ["x"]}, "stop"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"n": 2}, "n"),
        ({"top_k": "many"}, "top_k"),
    ],
)
async def test_a_wrong_field_is_named_in_anthropics_form(served: Served, body: Json, field: str) -> None:
    asked = {"model": "tiny", "max_tokens": 5, "messages": HELLO} | body
    answer = await served.http.post("/v1/messages", json={k: v for k, v in asked.items() if v is not None})
    assert answer.status_code == 400, answer.text
    said = answer.json()
    assert (said["type"], said["error"]["type"]) == ("error", "invalid_request_error")
    assert said["error"]["param"] == field
    assert said["request_id"] == answer.headers["request-id"]


@pytest.mark.parametrize(
    "body", [{"mcp_servers": []}, {"n": 1}, {"service_tier": "standard_only"}, {"service_tier": "flex"}]
)
def test_what_asks_for_nothing_is_taken(body: Json) -> None:
    asked = parse(MessagesBody, json.dumps({"model": "m", "max_tokens": 5, "messages": HELLO} | body).encode())
    asked.refuse_unsupported()


def test_a_count_needs_no_limit() -> None:
    parse(CountedMessages, json.dumps({"model": "m", "messages": HELLO}).encode()).refuse_unsupported()


async def test_errors_of_every_layer_have_anthropics_form(cluster: FakeServices) -> None:
    async with serve(cluster) as served:
        http = served.http
        answers = {
            403: await http.post("/v1/messages", json={}, headers={"host": "evil.example"}),
            404: await http.post("/v1/messages/batches", json={}),
            405: await http.get("/v1/messages"),
            415: await http.post("/v1/messages", content=b"{}", headers={"content-type": "text/plain"}),
        }
        with pytest.raises(anthropic.NotFoundError) as caught:
            await served.anthropic.messages.create(model="leagl", max_tokens=5, messages=HELLO)
    types = {
        403: "permission_error",
        404: "not_found_error",
        405: "invalid_request_error",
        415: "invalid_request_error",
    }
    for status, answer in answers.items():
        assert (answer.status_code, answer.json()["error"]["type"]) == (status, types[status])
    assert "Batches are not supported" in answers[404].text
    assert "Nearest names: legal" in caught.value.message
    assert caught.value.request_id


async def test_a_stream_that_breaks_ends_with_an_error_event(cluster: FakeServices) -> None:
    cluster.runners[0].step_seconds = 0.05
    async with serve(cluster, keep_alive_seconds=0.1) as served:
        names, events = await read(served, served.breaks_at("content_block_delta"), max_tokens=400, ignore_eos=True)
        assert names[0] == "message_start"
        assert names[-1] == "error"
        assert "message_stop" not in names
        assert events[-1]["error"]["type"] in ("overloaded_error", "timeout_error")


async def test_the_client_raises_an_error_within_a_stream(cluster: FakeServices) -> None:
    cluster.runners[0].step_seconds = 0.02
    async with serve(cluster, drain_seconds=0.1) as served:
        stream = await served.anthropic.messages.create(
            model="tiny", max_tokens=400, messages=HELLO, stream=True, extra_body={"ignore_eos": True}
        )
        draining = None
        with pytest.raises(anthropic.APIStatusError, match="gateway is stopping"):
            async for _ in stream:
                draining = draining or asyncio.create_task(served.gateway.drain())
        assert draining is not None
        await draining


async def test_a_client_that_leaves_frees_its_request(served: Served) -> None:
    served.cluster.runners[0].step_seconds = 0.02
    async with served.anthropic.messages.stream(
        model="tiny", max_tokens=400, messages=HELLO, extra_body={"ignore_eos": True}
    ) as stream:
        async for _ in stream.text_stream:
            break
    await eventually(lambda: served.gateway.dispatcher.live == 0)
    await eventually(lambda: served.cluster.runners[0].cancels)  # on its way when the gateway has let go


def test_a_text_of_a_million_pieces_is_joined_once() -> None:
    said = [{"role": "user", "content": [{"type": "text", "text": "x" * 100}] * 20}] * 4000
    (message,) = chat_messages(None, said)
    assert len(message["content"]) == 4000 * 20 * 101 - 1


@pytest.mark.parametrize("error", TABLE.values())
def test_each_error_has_a_type_of_anthropics(error: type[MotetError]) -> None:
    assert messages_error(error("Why."), "req")["error"]["type"] in ERROR_TYPES
