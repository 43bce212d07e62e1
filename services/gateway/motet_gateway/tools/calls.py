"""How the calls of one answer are bound, read and named."""

import secrets
import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import orjson

from motet.chat_formats import ChatFormats
from motet.errors import UnsupportedParameter
from motet.grammars.grammar import Grammar
from motet.tool_calls.formats import FORMATS, ToolFormatName, known_format
from motet.tool_calls.parser import CallParser
from motet_gateway.catalog import Target
from motet_gateway.parameters import Body
from motet_gateway.tokens.text_model import ModelTokenizer
from motet_gateway.tools.parameters import OfferedTools

ID_LENGTH = 9
"""Mistral's templates take no other one."""
_SIGNS = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class CallableTools:
    offered: OfferedTools
    format: ToolFormatName

    def parser(self) -> CallParser:
        return CallParser(
            FORMATS[self.format], self.offered.schemas.keys(), _new_id, only_one=not self.offered.parallel
        )

    @property
    def signs(self) -> Sequence[str]:
        """What the format is made of."""
        form = FORMATS[self.format]
        return [sign for sign in (form.begin, form.end) if sign]


class OffersTools(Protocol):
    @property
    def tools_offered(self) -> OfferedTools | None: ...


def formats_of(target: Target, text: ModelTokenizer) -> ChatFormats:
    """What pool and adapter declare, and for the rest what the model's chat template shows."""
    return target.declared_formats.over(ChatFormats(tool=text.tool_format or ""))


def callable_tools(body: OffersTools, formats: ChatFormats) -> CallableTools | None:
    """None: the request offers none. Raises UnsupportedParameter if this model cannot call tools."""
    if (offered := body.tools_offered) is None:
        return None
    if not formats.tool:
        raise UnsupportedParameter(
            f"tools: this model's chat template shows none of the formats of calls that are known "
            f"({', '.join(FORMATS)}), or more than one. Set spec.chat.toolFormat of its adapter or pool to one of "
            "them, or remove the field",
            param="tools",
        )
    if (form := known_format(formats.tool)) is None:
        raise UnsupportedParameter(
            f"tools: spec.chat.toolFormat of this model is {formats.tool!r}, which this gateway does not know; it must "
            f"be one of {', '.join(FORMATS)}",
            param="tools",
        )
    return CallableTools(offered, form)


def grammar_of_answer(body: Body, tools: CallableTools | None) -> tuple[str, Grammar] | None:
    """Behind the field that asks for it."""
    asked = body.grammar_asked
    if tools is None:
        return asked
    content = None if asked is None else orjson.loads(asked[1].text)
    grammar = tools.offered.grammar(tools.format, content)
    field = "tools" if asked is None or tools.offered.bound else asked[0]
    return None if grammar is None else (field, grammar)


def _new_id() -> str:
    return "".join(secrets.choice(_SIGNS) for _ in range(ID_LENGTH))
