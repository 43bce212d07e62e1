"""A simulated network: it does what gRPC over TCP can do, and no more.

Messages of one stream keep their order in each direction. Their delays have a long tail. A stream may break and lose
what is under way; then each side notices at once, or up to ten seconds later. A partition stops one direction between
two hosts: messages wait, as in TCP, until it ends or until a side notices that its pings stay unanswered. A side whose
peer does not read waits.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any

from motet.errors import MotetError
from motet.health import Health
from motet.transport import (
    CallFailed,
    Down,
    DownloadMethod,
    Handlers,
    Method,
    StatusCode,
    StreamMethod,
    UnaryMethod,
    Up,
)
from motet_simulator.world.loop import ProcessLoop
from motet_simulator.world.time import World

FASTEST_SECONDS = 0.0001
SLOWEST_SECONDS = 0.3
TAIL = 0.6
"""Of the delays: the larger, the longer. With this, one of a hundred takes 16 times as long as the fastest."""

PING_SECONDS = (5.0, 10.0)
"""When a side notices that its peer is gone: with pings every 5 s that may take 5 s."""

WINDOW_BYTES = 256 * 1024
"""What may be under way or unread in one direction of a stream before its sender waits."""

OK: "Status" = (StatusCode.OK, "")
REFUSED: "Status" = (StatusCode.UNAVAILABLE, "connection refused")
RESET: "Status" = (StatusCode.UNAVAILABLE, "connection reset by peer")
UNANSWERED: "Status" = (StatusCode.UNAVAILABLE, "ping timeout")
STOPPED: "Status" = (StatusCode.UNAVAILABLE, "the server stops")

Status = tuple[StatusCode, str]
Record = Callable[[float, str, bytes], None]
"""Gets each message that is sent: when, on which stream and in which direction, and its bytes."""


class _Aborted(Exception):
    """A handler has ended its stream with a status."""


@dataclass(slots=True)
class _Host:
    name: str
    servers: "dict[str, SimulatedServer]" = field(default_factory=dict)
    streams: "dict[_Stream, None]" = field(default_factory=dict)
    opened: int = 0


class Wires:
    """All hosts, and what is between them."""

    def __init__(self, world: World, record: Record = lambda *_: None) -> None:
        self.world = world
        self.record = record
        self.slowness: dict[tuple[str, str], tuple[float, float]] = {}
        """Between two hosts: by how much delays are longer, and until when."""
        self._hosts: dict[str, _Host] = {}
        self._servers: dict[str, SimulatedServer] = {}
        self.aliases: dict[str, tuple[str, ...]] = {}
        """Addresses behind which there are several others: one of those that listen is taken."""
        self._blocked: dict[tuple[str, str], float] = {}

    def host(self, name: str) -> _Host:
        return self._hosts.setdefault(name, _Host(name))

    def server_at(self, address: str, *of: object) -> "SimulatedServer | None":
        behind = [one for one in self.aliases.get(address, (address,)) if one in self._servers]
        return self._servers[behind[int(self.world.draw("server", *of) * len(behind))]] if behind else None

    def listen(self, server: "SimulatedServer") -> None:
        self._servers[server.address] = server

    def stop_listening(self, server: "SimulatedServer") -> None:
        if self._servers.get(server.address) is server:
            del self._servers[server.address]

    # ----------------------------------------------------------------------------------------------------------- faults

    def host_died(self, name: str, *, power: bool = False) -> None:
        """All processes of the host have ended. Its kernel tells their peers, unless the whole machine is gone."""
        for server in [one for one in self._servers.values() if one.host == name]:
            self.stop_listening(server)
        for stream in list(self.host(name).streams):
            stream.side_died(name, power=power)

    def partition(self, source: str, target: str, seconds: float) -> None:
        """Nothing that `source` sends reaches `target` for this long."""
        began, self._blocked[source, target] = self.world.now, self.world.now + seconds
        for stream in self._between(source, target):
            for end in (stream.client, stream.server):
                notices = began + self._ping(stream, end)
                if notices < began + seconds:
                    self.world.at(notices, end.breaks, UNANSWERED)

    def break_streams(self, one: str, other: str) -> None:
        """All streams between two hosts break, and what is under way is lost."""
        for stream in self._between(one, other):
            stream.lose_all()
            for end in (stream.client, stream.server):
                late = self.world.draw("notices late", stream.name, end.is_client, self.world.now) < 0.5
                self.world.after(self._ping(stream, end) if late else FASTEST_SECONDS, end.breaks, RESET)

    def _ping(self, stream: "_Stream", end: "_End") -> float:
        low, high = PING_SECONDS
        return low + (high - low) * self.world.draw("ping", stream.name, end.is_client, self.world.now)

    def _between(self, one: str, other: str) -> "list[_Stream]":
        return [stream for stream in self.host(one).streams if {stream.client.host, stream.server.host} == {one, other}]

    def blocked_until(self, source: str, target: str) -> float:
        return self._blocked.get((source, target), 0.0)

    def delay(self, source: str, target: str, *of: object) -> float:
        tail: float = (1.0 - self.world.draw(*of)) ** -TAIL
        factor, until = self.slowness.get((source, target), (1.0, 0.0))
        return min(FASTEST_SECONDS * tail, SLOWEST_SECONDS) * (factor if until > self.world.now else 1.0)


class _Pipe:
    """One direction of a stream."""

    __slots__ = ("_lost", "_numbers", "_queue", "_source", "_target", "_wires", "label", "unread")

    def __init__(self, wires: Wires, label: str, source: "_End", target: "_End") -> None:
        self.label = label
        self._wires = wires
        self._source = source
        self._target = target
        self._queue: deque[tuple[float, Callable[..., None], tuple[Any, ...]]] = deque()
        self._numbers = 0
        self._lost = False
        self.unread = 0

    def send(self, do: Callable[..., None], *args: Any, by_kernel: bool = False) -> None:
        """Have the process on the other side do this, after all that was sent before."""
        if self._lost or (self._source.loop.dead and not by_kernel):
            return
        self._numbers += 1
        source, target = self._source.host, self._target.host
        arrives = self._wires.world.now + self._wires.delay(source, target, self.label, self._numbers)
        if self._queue:
            arrives = max(arrives, self._queue[-1][0])
        self._queue.append((arrives, do, args))
        self._wires.world.at(arrives, self._arrive)

    def lose(self) -> None:
        self._lost = True
        self._queue.clear()

    def _arrive(self) -> None:
        queue, now = self._queue, self._wires.world.now
        while queue and queue[0][0] <= now:
            free_at = self._wires.blocked_until(self._source.host, self._target.host)
            if free_at > now:
                self._wires.world.at(free_at + FASTEST_SECONDS, self._arrive)
                return
            _, do, args = queue.popleft()
            self._target.loop.call_soon(do, *args)


class _End:
    """One side of a stream."""

    def __init__(self, wires: Wires, host: str, loop: ProcessLoop, *, is_client: bool) -> None:
        self.host = host
        self.loop = loop
        self.is_client = is_client
        self.status: Status | None = None
        """How the stream has ended for this side."""
        self.task: asyncio.Task[None] | None = None
        """Of the handler, on the server's side."""
        self.cancelled = False
        self.accepted = False
        self.stream: _Stream
        self.out: _Pipe
        self.into: _Pipe
        self.encode: Callable[[Any], bytes]
        self.decode: Callable[[bytes], Any]
        self._wires = wires
        self._inbox: deque[bytes] = deque()
        self._changed: asyncio.Future[None] | None = None
        self._room: asyncio.Future[None] | None = None

    # ------------------------------------------------------------------------------------------------ what arrives here

    def on_accepted(self) -> None:
        self.accepted = True
        self._wake()

    def on_message(self, message: bytes) -> None:
        self.accepted = True
        if self.status is None:
            self._inbox.append(message)
            self._wake()

    def on_end(self, status: Status) -> None:
        """The stream has ended, on the other side or below."""
        if self.status is not None:
            return
        self.status = status
        self._wake()
        self._make_room()
        self.stream.side_ended(self)
        if self.task is not None:
            # gRPC cancels the handler; it may see that its client sends no more before that.
            late = self._wires.world.draw("cancelled late", self.stream.name) < 0.5
            self.loop.call_later(FASTEST_SECONDS if late else 0.0, self.task.cancel)

    def on_read(self, size: int) -> None:
        self.out.unread -= size
        self._make_room()

    def breaks(self, status: Status) -> None:
        """This side notices that the connection is gone."""
        if self.status is None:
            self.out.send(self.stream.other(self).on_end, RESET)
            self.loop.call_soon(self.on_end, status)

    # ---------------------------------------------------------------------------------------------- what this side does

    async def connected(self) -> None:
        while not self.accepted:
            self._raise_if_failed()
            await self._change()

    async def accept(self) -> None:
        self.out.send(self.stream.other(self).on_accepted)

    async def send(self, message: Any) -> None:
        while self.status is None and self.out.unread > WINDOW_BYTES:
            self._room = self.loop.create_future()
            await self._room
        if self.status is not None:
            raise CallFailed(*self.status)
        encoded = self.encode(message)
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
                message = self._inbox.popleft()
                self.out.send(self.stream.other(self).on_read, len(message))
                receive(self.decode(message))
            if self.status is not None:
                self._raise_if_failed()
                return
            await self._change()

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
        raise _Aborted

    def end_now(self, status: Status) -> None:
        """On the server's side, unless the stream has a status."""
        if self.status is None:
            self.out.send(self.stream.other(self).on_end, status)
            self.status = status
            self._wake()
            self._make_room()
            self.stream.side_ended(self)

    async def _change(self) -> None:
        self._changed = self.loop.create_future()
        await self._changed

    def _wake(self) -> None:
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)

    def _make_room(self) -> None:
        if self._room is not None and not self._room.done():
            self._room.set_result(None)


