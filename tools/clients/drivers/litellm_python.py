"""LiteLLM, with its name for servers like ours: `hosted_vllm/…`."""

import gc
import importlib
import os
from typing import Any

from tools.clients.drivers.protocol import Asked, must_raise, serve

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
litellm: Any = importlib.import_module("litellm")


def complete(asked: Asked, model: str, *, broken: bool = False, **more: Any) -> Any:
    return litellm.completion(
        model=f"hosted_vllm/{model}",
        api_base=asked.broken_url if broken else asked.url,
        api_key="none",
        messages=more.pop("messages", asked.messages),
        temperature=more.pop("temperature", 0),
        num_retries=0,
        **more,
    )


def chat(asked: Asked) -> None:
    choice = complete(asked, asked.adapter).choices[0]
    assert (choice.message.content, choice.finish_reason) == (asked.answer, "stop"), choice


def pieces(asked: Asked, *, broken: bool = False) -> str:
    chunks = complete(asked, asked.adapter, broken=broken, stream=True)
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def stream(asked: Asked) -> None:
    assert pieces(asked) == asked.answer


def n(asked: Asked) -> None:
    assert [one.message.content for one in complete(asked, asked.adapter, n=2).choices] == [asked.answer] * 2


def logprobs(asked: Asked) -> None:
    answer = complete(asked, asked.adapter, logprobs=True, top_logprobs=2)
    assert all(token["logprob"] <= 0 for token in answer.choices[0].logprobs["content"])


def structured(asked: Asked) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": asked.schema, "strict": True}}
    asked.check_object(complete(asked, asked.adapter, response_format=form, max_tokens=200).choices[0].message.content)


def tools(asked: Asked) -> None:
    named = {"type": "function", "function": {"name": asked.tool}}
    (call,) = complete(asked, asked.caller, tools=asked.tools, tool_choice=named).choices[0].message.tool_calls
    assert call.function.name == asked.tool
    asked.check_arguments(call.function.arguments)


def loop(asked: Asked) -> None:
    first = complete(asked, asked.caller, tools=asked.tools).choices[0].message
    (call,) = first.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": asked.result}
    last = complete(asked, asked.caller, tools=asked.tools, messages=[*asked.messages, first.model_dump(), result])
    asked.check_end(last.choices[0].message.content)


def cancel(asked: Asked) -> None:
    chunks = complete(asked, asked.adapter, stream=True, max_tokens=1500, extra_body={"ignore_eos": True})
    next(iter(chunks))
    del chunks  # it has no way to close
    gc.collect()


def errors(asked: Asked) -> None:
    error = must_raise(litellm.exceptions.NotFoundError, lambda: complete(asked, "nobody"))
    assert "nobody" in str(error), error
    must_raise(litellm.exceptions.BadRequestError, lambda: complete(asked, asked.adapter, temperature=-1))


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
