"""One HTTP/1.1 connection: uvicorn's, with an end to what a client may send before a body, or of one that nobody reads,
and to how long it may not read what it is sent. What is slow or too much here has not reached the application yet, or
never comes back to it.
"""

import array
import asyncio
import contextlib
import fcntl
import termios
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from motet.errors import MotetError
from motet_gateway.errors import HeadersTooLarge, RequestTimeout, error_body
from motet_gateway.settings import Settings

BODY_LINGER_SECONDS = 5.0
"""How long the rest of a body may come that was answered before it was read. What its client has sent by then cannot be
unsent, and it reads its answer meanwhile; who sends all of it may go on, others are cut off."""

MIN_READ_BYTES = 16 * 1024
"""What a client has to read of a large answer in each `unread_seconds`, or all that is left. The slowest lines that
people work on carry more; who reads a byte now and then is as one who does not read."""

_REASONS = {408: b"Request Timeout", 431: b"Request Header Fields Too Large"}


def bounded(settings: Settings) -> type[HttpToolsProtocol]:
    """The class that uvicorn makes its connections of."""
    return type("Connection", (HttpConnection,), {"settings": settings})


class _TooLarge(Exception):
    """Raised through the parser, which says no more than that a callback failed."""


class HttpConnection(HttpToolsProtocol):
    settings: Settings

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._bytes_without_progress = 0
        """Bytes since the last ones that completed a head or were part of a body: a head in parts, framing, trailers.
        The parser gathers those without a limit."""
        self._head_bytes = 0
        self._head_complete = False
        self._refusal: HeadersTooLarge | None = None
        self._lingering_bytes = 0
        """Of a body, since its answer came to its end."""
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
        self._unset_keepalive_if_required()  # it may stand right behind the rest of a body that nobody read
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
        if self._linger_timer is not None:  # all of it came: from here on it is an idle connection like others
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
        """Say why while that is possible, and close the connection whether the client reads it or not."""
        if self._refusal is not None and not self._answering:
            self._send_error(self._refusal)
        self.transport.close()
        self._watch_writing()

    def _on_read_timeout(self) -> None:
        self._read_timer = None
        if self._answering:  # what stands behind a request must not cut its answer; old clients send an empty line
            self._read_timer = self.loop.call_later(self.settings.header_seconds, self._on_read_timeout)
        elif not self.transport.is_closing():
            if self._bytes_without_progress:  # a connection that was only opened ahead of its use hears nothing
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
        """The last request is answered. Should its body not be here, it is waited for; by uvicorn, for ever."""
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
        super().connection_lost(exc)
        self._stop_writing_timer()

    def _watch_writing(self) -> None:
        """A close waits until everything is written, and so does an answer; a client that does not read stops both."""
        if self.transport.get_write_buffer_size():
            self._stop_writing_timer()
            self._write_timer = self.loop.call_later(
                self.settings.unread_seconds, self._check_write_progress, self._unread_bytes()
            )

    def _check_write_progress(self, before: int) -> None:
        """`before`: what was unread at the last look."""
        self._write_timer = None
        # An answer that is under way may have written just now; unless it has to wait, it is being read.
        if not self.transport.get_write_buffer_size() or (self._answering and not self.flow.write_paused):
            return
        if before - self._unread_bytes() >= MIN_READ_BYTES:  # slowly, but it is being read
            self._watch_writing()
        else:
            self.transport.abort()

    def _unread_bytes(self) -> int:
        """Here and in the kernel, which takes more from here only when much of what it has is read."""
        queued = array.array("i", [0])
        with contextlib.suppress(OSError):
            fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, queued)
        return self.transport.get_write_buffer_size() + queued[0]

    def _stop_writing_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
