"""One side of a simulated stream: what its process reads and sends, and when it hears that the stream has ended."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from motet.transport import CallFailed, StatusCode
from motet_simulator.world.loop import ProcessLoop
from motet_simulator.world.pipe import Pipe
from motet_simulator.world.statuses import OK, RESET, Aborted, Status
from motet_simulator.world.wires import FASTEST_SECONDS, Wires

if TYPE_CHECKING:
    from motet_simulator.world.streams import Stream

WINDOW_BYTES = 256 * 1024
"""What may be under way or unread in one direction of a stream before its sender waits."""

UPDATE_BYTES = WINDOW_BYTES // 4
"""A reader says how much it has read once it is this much, as in HTTP/2. Else a fifth of all turns is for that."""


class _Waiters:
    """Those that wait for the next change."""

    __slots__ = ("_futures", "_loop")

    def __init__(self, loop: ProcessLoop) -> None:
        self._loop = loop
        self._futures: list[asyncio.Future[None]] = []

    async def wait(self) -> None:
        future = self._loop.create_future()
        self._futures.append(future)
        await future

    def wake(self) -> None:
        futures, self._futures = self._futures, []
        for future in futures:
            if not future.done():
                future.set_result(None)


class End:
    """One side of a stream."""

    def __init__(self, wires: Wires, host: str, loop: ProcessLoop, *, is_client: bool) -> None:
        self.host = host
        self.loop = loop
        self.is_client = is_client
        self.status: Status | None = None
        """How the stream has ended for this side."""
        self.task: asyncio.Task[None] | None = None
        """Of the handler, on the server's side."""
        self.begun = is_client
        """Whether this side has heard of the stream."""
        self.cancelled = False
        self.accepted = False
        self.stream: Stream
        self.out: Pipe
        self.into: Pipe
        self.encode: Callable[[Any], bytes]
        self.decode: Callable[[bytes], Any]
        self._wires = wires
        self._inbox: deque[bytes] = deque()
        self._read_bytes = 0
        """Of which the sender has not heard."""
        self._changed = _Waiters(loop)
        self._room = _Waiters(loop)

    # ------------------------------------------------------------------------------------------------ what arrives here

    def on_accepted(self) -> None:
        self.accepted = True
        self._changed.wake()

    def on_message(self, message: bytes) -> None:
        self.accepted = True
        if self.status is None:
            self._inbox.append(message)
            self._changed.wake()

    def on_end(self, status: Status) -> None:
        """The stream has ended, on the other side or below."""
        if self.status is not None:
            return
        self.status = status
        self._changed.wake()
        self._room.wake()
        self.stream.side_ended(self)
        if self.task is not None:
            # gRPC cancels the handler; it may see that its client sends no more before that.
            late = self._wires.world.draw("cancelled late", self.stream.name) < 0.5
            self.loop.call_later(FASTEST_SECONDS if late else 0.0, self.task.cancel)

    def on_read(self, size: int) -> None:
        self.out.unread -= size
        self._room.wake()

    def breaks(self, status: Status) -> None:
        """This side notices that the connection is gone."""
        if self.status is None and self.begun:
            self.out.send(self.stream.other(self).on_end, RESET)
            self.loop.call_soon(self.on_end, status)

    # ---------------------------------------------------------------------------------------------- what this side does

    async def connected(self) -> None:
        while not self.accepted and self.status is None:
            await self._changed.wait()
        if not self.accepted:
            self._raise_if_failed()

    async def accept(self) -> None:
        self.out.send(self.stream.other(self).on_accepted)

    async def send(self, message: Any) -> None:
        while self.status is None and self.out.unread > WINDOW_BYTES:
            await self._room.wait()
        if self.status is not None:
            raise CallFailed(*self.status)
        lies = self._wires.lies.get(self.host)
        for said in (message,) if lies is None else lies(message):
            encoded = self.encode(said)
            self.out.unread += len(encoded)
            self._wires.record(self._wires.world.now, self.out.label, encoded)
            self.out.send(self.stream.other(self).on_message, encoded)

    async def send_all(self, take: Callable[[], Awaitable[Any]]) -> None:
        with suppress(CallFailed):
            while True:
                await self.send(await take())

    async def receive_all(self, receive: Callable[[Any], None]) -> None:
        while True:
            while self._inbox and not self.cancelled:
                receive(self._take())
            if self.status is not None:
                self._raise_if_failed()
                return
            await self._changed.wait()

    async def messages(self) -> AsyncGenerator[Any, None]:
        """As `receive_all`, for one who may not have time for the next one at once."""
        while True:
            while self._inbox and not self.cancelled:
                yield self._take()
            if self.status is not None:
                self._raise_if_failed()
                return
            await self._changed.wait()

    async def request(self) -> Any:
        """The only message of a client that sends one."""
        while not self._inbox:
            await self._changed.wait()
        return self._take()

    def _take(self) -> Any:
        message = self._inbox.popleft()
        self._read_bytes += len(message)
        if self._read_bytes >= UPDATE_BYTES:
            self.out.send(self.stream.other(self).on_read, self._read_bytes)
            self._read_bytes = 0
        return self.decode(message)

    def _raise_if_failed(self) -> None:
        if self.cancelled:
            raise asyncio.CancelledError
        if self.is_client and self.status is not None and self.status != OK:
            raise CallFailed(*self.status)

    def cancel(self) -> None:
        """On the client's side: end the stream at once."""
        if self.status is None:
            self.cancelled = True
            self.out.send(self.stream.other(self).on_end, (StatusCode.CANCELLED, "the client cancelled"))
            self.on_end((StatusCode.CANCELLED, "locally cancelled"))

    async def end(self, code: StatusCode, details: str) -> None:
        self.end_now((code, details))
        raise Aborted

    def end_now(self, status: Status) -> None:
        """On the server's side, unless the stream has a status."""
        if self.status is None:
            self.out.send(self.stream.other(self).on_end, status)
            self.status = status
            self._changed.wake()
            self._room.wake()
            self.stream.side_ended(self)
