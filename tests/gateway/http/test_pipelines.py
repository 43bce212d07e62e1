"""Requests that are sent before earlier ones are answered, through a real server."""

import asyncio
import contextlib
import time
from contextvars import ContextVar

import orjson
import pytest
from prometheus_client import CollectorRegistry
from starlette.types import Receive, Scope, Send

from motet.clock import monotonic
from motet_gateway.http.connection import MAX_WAITING
from motet_gateway.metrics import Metrics
from motet_gateway.server import HttpServer, listening
from motet_gateway.settings import Settings
from testbed.fake_services import FakeServices
from tests.common.waiting import PATIENCE_S
from tests.gateway.conftest import Served, eventually, serve
from tests.gateway.test_connections import BODY, HEAD, RawClient, raw_client, with_length

GET = b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n"
STREAM = with_length(BODY.replace(b'"max_tokens":4', b'"max_tokens":30,"ignore_eos":true,"stream":true'))


async def statuses(client: RawClient) -> list[int]:
    """Of the answers until the connection ends."""
    return [int(part[:3]) for part in (await client.rest()).split(b"HTTP/1.1 ")[1:]]


async def test_of_a_pipeline_without_end_only_the_first_requests_are_answered(served: Served) -> None:
    async with raw_client(served) as client:
        with contextlib.suppress(ConnectionError):
            await client.send(GET * 5000)
        assert await statuses(client) == [200] * MAX_WAITING


async def test_a_connection_says_that_it_closes_after_a_pipeline_that_is_too_long(served: Served) -> None:
    async with raw_client(served) as client:
        await client.send(GET * (MAX_WAITING + 1))
        *_, last = (await client.rest()).split(b"HTTP/1.1 ")
    assert b"\r\nconnection: close\r\n" in last


async def test_a_pipeline_that_fits_is_answered_and_the_connection_stays(served: Served) -> None:
    async with raw_client(served) as client:
        for _ in range(3):
            await client.send(GET * MAX_WAITING)
            for _ in range(MAX_WAITING):
                assert (await client.answer()).startswith(b"HTTP/1.1 200 ")
                await client.reader.readuntil(b"}")


async def test_a_wrong_request_behind_right_ones_is_answered_after_them(served: Served) -> None:
    for pieces in ((GET + GET + b"nonsense\r\n\r\n",), (GET, GET, b"non", b"sense\r\n\r\n")):
        async with raw_client(served) as client:
            await client.send(*pieces)
            assert await statuses(client) == [200, 200, 400]


