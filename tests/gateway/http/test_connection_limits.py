"""How many connections a gateway takes."""

import asyncio
import resource
from contextlib import AsyncExitStack
from functools import partial

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.errors import Overloaded
from motet_gateway import server
from motet_gateway.http.connection_limit import ConnectionLimit
from motet_gateway.server import OTHER_FILES, room_for
from testbed.fake_services import FakeServices
from tests.common.waiting import PATIENCE_S
from tests.gateway.conftest import eventually, serve
from tests.gateway.http.test_pipelines import GET, STREAM
from tests.gateway.test_connections import RawClient, raw_client

REFUSED = "motet_refused_connections_total"


async def test_a_connection_above_the_maximum_is_refused_and_those_before_it_stay(cluster: FakeServices) -> None:
    async with serve(cluster, max_connections=20) as served, AsyncExitStack() as stack:
        opened = [await stack.enter_async_context(raw_client(served)) for _ in range(20)]
        await eventually(lambda: served.registry.get_sample_value("motet_client_connections") == 20)
        async with raw_client(served) as client:
            answer = await client.rest()
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"overloaded" in answer
        assert b"retry-after: 1\r\n" in answer
        async with httpx2.AsyncClient(base_url=served.url, verify=False) as client:
            assert (await client.get("/version")).status_code == 503
        assert served.registry.get_sample_value(REFUSED, {"limit": "all"}) == 2
        for one in opened:
            await one.send(GET)
            assert (await one.answer()).startswith(b"HTTP/1.1 200 ")
        opened[0].writer.close()
        await eventually(lambda: served.registry.get_sample_value("motet_client_connections") == 19)
        async with raw_client(served) as client:
            await client.send(GET)
            assert (await client.answer()).startswith(b"HTTP/1.1 200 ")


async def test_an_address_above_its_share_is_refused(cluster: FakeServices) -> None:
    async with serve(cluster, max_connections_per_address=2) as served, raw_client(served), raw_client(served):
        async with raw_client(served) as client:
            answer = await client.rest()
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"Your address has 2 open connections" in answer
        assert served.registry.get_sample_value(REFUSED, {"limit": "address"}) == 1
        port = int(served.url.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=("127.0.0.2", 0))
        writer.write(GET)
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
        writer.close()


@pytest.fixture
def little_may_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "ConnectionLimit", partial(ConnectionLimit, most_waiting_bytes=40_000))


async def test_parts_of_heads_are_bounded_in_all_connections_together(
    little_may_wait: None, cluster: FakeServices
) -> None:
    part = b"GET /version HTTP/1.1\r\nhost: localhost\r\nx: " + b"a" * 15_000
    async with serve(cluster) as served, raw_client(served) as one, raw_client(served) as two:
        await one.send(part)
        await two.send(part)
        async with raw_client(served) as three:
            await three.send(part)
            assert (await three.rest()).startswith(b"HTTP/1.1 503 ")
        assert served.registry.get_sample_value(REFUSED, {"limit": "bytes"}) == 1
        assert (await served.http.get("/version")).status_code == 200, "whole heads do not wait"
        await one.send(b"\r\n\r\n")
        assert (await one.answer()).startswith(b"HTTP/1.1 200 ")
        async with raw_client(served) as three:
            await three.send(part, b"\r\n\r\n")
            assert (await three.answer()).startswith(b"HTTP/1.1 200 ")


async def test_pipelined_requests_are_bounded_in_all_connections_together(
    little_may_wait: None, cluster: FakeServices
) -> None:
    behind = (b"GET /version HTTP/1.1\r\nhost: localhost\r\nx: " + b"a" * 15_000 + b"\r\n\r\n") * 2
    async with serve(cluster) as served, raw_client(served) as one, raw_client(served) as two:
        await one.send(STREAM, behind)
        await one.answer()
        await two.send(STREAM, behind)
        refused, waited = (await two.rest()).split(b"HTTP/1.1 "), await statuses_of(one, 2)
    assert [answer[:3] for answer in refused[1:]] == [b"200", b"503"], "the answer that has begun is whole"
    assert b"data: [DONE]" in refused[1]
    assert waited == [b"200", b"200"], "the others are served"
    assert served.registry.get_sample_value(REFUSED, {"limit": "bytes"}) == 1


async def statuses_of(client: RawClient, count: int) -> list[bytes]:
    """Of the next answers on a connection that stays open."""
    read = b""
    while read.count(b"HTTP/1.1 ") < count:
        read += await asyncio.wait_for(client.reader.read(65536), PATIENCE_S)
    return [part[:3] for part in read.split(b"HTTP/1.1 ")[1:]]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans())))
def test_what_enters_and_leaves_is_counted(events: list[tuple[str, bool]]) -> None:
    limit, inside = ConnectionLimit(4, most_per_address=2), []
    for address, enters in events:
        if enters:
            fits = len(inside) < 4 and inside.count(address) < 2
            if fits:
                limit.enter(address)
                inside.append(address)
            else:
                with pytest.raises(Overloaded):
                    limit.enter(address)
        elif address in inside:
            limit.leave(address)
            inside.remove(address)
        assert limit.open == len(inside)


def test_a_process_may_open_as_many_files_as_its_connections_need() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (OTHER_FILES + 300, hard))
        assert room_for(200) == 200
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (OTHER_FILES + 300, hard)
        assert room_for(400) == 400
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (OTHER_FILES + 400, hard)
        if hard != resource.RLIM_INFINITY:
            assert room_for(hard) == hard - OTHER_FILES
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
