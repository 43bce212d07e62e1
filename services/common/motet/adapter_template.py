"""The chat template that an adapter brings, as a runner has resolved it: the value, its bytes and its digest. Pure.

A runner makes it when it certifies the adapter, and gateways fetch it by its digest. So a gateway parses no file of a
tenant: what is in here is bounded, and is text.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

import orjson
from pydantic import TypeAdapter

from motet.domain import Digest

MAX_ADAPTER_TEMPLATE_BYTES = 7 << 20
"""Of the encoded value: JSON writes a control character of a template in six bytes."""
MAX_SPECIAL_TOKEN_CHARACTERS = 256
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
"""The variables of a chat template that name special tokens"""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterTemplate:
    text: str
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    """The adapter's own, and for the rest the base model's"""
    shows_tools: bool = False
    """Whether it writes the tools that a request offers"""

    def encode(self) -> bytes:
        said = {"text": self.text, "special_tokens": dict(self.special_tokens), "shows_tools": self.shows_tools}
        return orjson.dumps(said, option=orjson.OPT_SORT_KEYS)

    @classmethod
    def decode(cls, content: bytes) -> Self:
        """Raises ValueError for what `encode` has not written."""
        return TypeAdapter(cls).validate_json(content, strict=True)


def digest_of_template(content: bytes) -> Digest:
    """Of an encoded template"""
    return Digest("sha256:" + hashlib.sha256(content).hexdigest())


def token_text(token: object) -> str:
    """Of an entry of tokenizer_config.json"""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""


def declared_template(jinja: str | None, inline: object) -> str:
    """The template of a folder. `jinja`: the text of `chat_template.jinja`, if that exists; `inline`: `chat_template`
    of tokenizer_config.json. Empty: there is none. Raises ValueError for a list that names no templates."""
    if jinja is not None:
        return jinja
    if not isinstance(inline, list):
        return inline if isinstance(inline, str) else ""
    named: dict[str, str] = {}
    for entry in inline:
        if (found := _named(entry)) is None:
            raise ValueError("needs a name and a template, both text, in each entry")
        named |= found
    return named.get("default", "")


def _named(entry: object) -> dict[str, str] | None:
    name, text = (entry.get("name"), entry.get("template")) if isinstance(entry, dict) else (None, None)
    return {name: text} if isinstance(name, str) and isinstance(text, str) else None