async def test_a_wrong_request_behind_a_stream_does_not_break_it(cluster: FakeServices) -> None:
    cluster.runners[0].step_seconds = 0.02
    async with serve(cluster) as served, raw_client(served) as client:
        await client.send(STREAM)
        assert (await client.answer()).startswith(b"HTTP/1.1 200 ")
        await client.send(b"\x00 nonsense\r\n\r\n")
        stream, _, after = (await client.rest()).partition(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert b"HTTP/1.1" not in stream
        assert after.startswith(b"HTTP/1.1 400 ")


async def test_a_body_with_wrong_framing_is_a_400_and_its_request_ends(served: Served) -> None:
    async with raw_client(served) as client:
        await client.send(HEAD + b"transfer-encoding: chunked\r\n\r\n5\r\n{    \r\n", b"nonsense\r\n")
        answer = await client.rest()
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert orjson.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_value"
    await eventually(lambda: served.gateway.bodies.held == 0)


async def test_bodies_behind_an_answer_are_read_only_up_to_a_limit(cluster: FakeServices) -> None:
    """The answer in front takes as long as it likes."""
    cluster.runners[0].step_seconds = 3600
    async with serve(cluster) as served, raw_client(served) as client:
        await client.send(STREAM)
        await eventually(lambda: served.gateway.dispatcher.live)
        sent, piece = 0, bytes(64 * 1024)
        with contextlib.suppress(TimeoutError):
            await client.send(HEAD + b"content-length: 1000000000\r\n\r\n")
            while sent < 100 << 20:
                await asyncio.wait_for(client.send(piece), 1)
                sent += len(piece)
        assert sent < 50 << 20  # what the buffers between them hold
        (connection,) = [one for one in served.server.server_state.connections if len(one.exchanges) == 2]
        assert sum(exchange.unread_bytes for exchange in connection.exchanges) < 1 << 20


@pytest.mark.parametrize("streamed", [False, True])
async def test_clients_that_leave_end_each_request_that_they_sent(cluster: FakeServices, streamed: bool) -> None:
    cluster.runners[0].step_seconds = 3600
    more = b'"max_tokens":40,"stream":' + (b"true" if streamed else b"false")
    async with serve(cluster) as served:
        async with raw_client(served) as client:
            await client.send(with_length(BODY.replace(b'"max_tokens":4', more)) * 3)
            await eventually(lambda: served.gateway.dispatcher.live)
        await eventually(lambda: not served.server.server_state.connections)
        await eventually(lambda: not served.gateway.dispatcher.live)
        async with raw_client(served) as another:  # once it has its answer, those behind it would have begun
            await another.send(GET)
            assert (await another.answer()).startswith(b"HTTP/1.1 200 ")
        assert not served.gateway.dispatcher.live, "those behind it do not begin"


async def test_at_the_servers_end_what_was_sent_is_answered(cluster: FakeServices) -> None:
    cluster.runners[0].step_seconds = 0.01
    async with serve(cluster, drain_seconds=20) as served, raw_client(served) as client:
        await client.send(STREAM + GET)
        await eventually(lambda: served.gateway.dispatcher.live)
        served.server.should_exit = True
        await eventually(lambda: not served.server.servers[0].is_serving())
        await asyncio.sleep(0.2)
        await client.send(GET)  # too late
        answer = await client.rest()
    assert answer.count(b"HTTP/1.1 200 ") == 2
    assert b"[DONE]" in answer
    assert b"connection: close" in answer.rpartition(b"HTTP/1.1 ")[2]


async def test_a_request_inherits_nothing_of_the_one_before_it() -> None:
    bound: ContextVar[str] = ContextVar("bound", default="nothing")

    async def app(_scope: Scope, _receive: Receive, send: Send) -> None:
        found = bound.get().encode()
        bound.set("something")
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"7")]})
        await send({"type": "http.response.body", "body": found})

    settings = Settings(port=0)
    server = HttpServer(app, settings, Metrics(CollectorRegistry(), clock=monotonic), grace=1)
    with listening(settings) as socket:
        running = asyncio.create_task(server.serve(sockets=[socket]))
        await eventually(lambda: server.started)
        reader, writer = await asyncio.open_connection(*socket.getsockname())
        writer.write(GET * 3)
        async with asyncio.timeout(PATIENCE_S):
            for _ in range(3):
                await reader.readuntil(b"\r\n\r\n")
                assert await reader.readexactly(7) == b"nothing"
        writer.close()
        server.should_exit = True
        await running


# -------------------------------------------------------------------------------------------------- old and other forms


async def test_http_1_0_gets_its_body_without_chunks_and_the_connections_end(served: Served) -> None:
    async with raw_client(served) as client:
        await client.send(STREAM.replace(b"HTTP/1.1", b"HTTP/1.0"))
        head, _, body = (await client.rest()).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head
    assert body.startswith(b"data: ")
    assert body.endswith(b"data: [DONE]\n\n")


async def test_a_client_that_waits_for_100_continue_is_asked_for_its_body(served: Served) -> None:
    async with raw_client(served) as client:
        await client.send(HEAD + b"expect: 100-continue\r\ncontent-length: %d\r\n\r\n" % len(BODY))
        assert await client.answer() == b"HTTP/1.1 100 Continue\r\n\r\n"
        await client.send(BODY)
        assert (await client.answer()).startswith(b"HTTP/1.1 200 ")


async def test_head_gets_the_head_alone(served: Served) -> None:
    async with raw_client(served) as client:
        await client.send(GET.replace(b"GET", b"HEAD") + GET.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"))
        first, second = (await client.rest()).split(b"HTTP/1.1 ")[1:]
    assert first.startswith(b"200 ")
    assert first.endswith(b"\r\n\r\n")
    assert b"content-length: " in first
    assert second.endswith(b"}")


@pytest.mark.parametrize("piece", [1, 5, 1000])
@pytest.mark.parametrize("framing", ["length", "chunks"])
async def test_a_request_that_asks_for_an_upgrade_is_served_without_it(
    served: Served, framing: str, piece: int
) -> None:
    body = orjson.dumps({"model": "tiny", "prompt": GET.decode()})
    head = HEAD.replace(b"/v1/completions", b"/tokenize") + b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\n"
    if framing == "length":
        request = head + b"content-length: %d\r\n\r\n" % len(body) + body
    else:
        request = head + b"transfer-encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    async with raw_client(served) as client:
        for _ in range(2):
            for at in range(0, len(request), piece):
                await client.send(request[at : at + piece])
            assert (await client.answer()).startswith(b"HTTP/1.1 200 ")
            assert b'"count"' in await client.reader.readuntil(b"}")
        began = time.monotonic()
        await client.send(GET.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"))
        assert await statuses(client) == [200]
        assert time.monotonic() - began < 5
