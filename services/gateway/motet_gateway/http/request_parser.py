"""The requests in the bytes of one connection: bytes in, events out.

httptools finds the parts of a request. This module bounds them, and refuses what another reader of the same bytes, such
as a proxy, could take for other requests (RFC 9112, 11.2). After a refusal nothing more is parsed.
"""

from dataclasses import dataclass
from enum import Enum
from typing import NoReturn
from urllib.parse import unquote

import httptools
import structlog

from motet.errors import InvalidRequest, MotetError
from motet_gateway.errors import HeadersTooLarge

log = structlog.get_logger(__name__)

Headers = list[tuple[bytes, bytes]]

_CHECKED = frozenset((b"host", b"transfer-encoding", b"expect"))
_FRAMING = frozenset((b"content-length", b"transfer-encoding"))


@dataclass(slots=True)  # one for each request: a frozen one takes several times as long to create
class RequestHead:
    method: str
    path: str
    raw_path: bytes
    query: bytes
    version: str
    """1.1 or 1.0."""
    headers: Headers
    """Names are in lower case."""
    keep_alive: bool
    """Whether the client may send another request after this one."""
    expects_continue: bool
    """Whether the client waits for `100 Continue` before it sends the body."""
    size: int
    """Bytes of the target and of the headers."""


class Mark(Enum):
    END_OF_REQUEST = "the whole body has arrived"
    TOO_MANY = "one more request began than may wait"


@dataclass(frozen=True, slots=True)
class Refusal:
    """The bytes are not a request that is served."""

    error: MotetError


Event = RequestHead | bytes | Mark | Refusal
"""Bytes are a part of the body of the last request."""


class _Stop(Exception):
    """Ends httptools within a read. It cannot go on afterwards."""


