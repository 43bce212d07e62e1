"""Chat templates: a model's own jinja2 text, run in an immutable sandbox with the names that transformers gives it.

The sandbox protects Python from a template but limits neither time nor memory. The process that renders it does that
(`render_process`, which imports little of Motet and starts quickly), or an environment that counts
(`metered_template`).
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Self

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_TEMPLATE_BYTES = 1 << 20
MAX_RENDERED_CHARACTERS = 1 << 24
MAX_ERROR_CHARACTERS = 1000
"""Templates may repeat messages in their errors, so errors are cut."""


class CannotRender(Exception):
    """The reason, and which field of the request caused it."""

    def __init__(self, message: str, param: str = "messages") -> None:
        super().__init__(message)
        self.message = message[:MAX_ERROR_CHARACTERS]
        self.param = param


class _Refusal(jinja2.TemplateError):
    """The template itself refused these messages, with raise_exception()."""


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's words for training; here only its body matters."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own attribute

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise _Refusal(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Not jinja2's own: that one escapes for HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)  # noqa: DTZ005 - templates mean the local day


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """The filters and functions that transformers gives to a template."""

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[jinja2.ext.loopcontrols, _GenerationBlock],
            optimized=False,  # a template may repeat a constant any number of times
        )
        self.filters["tojson"] = _tojson
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now


class ChatTemplate:
    def __init__(self, template: jinja2.Template, special_tokens: Mapping[str, str]) -> None:
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
            return cls(ChatEnvironment().from_string(text), special_tokens)
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
        context["messages"] = messages
        context["add_generation_prompt"] = add_generation_prompt and not continue_final_message
        context.setdefault("tools", None)
        context.setdefault("documents", None)
        try:
            text = self._bounded(context)
        except _Refusal as refusal:
            raise CannotRender(f"the model's chat template refused the messages: {refusal}") from None
        except (CannotRender, MemoryError):
            raise
        except Exception as error:
            raise CannotRender(f"the model's chat template cannot render these messages: {error}") from None
        return _cut_after(text, str(messages[-1].get("content", ""))) if continue_final_message else text

    def _bounded(self, context: dict[str, Any]) -> str:
        pieces: list[str] = []
        size = 0
        for piece in self._template.generate(context):
            pieces.append(piece)
            size += len(piece)
            if size > MAX_RENDERED_CHARACTERS:
                raise CannotRender(
                    f"the model's chat template makes more than {MAX_RENDERED_CHARACTERS} characters of these messages"
                )
        return "".join(pieces)


def _cut_after(text: str, final: str) -> str:
    """The rendered text up to the end of the final message, so that the answer goes on within it."""
    stripped = final.strip()
    at = text.rfind(stripped) if stripped else -1
    if at < 0:
        raise CannotRender(
            "continue_final_message: the final message is empty, or the model's chat template changes its text",
            param="continue_final_message",
        )
    # Many templates trim messages. If this one does not, the message's trailing space belongs to the prompt.
    end = at + len(stripped)
    trailing = final[len(final.rstrip()) :]
    return text[: end + len(trailing)] if text.startswith(trailing, end) else text[:end]
