"""Whether a chat template reads the content of a message as a string or as parts, as templates of models that see
images do. Pure."""

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

_READS_PARTS = re.compile(
    r"\bfor\s+\w+\s+in\s+(\w+\.)?(\w+\[['\"])?content(['\"]\])?\s*(if\b|-?%}|\|\s*(select|reject)attr\b)"
)
_TAKES_STRINGS = re.compile(r"\bis\s+(not\s+)?string\b")


@lru_cache(maxsize=64)
def reads_parts(template: str) -> bool:
    return _READS_PARTS.search(template) is not None


@lru_cache(maxsize=64)
def _reads_parts_alone(template: str) -> bool:
    return reads_parts(template) and _TAKES_STRINGS.search(template) is None


def as_read(template: str, messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """The messages, each string as one part if the template reads parts alone: it would show nothing of a string."""
    return [_in_parts(one) for one in messages] if _reads_parts_alone(template) else messages


def _in_parts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    text = message["content"]
    return {**message, "content": [{"type": "text", "text": text}]} if isinstance(text, str) else message