class RequestParser:
    def __init__(self, *, max_head_bytes: int, max_fields: int) -> None:
        self.stopped = False
        """Whether all further bytes are ignored."""
        self.begun = False
        """Whether a part of a head has arrived, but not all of it."""
        self._max_head_bytes = max_head_bytes
        self._max_fields = max_fields
        self._parser = httptools.HttpRequestParser(self)
        self._events: list[Event] = []
        self._pieces: list[bytes] = []
        """The parts of a body since the last event."""
        self._room = 0
        self._last = False
        """Whether no further request may begin."""
        self._ended: Event | None = None
        """Why a callback stopped httptools, if that is an event."""
        self._bytes_without_event = 0
        """Parts of a head, framing, trailers: httptools collects them without a limit."""
        self._bytes_of_next = 0
        """The most bytes of a head that came together with the end of the request before it."""
        self._upgrade = False
        self._repeating = False
        # Of the head that is being parsed:
        self._target = b""
        self._headers: Headers = []
        self._head_bytes = 0
        self._hosts = 0
        self._chunked = False
        self._expects_continue = False
        self._keep_alive = True

    def feed(self, data: bytes, room: int) -> list[Event]:
        """What `data` completes. `room`: how many more heads may be complete."""
        self._room = room - self.begun
        for at in range(0, len(data), self._max_head_bytes):
            if self.stopped:
                break
            self._feed(data[at : at + self._max_head_bytes])
        events, self._events = self._events, []
        return events

    def end(self) -> None:
        """Let go of httptools, which holds this object's methods: a cycle. Nothing more may be fed."""
        self.stopped = True
        del self._parser

    def _feed(self, data: bytes) -> None:
        before, rest = len(self._events), data
        try:
            while rest:
                rest = self._parse(rest)
        except httptools.HttpParserError as error:
            self._stop(error)
        self._take_pieces()
        if len(self._events) > before:
            self._bytes_without_event = 0
            self._bytes_of_next = len(data) if self.begun else 0
            return
        self._bytes_without_event += len(data)
        if self._bytes_without_event > self._max_head_bytes and not self.stopped:
            self.stopped = True
            self._events.append(self._too_large(f"{self._max_head_bytes} bytes"))

    @property
    def unfinished_bytes(self) -> int:
        """At least the bytes that are held here, of what is not an event yet."""
        return 0 if self.stopped else self._bytes_without_event + self._bytes_of_next

    def take_no_more(self) -> None:
        """Let no further request begin. The body of the last one is still parsed."""
        self._last = True
        self.stopped = self.stopped or self.begun

    # ------------------------------------------------------------------------------------------------------- upgrades

    def _parse(self, data: bytes) -> bytes:
        """Returns the bytes behind a head that asks for an upgrade. They are not parsed yet."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._ignore_upgrade()
            return data[upgrade.args[0] :]
        return b""

    def _ignore_upgrade(self) -> None:
        """Serve the request as if it had not asked (RFC 9110, 7.8). httptools takes the bytes behind its head for those
        of another protocol, so a new parser goes on behind a head with the same framing."""
        framing = [name + b": " + value + b"\r\n" for name, value in self._headers]
        self._headers = []
        self._parser = httptools.HttpRequestParser(self)
        self._upgrade, self._repeating = False, True
        self._parser.feed_data(b"POST / HTTP/1.1\r\n" + b"".join(framing) + b"\r\n")
        self._repeating = False

    # ------------------------------------------------------------------------------------------------------- refusals

    def _stop(self, error: httptools.HttpParserError) -> None:
        """`error` ended httptools: a callback of ours did, or the bytes did."""
        stopped, self.stopped = self.stopped, True
        self._take_pieces()
        if self._ended is not None:
            self._events.append(self._ended)
        elif isinstance(error, httptools.HttpParserCallbackError):
            if not isinstance(error.__context__, _Stop):
                log.error("request_parser_failed", exc_info=error)
                self._events.append(_invalid("it could not be read"))
        elif not stopped:
            self._events.append(_invalid(str(error)))

    def _refuse(self, why: str) -> NoReturn:
        self._ended = _invalid(why)
        raise _Stop

    def _too_large(self, what: str) -> Refusal:
        return Refusal(
            HeadersTooLarge(f"The request line and headers have more than {what}. Send fewer or shorter headers.")
        )

    def _refuse_size(self) -> NoReturn:
        self._ended = self._too_large(f"{self._max_head_bytes} bytes")
        raise _Stop

    # --------------------------------------------------------------------------------------------- httptools' callbacks

    def on_message_begin(self) -> None:
        if self._repeating:
            return
        if self._last:
            raise _Stop
        if not self._room:
            self._ended = Mark.TOO_MANY
            raise _Stop
        self._room -= 1
        self.begun = True
        self._target = b""
        self._headers = []
        self._head_bytes = self._hosts = 0
        self._chunked = self._expects_continue = False

    def on_url(self, url: bytes) -> None:
        if self._repeating:
            return
        self._target += url
        self._head_bytes += len(url)
        if self._head_bytes > self._max_head_bytes:
            self._refuse_size()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._repeating:
            return
        self._head_bytes = size = self._head_bytes + len(name) + len(value)
        if size > self._max_head_bytes:
            self._refuse_size()
        if not self.begun:
            return  # a trailer, which nobody reads
        headers = self._headers
        if len(headers) >= self._max_fields:
            self._ended = self._too_large(f"{self._max_fields} fields")
            raise _Stop
        name = name.lower()
        if name in _CHECKED:
            self._check(name, value.strip(b" \t").lower())
        headers.append((name, value))

    def _check(self, name: bytes, value: bytes) -> None:
        if name == b"host":
            self._hosts += 1
        elif name == b"expect":
            self._expects_continue = value == b"100-continue"
        elif value != b"chunked":
            self._refuse("the only transfer encoding is chunked")
        else:
            self._chunked = True

    def on_headers_complete(self) -> None:
        if self._repeating:
            return
        parser = self._parser
        version, method = parser.get_http_version(), parser.get_method().decode()
        if version == "1.1":
            if self._hosts != 1:
                self._refuse(f"it has {self._hosts or 'no'} Host headers instead of one")
        elif version != "1.0":
            self._refuse(f"its version is {version} instead of 1.1")
        elif self._chunked:
            self._refuse("version 1.0 has no transfer encoding")
        if method == "CONNECT":
            self._refuse("the method CONNECT is for proxies")
        target = _parsed(self._target)
        if target is None:
            self._refuse("its target is not a path")
        self.begun = False
        self._upgrade = parser.should_upgrade()
        self._keep_alive = version == "1.1" and parser.should_keep_alive()
        path, query = target
        plain = path.decode()
        self._events.append(
            RequestHead(
                method=method,
                path=unquote(plain) if "%" in plain else plain,
                raw_path=path,
                query=query,
                version=version,
                headers=self._headers,
                keep_alive=self._keep_alive,
                expects_continue=self._expects_continue and version == "1.1",
                size=self._head_bytes,
            )
        )
        # A connection may stay open for long without another request.
        self._target = b""
        self._headers = [one for one in self._headers if one[0] in _FRAMING] if self._upgrade else []

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)

    def on_message_complete(self) -> None:
        if self._upgrade:
            return  # its body comes
        self._take_pieces()
        self._events.append(Mark.END_OF_REQUEST)
        if self._last or not self._keep_alive:
            self._last = self.stopped = True

    def _take_pieces(self) -> None:
        if self._pieces:
            self._events.append(b"".join(self._pieces))
            self._pieces.clear()


def _parsed(target: bytes) -> tuple[bytes, bytes] | None:
    """Path and query."""
    try:
        url = httptools.parse_url(target)
    except httptools.HttpParserInvalidURLError:
        return None
    return url.path or b"/", url.query or b""


def _invalid(why: str) -> Refusal:
    return Refusal(InvalidRequest(f"The request is not valid HTTP/1.1: {why}."))
