"""One HTTP/1.1 connection on a transport that uvicorn accepted, with bounds on what a client may send, leave or hold.

    opened ──▶ HEAD ──────────▶ ANSWERING ◀─────────────┐
                ▲    head         │   │                 │ head
      first     │                 │   │ answer ends,    │
      byte      │  answer ends,   │   ├──────────────▶ IDLE
                │  a part of the  │   │ nothing came    ▲
                │  next head came │   │                 │ body ends
                ├─────────────────┘   └──────────────▶ LINGERING
                │                       answer ends,
               IDLE                     not the request's body

    each state ──▶ CLOSING ──▶ closed

HEAD: a head has to arrive within `header_seconds`, however it trickles; also the first one of a new connection.
ANSWERING: the application answers the oldest request. Its body arrives meanwhile, and up to MAX_WAITING requests with
those behind it. It stays in this state until all of them are answered.
LINGERING: the rest of a body arrives that the answer did not wait for, for BODY_LINGER_SECONDS.
IDLE: the client may send its next request, within the time of keep-alive.
CLOSING: what was written is sent, as long as the client reads. Nothing is read any more. A connection closes after the
last answer that it gives: for the client's wish, at the server's shutdown, after MAX_WAITING requests that came faster
than their answers, and after an error of HTTP, which is the last answer.

A client that leaves and one that only sends no more look the same. So applications hear that the client left: one that
computes an answer for long gives up, and the connection closes. Other answers are still given.
"""

import array
import asyncio
import contextlib
import contextvars
import fcntl
import termios
from collections import deque
from enum import Enum
from itertools import islice
from typing import Any, cast

import uvicorn
from uvicorn.server import ServerState

from motet.errors import MotetError, Overloaded
from motet_gateway import direct_writes
from motet_gateway.errors import RequestTimeout
from motet_gateway.http.connection_limit import ConnectionLimit
from motet_gateway.http.exchange import Exchange
from motet_gateway.http.request_parser import Mark, Refusal, RequestHead, RequestParser
from motet_gateway.http.response_writer import ResponseWriter, error_response
from motet_gateway.metrics import Metrics
from motet_gateway.settings import Settings

MAX_WAITING = 16
"""The most requests of a connection that are not answered yet. Few clients send a request before the last answer."""

MAX_UNREAD_BYTES = 64 * 1024
"""Above it, the connection reads no more until the application has taken some: heads and bodies that wait."""

BODY_LINGER_SECONDS = 5.0
"""How long the rest of a body may take after the gateway has answered early. The client can read its answer meanwhile.
If it sends the whole body, the connection stays open; otherwise the gateway closes it."""

MIN_READ_BYTES = 16 * 1024
"""What a client has to read of a large answer in each `unread_seconds`, if that much is left. Even slow networks are
faster; a client that reads a byte now and then counts as one that does not read."""


class State(Enum):
    HEAD = "head"
    ANSWERING = "answering"
    LINGERING = "lingering"
    IDLE = "idle"
    CLOSING = "closing"


