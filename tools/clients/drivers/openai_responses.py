"""OpenAI's client for Python, by its `responses`."""

import importlib
from typing import Any

from tools.clients.drivers.openai_python import client, list_models
from tools.clients.drivers.protocol import Asked, must_raise, serve

openai: Any = importlib.import_module("openai")


def tools_of(asked: Asked) -> list[dict[str, Any]]:
    return [{"type": "function", **tool["function"]} for tool in asked.tools]


def chat(asked: Asked) -> None:
    answer = client(asked).responses.create(model=asked.adapter, input=asked.question, temperature=0)
    assert (answer.output_text, answer.status) == (asked.answer, "completed"), answer


def pieces(asked: Asked, *, broken: bool = False) -> str:
    with client(asked, broken=broken).responses.stream(
        model=asked.adapter, input=asked.question, temperature=0
    ) as events:
        said = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        assert events.get_final_response().output_text == said
    return said


def stream(asked: Asked) -> None:
    assert pieces(asked) == asked.answer


def logprobs(asked: Asked) -> None:
    answer = client(asked).responses.create(
        model=asked.adapter,
        input=asked.question,
        temperature=0,
        top_logprobs=2,
        include=["message.output_text.logprobs"],
    )
    tokens = answer.output[0].content[0].logprobs
    assert "".join(token.token for token in tokens).startswith(asked.answer)
    assert all(token.logprob <= 0 for token in tokens)


def structured(asked: Asked) -> None:
    form = {"format": {"type": "json_schema", "name": "answer", "schema": asked.schema, "strict": True}}
    answer = client(asked).responses.create(model=asked.adapter, input=asked.question, text=form, max_output_tokens=200)
    asked.check_object(answer.output_text)


def tools(asked: Asked) -> None:
    answer = client(asked).responses.create(
        model=asked.caller,
        input=asked.question,
        tools=tools_of(asked),
        tool_choice={"type": "function", "name": asked.tool},
    )
    (call,) = (item for item in answer.output if item.type == "function_call")
    assert call.name == asked.tool
    asked.check_arguments(call.arguments)


def loop(asked: Asked) -> None:
    ask, items = client(asked).responses.create, [*asked.messages]
    first = ask(model=asked.caller, input=items, tools=tools_of(asked), temperature=0)
    (call,) = (item for item in first.output if item.type == "function_call")
    assert call.name == asked.tool
    items += [*first.output, {"type": "function_call_output", "call_id": call.call_id, "output": asked.result}]
    asked.check_end(ask(model=asked.caller, input=items, tools=tools_of(asked), temperature=0).output_text)


def cancel(asked: Asked) -> None:
    with client(asked).responses.create(
        model=asked.adapter, input=asked.question, stream=True, extra_body={"ignore_eos": True}, max_output_tokens=1500
    ) as events:
        for event in events:
            if event.type == "response.output_text.delta":
                break


def errors(asked: Asked) -> None:
    create = client(asked).responses.create
    error = must_raise(openai.NotFoundError, lambda: create(model="nobody", input="Hello!"))
    assert error.code == "model_not_found", error
    error = must_raise(openai.BadRequestError, lambda: create(model=asked.adapter, input="Hello!", temperature=-1))
    assert error.param == "temperature", error


def broken(asked: Asked) -> None:
    must_raise(Exception, lambda: pieces(asked, broken=True))


if __name__ == "__main__":
    serve(
        {
            "list": list_models,
            "chat": chat,
            "stream": stream,
            "logprobs": logprobs,
            "structured": structured,
            "tools": tools,
            "loop": loop,
            "cancel": cancel,
            "errors": errors,
            "broken": broken,
        }
    )
