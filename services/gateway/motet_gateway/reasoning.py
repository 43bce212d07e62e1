"""What requests say about reasoning, and how an answer's reasoning is found. Pure."""

from collections.abc import Sequence
from typing import Any, Final

from motet.chat_formats import ChatFormats
from motet.errors import InvalidRequest
from motet.reasoning.formats import ExpectedReasoning, is_begun, known_format
from motet_gateway.tokens.text_model import ModelTokenizer

EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh")
_NAMES = ("reasoning_content", "reasoning")
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


def read_reasoning(message: dict[str, Any], where: str) -> None:
    """Put the message's reasoning under both names: templates read one or the other. Without any, it has neither."""
    said = None
    for name in _NAMES:
        value = message.pop(name, None)
        if not isinstance(value, str | None):
            raise InvalidRequest(f"{where}.{name}: must be a string", param=f"{where}.{name}")
        said = said or value
    if said:
        message |= dict.fromkeys(_NAMES, said)
