"""The jinja2 environment of chat templates, with the names that transformers gives to them.

A runner parses an adapter's template in it, and a gateway renders templates in it. The sandbox protects Python from a
template but limits neither time nor memory: whoever uses it does that.
"""

import json
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_TEMPLATE_BYTES = 1 << 20
MAX_LEXED_CHARACTERS = 64 * 1024
"""It takes 10 ms for 20,000. Templates of models have up to that."""


class Refusal(jinja2.TemplateError):
    """The template itself refused these messages, with raise_exception()."""


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's words for training; here only its body matters."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own attribute

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise Refusal(message)


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


def reads(text: str, name: str) -> bool:
    """Whether a template reads the variable of this name. A template that is no valid one is said to."""
    if name not in text or len(text) > MAX_LEXED_CHARACTERS:
        return name in text
    try:
        return any(kind == "name" and word == name for _, kind, word in ChatEnvironment().lex(text))
    except jinja2.TemplateError:
        return True
