"""What a gateway that stops does with requests that have not begun."""

import asyncio

import orjson

from testbed.fake_services import FakeServices
from tests.gateway.conftest import eventually, serve
from tests.gateway.test_connections import BODY, HEAD, raw_client, with_length

STREAM = with_length(BODY.replace(b'"max_tokens":4', b'"max_tokens":30,"ignore_eos":true,"stream":true'))


async def test_a_request_whose_body_arrives_after_the_drain_is_refused(cluster: FakeServices) -> None:
    async with serve(cluster, drain_seconds=0.1) as served, raw_client(served) as client:
        await client.send(HEAD + b"content-length: %d\r\n\r\n" % len(BODY) + BODY[:10])
        await eventually(lambda: served.gateway.bodies.held)
        await served.gateway.drain()
        await client.send(BODY[10:])
        head = await client.answer()
        assert head.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 1\r\n" in head
        assert orjson.loads(await client.reader.readuntil(b"}}"))["error"]["code"] == "engine_restarted"
    assert not cluster.runners[0].submits


async def test_a_request_behind_a_stream_that_the_drain_ends_is_refused(cluster: FakeServices) -> None:
    cluster.runners[0].step_seconds = 0.1
    async with serve(cluster, drain_seconds=0.1) as served, raw_client(served) as client:
        await client.send(STREAM + STREAM)
        assert (await client.answer()).startswith(b"HTTP/1.1 200 ")
        await served.gateway.drain()
        async with asyncio.timeout(20):
            stream = await client.reader.readuntil(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert b"engine_restarted" in stream
        assert (await client.answer()).startswith(b"HTTP/1.1 503 ")
