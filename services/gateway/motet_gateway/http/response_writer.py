"""The bytes of one answer: messages of ASGI in, bytes out."""

import re
from collections.abc import Iterable
from http import HTTPStatus

from motet.errors import MotetError
from motet_gateway.error_format import error_body, error_headers

_BAD_NAME = re.compile(rb'[\x00-\x1f\x7f()<>@,;:\[\]={} \t\\"]')
_BAD_VALUE = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_WITHOUT_BODY = frozenset((204, 304))


def _status_line(status: int) -> bytes:
    try:
        phrase = HTTPStatus(status).phrase
    except ValueError:
        phrase = ""
    return f"HTTP/1.1 {status} {phrase}\r\n".encode()


_STATUS_LINES = {status: _status_line(status) for status in range(100, 600)}


class ResponseWriter:
    """Frames one answer, and raises RuntimeError when the application breaks the frame that its headers promise."""

    __slots__ = ("_has_body", "_left", "_version", "chunked", "complete", "keep_alive", "started")

    def __init__(self, method: str, version: str, *, keep_alive: bool) -> None:
        self.started = False
        self.complete = False
        self.chunked = False
        self.keep_alive = keep_alive
        """Whether the connection takes another request after this answer."""
        self._has_body = method != "HEAD"
        self._version = version
        self._left: int | None = None
        """Bytes of the body that the header content-length promises and that have not come."""

    def start(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
        parts = [_STATUS_LINES[status]]
        closes = framed = False
        for any_case, value in headers:
            name = any_case.lower()
            if _BAD_NAME.search(name) or _BAD_VALUE.search(value):
                raise RuntimeError(f"the header {name!r} of the answer cannot be sent")
            if name == b"content-length":
                framed, self._left = True, int(value)
            elif name == b"transfer-encoding":
                continue  # the frame is ours
            elif name == b"connection":
                closes = b"close" in [token.strip().lower() for token in value.split(b",")]
            parts += (name, b": ", value, b"\r\n")
        if status in _WITHOUT_BODY:
            self._has_body = False
        elif not framed and self._has_body:
            if self._version == "1.1":
                self.chunked = True
                parts.append(b"transfer-encoding: chunked\r\n")
            else:
                self.keep_alive = False  # the end of the connection is the end of the body
        if closes:
            self.keep_alive = False
        elif not self.keep_alive:
            parts.append(b"connection: close\r\n")
        parts.append(b"\r\n")
        self.started = True
        return b"".join(parts)

    def body(self, piece: bytes, *, more: bool) -> bytes:
        self.complete = not more
        if not self._has_body:
            return b""
        if self.chunked:
            chunk = b"%x\r\n%b\r\n" % (len(piece), piece) if piece else b""
            return chunk if more else chunk + b"0\r\n\r\n"
        if self._left is not None:
            self._left -= len(piece)
            if self._left < 0 or (self._left and not more):
                raise RuntimeError("the answer's body is not as long as its header content-length says")
        return piece


def error_response(error: MotetError, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """A whole answer, after which the connection closes. `headers`: those that each answer has."""
    content = error_body(error)
    own = {"content-type": "application/json", "content-length": str(len(content)), "connection": "close"}
    encoded = [(name.encode(), value.encode()) for name, value in (own | error_headers(error)).items()]
    writer = ResponseWriter("GET", "1.1", keep_alive=False)
    return writer.start(error.mapping.http, [*headers, *encoded]) + writer.body(content, more=False)
