"""LlamaIndex's client for servers like OpenAI's."""

import importlib
from typing import Any

from tools.clients.drivers.protocol import Asked, must_raise, serve

like: Any = importlib.import_module("llama_index.llms.openai_like")
llms: Any = importlib.import_module("llama_index.core.base.llms.types")
openai: Any = importlib.import_module("openai")


def model(asked: Asked, name: str, *, broken: bool = False, **more: Any) -> Any:
    return like.OpenAILike(
        model=name,
        api_base=asked.broken_url if broken else asked.url,
        api_key="none",
        is_chat_model=True,
        is_function_calling_model=True,
        max_retries=0,
        **{"temperature": 0, "max_tokens": 200} | more,
    )


def question(asked: Asked) -> list[Any]:
    return [llms.ChatMessage(role="user", content=asked.question)]


def chat(asked: Asked) -> None:
    assert model(asked, asked.adapter).chat(question(asked)).message.content == asked.answer


def pieces(asked: Asked, *, broken: bool = False) -> str:
    return "".join(
        chunk.delta or "" for chunk in model(asked, asked.adapter, broken=broken).stream_chat(question(asked))
    )


def stream(asked: Asked) -> None:
    assert pieces(asked) == asked.answer


def tools(asked: Asked) -> None:
    named = {"type": "function", "function": {"name": asked.tool}}
    answer = model(asked, asked.caller).chat(question(asked), tools=asked.tools, tool_choice=named)
    (call,) = answer.message.additional_kwargs["tool_calls"]
    assert call.function.name == asked.tool
    asked.check_arguments(call.function.arguments)


def cancel(asked: Asked) -> None:
    more = {"extra_body": {"ignore_eos": True}}
    chunks = model(asked, asked.adapter, max_tokens=1500, additional_kwargs=more).stream_chat(question(asked))
    next(chunks)
    chunks.close()


def errors(asked: Asked) -> None:
    error = must_raise(openai.NotFoundError, lambda: model(asked, "nobody").chat(question(asked)))
    assert error.code == "model_not_found", error


def broken(asked: Asked) -> None:
    must_raise(Exception, lambda: pieces(asked, broken=True))


if __name__ == "__main__":
    serve({"chat": chat, "stream": stream, "tools": tools, "cancel": cancel, "errors": errors, "broken": broken})
