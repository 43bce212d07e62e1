"""A simulated network: it does what gRPC over TCP can do, and no more.

Messages of one stream keep their order in each direction. Their delays have a long tail. A stream may break and lose
what is under way; then each side notices at once, or up to ten seconds later. A partition stops one direction between
two hosts: messages wait, as in TCP, until it ends or until a side notices that its pings stay unanswered. After it they
are sent again, each stream's when its next attempt is due: those of one that was given up may come after the first of
its successor. A side whose peer does not read waits. A machine that is switched on refuses a connection where nobody
listens; one that is off, and one behind a partition, is silent.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any

from motet.errors import MotetError, SetupError
from motet.health import Health
from motet.transport import (
    HANDLER_END_SECONDS,
    CallFailed,
    Down,
    DownloadMethod,
    Handlers,
    Method,
    StatusCode,
    StreamMethod,
    UnaryMethod,
    Up,
    spread,
    status_of,
)
from motet_simulator.world.loop import ProcessLoop
from motet_simulator.world.time import World

FASTEST_SECONDS = 0.0001
SLOWEST_SECONDS = 0.3
TAIL = 0.6
"""Of the delays: the larger, the longer. With this, one of a hundred takes 16 times as long as the fastest."""

SLOW_FACTOR = 100.0
"""How much longer delays are on a slow way."""

PING_SECONDS = (5.0, 10.0)
"""When a side notices that its peer is gone: with pings every 5 s that may take 5 s."""

MAX_ATTEMPT_SECONDS = 3.0
"""By then TCP has sent again what waited in a partition. Its pauses double: each is as long as it has waited so far."""

CONNECT_SECONDS = 20.0
"""When gRPC gives up a connection to a machine that is silent."""

WINDOW_BYTES = 256 * 1024
"""What may be under way or unread in one direction of a stream before its sender waits."""

UPDATE_BYTES = WINDOW_BYTES // 4
"""A reader says how much it has read once it is this much, as in HTTP/2. Else a fifth of all turns is for that."""

OK: "Status" = (StatusCode.OK, "")
REFUSED: "Status" = (StatusCode.UNAVAILABLE, "connection refused")
RESET: "Status" = (StatusCode.UNAVAILABLE, "connection reset by peer")
UNANSWERED: "Status" = (StatusCode.UNAVAILABLE, "ping timeout")
SILENT: "Status" = (StatusCode.UNAVAILABLE, "connection timed out")
STOPPED: "Status" = (StatusCode.UNAVAILABLE, "the server stops")

Status = tuple[StatusCode, str]
Record = Callable[[float, str, bytes], None]
"""Gets each message that is sent: when, on which stream and in which direction, and its bytes."""


class _Aborted(Exception):
    """A handler has ended its stream with a status."""


@dataclass(slots=True)
class Host:
    """A machine. It outlives its processes."""

    name: str
    wall_error: float
    """By how much its wall clock is wrong: a fault may change it."""
    streams: "dict[_Stream, None]" = field(default_factory=dict)
    opened: int = 0
    off: bool = False
    """It has no power. A process that starts there says that it has."""


@dataclass(frozen=True, slots=True)
class _Partition:
    began: float
    until: float


class Wires:
    """All hosts, and what is between them."""

    def __init__(self, world: World, record: Record = lambda *_: None) -> None:
        self.world = world
        self.record = record
        self._slow_until: dict[tuple[str, str], float] = {}
        self._hosts: dict[str, Host] = {}
        self._servers: dict[str, SimulatedServer] = {}
        self.aliases: dict[str, tuple[str, ...]] = {}
        """Addresses behind which there are several others: one of those that listen is taken."""
        self._partitions: dict[tuple[str, str], _Partition] = {}

    def host(self, name: str) -> Host:
        if name not in self._hosts:
            self._hosts[name] = Host(name, wall_error=10 * (self.world.draw("wall clock", name) - 0.5))
        return self._hosts[name]

    def server_at(self, address: str, *of: object) -> "SimulatedServer | None":
        behind = [one for one in self.aliases.get(address, (address,)) if one in self._servers]
        return self._servers[behind[int(self.world.draw("server", *of) * len(behind))]] if behind else None

    def listen(self, server: "SimulatedServer") -> None:
        if server.loop.dead:
            return  # what it does in the moment of its end
        if server.address in self._servers:
            raise SetupError(f"cannot listen on {server.address}: it is in use")
        self._servers[server.address] = server

    def stop_listening(self, server: "SimulatedServer") -> None:
        if self._servers.get(server.address) is server:
            del self._servers[server.address]

    # ----------------------------------------------------------------------------------------------------------- faults

    def host_died(self, name: str, *, power: bool = False) -> None:
        """All processes of the host have ended. Its kernel tells their peers, unless the whole machine is gone."""
        self.host(name).off = power
        for server in [one for one in self._servers.values() if one.host == name]:
            self.stop_listening(server)
        for stream in list(self.host(name).streams):
            stream.side_died(name, power=power)

    def partition(self, source: str, target: str, seconds: float) -> None:
        """Nothing that `source` sends reaches `target` for this long."""
        now, before = self.world.now, self._partitions.get((source, target))
        if before is not None and before.until > now:
            partition = _Partition(before.began, max(before.until, now + seconds))
        else:
            partition = _Partition(now, now + seconds)
        self._partitions[source, target] = partition
        for stream in self._between(source, target):
            self._pings_fail(stream, partition)

    def opened(self, stream: "_Stream", *hosts: str) -> None:
        """A stream begins, which has a process on these hosts."""
        for name in hosts:
            self.host(name).streams[stream] = None
        one, other = stream.client.host, stream.server.host
        for way in ((one, other), (other, one)):
            partition = self._partitions.get(way)
            if partition is not None and partition.until > self.world.now:
                self._pings_fail(stream, partition)

    def _pings_fail(self, stream: "_Stream", partition: _Partition) -> None:
        began = max(partition.began, stream.began)
        for end in (stream.client, stream.server):
            notices = began + self.ping_seconds(stream, end, began)
            if notices < partition.until:
                self.world.at(notices, end.breaks, UNANSWERED)

    def slow(self, source: str, target: str, seconds: float) -> None:
        """What `source` sends to `target` takes longer for this long."""
        self._slow_until[source, target] = max(self._slow_until.get((source, target), 0.0), self.world.now + seconds)

    def break_streams(self, one: str, other: str) -> None:
        """All streams between two hosts break, and what is under way is lost."""
        for stream in self._between(one, other):
            stream.lose_all()
            for end in (stream.client, stream.server):
                late = self.world.draw("notices late", stream.name, end.is_client, self.world.now) < 0.5
                seconds = self.ping_seconds(stream, end, self.world.now) if late else FASTEST_SECONDS
                self.world.after(seconds, end.breaks, RESET)

    def ping_seconds(self, stream: "_Stream", end: "_End", silent_since: float) -> float:
        """How long a side waits for its peer before it counts as gone."""
        low, high = PING_SECONDS
        return low + (high - low) * self.world.draw("ping", stream.name, end.is_client, silent_since)

    def _between(self, one: str, other: str) -> "list[_Stream]":
        streams = self.host(one).streams | self.host(other).streams
        return [stream for stream in streams if {stream.client.host, stream.server.host} == {one, other}]

    def blocked_until(self, source: str, target: str) -> float:
        partition = self._partitions.get((source, target))
        return 0.0 if partition is None else partition.until

    def delay(self, source: str, target: str, *of: object) -> float:
        tail: float = (1.0 - self.world.draw(*of)) ** -TAIL
        slow = self._slow_until.get((source, target), 0.0) > self.world.now
        return min(FASTEST_SECONDS * tail, SLOWEST_SECONDS) * (SLOW_FACTOR if slow else 1.0)


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
                pause = min(free_at - queue[0][0], MAX_ATTEMPT_SECONDS)
                attempt = free_at + FASTEST_SECONDS + pause * self._wires.world.draw("attempt", self.label, free_at)
                self._wires.world.at(attempt, self._arrive)
                return
            _, do, args = queue.popleft()
            self._target.loop.call_soon(do, *args)


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
        self.begun = is_client
        """Whether this side has heard of the stream."""
        self.cancelled = False
        self.accepted = False
        self.stream: _Stream
        self.out: _Pipe
        self.into: _Pipe
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
        raise _Aborted

    def end_now(self, status: Status) -> None:
        """On the server's side, unless the stream has a status."""
        if self.status is None:
            self.out.send(self.stream.other(self).on_end, status)
            self.status = status
            self._changed.wake()
            self._room.wake()
            self.stream.side_ended(self)


