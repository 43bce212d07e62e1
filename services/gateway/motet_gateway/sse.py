"""Server-sent events as bytes. Everything but the text is encoded once per choice."""

from collections.abc import Mapping
from typing import Any, Final

import orjson

from motet.errors import MotetError
from motet_gateway.error_format import error_body

DONE: Final = b"data: [DONE]\n\n"

HEADERS: Final[dict[str, str]] = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # nginx would collect the stream and send it at its end
}


def event(content: Mapping[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(content) + b"\n\n"


def typed_event(content: Mapping[str, Any]) -> bytes:
    """Its type is also the name of the event."""
    return _named(content) + b"data: " + orjson.dumps(content) + b"\n\n"


def _named(content: Mapping[str, Any]) -> bytes:
    return f"event: {content['type']}\n".encode()


def error_event(error: MotetError) -> bytes:
    return b"data: " + error_body(error) + b"\n\n"


def comment(text: str) -> bytes:
    """Ignored by every client, seen by people with `curl -N`."""
    return b": " + text.replace("\n", " ").encode() + b"\n\n"


_MARK = "\ue000motet\ue000"
_JSON_MARK = orjson.dumps(_MARK)


class EventTemplate:
    """An event with one placeholder: the text replaces TEXT in `content`."""

    TEXT: Final = _MARK

    __slots__ = ("_after", "_before")

    def __init__(self, content: Mapping[str, Any], *, typed: bool = False) -> None:
        """`typed`: as `typed_event`."""
        before, after = orjson.dumps(content).split(_JSON_MARK)
        self._before = (_named(content) if typed else b"") + b"data: " + before
        self._after = after + b"\n\n"

    def fill(self, text: str) -> bytes:
        return self._before + orjson.dumps(text) + self._after
