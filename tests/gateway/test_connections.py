"""Clients that send too much, too slowly, or do not read: each is limited, and other clients notice nothing."""

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator

import orjson
import pytest

from motet.errors import InvalidRequest
from motet_gateway.http import connection
from motet_gateway.request_bodies import MAX_CONTAINERS, MAX_ELEMENTS, MAX_STRINGS, check_shape
from testbed.fake_services import FakeServices
from tests.common.waiting import PATIENCE_S
from tests.gateway.conftest import Served, eventually, serve
from tests.support.for_each import for_each

BODY = orjson.dumps({"model": "tiny", "prompt": "x", "max_tokens": 4})
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


class RawClient:
    """A client that sends exactly the bytes of the test, and reads only when the test does."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, *pieces: bytes) -> None:
        for piece in pieces:
            self.writer.write(piece)
            await self.writer.drain()

    async def answer(self) -> bytes:
        async with asyncio.timeout(PATIENCE_S):
            return await self.reader.readuntil(b"\r\n\r\n")

    async def rest(self) -> bytes:
        async with asyncio.timeout(PATIENCE_S):
            with contextlib.suppress(ConnectionError):
                return await self.reader.read()
        return b""


@contextlib.asynccontextmanager
async def raw_client(served: Served) -> AsyncIterator[RawClient]:
    port = int(served.url.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield RawClient(reader, writer)
    finally:
        writer.close()


def with_length(body: bytes) -> bytes:
    return HEAD + b"content-length: %d\r\n\r\n" % len(body) + body


# ------------------------------------------------------------------------------------------------------------ headers


@for_each(
    "head",
    [
        b"GET /" + b"a" * 100_000,
        b"GET / HTTP/1.1\r\n" + b"x: " + b"a" * 100_000,
        b"GET / HTTP/1.1\r\n" + b"a" * 100_000,
        b"GET / HTTP/1.1\r\n" + b"".join(b"x-%d: %s\r\n" % (i, b"a" * 900) for i in range(100)),
        b"GET / HTTP/1.1\r\n" + b"".join(b"x-%d: a\r\n" % i for i in range(200)),
        HEAD + b"transfer-encoding: chunked\r\n\r\n5;" + b"a" * 600_000,
        HEAD + b"transfer-encoding: chunked\r\n\r\n0\r\n" + b"x: " + b"a" * 600_000,
    ],
)
@for_each("piece", [1 << 20, 1000])
async def test_headers_without_end_are_cut_off(served: Served, head: bytes, piece: int) -> None:
    async with raw_client(served) as client:
        with contextlib.suppress(ConnectionError):
            await client.send(*(head[at : at + piece] for at in range(0, len(head), piece)))
        answer = await client.rest()
        if answer.startswith(b"HTTP/1.1 "):  # the connection may have been closed before it was read
            assert answer.split()[1] in (b"431", b"400")
    assert (await served.http.get("/version")).status_code == 200


async def test_too_large_headers_are_a_431_with_a_reason(served: Served) -> None:
    async with raw_client(served) as client:
        await client.send(b"GET /version HTTP/1.1\r\nhost: localhost\r\nx: " + b"a" * 40_000 + b"\r\n\r\n")
        answer = await client.rest()
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert b"headers_too_large" in answer


async def test_usual_headers_and_large_bodies_in_pieces_pass(served: Served) -> None:
    body = orjson.dumps({"model": "tiny", "prompt": "x", "max_tokens": 4, "user": "u" * 300_000})
    pieces = [body[at : at + 1000] for at in range(0, len(body), 1000)]
    cookie = b"cookie: " + b"c" * 8000 + b"\r\n"
    async with raw_client(served) as client:
        for _ in range(2):
            await client.send(HEAD + cookie + b"transfer-encoding: chunked\r\n\r\n")
            await client.send(*(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces), b"0\r\n\r\n")
            assert (await client.answer()).startswith(b"HTTP/1.1 200 ")
            await asyncio.wait_for(client.reader.readuntil(b"]}"), PATIENCE_S)


async def test_headers_that_never_end_are_given_up(cluster: FakeServices) -> None:
    async with serve(cluster, header_seconds=1) as served:
        async with raw_client(served) as silent, raw_client(served) as slow:
            await slow.send(b"GET / HTTP/1.1\r\nhost: loc")
            assert (await slow.rest()).startswith(b"HTTP/1.1 408 ")
            assert await silent.rest() == b""
        async with raw_client(served) as client:  # also after an answer
            await client.send(with_length(BODY))
            assert (await client.answer()).startswith(b"HTTP/1.1 200 ")
            await asyncio.wait_for(client.reader.readuntil(b"]}"), PATIENCE_S)
            await client.send(b"POST")
            assert (await client.rest()).startswith(b"HTTP/1.1 408 ")


async def test_bytes_after_a_body_do_not_break_an_answer(cluster: FakeServices) -> None:
    cluster.runners[0].step_seconds = 0.1
    body = BODY.replace(b'"max_tokens":4', b'"max_tokens":30,"ignore_eos":true,"stream":true')

    async def ask(behind: bytes) -> None:
        async with raw_client(served) as client, asyncio.timeout(PATIENCE_S):
            await client.send(with_length(body))
            assert (await client.answer()).startswith(b"HTTP/1.1 200 ")
            await client.send(behind)
            assert b"408" not in await client.reader.readuntil(b"[DONE]")

    async with serve(cluster, header_seconds=1) as served:
        await asyncio.gather(
            ask(b"\r\n"), ask(b"POST /v1")
        )  # old clients end a body like this; others send the next request early


# ------------------------------------------------------------------------------------------------------------- bodies


async def test_a_body_that_does_not_arrive_is_given_up(cluster: FakeServices) -> None:
    async with serve(cluster, body_seconds=0.2) as served:
        for path in (b"/v1/completions", b"/tokenize"):
            async with raw_client(served) as client:
                await client.send(HEAD.replace(b"/v1/completions", path) + b"content-length: 100\r\n\r\n{")
                assert (await client.answer()).startswith(b"HTTP/1.1 408 ")
        assert served.gateway.bodies.held == 0


async def test_bodies_together_stay_within_their_budget(cluster: FakeServices) -> None:
    async with serve(cluster, max_bodies_bytes=10_000) as served:
        async with raw_client(served) as client:
            await client.send(HEAD + b"content-length: 9000\r\n\r\n" + b" " * 8000)
            await eventually(lambda: served.gateway.bodies.held == 8000)
            refused = await served.http.post(
                "/v1/completions", json={"model": "tiny", "prompt": "x", "user": "u" * 3000}
            )
            assert refused.status_code == 503
            assert refused.headers["retry-after"]
            assert (await served.http.post("/v1/completions", content=BODY, headers=JSON)).status_code == 200
        await eventually(lambda: served.gateway.bodies.held == 0)


async def test_the_objects_of_a_body_count_for_the_budget(cluster: FakeServices) -> None:
    async with serve(cluster, max_bodies_bytes=100_000) as served:
        body = {"model": "tiny", "prompt": "x", "max_tokens": 1}
        assert (await served.http.post("/v1/completions", json=body | {"user": "u" * 8000})).status_code == 200
        refused = await served.http.post("/v1/completions", json=body | {"metadata": [{}] * 2000})
        assert refused.status_code == 503
        assert served.gateway.bodies.held == 0


JSON = {"content-type": "application/json"}


async def test_a_full_gateway_refuses_before_it_reads_a_body(cluster: FakeServices) -> None:
    async with serve(cluster, max_live_requests=1) as served:
        cluster.runners[0].step_seconds = 3600
        body = BODY.replace(b'"max_tokens":4', b'"max_tokens":40')
        first = asyncio.create_task(served.http.post("/v1/completions", content=body, headers=JSON))
        await eventually(lambda: served.gateway.dispatcher.live)
        for path in (b"/v1/completions", b"/v1/chat/completions", b"/tokenize"):
            async with raw_client(served) as client:
                await client.send(HEAD.replace(b"/v1/completions", path) + b"content-length: 1000000\r\n\r\n")
                assert (await client.answer()).startswith(b"HTTP/1.1 503 ")
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)


@pytest.mark.parametrize("path", [b"/v1/completions", b"/tokenize"])
async def test_an_upload_that_breaks_is_not_logged_as_a_crash(
    served: Served, path: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    async with raw_client(served) as client:
        await client.send(HEAD.replace(b"/v1/completions", path) + b"content-length: 1000\r\n\r\n" + b" " * 500)
        await eventually(lambda: served.gateway.bodies.held == 500)
    await eventually(lambda: served.gateway.bodies.held == 0)
    await served.http.get("/version")
    output = capsys.readouterr()
    assert "crash" not in output.out + output.err
    assert "Traceback" not in output.out + output.err


async def test_a_client_that_does_not_read_is_cut_off_and_its_request_cancelled(cluster: FakeServices) -> None:
    async with serve(cluster, unread_seconds=0.2, max_live_requests=1000) as served:
        async with raw_client(served) as client:
            # Answers to pipelined requests fill every buffer.
            client.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            await eventually(lambda: served.server.server_state.connections)
            for connection in served.server.server_state.connections:
                theirs = connection.transport.get_extra_info("socket")
                theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            request = with_length(BODY.replace(b'"max_tokens":4', b'"max_tokens":400,"ignore_eos":true,"stream":true'))
            sending = asyncio.create_task(client.send(*[request] * 20_000))
            await eventually(lambda: served.gateway.dispatcher.live)
            await eventually(lambda: not served.server.server_state.connections)
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
        await eventually(lambda: not served.gateway.dispatcher.live)
        assert served.gateway.bodies.held == 0


async def test_a_client_that_reads_slowly_gets_all_of_its_answer(cluster: FakeServices) -> None:
    body = orjson.dumps({"model": "tiny", "prompt": "word " * 150_000, "return_token_strs": True})
    async with serve(cluster, unread_seconds=1) as served, raw_client(served) as client:
        client.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * 1024)
        await client.send(with_length(body).replace(b"/v1/completions", b"/tokenize"))
        head = await client.answer()
        length = int(head.lower().partition(b"content-length: ")[2].split()[0])
        got = 0
        while piece := await client.reader.read(256 * 1024):
            got += len(piece)
            if got == length:
                break
            await asyncio.sleep(0.1)
        assert got == length


# ------------------------------------------------------------------------------------------ bodies that are not read


REFUSED = HEAD.replace(b"content-type: application/json", b"content-type: text/plain")
"""The gateway refuses it after its head."""


@pytest.fixture
def left_seconds(monkeypatch: pytest.MonkeyPatch) -> float:
    monkeypatch.setattr(connection, "BODY_LINGER_SECONDS", 0.3)
    return 0.3


@pytest.mark.parametrize("framing", [b"content-length: 1000000", b"transfer-encoding: chunked"])
@pytest.mark.parametrize("expect", [b"", b"expect: 100-continue\r\n"])
async def test_the_gateway_does_not_wait_for_the_rest_of_a_refused_body(
    served: Served, left_seconds: float, framing: bytes, expect: bytes
) -> None:
    async with raw_client(served) as client, asyncio.timeout(PATIENCE_S):
        await client.send(REFUSED + expect + framing + b"\r\n\r\n")
        assert (await client.answer()).startswith(b"HTTP/1.1 415 ")
        with contextlib.suppress(ConnectionError):
            while served.server.server_state.connections:  # a byte now and then
                await client.send(b"1\r\n \r\n")
                await asyncio.sleep(left_seconds / 10)


async def test_a_client_that_may_leave_its_body_out_is_told_that_the_connection_closes(served: Served) -> None:
    """Its next request would be taken for the body."""
    waits = REFUSED + b"expect: 100-continue\r\ncontent-length: 500\r\n\r\n"
    for body, closes in ((b"", True), (b"{", False)):
        async with raw_client(served) as client:
            await client.send(waits + body)
            answer = await client.answer()
            assert answer.startswith(b"HTTP/1.1 415 ")
            assert (b"connection: close\r\n" in answer) is closes


async def test_a_refused_body_is_read_only_up_to_a_limit(served: Served, left_seconds: float) -> None:
    async with raw_client(served) as client, asyncio.timeout(PATIENCE_S):
        await client.send(REFUSED + b"content-length: 1000000000\r\n\r\n")
        assert (await client.answer()).startswith(b"HTTP/1.1 415 ")
        sent, piece = 0, bytes(64 * 1024)
        with contextlib.suppress(ConnectionError):
            while True:
                await client.send(piece)
                sent += len(piece)
        assert sent < 64 * 1024 * 1024  # what the buffers between them hold
        await eventually(lambda: not served.server.server_state.connections)


async def test_after_the_rest_of_a_refused_body_a_connection_is_idle_like_others(
    cluster: FakeServices, left_seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    idle = 3 * left_seconds
    monkeypatch.setattr("motet_gateway.server.KEEP_ALIVE_SECONDS", idle)
    cluster.runners[0].step_seconds = idle / 10
    body = BODY.replace(b'"max_tokens":4', b'"max_tokens":20,"ignore_eos":true')

    async def refused(client: RawClient) -> None:
        await client.send(REFUSED + b"content-length: 10\r\n\r\n12345")
        assert (await client.answer()).startswith(b"HTTP/1.1 415 ")
        await client.reader.readuntil(b"}}")

    async with serve(cluster) as served, raw_client(served) as client, asyncio.timeout(PATIENCE_S):
        await refused(client)
        await client.send(b"67890")
        await asyncio.sleep(2 * left_seconds)
        await refused(client)
        await client.send(b"67890" + with_length(body))  # its answer takes longer than a connection may be idle
        assert (await client.answer()).startswith(b"HTTP/1.1 200 ")
        await client.reader.readuntil(b"]}")
        await refused(client)
        await client.send(b"67890")
        began = time.monotonic()
        assert await client.rest() == b""
        assert time.monotonic() - began > 2 * left_seconds


async def test_an_upload_is_read_after_its_answer_has_begun(served: Served, left_seconds: float) -> None:
    """Only a complete answer leaves a body unread."""
    async with raw_client(served) as client, asyncio.timeout(PATIENCE_S):
        await client.send(HEAD + b"content-length: %d\r\n\r\n" % len(BODY) + BODY[:5])
        await asyncio.sleep(2 * left_seconds)
        await client.send(BODY[5:])
        assert (await client.answer()).startswith(b"HTTP/1.1 200 ")


# -------------------------------------------------------------------------------------------------------------- shape


def test_a_body_that_takes_long_to_parse_is_refused_before_that() -> None:
    for body, what in (
        (b"[" + b"[]," * (MAX_CONTAINERS + 1) + b"1]", "lists"),
        (b"[" + b"{}," * (MAX_CONTAINERS + 1) + b"1]", "lists"),
        (b"[" + b'"",' * (MAX_STRINGS + 1) + b"1]", "strings"),
        (b"[" + b'"\\\\",' * (MAX_STRINGS + 1) + b"1]", "strings"),
        (b"[" + b"1," * (MAX_ELEMENTS + 1) + b"1]", "elements"),
        (b'["\\\\",' + b"[]," * (MAX_CONTAINERS + 1) + b'"\\""]', "lists"),
        (b"[" + b"[]," * (MAX_CONTAINERS + 1) + b'"never closed', "lists"),
    ):
        with pytest.raises(InvalidRequest, match=what):
            check_shape(body)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"model": "m", "logit_bias": {str(token): 1 for token in range(200_000)}, "stop": "a"}, "logit_bias"),
        ({"model": "m", "prompt": "a: [", "stop": ["logit_bias"] * 200_000}, "stop"),
        ({"messages": [{"role": "x", "content": "n"}] * 60_000, "temperature": 1}, "messages"),
        ({"m' <b>": ["a"] * 200_000}, None),
        (["prompt"] * 200_000, None),
    ],
)
def test_the_field_with_too_many_strings_is_named(body: object, field: str | None) -> None:
    with pytest.raises(InvalidRequest, match="strings") as refused:
        check_shape(orjson.dumps(body))
    assert refused.value.param == field


def test_text_may_hold_any_number_of_commas_braces_and_quotes() -> None:
    for text in ("a," * (MAX_ELEMENTS + 1), '{"":[]},' * MAX_CONTAINERS, "\\" * 500_000, '"' * 300_000, "\\'\"" * 99):
        check_shape(orjson.dumps({"prompt": text}))


def test_checking_the_shape_of_a_body_takes_linear_time() -> None:
    def seconds(size: int) -> float:
        body = b"[" + b"[]," * (MAX_CONTAINERS + 1) + b'"' + b'\\"' * size
        began = time.process_time()
        with pytest.raises(InvalidRequest):
            check_shape(body)
        return time.process_time() - began

    assert seconds(1_000_000) < 20 * seconds(100_000) + 0.2