class _Stream:
    def __init__(self, wires: Wires, name: str, client: _End, server: _End, method: Method[Any, Any]) -> None:
        self.name = name
        self.method = method
        self.client = client
        self.server = server
        self.began = wires.world.now
        self._wires = wires
        client.stream = server.stream = self
        client.out = server.into = _Pipe(wires, f"{name} up", client, server)
        client.into = server.out = _Pipe(wires, f"{name} down", server, client)
        encoded = isinstance(method, StreamMethod) and method.encoded
        client.encode, server.decode = method.up.SerializeToString, method.up.FromString
        server.encode, client.decode = (bytes if encoded else method.down.SerializeToString), method.down.FromString

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
            world.after(self._wires.ping_seconds(self, theirs, world.now), theirs.breaks, UNANSWERED)
        elif world.draw("drops", self.name) < 0.5:
            mine.out.send(theirs.on_end, RESET, by_kernel=True)
        else:
            mine.out.lose()
            world.after(FASTEST_SECONDS, theirs.breaks, RESET)
        theirs.out.lose()


class SimulatedServer:
    def __init__(
        self, wires: Wires, host: str, loop: ProcessLoop, address: str, handlers: Handlers, *, process: Health
    ) -> None:
        self.address = address
        self.host = host
        self.loop = loop
        self._wires = wires
        self._handlers = handlers
        self.running: dict[asyncio.Task[None], _End] = {}
        self._process = process
        self._stops = False

    async def set_ready(self, ready: bool, why: str = "") -> None:
        self._process.set_ready(ready, why)

    def open(self, end: _End) -> None:
        """A client opens a stream."""
        if end.status is not None:
            return
        end.begun = True
        if self._stops:
            end.end_now(STOPPED)
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
                    async for answer in handle(await end.request()):
                        await end.send(answer)
                case _:
                    await end.send(await handle(await end.request()))
            end.end_now(OK)
        except _Aborted:
            pass
        except CallFailed:
            pass  # the client is gone
        except MotetError as error:
            end.end_now(status_of(error))
        except asyncio.CancelledError:
            end.end_now(STOPPED)
            raise
        except Exception as error:
            end.end_now((StatusCode.UNKNOWN, f"Unexpected {type(error)}: {error}"))

    async def stop(self, grace: float) -> None:
        """Take no more calls, and give those that run `grace` seconds to end."""
        await self.set_ready(False, "stopping")
        self._wires.stop_listening(self)
        self._stops = True
        if self.running and grace:
            await asyncio.wait(list(self.running), timeout=grace)
        cancelled = list(self.running)
        for task in cancelled:
            task.cancel()
        if cancelled:
            await asyncio.wait(cancelled, timeout=HANDLER_END_SECONDS)


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
        stream = self._open(method)
        try:
            await stream.send(request)
            async for answer in stream.messages():
                yield answer
        finally:
            stream.cancel()

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
            self._open_to_nobody(client, name, method)
            return client
        end = _End(wires, server.host, server.loop, is_client=False)
        stream = _Stream(wires, name, client, end, method)
        wires.opened(stream, self._host, server.host)
        client.out.send(server.open, end)
        return client

    def _open_to_nobody(self, client: _End, name: str, method: Method[Any, Any]) -> None:
        """The machine at this address refuses, if it is there. A name for several addresses none of which is served is
        refused by the client's own machine."""
        wires = self._wires
        host = self._host if self._address in wires.aliases else self._address.rpartition(":")[0]
        nobody = _End(wires, host, self._loop, is_client=False)
        wires.opened(_Stream(wires, name, client, nobody, method), self._host)

        def arrive() -> None:
            if wires.host(host).off:
                wires.world.at(nobody.stream.began + CONNECT_SECONDS, client.breaks, SILENT)
            else:
                nobody.end_now(REFUSED)

        client.out.send(arrive)

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
        server = SimulatedServer(self._wires, self._host, self._loop, address, handlers, process=process or Health())
        self._wires.listen(server)
        await server.set_ready(ready, "" if ready else "starting")
        try:
            yield server
        finally:
            await server.stop(grace)

    async def pause(self, address: str, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def spread(self, seconds: float) -> float:
        return spread(self._random, seconds)

    def explain_failure(self, why: str, role: str) -> str:
        return ""
