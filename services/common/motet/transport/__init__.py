"""How two processes talk: calls and streams of messages. Who uses it does not know what carries them.

`motet.transport.over_grpc` carries them between processes. A simulation brings another `Network`, which runs in virtual
time and loses what gRPC over TCP may lose. Both pass the tests in `tests/contract/test_networks.py`.

All methods are in `motet.transport.methods`. A stream keeps the order of its messages. It ends once, with a status of
gRPC, for both sides; which messages the other side has read before that, nobody knows.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from random import Random
from typing import Any, Generic, Protocol, TypeVar

from grpc import StatusCode

from motet.errors import MotetError
from motet.health import Health

__all__ = [
    "FIRST_RETRY_SECONDS",
    "HANDLER_END_SECONDS",
    "LAST_RETRY_SECONDS",
    "CallFailed",
    "Channel",
    "ClientStream",
    "DownloadMethod",
    "Handlers",
    "Method",
    "Network",
    "Server",
    "ServerStream",
    "StatusCode",
    "StreamMethod",
    "UnaryMethod",
    "spread",
    "status_of",
]

FIRST_RETRY_SECONDS = 0.05
LAST_RETRY_SECONDS = 0.5
"""How long to wait before connecting again: at first, and at most."""

HANDLER_END_SECONDS = 1.0
"""How long a stopping server waits for cancelled handlers. They need milliseconds, unless one hangs."""

Up = TypeVar("Up")
Down = TypeVar("Down")
Sent_contra = TypeVar("Sent_contra", contravariant=True)
Read_co = TypeVar("Read_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Method(Generic[Up, Down]):
    path: str
    """`/package.Service/Method`"""
    up: type[Up]
    """What the client sends: a kind of protobuf message, or bytes."""
    down: type[Down]
    """What the server sends."""

    @property
    def service(self) -> str:
        return self.path.split("/")[1]

    @property
    def name(self) -> str:
        return self.path.split("/")[2]


@dataclass(frozen=True, slots=True)
class UnaryMethod(Method[Up, Down]):
    """One request, one answer."""


@dataclass(frozen=True, slots=True)
class DownloadMethod(Method[Up, Down]):
    """One request, a sequence of answers."""


@dataclass(frozen=True, slots=True)
class StreamMethod(Method[Up, Down]):
    """Both sides send messages when they want to."""

    encoded: bool = False
    """Whether the server sends messages that are encoded already."""


class CallFailed(Exception):
    """A call or a stream ended with this status: the peer said so, or the connection broke."""

    def __init__(self, code: StatusCode, details: str) -> None:
        super().__init__(f"{code.name}: {details}")
        self.code = code
        self.details = details


def status_of(error: MotetError) -> tuple[StatusCode, str]:
    """How a call ends whose handler raises it."""
    return error.mapping.grpc, error.message


def spread(random: Random, seconds: float) -> float:
    """What `Network.spread` returns."""
    return seconds * random.uniform(0.75, 1.25)


class ClientStream(Protocol[Sent_contra, Read_co]):
    """The client's side of one stream."""

    async def connected(self) -> None:
        """Wait until the server has accepted the stream. Raises CallFailed."""

    async def send_all(self, take: Callable[[], Awaitable[Sent_contra]]) -> None:
        """Send each message that `take` returns, until one cannot be sent: the stream has ended. Does not raise its
        status."""

    async def receive_all(self, receive: Callable[[Read_co], None]) -> None:
        """Give each message to `receive`, until the server ends the stream. Raises CallFailed if its status is an
        error, CancelledError after `cancel`, and what `receive` raises."""

    def cancel(self) -> None:
        """End the stream from this side, at once. Messages that were not sent yet are lost."""


class ServerStream(Protocol[Sent_contra, Read_co]):
    """The server's side of one stream. The stream ends when its handler ends, or with `end`.

    The handler is cancelled when the client has ended the stream, or is lost.
    """

    async def accept(self) -> None:
        """Tell the client that it is connected. Without it, the first message does."""

    async def send(self, message: Sent_contra) -> None:
        """Send one message."""

    async def send_all(self, take: Callable[[], Awaitable[Sent_contra]]) -> None:
        """As on the client's side."""

    async def receive_all(self, receive: Callable[[Read_co], None]) -> None:
        """Give each message to `receive`, until the client sends no more. Raises what `receive` raises."""

    async def end(self, code: StatusCode, details: str) -> None:
        """End the stream with a status, if it has none yet. Raises an error that the handler must not catch."""


class Channel(Protocol):
    """A connection to one address. It connects again by itself."""

    def stream(self, method: StreamMethod[Up, Down]) -> ClientStream[Up, Down]: ...

    async def call(self, method: UnaryMethod[Up, Down], request: Up, *, seconds: float) -> Down:
        """Raises CallFailed, also if no answer comes within `seconds`."""

    def download(self, method: DownloadMethod[Up, Down], request: Up) -> AsyncGenerator[Down, None]:
        """Raises CallFailed. Close the iterator (`contextlib.aclosing`): that ends the call."""


Handlers = Mapping[Method[Any, Any], Callable[..., Any]]
"""What answers each method of a server: for a stream `async def (ServerStream)`; for one answer `async def (request)`,
which returns it; for a download an asynchronous generator of the request. A call whose handler raises a MotetError ends
with the status of that error."""


class Server(Protocol):
    """What `serving` yields. With it a service says whether it is ready."""

    async def set_ready(self, ready: bool, why: str = "") -> None: ...


class Network(Protocol):
    """What connects this process with others."""

    def channel(
        self, address: str, role: str = "", *, grace: float | None = None
    ) -> AbstractAsyncContextManager[Channel]:
        """A channel to `unix:/path` or `host:port`. It is closed when the context ends.

        With TLS, the certificate of the peer must have `role`; if `role` is empty, the name in `address`. Calls that
        still run when the channel is closed have `grace` seconds to end. Raises SetupError if this process's own TLS
        certificate is not valid.
        """

    def serving(
        self,
        address: str,
        handlers: Handlers,
        *,
        ready: bool = True,
        grace: float = 0.5,
        process: Health | None = None,
    ) -> AbstractAsyncContextManager[Server]:
        """A server at this address. When the context ends, calls that still run have `grace` seconds to end.

        `process` gets the same readiness as the server.
        """

    async def pause(self, address: str, seconds: float) -> None:
        """Wait before the next attempt to connect: at most `seconds`, less if it is known that a server is there."""

    def spread(self, seconds: float) -> float:
        """A random wait near this one: processes that have lost the same peer must not come back all at once."""

    def explain_failure(self, why: str, role: str) -> str:
        """What this process or its peer must change, if a stream failed for that reason; empty: it is not known."""
