"""The grammar that an answer has to follow, as requests carry it. Pure."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from motet.api.v1 import runner_pb2
from motet.errors import InvalidRequest
from motet.reasoning.formats import ExpectedReasoning

MAX_GRAMMAR_BYTES = 256 * 1024


class GrammarForm(StrEnum):
    """The names of the fields of the message `Sampling`."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"
    """In llguidance's language, which is close to Lark's."""
    EBNF = "ebnf"
    STRUCTURAL_TAG = "structural_tag"
    """A JSON object (`motet.grammars.structural_tags`)"""
    TOOL_CALLS = "tool_calls"
    """`motet.tool_calls.grammar.CallRules`"""


@dataclass(frozen=True, slots=True)
class Grammar:
    form: GrammarForm
    text: str
    behind: ExpectedReasoning | None = None
    """It begins where this ends. None: with the answer."""

    @classmethod
    def from_proto(cls, message: runner_pb2.Sampling) -> Self | None:
        if (form := message.WhichOneof("grammar")) is None:
            return None
        said = message.reasoning
        behind = ExpectedReasoning(said.begin, said.end, said.begun) if said.end else None
        if form == "json_object":
            return cls(GrammarForm.JSON_SCHEMA, ANY_OBJECT, behind)
        return cls(GrammarForm(form), getattr(message, form), behind)

    def write(self, message: runner_pb2.Sampling) -> None:
        setattr(message, self.form, self.text)
        if (behind := self.behind) is not None:
            said = runner_pb2.Reasoning(begin=behind.begin, end=behind.end, begun=behind.begun)
            message.reasoning.CopyFrom(said)


def impossible(why: str) -> InvalidRequest:
    return InvalidRequest(f"the grammar cannot be served: {why}", param="response_format")


ANY_OBJECT = '{"type":"object"}'
"""A JSON schema"""
