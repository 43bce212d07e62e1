"""The formats in which models write calls of tools, as data: parser and grammar follow from it. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

ToolFormatName = Literal["hermes", "llama3", "mistral", "pythonic"]
TOOL_FORMATS: tuple[ToolFormatName, ...] = get_args(ToolFormatName)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """An answer has any text, then blocks of calls. A block is `begin`, `opening`, calls with `between` between them,
    `closing` and `end`. White space may stand between all of these."""

    begin: str = ""
    """What begins a block wherever it stands. Empty: a block stands at the beginning of the answer only."""
    at_start: bool = False
    """Whether a block at the beginning of the answer needs no `begin`."""
    opening: str = ""
    between: str = ""
    """Empty: a block has one call."""
    closing: str = ""
    end: str = ""
    before: str = ""
    """What is written between blocks. Empty: there is one block."""
    inside: str = ""
    """White space that is written between `begin` and the call, and between the call and `end`."""
    arguments: str = ""
    """The member of a call's JSON object that has the arguments; `name` has the tool's name. Empty: a call is written
    as in Python, `name(key=value)`."""
    known_by: tuple[str, ...]
    """What a chat template of this format has in its text: one of these,"""
    not_with: tuple[str, ...] = ()
    """and none of these, which are of other formats."""


FORMATS: Mapping[ToolFormatName, ToolFormat] = {
    "hermes": ToolFormat(
        begin="<tool_call>",
        inside="\n",
        end="</tool_call>",
        before="\n",
        arguments="arguments",
        known_by=("<tool_call>",),
        not_with=("<function=", "<arg_key>"),
    ),
    "llama3": ToolFormat(
        begin="<|python_tag|>",
        at_start=True,
        between="; ",
        arguments="parameters",
        known_by=('"parameters": dictionary of argument name', "<|python_tag|>"),
        not_with=("[func_name1(",),
    ),
    "mistral": ToolFormat(
        begin="[TOOL_CALLS]",
        opening="[",
        between=", ",
        closing="]",
        arguments="arguments",
        known_by=("[TOOL_CALLS]",),
        not_with=("[ARGS]",),
    ),
    "pythonic": ToolFormat(at_start=True, opening="[", between=", ", closing="]", known_by=("[func_name1(",)),
}


def known_format(name: str) -> ToolFormatName | None:
    return next((one for one in FORMATS if one == name), None)


def format_of_template(text: str) -> ToolFormatName | None:
    """The format of a model with this chat template. None: it shows none, or more than one."""
    known = [
        name
        for name, one in FORMATS.items()
        if any(sign in text for sign in one.known_by) and not any(sign in text for sign in one.not_with)
    ]
    return known[0] if len(known) == 1 else None
