"""OpenAI's client for Python."""

import importlib
from typing import Any

from tools.clients.drivers.protocol import Asked, must_raise, serve

openai: Any = importlib.import_module("openai")


def client(asked: Asked, *, broken: bool = False) -> Any:
    return openai.OpenAI(base_url=asked.broken_url if broken else asked.url, api_key="none", max_retries=0, timeout=60)


def list_models(asked: Asked) -> None:
    assert asked.adapter in [model.id for model in client(asked).models.list()]


def chat(asked: Asked) -> None:
    choice = (
        client(asked).chat.completions.create(model=asked.adapter, messages=asked.messages, temperature=0).choices[0]
    )
    assert (choice.message.content, choice.finish_reason) == (asked.answer, "stop"), choice


def pieces(asked: Asked, *, broken: bool = False) -> str:
    stream = client(asked, broken=broken).chat.completions.create(
        model=asked.adapter, messages=asked.messages, temperature=0, stream=True
    )
    return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)


def stream(asked: Asked) -> None:
    assert pieces(asked) == asked.answer


def n(asked: Asked) -> None:
    answer = client(asked).chat.completions.create(model=asked.adapter, messages=asked.messages, n=2, temperature=0)
    assert [choice.message.content for choice in answer.choices] == [asked.answer] * 2


def logprobs(asked: Asked) -> None:
    answer = client(asked).chat.completions.create(
        model=asked.adapter, messages=asked.messages, temperature=0, logprobs=True, top_logprobs=2
    )
    tokens = answer.choices[0].logprobs.content
    assert "".join(token.token for token in tokens).startswith(asked.answer)
    assert all(token.logprob <= 0 and len(token.top_logprobs) == 2 for token in tokens)


def structured(asked: Asked) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": asked.schema, "strict": True}}
    answer = client(asked).chat.completions.create(
        model=asked.adapter, messages=asked.messages, response_format=form, max_tokens=200
    )
    asked.check_object(answer.choices[0].message.content)


def tools(asked: Asked) -> None:
    named = {"type": "function", "function": {"name": asked.tool}}
    with client(asked).chat.completions.stream(
        model=asked.caller, messages=asked.messages, tools=asked.tools, tool_choice=named
    ) as events:
        (call,) = events.get_final_completion().choices[0].message.tool_calls
    assert call.function.name == asked.tool
    asked.check_arguments(call.function.arguments)


def loop(asked: Asked) -> None:
    ask = client(asked).chat.completions.create
    history = [*asked.messages]
    first = ask(model=asked.caller, messages=history, tools=asked.tools, temperature=0).choices[0].message
    (call,) = first.tool_calls
    assert call.function.name == asked.tool
    asked.check_arguments(call.function.arguments)
    history += [first, {"role": "tool", "tool_call_id": call.id, "content": asked.result}]
    last = ask(model=asked.caller, messages=history, tools=asked.tools, temperature=0).choices[0].message
    asked.check_end(last.content)


def cancel(asked: Asked) -> None:
    with client(asked).chat.completions.create(
        model=asked.adapter, messages=asked.messages, stream=True, max_tokens=1500, extra_body={"ignore_eos": True}
    ) as answer:
        next(iter(answer))


def errors(asked: Asked) -> None:
    create = client(asked).chat.completions.create
    error = must_raise(openai.NotFoundError, lambda: create(model="nobody", messages=asked.messages))
    assert error.code == "model_not_found", error
    error = must_raise(
        openai.BadRequestError, lambda: create(model=asked.adapter, messages=asked.messages, temperature=-1)
    )
    assert error.param == "temperature", error


def broken(asked: Asked) -> None:
    must_raise(Exception, lambda: pieces(asked, broken=True))


if __name__ == "__main__":
    serve(
        {
            "list": list_models,
            "chat": chat,
            "stream": stream,
            "n": n,
            "logprobs": logprobs,
            "structured": structured,
            "tools": tools,
            "loop": loop,
            "cancel": cancel,
            "errors": errors,
            "broken": broken,
        }
    )
