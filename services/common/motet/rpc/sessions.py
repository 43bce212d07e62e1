"""The server's end of streams: who is connected, from a peer's hello to the end of its stream."""

import asyncio
from collections.abc import AsyncIterator, Callable, Hashable, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any, Generic, TypeVar

import structlog

from motet.errors import InvalidRequest, MotetError, Overloaded
from motet.rpc.outbox import Outbox
from motet.rpc.packing import unpacked, write_all

log = structlog.get_logger(__name__)

ENDED = Overloaded("the server has ended this stream; connect again")

FLUSH_SECONDS = 1.0
"""For the status of a stream that this side ends: a peer that does not read may never get it."""

Peer = TypeVar("Peer", bound=Hashable)
Up = TypeVar("Up")
Down = TypeVar("Down")


class Session(Generic[Peer, Down]):
    """One stream of one peer that has said who it is."""

    def __init__(self, peer: Peer, outbox: Outbox[Down]) -> None:
        self.peer = peer
        self._outbox = outbox
        self._handler = asyncio.current_task()
        self.ended = False
        """From this side."""

    @property
    def flushed(self) -> bool:
        """Whether all that was sent has been handed to gRPC."""
        return self._outbox.empty

    def send(self, message: Down) -> None:
        """Never blocks. A peer that does not read loses its stream, and is told everything again on the next one."""
        self._outbox.put(message)
        if self._outbox.full and not self.ended:
            log.warning("peer_too_slow", peer=str(self.peer), hint="It does not read its messages. Its stream ends.")
            self.end()

    def end(self) -> None:
        """From this side; a peer that is still there connects again."""
        if self._handler is not None and not self.ended:
            self.ended = True
            self._handler.cancel()


class Sessions(Generic[Peer, Up, Down]):
    """Who is connected to a server over one kind of stream. A service has one of these for each of its streams.

    `hello` tells who speaks from the message that says so, and gives None for any other. That message comes first and
    once: with it the session is open, and a stream that begins otherwise is refused. `heard` gets every message, the
    hello included; `closed` is called when the stream has ended, however it did.

    `key` is what a peer is found by, if not by itself. A peer that connects again takes its old session's place, and
    the end of the old one is not told: nothing has ended. What is sent to somebody who is not connected is dropped:
    its next hello asks again.
    """

    def __init__(
        self,
        *,
        heard: Callable[[Session[Peer, Down], Up], None],
        closed: Callable[[Session[Peer, Down]], None],
        hello: Callable[[Up], Peer | None] = lambda _: None,
        opened: Callable[[Session[Peer, Down]], None] = lambda _: None,
        key: Callable[[Peer], Hashable] = lambda peer: peer,
        outbox: Callable[[], Outbox[Down]] = Outbox,
    ) -> None:
        self._hello = hello
        self._opened = opened
        self._heard = heard
        self._closed = closed
        self._key = key
        self._make_outbox = outbox
        self._open: dict[Hashable, Session[Peer, Down]] = {}

    async def serve(self, requests: AsyncIterator[Up], context: Any, peer: Peer | None = None) -> None:
        """One stream from its beginning to its end, in a handler that is a plain coroutine.

        `peer` is who speaks on a stream that has no hello: its session is open at once.
        """
        outbox = self._make_outbox()
        session: Session[Peer, Down] | None = None

        def open_for(peer: Peer) -> None:
            nonlocal session
            session = self._open[self._key(peer)] = Session(peer, outbox)
            self._opened(session)

        def receive(message: Up) -> None:
            said = self._hello(message)
            if session is not None and said is not None:
                raise InvalidRequest("a stream has one hello, as its first message: open another stream")
            if session is None:
                if said is None or not self._key(said):
                    raise InvalidRequest("the first message of a stream must be its hello, with a name in it")
                open_for(said)
            assert session is not None
            self._heard(session, message)

        try:
            if peer is not None:
                async with _abort_with_status(context):
                    open_for(peer)
            await run_stream(context, requests, outbox, receive)
        finally:
            if session is not None and self._open.get(self._key(session.peer)) is session:
                del self._open[self._key(session.peer)]
                self._closed(session)
            if session is not None and session.ended:
                # The library tells the peer nothing of a handler that was cancelled: it would wait for ever.
                with suppress(TimeoutError):
                    async with asyncio.timeout(FLUSH_SECONDS):
                        await context.abort(ENDED.mapping.grpc, ENDED.message)

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

    def end_all(self) -> None:
        for session in list(self._open.values()):
            session.end()


async def run_stream(
    context: Any, requests: AsyncIterator[Up], outbox: Outbox[Down], receive: Callable[[Up], None]
) -> None:
    """The server's end of a bidirectional stream: read until the peer leaves, write what `outbox` holds meanwhile.

    Use it in a handler that is a plain coroutine. An error of `receive` ends the stream with the error's status.
    """
    await context.send_initial_metadata(())  # the client counts itself connected from here
    writer = asyncio.create_task(write_all(outbox, context.write), name="stream: write")
    try:
        async with _abort_with_status(context):
            async for message in requests:
                for one in unpacked(message):
                    receive(one)
    finally:
        writer.cancel()
        await asyncio.gather(writer, return_exceptions=True)


@asynccontextmanager
async def _abort_with_status(context: Any) -> AsyncIterator[None]:
    """An error of ours ends the stream with its status, and not as a defect."""
    try:
        yield
    except MotetError as error:
        log.info("stream_refused", reason=error.message)
        await context.abort(error.mapping.grpc, error.message)
