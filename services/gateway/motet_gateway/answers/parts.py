"""The parts of one choice, in the order in which the model wrote them: texts, reasoning, calls of tools. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

from motet.tool_calls.parser import CallDelta
from motet_gateway.answers.logprobs import Columns


@dataclass(slots=True)  # frozen, one takes three times as long to make
class Reasoning:
    text: str


@dataclass(slots=True)
class Scores:
    """Log probabilities. They stand before the part whose tokens they are of; alone if these tokens add nothing to it,
    as those that end a call."""

    columns: Columns
    of_text: bool
    """Whether these tokens write a text: not a call, reasoning, tags, or white space beside these"""


Part = str | Reasoning | CallDelta | Scores


def joined(parts: list[Part]) -> list[Part]:
    """Neighbours of one kind are one part. A call is one, with its arguments."""
    if len(parts) < 2:
        return parts
    whole: list[Part] = []
    for _, same in groupby(parts, _kind):
        first, *more = same
        if isinstance(first, str):
            whole.append("".join([first, *texts(more)]))
        elif isinstance(first, Reasoning):
            whole.append(Reasoning("".join([first.text, *reasoning(more)])))
        elif isinstance(first, CallDelta):
            rest = (one.arguments for one in more if isinstance(one, CallDelta))
            whole.append(CallDelta(first.index, first.id, first.name, "".join([first.arguments, *rest])))
        else:
            whole += [first, *more]
    return whole


def texts(parts: Iterable[Part]) -> list[str]:
    return [part for part in parts if isinstance(part, str)]


def reasoning(parts: Iterable[Part]) -> list[str]:
    return [part.text for part in parts if isinstance(part, Reasoning)]


def scores(parts: Iterable[Part]) -> list[Columns]:
    return [part.columns for part in parts if isinstance(part, Scores)]


def _kind(part: Part) -> tuple[type, int]:
    return type(part), part.index if isinstance(part, CallDelta) else 0
