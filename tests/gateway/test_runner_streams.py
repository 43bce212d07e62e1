"""What waits for a runner's stream, and what the end of a stream loses."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from motet.api.v1 import runner_pb2
from motet.rpc.outbox import MAX_OUTBOX_BYTES
from motet.rpc.packing import unpacked
from motet.transport import Network, ServerStream
from motet.transport.methods import GENERATE
from motet_gateway.generation import RunnerPlacement
from motet_gateway.runner_streams import RunnerStreams
from tests.contract.networks import simulated

PLACEMENT = RunnerPlacement(1, "r0", "1", "server:1", 1)


class Streams:
    """A gateway's streams to a runner that notes what is submitted."""

    def __init__(self, network: Network) -> None:
        self.submitted: list[str] = []
        self.lost: list[str] = []
        self.unreachable: list[str] = []
        self.of_gateway = RunnerStreams(
            "g",
            network=network,
            on_message=lambda *_: None,
            on_stream_lost=lambda address, _: self.lost.append(address),
            on_unreachable=lambda _placement, request, _why: self.unreachable.append(request),
            connect_seconds=30.0,
        )

    def submit(self, request: str, size: int = 0) -> None:
        self.of_gateway.submit(PLACEMENT, runner_pb2.Submit(request=request, epoch=1, cache_salt="x" * size))

    async def runner(self, stream: ServerStream[Any, runner_pb2.GenerateUp]) -> None:
        def receive(packed: runner_pb2.GenerateUp) -> None:
            self.submitted += [up.submit.request for up in unpacked(packed) if up.HasField("submit")]

        await stream.send(runner_pb2.GenerateDown(welcome=runner_pb2.GenerateWelcome()).SerializeToString())
        await stream.receive_all(receive)


@asynccontextmanager
async def connected(client: Network, server: Network) -> AsyncIterator[Streams]:
    streams = Streams(client)
    async with server.serving(PLACEMENT.address, {GENERATE: streams.runner}, grace=0):
        streams.of_gateway.set_addresses([PLACEMENT.address])
        await asyncio.sleep(1.0)
        streams.submit("first")
        await asyncio.sleep(1.0)
        assert streams.submitted == ["first"]
        yield streams
        await streams.of_gateway.close()


def test_what_was_lost_with_a_full_stream_is_not_submitted_by_the_next_one() -> None:
    """Mutation: it waits for the next stream, though the scheduler places it again."""
    simulated(_more_than_a_stream_takes)


async def _more_than_a_stream_takes(client: Network, server: Network, _: str) -> None:
    async with connected(client, server) as streams:
        streams.submit("large", MAX_OUTBOX_BYTES)
        streams.submit("behind it")
        await asyncio.sleep(5.0)
        assert streams.lost == [PLACEMENT.address]
        streams.submit("next")
        await asyncio.sleep(1.0)
        assert (streams.submitted, streams.unreachable) == (["first", "next"], [])


def test_the_end_of_a_replaced_stream_loses_nothing_of_the_new_one() -> None:
    """A runner leaves the catalog and comes back. Mutation: whatever stream ends, all that is placed there is lost."""
    simulated(_a_stream_is_replaced)


async def _a_stream_is_replaced(client: Network, server: Network, _: str) -> None:
    async with connected(client, server) as streams:
        streams.of_gateway.set_addresses([])
        streams.of_gateway.set_addresses([PLACEMENT.address])
        streams.submit("on the new one")
        await asyncio.sleep(1.0)
        assert (streams.submitted, streams.lost) == (["first", "on the new one"], [])
