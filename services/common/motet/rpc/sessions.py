"""The server's side of streams: which peers are connected, from their hello to the end of their stream."""

import asyncio
from collections.abc import AsyncIterator, Callable, Hashable, Iterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, Generic, TypeVar

import structlog

from motet.errors import InvalidRequest, MotetError, Overloaded
from motet.rpc.finite_check import check_numbers
from motet.rpc.message_failures import EndStream, handle
from motet.rpc.outbox import Outbox
from motet.rpc.packing import next_packed, unpacked
from motet.transport import ServerStream, StatusCode

log = structlog.get_logger(__name__)

Status = tuple[StatusCode, str]
"""What a peer gets at the end of its stream."""

ENDED: Status = Overloaded.mapping.grpc, "the server has ended this stream; connect again"

REPLACED: Status = Overloaded.mapping.grpc, "a newer stream of this process has replaced this one"

OTHER_PROCESS_CODE = StatusCode.ALREADY_EXISTS
OTHER_PROCESS: Status = (
    OTHER_PROCESS_CODE,
    "another process uses this name and has replaced this stream; give each its own name (MOTET_RUNNER_INSTANCE)",
)

HELLO_SECONDS = 10.0
"""A stream that has no hello after this time ends. A link sends it at once."""

FLUSH_SECONDS = 1.0
"""How long the server tries to send the status when it ends a stream. A peer that does not read never gets it."""

Peer = TypeVar("Peer", bound=Hashable)
Up = TypeVar("Up")
Down = TypeVar("Down")


class Session(Generic[Peer, Down]):
    """One stream of a peer whose name is known."""

    def __init__(self, peer: Peer, outbox: Outbox[Down]) -> None:
        self.peer = peer
        self._outbox = outbox
        self._handler = asyncio.current_task()
        self.ended: Status | None = None
        """With what this side has ended the stream."""

    @property
    def flushed(self) -> bool:
        """Whether gRPC has taken all messages."""
        return self._outbox.empty

    def send(self, message: Down) -> None:
        """Never blocks. The stream of a peer that does not read ends. Its next stream begins with the whole state."""
        self._outbox.put(message)
        if self._outbox.full and not self.ended:
            log.warning("peer_too_slow", peer=str(self.peer), hint="It does not read its messages. Its stream ends.")
            self.end()

    def end(self, status: Status = ENDED) -> None:
        """End the stream from this side. The peer connects again if it is still running."""
        if self._handler is not None and not self.ended:
            self.ended = status
            self._handler.cancel()


