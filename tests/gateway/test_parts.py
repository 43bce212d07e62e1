"""The parts of an answer: in the model's order, in each API, whole and streamed, in steps of any size."""

import json
from collections.abc import AsyncIterator, Mapping
from itertools import groupby
from typing import Any

import pytest

from motet_gateway.answers.answer import AnswerResponse
from tests.gateway.conftest import Served
from tests.gateway.test_reasoning import LAST, reasoning

Json = dict[str, Any]
Shown = list[tuple[str, Any]]
"""Texts, reasoning and calls, in their order."""

LOOK = '<tool_call>\n{"name": "look_up", "arguments": {"q": "a b"}}\n</tool_call>'
SEND = '<tool_call>{"name": "send", "arguments": {}}</tool_call>'
SCHEMA: Json = {"type": "object", "properties": {"q": {"type": "string"}}}
THOUGHT = ("reasoning", "so so")
LOOKED = ("look_up", {"q": "a b"})
SENT: tuple[str, Json] = ("send", {})

STEPS = [1, 3, 1000]


@pytest.fixture(params=STEPS)
async def served(request: pytest.FixtureRequest) -> AsyncIterator[Served]:
    async with reasoning(LAST + "{% if tools and false %} {% endif %}", tool="hermes", step=request.param) as one:
        yield one


def functions(**beside: Any) -> list[Json]:
    return [{"type": "function", "name": name, "parameters": SCHEMA, **beside} for name in ("look_up", "send")]


async def of_messages(served: Served, said: str, stop: str | None) -> tuple[Shown, Shown]:
    tools = [{"name": tool["name"], "input_schema": SCHEMA} for tool in functions()]
    body = {"model": "tiny", "max_tokens": 400, "messages": [{"role": "user", "content": said}], "tools": tools}
    body |= {"thinking": {"type": "adaptive"}} | ({} if stop is None else {"stop_sequences": [stop]})
    whole = (await served.http.post("/v1/messages", json=body)).json()
    blocks = {}
    for event in await served.typed_events("/v1/messages", body):
        if event["type"] == "content_block_start":
            blocks[event["index"]] = event["content_block"] | {"json": ""}
        elif event["type"] == "content_block_delta":
            block, delta = blocks[event["index"]], event["delta"]
            block["json"] += delta.get("partial_json", "")
            for name in ("text", "thinking"):
                if name in delta:
                    block[name] += delta[name]
    for block in blocks.values():
        if block["type"] == "tool_use":
            block["input"] = json.loads(block["json"] or "{}")
    return [_block(one) for one in whole["content"]], [_block(one) for one in blocks.values()]


def _block(block: Mapping[str, Any]) -> tuple[str, Any]:
    if block["type"] == "tool_use":
        return block["name"], block["input"]
    return ("reasoning", block["thinking"]) if block["type"] == "thinking" else ("text", block["text"])


async def of_responses(served: Served, said: str, _stop: str | None) -> tuple[Shown, Shown]:
    body = {"model": "tiny", "input": said, "tools": functions(), "include": ["message.output_text.logprobs"]}
    whole = (await served.http.post("/v1/responses", json=body)).json()
    events = await served.typed_events("/v1/responses", body)
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    shown = events[-1]["response"]["output"]
    for at, item in enumerate(shown):
        deltas = [event for event in events if event.get("output_index") == at and event["type"].endswith(".delta")]
        if item["type"] == "message":
            (part,) = item["content"]
            assert [one for event in deltas for one in event["logprobs"]] == part["logprobs"]
            assert part == whole["output"][at]["content"][0]
            tokens = b"".join(bytes(one["bytes"]) for one in part["logprobs"]).decode()
            assert tokens == part["text"]
    assert [_item(one) for one in done] == [_item(one) for one in shown]
    return [_item(one) for one in whole["output"]], [_item(one) for one in shown]


def _item(item: Mapping[str, Any]) -> tuple[str, Any]:
    if item["type"] == "function_call":
        return item["name"], json.loads(item["arguments"])
    kind = "reasoning" if item["type"] == "reasoning" else "text"
    return kind, item["content"][0]["text"]