class _Stream:
    def __init__(self, wires: Wires, name: str, client: _End, server: _End, method: Method[Any, Any]) -> None:
        self.name = name
        self.method = method
        self.client = client
        self.server = server
        self._wires = wires
        client.stream = server.stream = self
        client.out = server.into = _Pipe(wires, f"{name} up", client, server)
        client.into = server.out = _Pipe(wires, f"{name} down", server, client)
        encoded = isinstance(method, StreamMethod) and method.encoded
        client.encode, server.decode = method.up.SerializeToString, method.up.FromString
        server.encode, client.decode = (bytes if encoded else method.down.SerializeToString), method.down.FromString
        for host in (client.host, server.host):
            wires.host(host).streams[self] = None

    def other(self, end: _End) -> _End:
        return self.server if end is self.client else self.client

    def side_ended(self, end: _End) -> None:
        self._wires.host(end.host).streams.pop(self, None)

    def lose_all(self) -> None:
        self.client.out.lose()
        self.server.out.lose()

    def side_died(self, host: str, *, power: bool) -> None:
        """The process of one side has ended. Its kernel sends what it still has, or drops it, and closes."""
        mine, theirs = (self.client, self.server) if self.client.host == host else (self.server, self.client)
        world = self._wires.world
        mine.status = mine.status or RESET
        self.side_ended(mine)
        if power:
            mine.out.lose()
            low, high = PING_SECONDS
            late = low + (high - low) * world.draw("ping", self.name, world.now)
            world.after(late, theirs.breaks, UNANSWERED)
        elif world.draw("drops", self.name) < 0.5:
            mine.out.send(theirs.on_end, RESET, by_kernel=True)
        else:
            mine.out.lose()
            world.after(FASTEST_SECONDS, theirs.breaks, RESET)
        theirs.out.lose()