class Sessions(Generic[Peer, Up, Down]):
    """The peers that are connected to a server over one kind of stream. A service has one of these for each kind.

    `hello` returns the peer from a hello, and None for any other message. The hello must be the first message of a
    stream, and the only one. With it the session opens (`opened`); a stream that begins with another message is
    refused. `received` gets every message, also the hello. `closed` is called when the stream has ended for any reason.

    An error while a session opens ends its stream. A later message that cannot be handled goes to `failed`, with the
    error; `motet.rpc.message_failures` lists what else ends a stream.

    `key` returns the key by which a peer is found; by default the peer itself. When a peer connects again and its hello
    is accepted, its new session replaces the old one: `closed` is not called for that one, and what it has not read yet
    is dropped, since the new one begins with the whole state. The old stream ends with REPLACED, or with OTHER_PROCESS
    if its peer has the same key but is not equal. A message to a peer that is not connected is dropped: after its next
    hello it gets the whole state.
    """

    def __init__(
        self,
        *,
        received: Callable[[Session[Peer, Down], Up], None],
        closed: Callable[[Session[Peer, Down]], None],
        hello: Callable[[Up], Peer | None] = lambda _: None,
        opened: Callable[[Session[Peer, Down]], None] = lambda _: None,
        failed: Callable[[Session[Peer, Down], Up, MotetError], None] = lambda *_: None,
        key: Callable[[Peer], Hashable] = lambda peer: peer,
        outbox: Callable[[], Outbox[Down]] = Outbox,
    ) -> None:
        self._hello = hello
        self._opened = opened
        self._received = received
        self._failed = failed
        self._closed = closed
        self._key = key
        self._make_outbox = outbox
        self._open: dict[Hashable, Session[Peer, Down]] = {}

    async def serve(self, stream: ServerStream[Down, Up], peer: Peer | None = None) -> None:
        """Handle one stream from its beginning to its end.

        `peer` is for streams without a hello: the session of this peer opens at once.
        """
        outbox = self._make_outbox()
        session: Session[Peer, Down] | None = None
        hello_due = asyncio.timeout(HELLO_SECONDS)

        def open_for(peer: Peer, hello: Up | None = None) -> None:
            nonlocal session
            key = self._key(peer)
            older = self._open.get(key)
            session = self._open[key] = Session(peer, outbox)  # already now: what the hello causes is sent by its key
            try:
                self._opened(session)
                if hello is not None:
                    self._received(session, hello)
            except Exception:
                if older is not None:
                    self._open[key] = older
                raise
            hello_due.reschedule(None)
            if older is not None:
                log.info("stream_replaced", peer=str(older.peer))
                older.end(REPLACED if older.peer == peer else OTHER_PROCESS)

        def receive_first(message: Up) -> None:
            check_numbers(message)
            hello = self._hello(message)
            if hello is None or not self._key(hello):
                raise InvalidRequest("the first message of a stream must be a hello with the name of the sender")
            open_for(hello, message)

        def receive(message: Up) -> None:
            if session is None:
                receive_first(message)
                return
            if self._hello(message) is not None:
                raise InvalidRequest("a stream has only one hello, its first message; open another stream")
            handle(message, partial(self._received, session), partial(self._failed, session))

        try:
            async with _ended_with_status(stream):
                try:
                    async with hello_due:
                        if peer is not None:
                            open_for(peer)
                        await run_stream(stream, outbox, receive)
                except TimeoutError as error:
                    if not hello_due.expired():
                        raise
                    raise InvalidRequest(
                        f"no hello came within {HELLO_SECONDS:g} s; send it as the first message of a stream"
                    ) from error
        finally:
            if session is not None and self._is_open(session):
                del self._open[self._key(session.peer)]
                self._closed(session)
            if session is not None and session.ended is not None:
                # gRPC does not tell the peer that the handler was cancelled, so the peer would wait for ever.
                with suppress(TimeoutError):
                    async with asyncio.timeout(FLUSH_SECONDS):
                        await stream.end(*session.ended)

    def _is_open(self, session: Session[Peer, Down]) -> bool:
        """False if the peer has connected again."""
        return self._open.get(self._key(session.peer)) is session

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Session[Peer, Down]]:
        return iter(self._open.values())

    def __contains__(self, key: Hashable) -> bool:
        return key in self._open

    def send(self, key: Hashable, message: Down) -> None:
        session = self._open.get(key)
        if session is not None:
            session.send(message)

    def broadcast(self, message: Down) -> None:
        for session in self._open.values():
            session.send(message)

    def end(self, key: Hashable) -> None:
        session = self._open.get(key)
        if session is not None:
            session.end()

    def end_all(self) -> None:
        for session in list(self._open.values()):
            session.end()


async def run_stream(stream: ServerStream[Down, Up], outbox: Outbox[Down], receive: Callable[[Up], None]) -> None:
    """The server's side of a bidirectional stream: read until the peer ends it, and write what is put into `outbox`.

    An error in `receive` ends the stream with the error's status.
    """

    def receive_all(message: Up) -> None:
        for one in unpacked(message):
            receive(one)

    await stream.accept()
    writer = asyncio.create_task(stream.send_all(partial(next_packed, outbox)), name="stream: write")
    try:
        async with _ended_with_status(stream):
            await stream.receive_all(receive_all)
    finally:
        writer.cancel()
        await asyncio.gather(writer, return_exceptions=True)


@asynccontextmanager
async def _ended_with_status(stream: ServerStream[Any, Any]) -> AsyncIterator[None]:
    """End the stream with the status of a MotetError. Otherwise gRPC would report it as a defect."""
    try:
        yield
    except (EndStream, MotetError) as raised:
        error = raised.error if isinstance(raised, EndStream) else raised
        log.info("stream_refused", reason=error.message)
        await stream.end(error.mapping.grpc, error.message)
