"""gRPC as Motet uses it: few long-lived streams, each one told everything again after it broke.

Rules, each learnt from a failure seen in practice:
- a handler that is cancelled re-raises, a client call lives in a context that cancels it: grpc.aio leaks otherwise;
- reconnecting starts after 50 ms and never waits longer than 500 ms (gRPC's own back-off costs over a second), nor
  longer than a Unix socket takes to be served again;
- what is said while a stream is down is dropped: the greeting of the next connection tells the whole truth again;
- a name is resolved anew at each reconnect, and a peer that vanished without a word is noticed within ten seconds;
- channels are made after the process has started, never before a fork;
- `asyncio.timeout`, never `wait_for`.
"""

import asyncio
import random
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import grpc
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from motet import tls
from motet.errors import MotetError, SetupError
from motet.health import Health

log = structlog.get_logger(__name__)

Up = TypeVar("Up")
Down = TypeVar("Down")
Message = TypeVar("Message")

FIRST_RETRY_SECONDS = 0.05
LAST_RETRY_SECONDS = 0.5
LOOK_SECONDS = 0.025
CONNECT_SECONDS = 5.0
PATIENCE_SECONDS = 10.0
"""A peer that stays away for longer is worth a warning, once."""
MOST_IN_A_PACK = 64
LARGEST_PACK_BYTES = 1024 * 1024  # before its last message
MAX_MESSAGE_BYTES = 64 * 1024 * 1024

_BOTH: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # A peer whose machine vanished sends nothing; without pings its stream would look healthy for ever. The time that
    # an answer may take has two names, of which the second counts; and without the last of these, a stream on which
    # nobody speaks would be pinged twice and then once a minute.
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]
_CHANNEL_OPTIONS: list[tuple[str, Any]] = [
    *_BOTH,
    # Each connection attempt is ours: no back-off remembered from an earlier channel to the same address.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", int(FIRST_RETRY_SECONDS * 1000)),
    ("grpc.max_reconnect_backoff_ms", int(LAST_RETRY_SECONDS * 1000)),
    # A pod that comes back has another address; by default a channel asks for it twice a minute.
    ("grpc.dns_min_time_between_resolutions_ms", 500),
    ("grpc.enable_http_proxy", 0),
]
_SERVER_OPTIONS: list[tuple[str, Any]] = [
    *_BOTH,
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    # Two processes on one port would share its requests at random.
    ("grpc.so_reuseport", 0),
]


@asynccontextmanager
async def open_channel(address: str, role: str = "", *, grace: float | None = None) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to `unix:/path` or `host:port`, closed on the way out. The one place that knows how peers connect.

    With TLS the peer must prove to be of `role`; without one, to be called what was dialled. Calls that still run when
    the channel is closed have `grace` seconds to end. Raises SetupError when this process's own certificate is unfit.
    """
    identity = tls.current()
    if identity is None or socket_path(address) is not None:
        channel = grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS)
    else:
        options = [("grpc.ssl_target_name_override", tls.name_of(role))] if role else []
        channel = grpc.aio.secure_channel(
            address, identity.channel_credentials(), options=[*_CHANNEL_OPTIONS, *options]
        )
    try:
        yield channel
    finally:
        await channel.close(grace)


class Outbox(Generic[Message]):
    """What waits to be written to a stream. `put` never blocks; a subclass may merge what a slow reader left."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Message] = asyncio.Queue()

    def put(self, message: Message) -> None:
        self._queue.put_nowait(message)

    async def get(self) -> Message:
        return await self._queue.get()

    def take(self) -> Message | None:
        """The next one if it is here already."""
        return None if self._queue.empty() else self._queue.get_nowait()


class Backoff:
    """Jittered waits that double from the first to the last, and start over after a success."""

    def __init__(self, first: float = FIRST_RETRY_SECONDS, last: float = LAST_RETRY_SECONDS) -> None:
        self._first, self._last, self._next = first, last, first

    def reset(self) -> None:
        self._next = self._first

    def next(self) -> float:
        wait, self._next = self._next, min(self._next * 2, self._last)
        return wait * random.uniform(0.75, 1.25)  # noqa: S311 - spreads load, guards nothing


async def _pause(address: str, seconds: float) -> None:
    """Wait before the next attempt; beside a Unix socket that nobody serves, only until somebody does."""
    path = socket_path(address)
    if path is None or _is_served(path):
        await asyncio.sleep(seconds)
        return
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    while (left := end - loop.time()) > 0 and not _is_served(path):  # noqa: ASYNC110 - another process's doing
        await asyncio.sleep(min(left, LOOK_SECONDS))


