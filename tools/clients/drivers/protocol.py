"""How a driver is asked: `tools.clients` starts it with the client's own Python. It imports nothing of the product.

The first line of stdin says where the product is and what to ask. Then each line is an action, and each line of stdout
its result, as JSON:

    {"url", "broken_url", "adapter", "caller", "question", "answer", "tools", "tool", "result",
     "tokenizer"}
    "chat" -> {"works": true} or {"works": false, "why"}
"""

import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

LOAD_REQUESTS = 20
"""Of a load generator"""


@dataclass(frozen=True)
class Asked:
    url: str
    broken_url: str
    """The same, but for a stream, which breaks after some pieces"""
    adapter: str
    caller: str
    """The adapter that calls tools"""
    question: str
    answer: str
    """The adapter's, to the question, without temperature"""
    tools: list[dict[str, Any]]
    """In the form of OpenAI's chats"""
    tool: str
    """The name of the tool that the question needs"""
    result: str
    """What the tool says"""
    tokenizer: str
    """The folder with the model's"""

    @property
    def messages(self) -> list[Any]:
        return [{"role": "user", "content": self.question}]

    @property
    def schema(self) -> dict[str, Any]:
        return {
            "type": "object",
            "properties": {"answer": {"type": "string", "maxLength": 20}, "sure": {"type": "boolean"}},
            "required": ["answer", "sure"],
            "additionalProperties": False,
        }

    def check_object(self, text: str) -> None:
        found = json.loads(text)
        assert found.keys() == {"answer", "sure"}, found
        assert isinstance(found["sure"], bool), found

    def check_arguments(self, text: str) -> None:
        assert json.loads(text).keys() == {"name", "topic"}, text

    def check_end(self, text: str | None) -> None:
        """The answer has what the tool said, which is not what the model has learnt."""
        assert self.result in (text or ""), text


Action = Callable[[Asked], None]
"""Raises if the client does not do what was asked."""


def serve(actions: Mapping[str, Action]) -> None:
    # What a library prints must not mix with results.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    asked = Asked(**json.loads(sys.stdin.readline()))
    for line in sys.stdin:
        name = json.loads(line)
        try:
            actions[name](asked)
            result: dict[str, Any] = {"works": True}
        except Exception as error:
            traceback.print_exc()
            result = {"works": False, "why": f"{type(error).__name__}: {error}"[:300]}
        print(json.dumps(result), file=answers, flush=True)


def must_raise(kinds: type[BaseException] | tuple[type[BaseException], ...], do: Callable[[], object]) -> Any:
    """The error that this raises."""
    try:
        got = do()
    except kinds as error:
        return error
    raise AssertionError(f"it raised no error, and returned {got!r}"[:300])
