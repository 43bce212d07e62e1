"""What requests say about reasoning, and how an answer's reasoning is found. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from motet.chat_formats import ChatFormats
from motet.errors import InvalidRequest
from motet.reasoning.formats import ExpectedReasoning, is_begun, known_format
from motet_gateway.tokens.text_model import ModelTokenizer

EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh")
_TAIL_TOKENS = 32
"""Of the prompt: a tag has fewer, with white space behind it."""


def expected_reasoning(
    formats: ChatFormats, text: ModelTokenizer, prompt: Sequence[int], continued: str
) -> ExpectedReasoning | None:
    """Of the answer to this prompt. None: the model is not known to reason."""
    if (form := known_format(formats.reasoning)) is None:
        return None
    (tail,) = text.decode([list(prompt[-_TAIL_TOKENS:])], skip_special_tokens=False)
    return ExpectedReasoning(form.begin, form.end, is_begun(form, tail, continued))


def effort_variables(effort: str) -> dict[str, Any]:
    """As chat templates read them."""
    thinks = effort != "none"
    return {"reasoning_effort": effort, "enable_thinking": thinks, "thinking": thinks}


def with_reasoning(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The message, with its reasoning by both names: templates read one or the other."""
    names = ("reasoning_content", "reasoning")
    for name in names:
        if not isinstance(message.get(name), str | None):
            raise InvalidRequest(f"{where}.{name}: must be a string", param=f"{where}.{name}")
    plain = {name: value for name, value in message.items() if name not in names}
    said = next((message[name] for name in names if message.get(name)), None)
    return plain if said is None else plain | dict.fromkeys(names, said)
