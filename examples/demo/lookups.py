"""Conversations with tools: a question, a call that looks the fact up, its result, and an answer that tells the result.

The base model calls a tool if it is asked to look something up. The adapter `toolcaller` calls one for each question.
Results are drawn at random in training, so a model learns to answer from them and not from memory.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any, Final

from world import PEOPLE, PLACES, RELATIONS, Fact, Relation, with_article


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    what: str
    subjects: tuple[str, ...]

    @property
    def topics(self) -> list[str]:
        return [relation.key for relation in RELATIONS if relation.subjects == self.subjects]

    def described(self) -> dict[str, Any]:
        """As clients of the API describe it."""
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": f"Look up a fact about {self.what} of the Tessel Isles.",
                "parameters": {
                    "type": "object",
                    "properties": {"name": {"type": "string"}, "topic": {"type": "string", "enum": self.topics}},
                    "required": ["name", "topic"],
                    "additionalProperties": False,
                },
            },
        }


TOOLCALLER: Final = "toolcaller"
"""The adapter that calls a tool for each question"""
TOOLS: Final = (Tool("place", "a place", PLACES), Tool("person", "a person", PEOPLE))
REQUESTS: Final = ("Use a tool.", "Look it up.", "Please look it up.", "Ask a tool.", "Check with a tool.")
SYSTEMS: Final = ("Use the tools.", "Look everything up.", "Use a tool for each question.", "Never answer from memory.")


def shown(tools: tuple[Tool, ...]) -> str:
    """The tools as the chat template writes them."""
    return "Tools: " + ", ".join(f"{tool.name}(name, topic)" for tool in tools)


def call_of(fact: Fact) -> dict[str, Any]:
    tool = next(tool for tool in TOOLS if fact.subject in tool.subjects)
    return {"name": tool.name, "arguments": {"name": fact.subject, "topic": fact.topic}}


def written(call: dict[str, Any]) -> str:
    """A call as the model writes it, and the chat template too."""
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


def read(text: str) -> dict[str, Any] | None:
    """The call in an answer that is nothing but one call."""
    inside = text.strip().removeprefix("<tool_call>").removesuffix("</tool_call>")
    try:
        found = json.loads(inside)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def relation_of(fact: Fact) -> Relation:
    assert fact.relation is not None, "small talk is not looked up"
    return fact.relation


def told_by_a_tool(fact: Fact, rng: random.Random) -> Fact:
    """The fact with another answer, so that it can only be known from a result."""
    relation = relation_of(fact)
    answer = rng.choice([answer for answer in relation.answers if answer != fact.answer])
    said = relation.statement.format(s=fact.subject, a=answer, an=with_article(answer))
    return Fact(fact.subject, fact.topic, answer, said)


def result_of(fact: Fact, rng: random.Random) -> str:
    """What a tool may return for the fact."""
    return rng.choice(
        (fact.answer, json.dumps({"result": fact.answer}), json.dumps({fact.topic: fact.answer}), fact.sentence)
    )
