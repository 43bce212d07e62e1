"""Clients that stop reading, or that send no more, on both event loops: the loops end a connection differently."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
import uvloop
from prometheus_client import CollectorRegistry
from starlette.types import Receive, Scope, Send

from motet.clock import monotonic
from motet_gateway.http.connection import HttpConnection
from motet_gateway.metrics import Metrics
from motet_gateway.server import HttpServer, listening
from motet_gateway.settings import Settings
from tests.common.waiting import PATIENCE_S
from tests.gateway.conftest import eventually

CLOSE = b"connection: close\r\n"
SMALL_BUFFER = 4096


def get(path: str, header: bytes = b"") -> bytes:
    return b"GET " + path.encode() + b" HTTP/1.1\r\nhost: localhost\r\n" + header + b"\r\n"


@dataclass
class App:
    """`/bytes?N` is N bytes, `/slow` its own body after a while, `/stream` a few bytes now and then, without an end."""

    begun: int = 0
    streams: int = 0
    """Those whose clients have not left."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.begun += 1
        if scope["path"] == "/stream":
            await self._stream(receive, send)
        elif scope["path"] == "/slow":
            message = await receive()
            await asyncio.sleep(0.2)
            await _answer(message["body"], send)
        else:
            await _answer(b"x" * int(scope["query_string"]), send)

    async def _stream(self, receive: Receive, send: Send) -> None:
        self.streams += 1
        left = asyncio.create_task(_end_of(receive))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while not left.done():
            await send({"type": "http.response.body", "body": b"token", "more_body": True})
            await asyncio.sleep(0.02)
        self.streams -= 1


async def _answer(body: bytes, send: Send) -> None:
    headers = [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _end_of(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


@dataclass
class Client:
    """It reads only when the test does, and the buffers between it and the server are small."""

    app: App
    socket: socket.socket
    server: HttpServer

    @property
    def connection(self) -> HttpConnection | None:
        return next(iter(self.server.server_state.connections), None)  # type: ignore[arg-type, return-value]

    @property
    def unsent(self) -> int:
        return self.connection.transport.get_write_buffer_size() if self.connection is not None else 0

    async def send(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.socket, data)

    async def read(self, size: int) -> bytes:
        return await asyncio.wait_for(asyncio.get_running_loop().sock_recv(self.socket, size), PATIENCE_S)

    async def rest(self) -> bytes:
        read = b""
        while piece := await self.read(1 << 16):
            read += piece
        return read


@asynccontextmanager
async def client_of(app: App) -> AsyncIterator[Client]:
    settings = Settings(port=0, unread_seconds=0.3)
    server = HttpServer(app, settings, Metrics(CollectorRegistry(), clock=monotonic), grace=1)
    with listening(settings) as bound, socket.socket() as own:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL_BUFFER)
        own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER)
        own.setblocking(False)
        running = asyncio.create_task(server.serve(sockets=[bound]))
        await eventually(lambda: server.started)
        await asyncio.get_running_loop().sock_connect(own, bound.getsockname())
        await eventually(lambda: server.server_state.connections)
        try:
            yield Client(app, own, server)
        finally:
            own.close()
            server.should_exit = True
            await running


OnLoop = Callable[[Callable[[Client], Awaitable[None]]], None]


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def on_loop(request: pytest.FixtureRequest) -> OnLoop:
    async def run(test: Callable[[Client], Awaitable[None]]) -> None:
        async with client_of(App()) as client:
            await test(client)

    def start(test: Callable[[Client], Awaitable[None]]) -> None:
        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(run(test))

    return start


def test_a_client_that_sends_no_more_while_bytes_wait_is_noticed(on_loop: OnLoop) -> None:
    async def test(client: Client) -> None:
        await client.send(get("/bytes?40000") + get("/stream"))
        await eventually(lambda: client.app.streams and client.unsent)
        client.socket.shutdown(socket.SHUT_WR)
        await eventually(lambda: not client.app.streams)
        await eventually(lambda: client.connection is None)

    on_loop(test)


def test_a_client_that_sends_no_more_gets_the_answers_that_it_waits_for(on_loop: OnLoop) -> None:
    async def test(client: Client) -> None:
        post = get("/slow", b"content-length: 5\r\n").replace(b"GET", b"POST") + b"right"
        await client.send(get("/bytes?40000") + post + post)
        await eventually(lambda: client.app.begun == 2)
        client.socket.shutdown(socket.SHUT_WR)
        answers = await client.rest()
        assert answers.count(b"HTTP/1.1 200 ") == 3
        assert answers.count(b"\r\n\r\nright") == 2
        assert b"x" * 40000 in answers
        assert b"connection: close" in answers.rpartition(b"HTTP/1.1")[2]

    on_loop(test)


@pytest.mark.parametrize(
    "sent", [b"", b"GET / HT", get("/slow", b"content-length: 5\r\n")], ids=["none", "head", "body"]
)
def test_a_client_that_sends_no_more_gets_no_answer_to_a_part_of_a_request(on_loop: OnLoop, sent: bytes) -> None:
    async def test(client: Client) -> None:
        await client.send(get("/bytes?40000") + sent)
        await eventually(lambda: client.unsent)
        client.socket.shutdown(socket.SHUT_WR)
        answers = await client.rest()
        assert answers.count(b"HTTP/1.1 ") == 1
        assert answers.endswith(b"x" * 40000)

    on_loop(test)


@pytest.mark.parametrize("last", [300_000, 14_000])
def test_a_client_that_stops_reading_while_its_connection_closes_is_cut_off(on_loop: OnLoop, last: int) -> None:
    async def test(client: Client) -> None:
        await client.send(get("/bytes?70000") + get(f"/bytes?{last}", CLOSE))
        await eventually(lambda: client.unsent > SMALL_BUFFER)
        while not (client.app.begun == 2 and 0 < client.unsent <= 16 * 1024):
            assert await client.read(1024)
        await eventually(lambda: client.connection is None, seconds=5)

    on_loop(test)


def test_a_client_that_reads_slowly_while_its_connection_closes_gets_all(on_loop: OnLoop) -> None:
    async def test(client: Client) -> None:
        await client.send(get("/bytes?300000", CLOSE))
        read = b""
        while piece := await client.read(16 * 1024):
            read += piece
            await asyncio.sleep(0.03)
        assert read.endswith(b"\r\n\r\n" + b"x" * 300_000)

    on_loop(test)
