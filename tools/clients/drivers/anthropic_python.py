"""Anthropic's client for Python."""

import importlib
from typing import Any

from tools.clients.drivers.protocol import Asked, must_raise, serve

anthropic: Any = importlib.import_module("anthropic")

GREEDY = {"temperature": 0}
"""Its methods have no such argument any more."""


def client(asked: Asked, *, broken: bool = False) -> Any:
    url = asked.broken_url if broken else asked.url
    return anthropic.Anthropic(base_url=url.removesuffix("/v1"), api_key="none", max_retries=0, timeout=60)


def tools_of(asked: Asked) -> list[dict[str, Any]]:
    return [
        {"name": one["name"], "description": one["description"], "input_schema": one["parameters"]}
        for one in (tool["function"] for tool in asked.tools)
    ]


def list_models(asked: Asked) -> None:
    assert asked.adapter in [model.id for model in client(asked).models.list()]


def chat(asked: Asked) -> None:
    answer = client(asked).messages.create(
        model=asked.adapter, messages=asked.messages, max_tokens=100, extra_body=GREEDY
    )
    assert (answer.content[0].text, answer.stop_reason) == (asked.answer, "end_turn"), answer


def pieces(asked: Asked, *, broken: bool = False) -> str:
    with client(asked, broken=broken).messages.stream(
        model=asked.adapter, messages=asked.messages, max_tokens=100, extra_body=GREEDY
    ) as events:
        said = "".join(events.text_stream)
        assert events.get_final_message().content[0].text == said
    return said


def stream(asked: Asked) -> None:
    assert pieces(asked) == asked.answer


def tools(asked: Asked) -> None:
    answer = client(asked).messages.create(
        model=asked.caller,
        messages=asked.messages,
        tools=tools_of(asked),
        tool_choice={"type": "tool", "name": asked.tool},
        max_tokens=200,
    )
    (call,) = (block for block in answer.content if block.type == "tool_use")
    assert (call.name, answer.stop_reason) == (asked.tool, "tool_use")
    assert call.input.keys() == {"name", "topic"}, call


def loop(asked: Asked) -> None:
    ask, history = client(asked).messages.create, [*asked.messages]
    first = ask(model=asked.caller, messages=history, tools=tools_of(asked), max_tokens=200, extra_body=GREEDY)
    (call,) = (block for block in first.content if block.type == "tool_use")
    assert call.name == asked.tool
    result = {"type": "tool_result", "tool_use_id": call.id, "content": asked.result}
    history += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    last = ask(model=asked.caller, messages=history, tools=tools_of(asked), max_tokens=200, extra_body=GREEDY)
    asked.check_end(last.content[0].text)


def cancel(asked: Asked) -> None:
    with client(asked).messages.stream(
        model=asked.adapter, messages=asked.messages, max_tokens=1500, extra_body={"ignore_eos": True}
    ) as events:
        next(iter(events.text_stream))


def errors(asked: Asked) -> None:
    def create(**changed: Any) -> object:
        return client(asked).messages.create(
            **{"model": asked.adapter, "messages": asked.messages, "max_tokens": 9} | changed
        )

    error = must_raise(anthropic.NotFoundError, lambda: create(model="nobody"))
    assert error.body["error"]["type"] == "not_found_error", error
    error = must_raise(anthropic.BadRequestError, lambda: create(extra_body={"temperature": -1}))
    assert "temperature" in error.body["error"]["message"], error


def broken(asked: Asked) -> None:
    must_raise(Exception, lambda: pieces(asked, broken=True))


if __name__ == "__main__":
    serve(
        {
            "list": list_models,
            "chat": chat,
            "stream": stream,
            "tools": tools,
            "loop": loop,
            "cancel": cancel,
            "errors": errors,
            "broken": broken,
        }
    )
