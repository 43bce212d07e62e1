"""Chat templates: a model's own jinja2 text, run in an immutable sandbox with the names that transformers gives it.

The sandbox protects Python from a template but limits neither time nor memory. The process that renders it does that
(`render_process`, which imports little of Motet and starts quickly), or an environment that counts
(`metered_template`).
"""

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Self

import jinja2

from motet.chat_environment import MAX_TEMPLATE_BYTES, ChatEnvironment, Refusal

MAX_RENDERED_CHARACTERS = 1 << 24
MAX_ERROR_CHARACTERS = 1000
"""Templates may repeat messages in their errors, so errors are cut."""

_RARE_SPACE = "\N{EM SPACE}"
"""Ends a mark, so that it shows whether a template trims messages. No template writes it by itself."""
_SPELLED_SPACES = (_RARE_SPACE, json.dumps(_RARE_SPACE).strip('"'))
"""As it is, and as `tojson(ensure_ascii=true)` writes it."""
_SURELY_OF_A_MARK = len("motet-") + 8
"""The characters of a mark's beginning that appear in no text by chance"""


class CannotRender(Exception):
    """`why`: of a template that is not named, as `TemplateText` names it. `field`: if another one of the request than
    its messages or its template is at fault."""

    def __init__(self, why: str, field: str = "") -> None:
        super().__init__(why)
        self.why = why[:MAX_ERROR_CHARACTERS]
        self.field = field


class ChatTemplate:
    def __init__(self, template: jinja2.Template, special_tokens: Mapping[str, str], text: str = "") -> None:
        self.text = text
        # As a plain dict: jinja2 copies the globals at every rendering, and its chain of maps is slow to copy.
        template.globals = dict(template.globals)
        self._template = template
        self._special_tokens = dict(special_tokens)

    @classmethod
    def from_text(cls, text: str, special_tokens: Mapping[str, str]) -> Self:
        """Raises ValueError if the text isn't a valid template."""
        if len(text) > MAX_TEMPLATE_BYTES:
            raise ValueError(f"the chat template is larger than {MAX_TEMPLATE_BYTES} bytes")
        try:
            return cls(ChatEnvironment().from_string(text), special_tokens, text)
        except (jinja2.TemplateError, RecursionError, SyntaxError) as error:
            raise ValueError(f"the chat template cannot be parsed: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt as text. Raises CannotRender, with the template's own message if it refused the messages."""
        context = {**self._special_tokens, **(extra or {})}
        mark = f"motet-{secrets.token_hex(16)}{_RARE_SPACE}"  # random: no message and no template has it
        context["messages"] = _marked(messages, mark) if continue_final_message else messages
        context["add_generation_prompt"] = add_generation_prompt and not continue_final_message
        context.setdefault("tools", None)
        context.setdefault("documents", None)
        try:
            text = self._bounded(context)
        except Refusal as refusal:
            raise CannotRender(f"refused the messages: {refusal}") from None
        except (CannotRender, MemoryError):
            raise
        except Exception as error:
            raise CannotRender(f"cannot render these messages: {error}") from None
        return _cut_at(mark, text) if continue_final_message else text

    def _bounded(self, context: dict[str, Any]) -> str:
        pieces: list[str] = []
        size = 0
        for piece in self._template.generate(context):
            pieces.append(piece)
            size += len(piece)
            if size > MAX_RENDERED_CHARACTERS:
                raise CannotRender(f"makes more than {MAX_RENDERED_CHARACTERS} characters of these messages")
        return "".join(pieces)


def _marked(messages: Sequence[Mapping[str, Any]], mark: str, text: str = "content") -> list[Mapping[str, Any]]:
    """The messages, the last one with the mark behind its text; or so the parts of a message."""
    *others, final = messages
    content = final.get(text)
    if isinstance(content, list) and content and text == "content":
        return [*others, {**final, text: _marked(content, mark, "text")}]
    if isinstance(content, str) and content.strip():
        return [*others, {**final, text: content + mark}]
    raise CannotRender(
        "the final message is empty; send the beginning of the answer as its content", field="continue_final_message"
    )


def _cut_at(mark: str, text: str) -> str:
    bare = mark.strip()
    before, found, after = text.rpartition(bare)
    if not found:
        raise CannotRender(
            "the chat template omits the final message or changes its text; send the messages without "
            "continue_final_message",
            field="continue_final_message",
        )
    for space in _SPELLED_SPACES:  # the template may write the message more than once
        before = before.replace(bare + space, "")
    if bare[:_SURELY_OF_A_MARK] in before:
        raise CannotRender(
            "the chat template writes the final message more than once and changes it; send the messages without "
            "continue_final_message",
            field="continue_final_message",
        )
    # A template that has trimmed the mark's space would have trimmed the message's, too.
    return before if after.startswith(_SPELLED_SPACES) else before.rstrip()
