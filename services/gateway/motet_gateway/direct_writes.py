"""Writes the pieces of streamed answers from one callback for all streams, without waking the task of each stream.

With many streams, a step of an engine brings a few bytes for each of them. To wake a task, and to pass a piece through
the layers of ASGI, costs several times as much as the write. So a connection offers to write a piece itself, and the
pieces of all answers are written together, at the end of the event loop's turn in which their tokens came. An answer's
task still writes its first piece and its last one, and all pieces while a client reads too slowly.
"""

import asyncio
from typing import Protocol

import structlog
from starlette.types import Scope

from motet_gateway.http.exchange import Exchange

log = structlog.get_logger(__name__)

_SCOPE_KEY = "motet.direct_writer"


class DirectWriter:
    """Writes pieces of one answer whose head has been sent. Every piece is a chunk of the body, and never its last."""

    __slots__ = ("_answer", "_channel", "_exchange", "_transport")

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._answer = exchange.answer
        self._channel = exchange.channel
        self._transport = exchange.channel.transport

    @property
    def ready(self) -> bool:
        """Whether the connection takes a piece now. If not, the answer's task writes it and waits for the client."""
        gone = self._exchange.disconnected or self._answer.complete or self._transport.is_closing()
        return not (gone or self._channel.write_paused) and self._answer.chunked

    def write(self, piece: bytes) -> None:
        self._transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))


def offer(scope: Scope, writer: DirectWriter) -> None:
    """The connection calls this for each request, before its task begins."""
    scope[_SCOPE_KEY] = writer


def offered(scope: Scope) -> DirectWriter | None:
    """None if another server runs the application."""
    return scope.get(_SCOPE_KEY)


class Writing(Protocol):
    def write_now(self) -> None:
        """Write what has come. It should not raise: only the log would tell."""


class WritesOfTurn:
    """The answers to write at the end of this turn of the event loop."""

    def __init__(self) -> None:
        self._due: list[Writing] = []

    def add(self, answer: Writing) -> None:
        """Once for each answer and turn."""
        if not self._due:
            asyncio.get_running_loop().call_soon(self._write)
        self._due.append(answer)

    def _write(self) -> None:
        due, self._due = self._due, []
        for answer in due:
            try:
                answer.write_now()
            except Exception:  # the other answers must not wait for ever
                log.exception("write_failed")
