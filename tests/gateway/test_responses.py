"""OpenAI's Responses API: its unmodified client, over a real socket. The runner writes what the user says."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from openai.types.responses import Response
from pydantic import BaseModel

from motet.errors import InvalidRequest
from motet_gateway.answers.responses.body import ResponsesBody
from motet_gateway.answers.responses.conversation import chat_messages
from motet_gateway.parameters import parse
from testbed.fake_services import FakeServices, fake_services, model_assets
from tests.gateway.conftest import Heard, Served, hear_nothing, serve
from tests.gateway.test_reasoning import reasoning
from tests.support.for_each import for_each

Json = dict[str, Any]

FOX = "The quick brown fox"
SCHEMA = {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]}
TOOLS: list[Any] = [
    {"type": "function", "name": "look_up", "parameters": SCHEMA, "strict": None},
    {"type": "function", "name": "send", "parameters": {"type": "object"}, "strict": None},
    {"type": "custom", "name": "run", "description": "Runs a program."},
]
CALLS = (
    'So: <tool_call>\n{"name": "look_up", "arguments": {"q": "a b"}}\n</tool_call>\n'
    '<tool_call>{"name": "run", "arguments": {"input": "print(1)\\n"}}</tool_call>'
)


EARLIER: Json = {"type": "function_call", "call_id": "1", "name": "send", "arguments": "[" + "{}," * 36_000 + "{}]"}


@pytest.fixture
async def hermes() -> AsyncIterator[Served]:
    template = "{#- <tool_call> -#}{{ messages[-1].content }}{% if tools and false %} {% endif %}"
    async with fake_services(assets=model_assets(template=template)) as cluster, serve(cluster) as served:
        yield served


async def read(served: Served, heard: Heard = hear_nothing, **body: Any) -> list[Json]:
    """The events of a stream."""
    events = await served.typed_events("/v1/responses", {"model": "tiny", "input": FOX} | body, heard)
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    return events


def plain(response: Response) -> Json:
    """Without what differs between two answers to one request."""
    made = response.to_dict() | {"id": "", "created_at": 0, "completed_at": 0}
    made["output"] = [item | {"id": "", "call_id": ""} for item in made["output"]]
    return made


async def test_the_client_gets_a_response(served: Served) -> None:
    answer = await served.openai.responses.create(model="legal", input=FOX, temperature=0.5, metadata={"a": "b"})
    assert answer.output_text == "The quick brown fox "
    assert (answer.status, answer.error, answer.incomplete_details) == ("completed", None, None)
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    assert (answer.model, answer.temperature, answer.metadata, answer.store) == ("legal", 0.5, {"a": "b"}, False)
    assert (await served.http.get(f"/motet/requests/{answer.id}")).json()["status"] == "200"


async def test_the_client_streams_the_same_response(served: Served) -> None:
    whole = await served.openai.responses.create(model="legal", input=FOX)
    async with served.openai.responses.stream(model="legal", input=FOX) as stream:
        text = "".join([event.delta async for event in stream if event.type == "response.output_text.delta"])
        streamed = await stream.get_final_response()
    assert text == "The quick brown fox "
    made = plain(streamed)
    del made["output"][0]["content"][0]["parsed"]  # the helper adds it
    assert made == plain(whole)


async def test_the_events_come_in_their_order(served: Served) -> None:
    events = await read(served)
    names = [event["type"] for event in events]
    head, tail = names[:4], names[-4:]
    assert head == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert set(names[4:-4]) == {"response.output_text.delta"}
    assert tail == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert events[0]["response"]["output"] == []
    assert events[-4]["text"] == events[-1]["response"]["output"][0]["content"][0]["text"] == "The quick brown fox "


async def test_calls_of_functions_and_custom_tools_arrive_whole_and_streamed(hermes: Served) -> None:
    said: Json = {"model": "tiny", "input": CALLS, "tools": TOOLS}
    whole = await hermes.openai.responses.create(**said)
    assert [item.type for item in whole.output] == ["message", "function_call", "custom_tool_call"]
    _, function, custom = whole.output
    assert function.type == "function_call"
    assert custom.type == "custom_tool_call"
    assert (function.name, json.loads(function.arguments), function.status) == ("look_up", {"q": "a b"}, "completed")
    assert (custom.name, custom.input) == ("run", "print(1)\n")
    async with hermes.openai.responses.stream(**said) as stream:
        types = [event.type async for event in stream]
        streamed = await stream.get_final_response()
    assert [item.type for item in streamed.output] == ["message", "function_call", "custom_tool_call"]
    assert json.loads(streamed.output[1].to_dict()["arguments"]) == {"q": "a b"}
    assert streamed.output[2].to_dict()["input"] == "print(1)\n"
    for kind in ("function_call_arguments.delta", "function_call_arguments.done", "custom_tool_call_input.done"):
        assert f"response.{kind}" in types


@pytest.mark.parametrize("step", [1, 3, 1000])
async def test_items_of_a_stream_never_overlap(hermes: Served, step: int) -> None:
    hermes.cluster.runners[0].tokens_per_step = step
    events = await read(hermes, input=CALLS + " and then some" + CALLS, tools=TOOLS)
    open_item = None
    for event in events:
        if event["type"] == "response.output_item.added":
            assert open_item is None
            open_item = event["output_index"]
        elif "output_index" in event:
            assert event["output_index"] == open_item
        if event["type"] == "response.output_item.done":
            open_item = None
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]
    for item in done:
        if item["type"] == "function_call":
            deltas = [
                e["delta"] for e in events if e["type"].endswith("arguments.delta") and e["item_id"] == item["id"]
            ]
            assert "".join(deltas) == item["arguments"]
            assert json.loads(item["arguments"]) == {"q": "a b"}


async def test_a_runner_gets_the_pattern_of_a_custom_tool(hermes: Served) -> None:
    form = {"type": "grammar", "syntax": "regex", "definition": "[0-9]+ [+*] [0-9]+"}
    tools: list[Any] = [{"type": "custom", "name": "reckon", "format": form}]
    text = '<tool_call>{"name": "reckon", "arguments": {"input": "1 + 2"}}</tool_call>'
    answer = await hermes.openai.responses.create(model="tiny", input=text, tools=tools, tool_choice="required")
    (call,) = answer.output
    assert call.type == "custom_tool_call"
    assert call.input == "1 + 2"
    (submit,) = hermes.cluster.runners[0].submits
    schema = json.loads(submit.sampling.tool_calls)["tools"]["reckon"]
    assert schema["properties"]["input"]["pattern"] == "^(?:[0-9]+ [+*] [0-9]+)$"


async def test_a_loop_with_a_tool_goes_on_from_what_the_answer_had(hermes: Served) -> None:
    first = await hermes.openai.responses.create(model="tiny", input=CALLS, tools=TOOLS)
    call = first.output[1]
    assert call.type == "function_call"
    said: list[Any] = [{"role": "user", "content": CALLS}]
    said += [item.to_dict() for item in first.output]
    said.append({"type": "function_call_output", "call_id": call.call_id, "output": "found it"})
    second = await hermes.openai.responses.create(model="tiny", input=said)
    assert second.output_text == "found it"


async def test_the_client_parses_what_a_schema_says(cluster: FakeServices) -> None:
    class Keeper(BaseModel):
        name: str

    async with serve(cluster) as served:
        answer = await served.openai.responses.parse(
            model="tiny", input='{"name": "Jorun"}', text_format=Keeper, max_output_tokens=60
        )
    assert answer.output_parsed == Keeper(name="Jorun")
    (submit,) = cluster.runners[0].submits
    assert json.loads(submit.sampling.json_schema)["required"] == ["name"]
    assert answer.text is not None
    assert answer.text.format is not None
    assert answer.text.format.type == "json_schema"


async def test_an_answer_that_is_cut_is_incomplete(served: Served) -> None:
    body: Json = {"extra_body": {"ignore_eos": True}}
    answer = await served.openai.responses.create(model="tiny", input=FOX, max_output_tokens=5, **body)
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.output[0].to_dict()["status"] == "incomplete"
    events = await read(served, max_output_tokens=5, ignore_eos=True)
    assert events[-1]["type"] == "response.incomplete"
    with pytest.raises(openai.BadRequestError, match="lower max_output_tokens"):
        await served.openai.responses.create(model="tiny", input=FOX, max_output_tokens=5000)


async def test_log_probabilities_come_if_they_are_included(served: Served) -> None:
    said: Json = {"model": "tiny", "input": FOX, "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    whole = await served.openai.responses.create(**said)
    (item,) = whole.output
    assert item.type == "message"
    (part,) = item.content
    assert part.type == "output_text"
    assert part.logprobs is not None
    assert {len(one.top_logprobs) for one in part.logprobs} == {2}
    assert "".join(bytes(one.bytes).decode() for one in part.logprobs) == part.text
    events = await read(served, include=said["include"], top_logprobs=2)
    deltas = [one for e in events if e["type"] == "response.output_text.delta" for one in e["logprobs"]]
    last = events[-1]["response"]["output"][0]["content"][0]["logprobs"]
    assert deltas == last == [one.to_dict() for one in part.logprobs]
    alone = await served.openai.responses.create(model="tiny", input=FOX, top_logprobs=0)
    assert alone.output[0].to_dict()["content"] == [
        {"type": "output_text", "text": part.text, "annotations": [], "logprobs": []}
    ]


@pytest.mark.parametrize("step", [1, 3, 500])
async def test_reasoning_is_an_item_before_the_message(step: int) -> None:
    said = "<think>a b</think>So."
    async with reasoning(step=step) as served:
        whole = await served.openai.responses.create(model="tiny", input=said, reasoning={"effort": "low"})
        events = await read(served, input=said)
    thought, message = whole.output
    assert thought.type == "reasoning"
    assert message.type == "message"
    assert [part.text for part in thought.content or []] == ["a b"]
    assert whole.output_text == "So."
    assert whole.reasoning is not None
    assert whole.reasoning.effort == "low"
    assert whole.usage is not None
    assert whole.usage.output_tokens_details.reasoning_tokens > 0
    deltas = "".join(e["delta"] for e in events if e["type"] == "response.reasoning_text.delta")
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert deltas == done[0]["content"][0]["text"] == "a b"
    assert done == events[-1]["response"]["output"]
    assert [item["type"] for item in done] == ["reasoning", "message"]


async def test_an_answer_without_any_text_has_an_empty_message(hermes: Served) -> None:
    body: Json = {"input": "x", "stop_token_ids": hermes.cluster.tokenizer.encode("x").ids}
    events = await read(hermes, **body)
    (item,) = events[-1]["response"]["output"]
    assert item["content"][0]["text"] == ""
    answer = await hermes.http.post("/v1/responses", json={"model": "tiny"} | body)
    assert answer.json()["output"][0]["content"] == item["content"]


async def test_what_a_template_refuses_is_the_input() -> None:
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}x"
    async with fake_services(assets=model_assets(template=template)) as cluster, serve(cluster) as served:
        body: Json = {"model": "tiny", "input": FOX, "instructions": "Be brief."}
        answer = await served.http.post("/v1/responses", json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "input"
    assert "no system" in error["message"]


async def test_unknown_fields_of_text_are_named_and_do_not_come_back(served: Served) -> None:
    body: Json = {"model": "tiny", "input": FOX, "text": {"verbosity": "low", "foo": 1}}
    answer = await served.http.post("/v1/responses", json=body)
    assert answer.headers["x-motet-ignored"] == "text.foo"
    assert answer.json()["text"] == {"format": {"type": "text"}, "verbosity": "low"}


async def test_nothing_is_stored(served: Served) -> None:
    answer = await served.openai.responses.create(model="tiny", input=FOX, store=True)
    assert answer.to_dict()["store"] is False
    for ask in (served.openai.responses.retrieve, served.openai.responses.delete, served.openai.responses.cancel):
        with pytest.raises(openai.NotFoundError, match="No response is stored"):
            await ask(answer.id)


# ------------------------------------------------------------------------------------------------------- conversations


def test_an_input_becomes_messages_of_a_chat() -> None:
    made = chat_messages(
        "Be brief.",
        [
            {"role": "developer", "content": "Rhyme."},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Look up a b."}]},
            {"type": "reasoning", "id": "r", "summary": []},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I do."}]},
            {"type": "function_call", "call_id": "t1", "name": "look_up", "arguments": '{"q": "a b"}'},
            {"type": "custom_tool_call", "call_id": "t2", "name": "run", "input": "1 + 1"},
            {"type": "function_call_output", "call_id": "t1", "output": "found"},
            {"type": "custom_tool_call_output", "call_id": "t2", "output": [{"type": "input_text", "text": "2"}]},
            {"role": "user", "content": "And now?"},
        ],
    )
    calls = [
        {"id": "t1", "type": "function", "function": {"name": "look_up", "arguments": {"q": "a b"}}},
        {"id": "t2", "type": "function", "function": {"name": "run", "arguments": {"input": "1 + 1"}}},
    ]
    assert made == [
        {"role": "system", "content": "Be brief.\nRhyme."},
        {"role": "user", "content": "Look up a b."},
        {"role": "assistant", "content": "I do.", "tool_calls": calls, "reasoning": "hm", "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "t1", "content": "found"},
        {"role": "tool", "tool_call_id": "t2", "content": "2"},
        {"role": "user", "content": "And now?"},
    ]


@pytest.mark.parametrize(
    ("said", "field"),
    [
        (5, "input"),
        ([], "input"),
        (["x"], "input[0]"),
        ([{"role": "tool", "content": "x"}], "input[0].role"),
        ([{"role": "user"}], "input[0].content"),
        ([{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}], "input[0].content[0].type"),
        ([{"type": "item_reference", "id": "x"}], "input[0]"),
        ([{"type": "web_search_call", "id": "x"}], "input[0].type"),
        ([{"type": "function_call", "call_id": "t", "name": "n", "arguments": 5}], "input[0].arguments"),
        ([{"type": "function_call", "name": "n", "arguments": "{}"}], "input[0].call_id"),
        ([{"type": "custom_tool_call", "call_id": "t", "name": "n"}], "input[0].input"),
        ([{"type": "function_call_output", "call_id": "t"}], "input[0].output"),
    ],
)
def test_a_wrong_item_is_named(said: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat_messages(None, said)
    assert caught.value.param == field


@for_each(
    ("body", "field"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "x"}}, "prompt"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["file_search_call.results"]}, "include[0]"),
        ({"metadata": {"a": 5}}, "metadata"),
        ({"metadata": {str(i): "x" for i in range(17)}}, "metadata"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "name": "a", "parameters": {"type": "string"}}]}, "tools[0].parameters.type"),
        (
            {"tools": [{"type": "custom", "name": "a", "format": {"type": "grammar", "syntax": "lark"}}]},
            "tools[0].format.syntax",
        ),
        ({"tools": [{"type": "custom", "name": "a", "format": {"type": "json"}}]}, "tools[0].format.type"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "other"}}, "tool_choice.name"),
        ({"tools": TOOLS, "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "mode": "x"}}, "tool_choice.mode"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"text": 5}, "text"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"reasoning": "low"}, "reasoning"),
        ({"input": [{"type": "reasoning", "content": [{"type": "x"}]}]}, "input[0].content[0].type"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"stop": ["x"]}, "stop"),
        ({"text": {"verbosity": 2**70}}, "text"),
        ({"top_logprobs": 5}, "top_logprobs"),
        ({"max_output_tokens": 10**30}, "max_output_tokens"),
        ({"max_tool_calls": 10**30}, "max_tool_calls"),
        ({"input": [EARLIER] * 3}, "input[2].arguments"),
        ({"input": ""}, ""),
    ],
)
async def test_a_wrong_field_is_named(served: Served, body: Json, field: str) -> None:
    answer = await served.http.post("/v1/responses", json={"model": "tiny", "input": FOX} | body)
    if not field:  # an empty prompt has the template's own characters
        assert answer.status_code == 200
        return
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == field


def test_tools_that_may_be_called_are_those_of_the_choice() -> None:
    named = {"type": "custom", "name": "run"}
    some = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "send"}]}
    for choice, names, must in (("auto", 3, False), ("required", 3, True), (named, 1, True), (some, 1, False)):
        body = ResponsesBody(model="m", input="x", tools=TOOLS, tool_choice=choice)
        body.refuse_unsupported()
        assert body.tools_offered is not None
        assert (len(body.tools_offered.schemas), body.tools_offered.must) == (names, must)
    assert ResponsesBody(model="m", input="x", tools=TOOLS, tool_choice="none").tools_offered is None


def test_what_asks_for_nothing_is_taken() -> None:
    asked = {
        "model": "m",
        "input": FOX,
        "background": False,
        "previous_response_id": None,
        "truncation": "disabled",
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"effort": "low"},
        "store": False,
        "max_tool_calls": 3,
        "stream_options": {"include_obfuscation": False},
        "text": {"format": {"type": "text"}, "verbosity": "low"},
    }
    body = parse(ResponsesBody, json.dumps(asked).encode())
    body.refuse_unsupported()
    assert body.unknown_fields() == []


async def test_a_stream_that_breaks_ends_with_a_failed_response_and_an_error(cluster: FakeServices) -> None:
    cluster.runners[0].step_seconds = 0.05
    async with serve(cluster, keep_alive_seconds=0.1) as served:
        heard = served.breaks_at("response.output_text.delta")
        events = await read(served, heard, max_output_tokens=400, ignore_eos=True)
    assert [event["type"] for event in events[-2:]] == ["response.failed", "error"]
    failed, error = events[-2]["response"], events[-1]
    assert failed["status"] == "failed"
    assert failed["error"]["code"] == error["code"] == error["error"]["code"]
    assert failed["output"][0]["content"][0]["text"]


async def test_a_stream_that_breaks_before_its_first_token_ends_with_an_error(cluster: FakeServices) -> None:
    cluster.runners[0].silent = True
    async with serve(cluster, hold_seconds=0.1, keep_alive_seconds=0.1) as served:
        (event,) = await read(served, served.breaks_at(""))
    assert event["type"] == "error"


async def test_the_client_raises_an_error_within_a_stream(cluster: FakeServices) -> None:
    cluster.runners[0].step_seconds = 0.02
    async with serve(cluster, drain_seconds=0.1) as served:
        stream = await served.openai.responses.create(
            model="tiny", input=FOX, stream=True, extra_body={"ignore_eos": True}
        )
        draining = None
        with pytest.raises(openai.APIError, match="gateway is stopping"):
            async for _ in stream:
                draining = draining or asyncio.create_task(served.gateway.drain())
        assert draining is not None
        await draining


async def test_what_a_response_repeats_of_its_request_counts_as_held(served: Served) -> None:
    before = served.gateway.bodies.held
    seen: list[int] = []
    text = "x" * 20_000
    served.cluster.runners[0].step_seconds = 0.01
    async with served.openai.responses.stream(
        model="tiny", input=FOX, tools=[], extra_body={"user": text, "ignore_eos": True}, max_output_tokens=40
    ) as stream:
        seen += [served.gateway.bodies.held async for _ in stream]
    assert max(seen) >= before + 4 * len(text)
    assert served.gateway.bodies.held == before


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/completions", {"prompt": "Hi"}),
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/messages", {"max_tokens": 4, "messages": [{"role": "user", "content": "Hi"}]}),
    ],
)
async def test_texts_are_kept_from_answers_by_every_api(served: Served, path: str, body: dict[str, Any]) -> None:
    answer = await served.http.post(path, json=body | {"model": "tiny", "bad_words": ["fox"]})
    assert answer.status_code == 200
    assert "x-motet-ignored" not in answer.headers
    assert served.cluster.runners[0].submits[-1].sampling.bad_words
    refused = await served.http.post(path, json=body | {"model": "tiny", "bad_words": "fox"})
    assert (refused.status_code, refused.json()["error"]["message"][:10]) == (400, "bad_words:")
