"""A stream beside a hostile client keeps its pace: no single turn of the gateway's event loop takes long."""

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from testbed.fake_services import FakeServices
from tests.gateway.conftest import Served, serve
from tests.gateway.hostile.clients import CLIENTS, Target
from tests.gateway.test_streams import ReceivedStream, expected, long_request, read
from tests.support.garbage import uncollected

MAX_TURN_SECONDS = 0.15
"""CPU time. The defects that these clients aim at took seconds."""
TOKENS = 60


@asynccontextmanager
async def longest_turn() -> AsyncIterator[list[float]]:
    """The longest CPU time between two looks of a task that looks in each turn of the loop. The clients' own work is in
    it, too, as they share the loop."""
    longest = [0.0]

    async def look() -> None:
        before = time.thread_time()
        while True:
            await asyncio.sleep(0)
            now = time.thread_time()
            longest[0] = max(longest[0], now - before)
            before = now

    with uncollected():
        task = asyncio.create_task(look())
        try:
            yield longest
        finally:
            task.cancel()


async def stream_beside(served: Served, client: str) -> float:
    result = ReceivedStream()
    target = Target(int(served.url.rpartition(":")[2]))
    async with longest_turn() as longest:
        attack = asyncio.create_task(CLIENTS[client](target, random.Random(1)))
        await read(served, long_request(TOKENS), result)
        await attack
    assert result.text == expected(served.cluster, TOKENS)
    return longest[0]


@pytest.mark.parametrize("client", CLIENTS)
async def test_a_stream_keeps_its_pace_beside_a_hostile_client(cluster: FakeServices, client: str) -> None:
    cluster.runners[0].step_seconds = 0.01
    async with serve(cluster) as served:
        await read(served, long_request(2))
        assert await stream_beside(served, client) < MAX_TURN_SECONDS
