"""The chat template that an adapter's folder brings. It is parsed here, so that a broken one is refused with its place,
and rendered by gateways only. Called where time and memory are bounded: all of it is a tenant's."""

from pathlib import Path
from typing import Any

import jinja2

from motet.adapter_template import (
    MAX_SPECIAL_TOKEN_CHARACTERS,
    SPECIAL_TOKENS,
    AdapterTemplate,
    declared_template,
    token_text,
)
from motet.asset_fields import AssetFields
from motet.chat_environment import MAX_TEMPLATE_BYTES, ChatEnvironment, reads
from motet.errors import AdapterIncompatible, ModelFolderError
from motet_runner.adapters.strict_json import parse
from motet_runner.sources.file_selection import MAX_TEXT_BYTES

JINJA, CONFIG = "chat_template.jinja", "tokenizer_config.json"
MAX_WHY_CHARACTERS = 300


def own_template(folder: Path, base: Path | None) -> AdapterTemplate | None:
    """`base`: the base model's folder; None: there is none here. None: the adapter has no template, or the base's.
    Raises AdapterIncompatible, which says what is wrong with it, and in which file and line."""
    config = tokenizer_config(folder)
    jinja = _jinja(folder)
    try:
        text = declared_template(jinja, config.get("chat_template"))
    except ValueError as error:
        raise _refused(f"{CONFIG}: chat_template {error}.") from None
    if not text:
        return None
    place = JINJA if jinja is not None else f"{CONFIG}: chat_template"
    own = {name: token_text(config.get(name)) for name in SPECIAL_TOKENS}
    long = next((name for name, one in own.items() if len(one) > MAX_SPECIAL_TOKEN_CHARACTERS), None)
    if long is not None:
        raise _refused(f"{CONFIG}: {long} has more than {MAX_SPECIAL_TOKEN_CHARACTERS} characters.")
    base_text, of_base = _of_base(base)
    special_tokens = {name: own[name] or of_base.get(name, "") for name in SPECIAL_TOKENS}
    unlike = [name for name, token in of_base.items() if special_tokens[name] != token]
    if text == base_text and not any(reads(text, name) for name in unlike):
        return None
    _check(text, place)
    return AdapterTemplate(text=text, special_tokens=special_tokens, shows_tools=reads(text, "tools"))


def tokenizer_config(folder: Path) -> dict[str, Any]:
    """Empty: the adapter has none."""
    try:
        with (folder / CONFIG).open("rb") as file:
            raw = file.read(MAX_TEXT_BYTES + 1)
    except FileNotFoundError:
        return {}
    if len(raw) > MAX_TEXT_BYTES:
        raise AdapterIncompatible(f"{CONFIG} has more than {MAX_TEXT_BYTES} bytes.", reason="TooLarge")
    content = parse(raw, CONFIG)
    if not isinstance(content, dict):
        raise _refused(f"{CONFIG} must be a JSON object.")
    return content


def _jinja(folder: Path) -> str | None:
    try:
        with (folder / JINJA).open("rb") as file:
            raw = file.read(MAX_TEMPLATE_BYTES + 1)
    except FileNotFoundError:
        return None
    _check_size(len(raw), JINJA)
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise _refused(f"{JINJA} is not UTF-8: see byte {error.start}.") from None


def _of_base(base: Path | None) -> tuple[str, dict[str, str]]:
    if base is None:
        return "", {}
    try:
        fields = AssetFields(base)
    except ModelFolderError:  # its pool says so
        return "", {}
    return fields.chat_template, {name: token_text(fields.tokenizer.get(name)) for name in SPECIAL_TOKENS}


def _check(text: str, place: str) -> None:
    _check_size(len(text.encode()), place)
    try:
        ChatEnvironment().from_string(text)
    except jinja2.TemplateSyntaxError as error:
        raise _refused(f"{place}, line {error.lineno}: {str(error.message)[:MAX_WHY_CHARACTERS]}.") from None
    except (jinja2.TemplateError, RecursionError, SyntaxError, ValueError, OverflowError) as error:
        raise _refused(f"{place} cannot be parsed: {str(error)[:MAX_WHY_CHARACTERS]}.") from None


def _check_size(size: int, place: str) -> None:
    if size > MAX_TEMPLATE_BYTES:
        raise AdapterIncompatible(
            f"{place} is larger than {MAX_TEMPLATE_BYTES} bytes, which no chat template may be.", reason="TooLarge"
        )


def _refused(why: str) -> AdapterIncompatible:
    return AdapterIncompatible(
        f"{why} Correct the adapter's chat template, or remove it: then the base model's is used.",
        reason="FormatRejected",
    )