def _is_served(path: Path) -> bool:
    """Whether somebody listens on a Unix socket. Asking costs microseconds, an attempt of gRPC's milliseconds."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except OSError:
            return False
        return True


class LedBy(Exception):
    """The peer does not lead, and sends us to who does; or nowhere, while nobody does."""

    def __init__(self, address: str) -> None:
        super().__init__(address or "nobody yet")
        self.address = address


class Link(Generic[Up, Down]):
    """The client's end of one long-lived bidirectional stream, opened again whenever it breaks.

    `peer` is the role of who answers at `address`. `greet` makes the first messages of each connection. `receive` is
    called with every message from the peer, in order, and must not block; an error of it ends the connection, not the
    link. A peer whose first word is NotLeader is left at once for the one it names, until that connection breaks; it is
    the link's to hear, not `receive`'s. `opened` and `closed` are called when a connection comes and goes. `run` ends
    only by cancellation; `send` says False, and drops the message, while there is no connection.
    """

    def __init__(
        self,
        peer: str,
        address: str,
        open_stream: Callable[[grpc.aio.Channel], Any],
        *,
        greet: Callable[[], Iterable[Up]],
        receive: Callable[[Down], None],
        opened: Callable[[], None] | None = None,
        closed: Callable[[str], None] | None = None,
    ) -> None:
        self.peer = peer
        self.address = address
        self._said = ""
        self._down_since = time.monotonic()
        self._led = False
        self._open_stream = open_stream
        self._greet = greet
        self._receive = receive
        self._opened = opened
        self._closed = closed
        self._outbox: Outbox[Up] | None = None

    @property
    def connected(self) -> bool:
        return self._outbox is not None

    def send(self, message: Up) -> bool:
        if self._outbox is None:
            return False
        self._outbox.put(message)
        return True

    async def run(self) -> None:
        backoff, turned_away = Backoff(), Backoff()
        address = self.address
        while True:
            here, address = address, self.address
            try:
                await self._converse(here, backoff)
                why = "the peer ended the stream"
            except LedBy as word:
                log.info("stream led elsewhere", link=self.peer, address=here, to=word.address)
                address = word.address or self.address
                # At once when it is news; those who point at each other, or at nobody, are asked at leisure.
                if self._led or not word.address:
                    await asyncio.sleep(turned_away.next())
                else:
                    turned_away.reset()
                self._led = True
                continue
            except grpc.aio.AioRpcError as error:
                why = f"{error.code().name}: {error.details()}"
            except TimeoutError:
                why = "no answer"
            except SetupError as error:
                why = error.message
                self._warn(why)
            except Exception:
                # A message that we cannot take: the next connection tells everything anew. Not in a hurry, since a
                # peer that says it again would keep both sides busy.
                log.exception("stream dropped by an error of ours", link=self.peer, address=here)
                await asyncio.sleep(LAST_RETRY_SECONDS)
                continue
            log.debug("stream down", link=self.peer, address=here, why=why)
            if (identity := tls.current()) is not None and (reason := identity.blame(why, self.peer)):
                self._warn(reason)
            elif not self._said and time.monotonic() - self._down_since > PATIENCE_SECONDS:
                self._warn(why)
            await _pause(here, backoff.next())

    def _warn(self, reason: str) -> None:
        """Once for each reason in a row: attempts come twice a second."""
        if reason != self._said:
            log.warning("no connection", link=self.peer, address=self.address, reason=reason)
        self._said = reason

    async def _converse(self, address: str, backoff: Backoff) -> None:
        async with open_channel(address, self.peer) as channel:
            call = self._open_stream(channel)
            outbox: Outbox[Up] = Outbox()
            why = "the peer ended the stream"
            connected = False
            writer: asyncio.Task[None] | None = None
            try:
                async with asyncio.timeout(CONNECT_SECONDS):
                    await call.wait_for_connection()
                backoff.reset()
                connected, self._said = True, ""
                for message in self._greet():
                    outbox.put(message)
                self._outbox = outbox
                writer = asyncio.create_task(_write_all(outbox, call.write), name=f"{self.peer}: write")
                log.info("stream up", link=self.peer, address=address)
                if self._opened is not None:
                    self._opened()
                first = True
                async for message in call:
                    if first and (leader := _led_by(message)) is not None:
                        raise LedBy(leader)
                    first = self._led = False
                    for one in _unpacked(message):
                        self._receive(one)
            except LedBy as word:
                why = f"led by {word}"
                raise
            except grpc.aio.AioRpcError as error:
                why = f"{error.code().name}: {error.details()}"
                raise
            finally:
                self._outbox = None
                if writer is not None:
                    writer.cancel()
                    await asyncio.gather(writer, return_exceptions=True)
                call.cancel()
                if connected:
                    self._down_since = time.monotonic()
                    log.info("stream lost", link=self.peer, address=address, why=why)
                    if self._closed is not None:
                        self._closed(why)


async def _write_all(outbox: Outbox[Any], write: Callable[[Any], Any]) -> None:
    # A broken stream is the reader's to report: it sees the status, a failed write does not. So this only stops.
    with suppress(grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError):
        while True:
            message = await outbox.get()
            await write(_packed(message, outbox) if hasattr(message, "more") else message)


def _packed(first: Any, outbox: Outbox[Any]) -> Any:
    """All that waits by now, as one message: under load, a write costs more than what it carries."""
    waiting, size = [first], first.ByteSize()
    while len(waiting) < MOST_IN_A_PACK and size < LARGEST_PACK_BYTES and (following := outbox.take()) is not None:
        waiting.append(following)
        size += following.ByteSize()
    return first if len(waiting) == 1 else type(first)(more=waiting)


def _led_by(message: Any) -> str | None:
    """Where a standby sends us; None from anybody else."""
    if not hasattr(message, "not_leader") or not message.HasField("not_leader"):
        return None
    return str(message.not_leader.address)


def _unpacked(message: Any) -> Any:
    return getattr(message, "more", None) or (message,)


async def converse(
    context: Any, requests: AsyncIterator[Up], outbox: Outbox[Down], receive: Callable[[Up], None]
) -> None:
    """The server's end of a bidirectional stream: read until the peer leaves, write what `outbox` holds meanwhile.

    Use it in a handler that is a plain coroutine. An error of `receive` ends the stream with the error's status.
    """
    await context.send_initial_metadata(())  # the client counts itself connected from here
    writer = asyncio.create_task(_write_all(outbox, context.write), name="stream: write")
    try:
        async for message in requests:
            for one in _unpacked(message):
                receive(one)
    except MotetError as error:
        await context.abort(error.row.grpc, error.message)
    finally:
        writer.cancel()
        await asyncio.gather(writer, return_exceptions=True)


class Sessions(Generic[Message]):
    """Who is connected to a server, by name. What is sent to somebody who is not is dropped: its next hello asks again.

    A peer that connects again takes its old session's place.
    """

    def __init__(self) -> None:
        self._outboxes: dict[str, Outbox[Message]] = {}

    def open(self, name: str, outbox: Outbox[Message]) -> None:
        self._outboxes[name] = outbox

    def close(self, name: str, outbox: Outbox[Message]) -> bool:
        """False when the peer has connected again meanwhile: then nothing has ended."""
        if self._outboxes.get(name) is not outbox:
            return False
        del self._outboxes[name]
        return True

    def send(self, name: str, message: Message) -> None:
        outbox = self._outboxes.get(name)
        if outbox is not None:
            outbox.put(message)

    def broadcast(self, message: Message) -> None:
        for outbox in self._outboxes.values():
            outbox.put(message)


class AddServicer(Protocol):
    def __call__(self, server: grpc.aio.Server) -> None: ...


class Server:
    """What `serving` yields: lets a service say that it is ready, or no longer."""

    def __init__(self, health_servicer: health.aio.HealthServicer, port: int, process: Health) -> None:
        self._health = health_servicer
        self._process = process
        self.port = port
        """The TCP port, for an address that ended in `:0`."""

    async def set_ready(self, ready: bool, why: str = "") -> None:
        """Over gRPC, and for the process as a whole."""
        self._process.set_ready(ready, why)
        status = health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING
        await self._health.set("", status)


@asynccontextmanager
async def serving(
    address: str,
    *add: AddServicer,
    names: Iterable[str] = (),
    ready: bool = True,
    grace: float = 0.5,
    process: Health | None = None,
) -> AsyncIterator[Server]:
    """A gRPC server on `unix:/path` or `host:port`, with health and reflection beside the services that `add` adds.

    `process` hears what the health service says.
    """
    server = grpc.aio.server(options=_SERVER_OPTIONS)
    for add_servicer in add:
        add_servicer(server)
    health_servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    reflection.enable_server_reflection([*names, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
    path = socket_path(address)
    if path is not None:
        path.unlink(missing_ok=True)
    identity = tls.current()
    try:
        if identity is None or path is not None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, identity.server_credentials())
    except RuntimeError as error:
        raise SetupError(
            f"cannot listen on {address}: it is in use, or its folder cannot be written. Stop the other process, or "
            "choose another address."
        ) from error
    await server.start()
    handle = Server(health_servicer, port, process or Health())
    await handle.set_ready(ready, "" if ready else "starting")
    try:
        yield handle
    finally:
        await handle.set_ready(False, "stopping")
        await server.stop(grace)
        if path is not None:
            path.unlink(missing_ok=True)


def socket_path(address: str) -> Path | None:
    """The file behind a `unix:` address; None for TCP."""
    return Path(address.removeprefix("unix:")) if address.startswith("unix:") else None


async def is_healthy(address: str, role: str = "", *, seconds: float = 1.0) -> bool:
    """Ask the health service. Anything but a clear yes in time is a no."""
    try:
        async with asyncio.timeout(seconds), open_channel(address, role) as channel:
            answer = await health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=seconds, wait_for_ready=False
            )
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
    except (grpc.aio.AioRpcError, TimeoutError, SetupError):
        return False