class HttpConnection(asyncio.Protocol):
    def __init__(
        self,
        *,
        settings: Settings,
        metrics: Metrics,
        limit: ConnectionLimit,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        """`config` and those below are uvicorn's, which makes one of these for each connection."""
        self.transport: asyncio.Transport
        self.write_paused = False
        self._settings = settings
        self._metrics = metrics
        self._limit = limit
        self._app = config.loaded_app
        self._keep_alive_seconds = config.timeout_keep_alive
        self._server_state = server_state
        self._app_state = app_state
        self._loop = _loop or asyncio.get_running_loop()
        self._state = State.HEAD
        self._address = ""
        self._entered = False
        self._parser = RequestParser(max_head_bytes=settings.max_header_bytes, max_fields=settings.max_headers)
        self.exchanges: deque[Exchange] = deque()
        """Those that are not answered. The application has the first one."""
        self._arriving: Exchange | None = None
        """The one whose body arrives. It may be answered."""
        self._last_answer: MotetError | None = None
        """The error to send when all before it are answered."""
        self._lingering_bytes = 0
        self._waiting_bytes = 0
        """What the limit of all connections counts for this one."""
        self._read_paused = False
        self._writable = asyncio.Event()
        self._read_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    # ---------------------------------------------------------------------------------------- opening, ending, closing

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport = cast("asyncio.Transport", transport)
        client = transport.get_extra_info("peername")
        server = transport.get_extra_info("sockname")
        self._address = client[0] if client else ""
        try:
            self._limit.enter(self._address)
        except Overloaded as error:
            self._metrics.refused_connections.labels(error.reason).inc()
            self._end_with(error)
            return
        self._entered = True
        self._context = contextvars.copy_context()
        self._server_state.connections.add(cast("Any", self))
        self._scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "server": server[:2] if server else None,
            "client": client[:2] if client else None,
            "scheme": "https" if transport.get_extra_info("sslcontext") else "http",
            "root_path": "",
        }
        self._expect(State.HEAD, self._settings.header_seconds)

    def eof_received(self) -> bool:
        for exchange in self.exchanges:
            exchange.leave()
        self.shutdown()
        return True  # otherwise the transport would drop the answers

    def shutdown(self) -> None:
        """Answer what has come, and close. Uvicorn calls this at its own shutdown, too."""
        self._parser.take_no_more()
        if self.exchanges:
            self.exchanges[-1].answer.keep_alive = False
        else:
            self._close()

    def connection_lost(self, _: Exception | None) -> None:
        self._state = State.CLOSING
        self._stop_read_timer()
        self._stop_write_timer()
        if self._entered:
            self._limit.leave(self._address)
            self._limit.waiting_bytes -= self._waiting_bytes
            self._server_state.connections.discard(cast("Any", self))
        for exchange in self.exchanges:
            exchange.disconnect()
        # They lead back here: the garbage collector would have to find all that has come.
        self.exchanges.clear()
        self._arriving = None
        self._parser.end()
        self._writable.set()

    def _close(self) -> None:
        self._state = State.CLOSING
        self._parser.stopped = True
        self._stop_read_timer()
        self.transport.close()
        self._watch_writing()

    def _end_with(self, error: MotetError) -> None:
        self.transport.write(error_response(error, self.default_headers))
        self._close()

    # -------------------------------------------------------------------------------------------------------- reading

    def data_received(self, data: bytes) -> None:
        if self._state is State.LINGERING:
            self._lingering_bytes += len(data)
        for event in self._parser.feed(data, MAX_WAITING - len(self.exchanges)):
            if self._state is State.CLOSING:  # an answer before these bytes said so
                return
            if type(event) is RequestHead:
                self._begin(event)
            elif event is Mark.END_OF_REQUEST:
                self._end_request()
            elif event is Mark.TOO_MANY:
                self.exchanges[-1].answer.keep_alive = False
            elif type(event) is Refusal:
                self._refuse(event.error)
            elif self._arriving is not None:
                self._arriving.body_arrived(cast("bytes", event))
        if self._state is State.IDLE:
            self._expect(State.HEAD, self._settings.header_seconds)
        if self._count_waiting() > 0 and self._limit.too_much_waits:
            self._drop_waiting()
        self._regulate_reading()

    def _begin(self, head: RequestHead) -> None:
        scope = self._scope | {
            "http_version": head.version,
            "method": head.method,
            "path": head.path,
            "raw_path": head.raw_path,
            "query_string": head.query,
            "headers": head.headers,
            "state": self._app_state.copy(),
        }
        exchange = Exchange(
            self,
            scope,
            ResponseWriter(head.method, head.version, keep_alive=head.keep_alive),
            expects_continue=head.expects_continue,
            head_bytes=head.size,
        )
        direct_writes.offer(scope, direct_writes.DirectWriter(exchange))
        self._arriving = exchange
        self.exchanges.append(exchange)
        if len(self.exchanges) == 1:
            self._stop_read_timer()
            self._state = State.ANSWERING
            self._run(exchange)

    def _run(self, exchange: Exchange) -> None:
        # The end of one request starts the next: that one must not inherit what the first has bound for its log.
        task = self._loop.create_task(exchange.run(self._app), context=self._context.copy())
        self._server_state.tasks.add(task)
        task.add_done_callback(self._server_state.tasks.discard)

    def _end_request(self) -> None:
        exchange, self._arriving = self._arriving, None
        assert exchange is not None
        exchange.end_arrived()
        if self._state is State.LINGERING:
            self._after(exchange)

    def _refuse(self, error: MotetError) -> None:
        """`error` is the last answer. It stands for the answer to a request whose body is wrong."""
        if (broken := self._arriving) is not None and self.exchanges and self.exchanges[-1] is broken:
            self.exchanges.pop()
            broken.disconnect()
            if broken.answer.started:
                self.break_off()
                return
        if self.exchanges:
            self._last_answer = error
        elif self._state is State.LINGERING:
            self._close()
        else:
            self._end_with(error)

    def _count_waiting(self) -> int:
        """Count what the application cannot take yet. Returns by how much that has grown."""
        behind = sum(exchange.unread_bytes for exchange in islice(self.exchanges, 1, None))
        grown = self._parser.unfinished_bytes + behind - self._waiting_bytes
        self._waiting_bytes += grown
        self._limit.waiting_bytes += grown
        return grown

    def _drop_waiting(self) -> None:
        """Too much waits in all connections. This one still gives the answer that has begun, and refuses the rest."""
        self._parser.stopped = True
        while len(self.exchanges) > 1:
            if (last := self.exchanges.pop()) is self._arriving:
                self._arriving = None
            last.disconnect()
        self._metrics.refused_connections.labels("bytes").inc()
        self._refuse(Overloaded("Too many requests wait at the gateway for their other parts. Try again soon."))
        self._count_waiting()

    def _regulate_reading(self) -> None:
        if self._state is State.LINGERING:
            pause = self._lingering_bytes > self._settings.max_body_bytes
        else:
            unread = 0
            for exchange in self.exchanges:
                unread += exchange.unread_bytes
            pause = unread > MAX_UNREAD_BYTES
        if pause != self._read_paused and not self.transport.is_closing():
            self._read_paused = pause
            if pause:
                self.transport.pause_reading()
            else:
                self.transport.resume_reading()

    def _expect(self, state: State, seconds: float) -> None:
        """Wait in `state` for the client, no longer than this."""
        self._stop_read_timer()
        self._state = state
        self._read_timer = self._loop.call_later(seconds, self._on_read_timeout)

    def _on_read_timeout(self) -> None:
        self._read_timer = None
        if self._state is State.HEAD and self._parser.begun:
            self._end_with(RequestTimeout(f"No complete request arrived within {self._settings.header_seconds:g} s."))
        else:  # clients open some connections in advance
            self._close()

    def _stop_read_timer(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    # ------------------------------------------------------------------------------------------ what exchanges call

    @property
    def default_headers(self) -> list[tuple[bytes, bytes]]:
        return self._server_state.default_headers

    def body_taken(self) -> None:
        if self._read_paused:
            self._regulate_reading()

    def answered(self) -> None:
        exchange = self.exchanges.popleft()
        self._server_state.total_requests += 1
        if self._waiting_bytes:
            self._count_waiting()
        if self.transport.is_closing():
            return
        if exchange.whole:
            self._after(exchange)
        else:
            if not exchange.answer.keep_alive and self.transport.can_write_eof():
                self.transport.write_eof()
            self._lingering_bytes = 0
            self._expect(State.LINGERING, BODY_LINGER_SECONDS)
        self.body_taken()
        self._watch_writing()

    def _after(self, exchange: Exchange) -> None:
        """Go on after a request that has arrived and is answered."""
        if not exchange.answer.keep_alive:
            self._close()
        elif self.exchanges:
            self._run(self.exchanges[0])
        elif self._last_answer is not None:
            self._end_with(self._last_answer)
        elif self._parser.begun:
            self._expect(State.HEAD, self._settings.header_seconds)
        else:
            self._expect(State.IDLE, self._keep_alive_seconds)

    def break_off(self) -> None:
        self._close()

    async def drained(self) -> None:
        await self._writable.wait()

    # -------------------------------------------------------------------------------------------------------- writing

    def pause_writing(self) -> None:
        self.write_paused = True
        self._writable.clear()
        self._watch_writing()

    def resume_writing(self) -> None:
        self.write_paused = False
        self._writable.set()

    def _watch_writing(self) -> None:
        """Start the timer for unread bytes: a client that does not read would delay an answer or a close for ever. It
        starts again by itself until all are read."""
        self._stop_write_timer()
        if self.transport.get_write_buffer_size():
            self._write_timer = self._loop.call_later(
                self._settings.unread_seconds, self._check_write_progress, self._unread_bytes()
            )

    def _check_write_progress(self, before: int) -> None:
        """`before`: how many bytes were unread at the last check."""
        # While an answer may still write, the client reads fast enough.
        fast = self._state is State.ANSWERING and not self.write_paused
        unread = self.transport.get_write_buffer_size()
        if unread and not fast and before - self._unread_bytes() < MIN_READ_BYTES:
            self.transport.abort()
        else:
            self._watch_writing()

    def _unread_bytes(self) -> int:
        """Unread bytes in this process and in the kernel, which takes more only after the client has read much."""
        queued = array.array("i", [0])
        with contextlib.suppress(OSError):
            fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, queued)
        return self.transport.get_write_buffer_size() + queued[0]

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
