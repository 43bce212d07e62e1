"""The tags between which models write their reasoning, as data. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

ReasoningFormatName = Literal["think", "mistral", "granite", "seed"]
REASONING_FORMATS: tuple[ReasoningFormatName, ...] = get_args(ReasoningFormatName)


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """An answer may begin with `begin`; then it is reasoning up to `end`. What follows is its content."""

    begin: str
    end: str


@dataclass(frozen=True, slots=True)
class ExpectedReasoning:
    """Of one answer."""

    begin: str
    end: str
    begun: bool
    """The prompt has the first tag, so the answer begins inside."""


FORMATS: Mapping[ReasoningFormatName, ReasoningFormat] = {
    "think": ReasoningFormat("<think>", "</think>"),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
    "granite": ReasoningFormat("Here is my thought process:", "Here is my response:"),
    "seed": ReasoningFormat("<seed:think>", "</seed:think>"),
}


def known_format(name: str) -> ReasoningFormat | None:
    return next((one for known, one in FORMATS.items() if known == name), None)


def is_begun(form: ReasoningFormat, before: str, continued: str = "") -> bool:
    """Whether an answer begins inside of reasoning. `before`: the end of the prompt; some chat templates write the tag
    there. `continued`: what of the answer is in the prompt already."""
    if continued:
        _, found, behind = continued.rpartition(form.begin)
        return bool(found) and form.end not in behind
    return before.rstrip().endswith(form.begin)
