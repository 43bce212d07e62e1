"""Instructor: objects from answers, by a tool (its default) and by a schema."""

import importlib
from typing import Any

from tools.clients.drivers.protocol import Asked, must_raise, serve

instructor: Any = importlib.import_module("instructor")
openai: Any = importlib.import_module("openai")
pydantic: Any = importlib.import_module("pydantic")


def ask(asked: Asked, mode: Any, **changed: Any) -> Any:
    # With more members than these, a small model would go on for ever.
    fields = {"answer": (str, pydantic.Field(max_length=20)), "sure": (bool, ...)}
    answer = pydantic.create_model("Answer", __config__={"extra": "forbid"}, **fields)
    client = instructor.from_openai(openai.OpenAI(base_url=asked.url, api_key="none", max_retries=0), mode=mode)
    wanted = {"model": asked.caller, "messages": asked.messages, "max_tokens": 500, "temperature": 0, "max_retries": 0}
    return client.chat.completions.create(response_model=answer, **wanted | changed)


def structured(asked: Asked) -> None:
    assert isinstance(ask(asked, instructor.Mode.JSON_SCHEMA, model=asked.adapter).sure, bool)


def tools(asked: Asked) -> None:
    assert isinstance(ask(asked, instructor.Mode.TOOLS).sure, bool)


def errors(asked: Asked) -> None:
    error = must_raise(Exception, lambda: ask(asked, instructor.Mode.TOOLS, model="nobody"))
    assert "nobody" in str(error), error


if __name__ == "__main__":
    serve({"structured": structured, "tools": tools, "errors": errors})
