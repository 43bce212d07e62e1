"""One HTTP/1.1 connection: uvicorn's class with bounds on size and time.

The bounds cover what the application does not see: headers, the rest of a body after its answer, and clients that do
not read their answer.
"""

import array
import asyncio
import contextlib
import fcntl
import termios
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from motet.errors import MotetError
from motet_gateway import direct_writes
from motet_gateway.error_format import error_body
from motet_gateway.errors import HeadersTooLarge, RequestTimeout
from motet_gateway.settings import Settings

BODY_LINGER_SECONDS = 5.0
"""How long the rest of a body may take after the gateway has answered early. The client can read its answer meanwhile.
If it sends the whole body, the connection stays open; otherwise the gateway closes it."""

MIN_READ_BYTES = 16 * 1024
"""What a client has to read of a large answer in each `unread_seconds`, if that much is left. Even slow networks are
faster; a client that reads a byte now and then counts as one that does not read."""

_REASONS = {408: b"Request Timeout", 431: b"Request Header Fields Too Large"}


def bounded(settings: Settings) -> type[HttpToolsProtocol]:
    """The connection class for uvicorn, with these settings."""
    return type("Connection", (HttpConnection,), {"settings": settings})


class _TooLarge(Exception):
    """Ends the parser, which reports only that a callback failed."""


class HttpConnection(HttpToolsProtocol):
    settings: Settings

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._bytes_without_progress = 0
        """Bytes since the last complete head or the last bytes of a body: parts of a head, framing, trailers. The
        parser collects them without a limit."""
        self._head_bytes = 0
        self._head_complete = False
        self._refusal: HeadersTooLarge | None = None
        self._lingering_bytes = 0
        """Bytes of a body that came after the end of its answer."""
        self._unanswered: list[RequestResponseCycle] = []
        """A client may send more requests before it has the answer to the first one."""
        self._linger_timer: asyncio.TimerHandle | None = None
        self._read_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    # -------------------------------------------------------------------------------------------------------- reading

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._read_timer = self.loop.call_later(self.settings.header_seconds, self._on_read_timeout)

    def data_received(self, data: bytes) -> None:
        self._bytes_without_progress += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._bytes_without_progress > self.settings.max_header_bytes:
            self._refuse_headers(f"more than {self.settings.max_header_bytes} bytes")
            self._refuse_and_close()
        elif self._read_timer is None and not self._head_complete and self._bytes_without_progress:
            self._read_timer = self.loop.call_later(self.settings.header_seconds, self._on_read_timeout)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._unset_keepalive_if_required()  # this request may directly follow the rest of an unread body
        self._head_bytes = 0
        self._head_complete = False

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
        if len(self.headers) >= self.settings.max_headers:
            self._refuse_headers(f"more than {self.settings.max_headers} fields")
            raise _TooLarge
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._bytes_without_progress = 0
        self._head_complete = True
        self._stop_reading_timer()
        super().on_headers_complete()
        if self.cycle is not None and self.cycle.scope is self.scope:
            direct_writes.offer(self.scope, direct_writes.DirectWriter(self.cycle))
            self._unanswered = [*(one for one in self._unanswered if not one.response_complete), self.cycle]

    def on_body(self, body: bytes) -> None:
        self._bytes_without_progress = 0
        super().on_body(body)
        if self._linger_timer is not None:
            self._lingering_bytes += len(body)
            if self._lingering_bytes > self.settings.max_body_bytes:
                self.flow.pause_reading()

    def on_message_complete(self) -> None:
        self._bytes_without_progress = 0
        self._head_complete = False
        super().on_message_complete()
        if self._linger_timer is not None:  # the whole body arrived: now the connection is idle like others
            self._stop_linger_timer()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def _count(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > self.settings.max_header_bytes:
            self._refuse_headers(f"more than {self.settings.max_header_bytes} bytes")
            raise _TooLarge

    def _refuse_headers(self, what: str) -> None:
        self._refusal = HeadersTooLarge(f"The request line and headers have {what}. Send fewer or shorter headers.")

    def send_400_response(self, msg: str) -> None:
        if self._refusal is None:
            super().send_400_response(msg)
        else:
            self._refuse_and_close()

    def _refuse_and_close(self) -> None:
        """Send the error if no answer has begun, and close the connection even if the client does not read it."""
        if self._refusal is not None and not self._answering:
            self._send_error(self._refusal)
        self.transport.close()
        self._watch_writing()

    def _on_read_timeout(self) -> None:
        self._read_timer = None
        if self._answering:  # bytes after a request must not end its answer; old clients send an empty line
            self._read_timer = self.loop.call_later(self.settings.header_seconds, self._on_read_timeout)
        elif not self.transport.is_closing():
            if (
                self._bytes_without_progress
            ):  # a connection without any byte gets no error: clients open some in advance
                self._send_error(
                    RequestTimeout(f"No complete request arrived within {self.settings.header_seconds:g} s.")
                )
            self.transport.close()
            self._watch_writing()

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _send_error(self, error: MotetError) -> None:
        content = error_body(error)
        self.transport.write(
            b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
            % (error.mapping.http, _REASONS[error.mapping.http], len(content))
            + content
        )

    def _wait_for_body(self) -> None:
        """Wait for the rest of the body of an answered request, with a limit; uvicorn has none."""
        if self._head_complete and not self._answering and not self.transport.is_closing():
            self._unset_keepalive_if_required()
            self._lingering_bytes = 0
            self._linger_timer = self.loop.call_later(BODY_LINGER_SECONDS, self._close_lingering)

    def _close_lingering(self) -> None:
        self._linger_timer = None
        self.transport.close()
        self._watch_writing()

    def _stop_linger_timer(self) -> None:
        if self._linger_timer is not None:
            self._linger_timer.cancel()
            self._linger_timer = None

    def _stop_reading_timer(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    # -------------------------------------------------------------------------------------------------------- writing

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_writing()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_writing_timer()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._wait_for_body()
        self._watch_writing()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._watch_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_reading_timer()
        self._stop_linger_timer()
        for cycle in self._unanswered:  # uvicorn tells only the last one
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        super().connection_lost(exc)
        self._stop_writing_timer()

    def _watch_writing(self) -> None:
        """Start the timer for unread bytes: a client that does not read would delay an answer or a close for ever."""
        if self.transport.get_write_buffer_size():
            self._stop_writing_timer()
            self._write_timer = self.loop.call_later(
                self.settings.unread_seconds, self._check_write_progress, self._unread_bytes()
            )

    def _check_write_progress(self, before: int) -> None:
        """`before`: how many bytes were unread at the last check."""
        self._write_timer = None
        # While an answer may still write, the client reads fast enough.
        if not self.transport.get_write_buffer_size() or (self._answering and not self.flow.write_paused):
            return
        if before - self._unread_bytes() >= MIN_READ_BYTES:  # slow, but the client reads
            self._watch_writing()
        else:
            self.transport.abort()

    def _unread_bytes(self) -> int:
        """Unread bytes in this process and in the kernel, which takes more only after the client has read much."""
        queued = array.array("i", [0])
        with contextlib.suppress(OSError):
            fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, queued)
        return self.transport.get_write_buffer_size() + queued[0]

    def _stop_writing_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
