"""Reads request bodies: JSON within bounds of size, time and shape, so that parsing is quick."""

import asyncio
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import Receive, Scope

from motet.errors import InvalidRequest, Overloaded, RequestTooLarge, UnsupportedMediaType
from motet_gateway.errors import ClientGone, RequestTimeout

MAX_STRINGS = 100_000
MAX_CONTAINERS = 100_000
MAX_ELEMENTS = 2_000_000
"""Bounds on strings, on lists and objects, and on their elements in one body. Parsing blocks all other work, for about
0.1 s at these bounds, and objects take many times the memory of their text. A prompt of a million token ids fits."""

_STRING = re.compile(rb'"[^"]*"?')
_STRING_OR_BRACKET = re.compile(rb'"([^"]*)"\s*(:?)|[\[\]{}]')
_FIELD = re.compile(rb"[a-z_]{1,64}")


class BodyBudget:
    """Limits the memory of all bodies in progress together: their bytes, and what is made of them."""

    def __init__(self, budget: int, *, seconds: float) -> None:
        self._budget = budget
        self.seconds = seconds
        self.held = 0

    @contextmanager
    def hold(self) -> Iterator["RequestBody"]:
        """A body that counts until its request has ended."""
        body = RequestBody(self)
        try:
            yield body
        finally:
            self.held -= body.size

    def take(self, size: int) -> None:
        if self.held + size > self._budget:
            raise Overloaded("The gateway has too many large requests in progress. Try again soon.")
        self.held += size


class RequestBody:
    def __init__(self, bodies: BodyBudget) -> None:
        self._bodies = bodies
        self.size = 0

    async def read_json(self, scope: Scope, receive: Receive, *, limit: int) -> bytes:
        """The raw bytes. Raises if the content type isn't JSON or the body is too large, too slow or too complex."""
        headers = Headers(scope=scope)
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
            # For security, too: a web page can't send this content type to another origin without a preflight.
            raise UnsupportedMediaType(
                f"The content type is {kind or 'missing'}; send JSON with the header 'content-type: application/json'."
            )
        declared = headers.get("content-length", "")
        if declared.isdigit() and int(declared) > limit:
            raise _too_large(limit)
        try:
            async with asyncio.timeout(self._bodies.seconds):
                content = await self._arrived(receive, limit)
        except TimeoutError:
            raise RequestTimeout(f"The body did not arrive within {self._bodies.seconds:g} s.") from None
        if not content:
            raise InvalidRequest("The body is empty; send a JSON object.")
        check_shape(content)
        self.take(memory_of(content) - len(content))
        return content

    def take(self, size: int) -> None:
        """Count `size` bytes more, or fewer if it is negative, until the request has ended. Raises Overloaded."""
        self._bodies.take(size)
        self.size += size

    async def _arrived(self, receive: Receive, limit: int) -> bytes:
        pieces: list[bytes] = []
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            piece = message.get("body", b"")
            if self.size + len(piece) > limit:
                raise _too_large(limit)
            self.take(len(piece))
            pieces.append(piece)
            more = message.get("more_body", False)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def memory_of(content: bytes) -> int:
    """About how many bytes a body takes as objects and tokens. One rare character makes each of a text take four."""
    text = len(content) if content.isascii() and b"\\u" not in content else 4 * len(content)
    tokens = len(content)
    strings = content.count(b'"') // 2
    return text + tokens + 64 * strings + 128 * _containers(content) + 16 * content.count(b",")


@dataclass(frozen=True, slots=True)
class Shape:
    """How many strings, lists and objects, and elements of these JSON has."""

    strings: int = 0
    containers: int = 0
    elements: int = 0

    def __add__(self, other: "Shape") -> "Shape":
        return Shape(self.strings + other.strings, self.containers + other.containers, self.elements + other.elements)

    @property
    def too_much(self) -> str:
        """Of what it has more than may be parsed; empty: of nothing."""
        if self.strings > MAX_STRINGS:
            return f"{MAX_STRINGS} strings"
        if self.containers > MAX_CONTAINERS:
            return f"{MAX_CONTAINERS} lists and objects"
        return f"{MAX_ELEMENTS} elements" if self.elements > MAX_ELEMENTS else ""


def shape_of(content: bytes) -> Shape:
    return _shape_of_plain(_without_quotes_in_strings(content))


def _shape_of_plain(plain: bytes) -> Shape:
    strings = plain.count(b'"') // 2
    plain = _STRING.sub(b"", plain)  # the commas and braces may be part of a text
    return Shape(strings, _containers(plain), plain.count(b","))


def check_shape(content: bytes) -> None:
    """Raise InvalidRequest if the body has too many strings, containers or elements. For most bodies counting
    characters is enough."""
    if content.count(b'"') <= 2 * MAX_STRINGS and _sparse(content):
        return
    plain = _without_quotes_in_strings(content)
    if plain.count(b'"') > 2 * MAX_STRINGS:
        raise _too_much(f"{MAX_STRINGS} strings", _field_of_string(plain, MAX_STRINGS))
    if not _sparse(plain) and (what := _shape_of_plain(plain).too_much):
        raise _too_much(what)


def _without_quotes_in_strings(content: bytes) -> bytes:
    return content.replace(b"\\\\", b"").replace(b'\\"', b"")


def _field_of_string(plain: bytes, number: int) -> str | None:
    """The field of the body that has the string of this number; None if it is in no field that could be known. It
    reads no further, so it takes about as long as parsing may take."""
    depth, strings, field = 0, 0, None
    for found in _STRING_OR_BRACKET.finditer(plain):
        text, colon = found.groups()
        if text is None:
            depth += 1 if found[0] in b"[{" else -1
            continue
        if depth == 1 and colon:
            field = text.decode() if _FIELD.fullmatch(text) else None
        strings += 1
        if strings > number:
            break
    return field


def _sparse(content: bytes) -> bool:
    return _containers(content) <= MAX_CONTAINERS and content.count(b",") <= MAX_ELEMENTS


def _containers(content: bytes) -> int:
    return content.count(b"[") + content.count(b"{")


def _too_much(what: str, field: str | None = None) -> InvalidRequest:
    if field is None:
        return InvalidRequest(f"The body has more than {what}, the limit of this gateway.")
    return InvalidRequest(f"{field}: the body has more than {what}, the limit of this gateway", param=field)


def _too_large(limit: int) -> RequestTooLarge:
    return RequestTooLarge(f"The body is larger than {limit} bytes, the limit of this gateway.")
