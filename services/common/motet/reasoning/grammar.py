"""The grammar of an answer that reasons first, in llguidance's language. Pure."""

import json
from collections.abc import Callable

from motet.reasoning.formats import ExpectedReasoning

ANSWER = "answer"
"""The name of the grammar that begins behind the reasoning."""


def reasoning_rules(expected: ExpectedReasoning, special: Callable[[str], str]) -> str:
    """Rules of reasoning, if the model wants any, and then the grammar of this name. `special`: how a text is written
    that is one special token of the model; empty: it is none."""
    ends = ["thought"]
    if token := special(expected.end):
        ends.append(f"THOUGHT {token}")
    behind = f"({' | '.join(ends)}) WHITE answer"
    begins = [json.dumps(expected.begin)]
    if token := special(expected.begin):
        begins.append(token)
    start = behind if expected.begun else f"answer | ({' | '.join(begins)}) {behind}"
    return "\n".join(
        [
            f"start: {start}",
            f"answer: @{ANSWER}",
            f"thought[lazy]: THOUGHT {json.dumps(expected.end)}",
            r"THOUGHT: /(.|\n)*/",
            r"WHITE: /[ \n]{0,4}/",
            "",
        ]
    )
