"""LangChain's client for OpenAI."""

import importlib
from typing import Any

from tools.clients.drivers.protocol import Asked, must_raise, serve

langchain: Any = importlib.import_module("langchain_openai")
messages: Any = importlib.import_module("langchain_core.messages")
openai: Any = importlib.import_module("openai")


def model(asked: Asked, name: str, *, broken: bool = False, **more: Any) -> Any:
    url = asked.broken_url if broken else asked.url
    return langchain.ChatOpenAI(
        model=name, base_url=url, api_key="none", max_retries=0, **{"temperature": 0, "max_tokens": 200} | more
    )


def chat(asked: Asked) -> None:
    assert model(asked, asked.adapter).invoke(asked.question).content == asked.answer


def pieces(asked: Asked, *, broken: bool = False) -> str:
    return "".join(chunk.content for chunk in model(asked, asked.adapter, broken=broken).stream(asked.question))


def stream(asked: Asked) -> None:
    assert pieces(asked) == asked.answer


def n(asked: Asked) -> None:
    (answers,) = model(asked, asked.adapter, n=2).generate([[messages.HumanMessage(asked.question)]]).generations
    assert [answer.text for answer in answers] == [asked.answer] * 2


def logprobs(asked: Asked) -> None:
    answer = model(asked, asked.adapter, logprobs=True, top_logprobs=2).invoke(asked.question)
    assert all(token["logprob"] <= 0 for token in answer.response_metadata["logprobs"]["content"])


def structured(asked: Asked) -> None:
    asking = model(asked, asked.adapter).with_structured_output(
        {"title": "answer", "description": "An answer.", **asked.schema}, method="json_schema", strict=True
    )
    found = asking.invoke(asked.question)
    assert found.keys() == {"answer", "sure"}, found


def tools(asked: Asked) -> None:
    asking = model(asked, asked.caller).bind_tools(asked.tools, tool_choice=asked.tool)
    (call,) = asking.invoke(asked.question).tool_calls
    assert call["name"] == asked.tool
    assert call["args"].keys() == {"name", "topic"}, call


def loop(asked: Asked) -> None:
    asking, history = model(asked, asked.caller).bind_tools(asked.tools), [messages.HumanMessage(asked.question)]
    history.append(asking.invoke(history))
    (call,) = history[-1].tool_calls
    assert call["name"] == asked.tool
    history.append(messages.ToolMessage(asked.result, tool_call_id=call["id"]))
    asked.check_end(asking.invoke(history).content)


def cancel(asked: Asked) -> None:
    chunks = model(asked, asked.adapter, max_tokens=1500, extra_body={"ignore_eos": True}).stream(asked.question)
    next(chunks)
    chunks.close()


def errors(asked: Asked) -> None:
    error = must_raise(openai.NotFoundError, lambda: model(asked, "nobody").invoke("Hello!"))
    assert error.code == "model_not_found", error


def broken(asked: Asked) -> None:
    must_raise(Exception, lambda: pieces(asked, broken=True))


if __name__ == "__main__":
    serve(
        {
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