class SimulatedServer:
    def __init__(self, wires: Wires, host: str, loop: ProcessLoop, address: str, handlers: Handlers) -> None:
        self.address = address
        self.host = host
        self.loop = loop
        self._wires = wires
        self._handlers = handlers
        self.running: dict[asyncio.Task[None], _End] = {}
        self.ready = False
        self._process: Health | None = None

    async def set_ready(self, ready: bool, why: str = "") -> None:
        self.ready = ready

    def open(self, end: _End) -> None:
        """A client opens a stream."""
        if end.status is not None:
            return
        handle = self._handlers.get(end.stream.method)
        if handle is None:
            end.end_now((StatusCode.UNIMPLEMENTED, "Method not found!"))
            return
        task = end.task = self.loop.create_task(self._run(end, handle), name=end.stream.name)
        self.running[task] = end
        task.add_done_callback(lambda task: self.running.pop(task, None))

    async def _run(self, end: _End, handle: Callable[..., Any]) -> None:
        try:
            match end.stream.method:
                case StreamMethod():
                    await handle(end)
                case DownloadMethod():
                    async for answer in handle(await self._request(end)):
                        await end.send(answer)
                case _:
                    await end.send(await handle(await self._request(end)))
            end.end_now(OK)
        except _Aborted:
            pass
        except CallFailed:
            pass  # the client is gone
        except MotetError as error:
            end.end_now((error.mapping.grpc, error.message))
        except asyncio.CancelledError:
            end.end_now(STOPPED)
            raise
        except Exception as error:
            end.end_now((StatusCode.UNKNOWN, f"Unexpected {type(error)}: {error}"))

    @staticmethod
    async def _request(end: _End) -> Any:
        requests: list[Any] = []
        while not requests:
            while end._inbox:  # noqa: SLF001
                requests.append(end.decode(end._inbox.popleft()))  # noqa: SLF001
            if not requests:
                await end._change()  # noqa: SLF001
        return requests[0]

    async def stop(self) -> None:
        self._wires.stop_listening(self)
        running = list(self.running)
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)


