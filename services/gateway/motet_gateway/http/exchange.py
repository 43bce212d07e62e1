"""One request and its answer, as an ASGI application sees them."""

import asyncio
from typing import Protocol

import structlog
from starlette.types import ASGIApp, Message, Scope

from motet.errors import Internal
from motet_gateway.http.response_writer import ResponseWriter, error_response

FAILED = "The gateway failed on this request; its log says why."

log = structlog.get_logger(__name__)


class Channel(Protocol):
    """What an exchange needs of its connection."""

    transport: asyncio.Transport
    write_paused: bool
    """Whether the client reads too slowly, so that `drained` waits."""

    @property
    def default_headers(self) -> list[tuple[bytes, bytes]]: ...
    async def drained(self) -> None: ...
    def body_taken(self) -> None:
        """The application has taken what had arrived of a body."""

    def answered(self) -> None:
        """The answer to the oldest request is complete."""

    def break_off(self) -> None:
        """Close the connection before the end of an answer, so that the client does not take it for complete."""


class Exchange:
    __slots__ = (
        "_changed",
        "_expects_continue",
        "_left",
        "_pieces",
        "_scope",
        "_taken",
        "answer",
        "channel",
        "disconnected",
        "unread_bytes",
        "whole",
    )

    def __init__(
        self, channel: Channel, scope: Scope, answer: ResponseWriter, *, expects_continue: bool, head_bytes: int
    ) -> None:
        self.disconnected = False
        """Whether the client is gone, so that nobody reads the answer."""
        self.whole = False
        """Whether the whole request has arrived."""
        self.unread_bytes = head_bytes
        """What the application has not taken yet."""
        self.channel = channel
        self._scope = scope
        self.answer = answer
        self._expects_continue = expects_continue
        self._left = False
        """Whether the client sends no more. It may be gone."""
        self._taken = False
        """Whether the application has taken the whole request."""
        self._pieces: list[bytes] = []
        self._changed = asyncio.Event()

    def _over(self) -> bool:
        """Whether the application has nothing more to expect of the client."""
        return self.disconnected or self.answer.complete or (self._left and self._taken == self.whole)

    # ---------------------------------------------------------------------------------------- events of the connection

    def body_arrived(self, piece: bytes) -> None:
        if not self.answer.complete:
            self._pieces.append(piece)
            self.unread_bytes += len(piece)
            self._changed.set()

    def end_arrived(self) -> None:
        self.whole = True
        self._changed.set()

    def leave(self) -> None:
        self._left = True
        self._changed.set()

    def disconnect(self) -> None:
        self.disconnected = True
        self._pieces.clear()
        self._changed.set()

    # -------------------------------------------------------------------------------------------------- the application

    async def run(self, app: ASGIApp) -> None:
        scope = self._scope
        del self._scope  # it leads back here: the garbage collector would have to find both
        try:
            await app(scope, self.receive, self.send)
        except Exception:
            log.exception("application_failed")
        finally:
            if not self.answer.complete and not self.disconnected:
                self._fail()

    def _fail(self) -> None:
        """The application has ended without a complete answer."""
        answer, channel = self.answer, self.channel
        if answer.started or self._left:
            channel.break_off()
        else:
            answer.complete, answer.keep_alive = True, False
            channel.transport.write(error_response(Internal(FAILED), channel.default_headers))
            channel.answered()

    async def receive(self) -> Message:
        if self._expects_continue and not self.answer.started and not self.disconnected:
            self.channel.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._expects_continue = False
        if not self._over():
            await self._changed.wait()
            self._changed.clear()
        if self._over():
            return {"type": "http.disconnect"}
        self._taken = self.whole
        body = b"".join(self._pieces)
        self._pieces.clear()
        self.unread_bytes = 0
        self.channel.body_taken()
        return {"type": "http.request", "body": body, "more_body": not self.whole}

    async def send(self, message: Message) -> None:
        channel, answer, kind = self.channel, self.answer, message["type"]
        if channel.write_paused and not self.disconnected:
            await channel.drained()
        if self.disconnected:
            return
        if kind == "http.response.start" and not answer.started:
            if self._expects_continue and not self.whole and not self._pieces:
                answer.keep_alive = False  # the client may leave the body out; its next request would be taken for it
            headers = [*channel.default_headers, *message.get("headers", ())]
            channel.transport.write(answer.start(message["status"], headers))
        elif kind == "http.response.body" and answer.started and not answer.complete:
            more = message.get("more_body", False)
            if body := answer.body(message.get("body", b""), more=more):
                channel.transport.write(body)
            if not more:
                self._pieces.clear()
                self._changed.set()
                channel.answered()
        else:
            raise RuntimeError(f"the application sent {kind!r} at a wrong time")