async def of_chats(served: Served, said: str, stop: str | None) -> tuple[Shown, Shown]:
    tools = [{"type": "function", "function": {"name": one["name"], "parameters": SCHEMA}} for one in functions()]
    body = {"model": "tiny", "messages": [{"role": "user", "content": said}], "tools": tools, "logprobs": True}
    body |= {} if stop is None else {"stop": [stop]}
    whole = (await served.http.post("/v1/chat/completions", json=body)).json()["choices"][0]
    parts: list[tuple[str, str]] = []
    tokens: list[Json] = []
    async with served.http.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as stream:
        async for line in stream.aiter_lines():
            if not line.startswith("data: {"):
                continue
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                delta = choice["delta"]
                tokens += (choice["logprobs"] or {}).get("content") or []
                parts += [("reasoning", delta["reasoning"])] if "reasoning" in delta else []
                parts += [("text", delta["content"])] if delta.get("content") else []
                for call in delta.get("tool_calls", ()):
                    name = call["function"].get("name")
                    names = [*(one for one, _ in parts if one not in ("text", "reasoning"))]
                    parts.append((name or names[-1], call["function"]["arguments"]))
    assert tokens == whole["logprobs"]["content"]
    joined = [(kind, "".join(text for _, text in same)) for kind, same in groupby(parts, lambda part: part[0])]
    streamed = [(kind, text if kind in ("text", "reasoning") else json.loads(text)) for kind, text in joined]
    message = whole["message"]
    # A message of a chat has no order of its text and its calls.
    assert message["content"] == ("".join(text for kind, text in streamed if kind == "text") or None)
    calls = [(one["function"]["name"], json.loads(one["function"]["arguments"])) for one in message["tool_calls"]]
    assert calls == [one for one in streamed if one[0] not in ("text", "reasoning")]
    return streamed, streamed


ORDERS: list[tuple[str, str | None, Shown]] = [
    (
        f"<think>so so</think>A {LOOK} and then B {SEND} C",
        None,
        [THOUGHT, ("text", "A"), LOOKED, ("text", " and then B"), SENT, ("text", " C")],
    ),
    (f"{LOOK}{SEND}", None, [LOOKED, SENT]),
    (f"{SEND} <tool_call> is a tag {LOOK}", None, [SENT, ("text", " <tool_call> is a tag"), LOOKED]),
    (f"A X{LOOK}Q", "XYZ", [("text", "A X"), LOOKED, ("text", "Q")]),
    (f"A X{LOOK}YZ end", "XYZ", [("text", "A X"), LOOKED, ("text", "YZ end")]),
    (f"A {LOOK} B XYZ {SEND}", "XYZ", [("text", "A"), LOOKED, ("text", " B ")]),
]


@pytest.mark.parametrize("api", [of_messages, of_responses, of_chats])
async def test_parts_come_in_their_order(served: Served, api: Any) -> None:
    for said, stop, shown in ORDERS:
        if api is of_responses and stop is not None and "XYZ" in said:  # this API has no stop strings
            asked, wanted = said.replace("XYZ ", ""), [*shown[:-1], ("text", " B"), SENT]
        else:
            asked, wanted = said, shown
        for parts in await api(served, asked, stop):
            assert parts == wanted, asked


async def test_scores_that_a_response_does_not_show_are_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    held = list[int]()
    hold = AnswerResponse._hold  # noqa: SLF001 how many bytes an answer holds is told nowhere else

    def watch(self: AnswerResponse, size: int) -> None:
        held.append(size)
        hold(self, size)

    monkeypatch.setattr(AnswerResponse, "_hold", watch)
    body = {"model": "tiny", "include": ["message.output_text.logprobs"], "top_logprobs": 5}
    async with reasoning(LAST) as served:
        left = {}
        for said in ("<think>" + "so so " * 30 + "</think>hi", "so so " * 30 + "hi"):
            held.clear()
            assert (await served.typed_events("/v1/responses", body | {"input": said}))[-1]["type"].startswith("resp")
            left[said[0]] = sum(held)
    assert left["<"] < left["s"] / 4


THOUGHTS = ["", "<think>so so</think>", "<think>\n\n</think>\n\n", "<think>so</think>\n\n"]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(
    ("tool", "texts"),
    [
        ("llama3", ['{"parameters": {"a": 1, "b": "a long value"}, "x": 2}', '{"x": 1} ok']),
        ("mistral", ["[1, 2] ok"]),
        ("pythonic", ["[1, 2, 3]"]),
        ("hermes", ["<tool is a tag", "\N{GRINNING FACE} hi"]),
        ("", ["Yes."]),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
async def test_a_text_has_the_scores_of_its_own_tokens(tool: str, texts: list[str], step: int) -> None:
    async with reasoning(LAST + "{% if tools and false %} {% endif %}", tool=tool, step=step) as served:
        for said in texts:
            for thought in THOUGHTS:
                await check_scores(served, tool, thought, said)


async def check_scores(served: Served, tool: str, thought: str, said: str) -> None:
    body: Json = {"model": "tiny", "input": thought + said, "include": ["message.output_text.logprobs"]}
    body |= {"tools": functions()} if tool else {}
    whole = (await served.http.post("/v1/responses", json=body)).json()
    events = await served.typed_events("/v1/responses", body)
    (part,) = whole["output"][-1]["content"]
    assert part["text"] == said, thought
    assert b"".join(bytes(one["bytes"]) for one in part["logprobs"]).decode() == said
    assert events[-1]["response"]["output"][-1]["content"] == [part]
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert [one for event in deltas for one in event["logprobs"]] == part["logprobs"]