class SimulatedChannel:
    def __init__(self, wires: Wires, host: str, loop: ProcessLoop, address: str) -> None:
        self._wires = wires
        self._host = host
        self._loop = loop
        self._address = address
        self.streams: list[_End] = []

    def stream(self, method: StreamMethod[Up, Down]) -> _End:
        return self._open(method)

    async def call(self, method: UnaryMethod[Up, Down], request: Up, *, seconds: float) -> Down:
        answers: list[Down] = []
        stream = self._open(method)
        try:
            async with asyncio.timeout(seconds):
                await stream.send(request)
                await stream.receive_all(answers.append)
        except TimeoutError:
            raise CallFailed(StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded") from None
        finally:
            stream.cancel()
        return answers[0]

    async def download(self, method: DownloadMethod[Up, Down], request: Up) -> AsyncGenerator[Down, None]:
        answers: deque[Down] = deque()
        stream = self._open(method)
        try:
            await stream.send(request)
            await stream.receive_all(answers.append)
        except CallFailed:
            while answers:
                yield answers.popleft()
            raise
        finally:
            stream.cancel()
        while answers:
            yield answers.popleft()

    def _open(self, method: Method[Any, Any]) -> _End:
        wires = self._wires
        host = wires.host(self._host)
        host.opened += 1
        name = f"{self._host} {method.name} {host.opened}"
        client = _End(wires, self._host, self._loop, is_client=True)
        self.streams = [one for one in self.streams if one.status is None]
        self.streams.append(client)
        server = wires.server_at(self._address, name)
        if server is None:
            nobody = _End(wires, "", self._loop, is_client=False)
            _Stream(wires, name, client, nobody, method)
            nobody.out.send(client.on_end, REFUSED, by_kernel=True)
            return client
        end = _End(wires, server.host, server.loop, is_client=False)
        _Stream(wires, name, client, end, method)
        client.out.send(server.open, end)
        return client

    async def close(self, grace: float | None) -> None:
        live = [one for one in self.streams if one.status is None]
        if live and grace:
            await asyncio.sleep(grace)
        for one in live:
            one.cancel()


class SimulatedNetwork:
    """What one process has of the network."""

    def __init__(self, wires: Wires, host: str, loop: ProcessLoop) -> None:
        self._wires = wires
        self._host = host
        self._loop = loop
        self._random = Random(f"{wires.world.seed} {host} {loop.time()}")

    @asynccontextmanager
    async def channel(
        self, address: str, role: str = "", *, grace: float | None = None
    ) -> AsyncIterator[SimulatedChannel]:
        channel = SimulatedChannel(self._wires, self._host, self._loop, address)
        try:
            yield channel
        finally:
            await channel.close(grace)

    @asynccontextmanager
    async def serving(
        self,
        address: str,
        handlers: Handlers,
        *,
        ready: bool = True,
        grace: float = 0.5,
        process: Health | None = None,
    ) -> AsyncIterator[SimulatedServer]:
        server = SimulatedServer(self._wires, self._host, self._loop, address, handlers)
        self._wires.listen(server)
        await server.set_ready(ready)
        try:
            yield server
        finally:
            await server.stop()

    async def pause(self, address: str, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def spread(self, seconds: float) -> float:
        return seconds * self._random.uniform(0.75, 1.25)

    def explain_failure(self, why: str, role: str) -> str:
        return ""
