"""Peers that send what no honest peer sends: each message fails alone, no number in it counts, others are served."""

import asyncio
import itertools
from contextlib import suppress
from typing import Any

import grpc
import pytest
from google.protobuf.message_factory import GetMessageClass
from structlog.testing import capture_logs

from motet.api.v1 import runner_pb2, scheduler_pb2, scheduler_pb2_grpc, supervisor_pb2
from motet.rpc import Link, open_channel
from motet.rpc.message_failures import TOLD_ONCE
from tests.common.waiting import PATIENCE_S
from tests.scheduler.test_failing_messages import all_streams, streamed_types
from tests.support.hostile_messages import hostile, hostile_bytes, receive, serve
from tests.support.in_process_system import in_process_system

HIGHEST_TERM = 2**32

HELLOS: dict[type, Any] = {
    scheduler_pb2.ServeUp: scheduler_pb2.ServeUp(hello={"gateway": "evil"}),
    scheduler_pb2.AttachUp: scheduler_pb2.AttachUp(hello={"identity": {"instance": "evil"}}),
    supervisor_pb2.WatchUp: supervisor_pb2.WatchUp(hello={"identity": {"instance": "evil"}}),
    supervisor_pb2.AdviseUp: supervisor_pb2.AdviseUp(hello={"term": 1}),
    runner_pb2.GenerateUp: runner_pb2.GenerateUp(hello={"gateway": "evil"}),
}


@pytest.mark.parametrize("kind", sorted(streamed_types(), key=lambda kind: kind.__name__), ids=lambda m: m.__name__)
async def test_no_message_of_a_peer_harms_another(folder, kind):
    async with all_streams(folder) as streams:
        receiver = streams.receivers[kind]
        numbers = itertools.count(1000)
        with capture_logs() as logs:
            for message in hostile(kind):
                if isinstance(receiver, Link):
                    receive(receiver, message)
                elif (hello := HELLOS.get(kind)) is None:
                    await serve(receiver, message, peer=next(numbers))
                else:
                    await serve(receiver, *([] if message.HasField("hello") else [hello]), message)
            if kind.__name__ in {stream for stream, _ in TOLD_ONCE}:  # some messages were false but possible
                await streams.open_again(kind)
        assert [line for line in logs if line["event"] in ("message_failed", "decision_failed")] == []
        assert max(streams.terms()) < HIGHEST_TERM


SERVERS = {
    (scheduler_pb2, "Scheduler"): ("Serve", "Attach", "Sync"),
    (supervisor_pb2, "Supervisor"): ("Watch", "Advise"),
    (runner_pb2, "Runner"): ("Generate",),
}


async def test_bytes_that_are_no_message_end_their_own_stream(folder):
    async with all_streams(folder) as streams:
        for (module, service), methods in SERVERS.items():
            for method in methods:
                described = module.DESCRIPTOR.services_by_name[service].methods_by_name[method]
                async with open_channel(streams.addresses[service]) as channel:
                    for wrong in hostile_bytes(GetMessageClass(described.input_type)):
                        call = channel.stream_stream(f"/motet.api.v1.{service}/{method}")()
                        async with asyncio.timeout(PATIENCE_S):
                            with suppress(grpc.aio.AioRpcError):
                                await call.write(wrong)
                                await call.done_writing()
                                async for _ in call:
                                    pass
        await streams.open_again(scheduler_pb2.SyncUp)  # some were an empty catalog


async def test_a_leader_does_not_yield_to_an_impossible_term(folder):
    async with in_process_system(folder) as system, open_channel(system.control.scheduler_address) as channel:
        with pytest.raises(grpc.aio.AioRpcError, match="not possible"):
            await scheduler_pb2_grpc.SchedulerStub(channel).Succeed(
                scheduler_pb2.SucceedRequest(term=2**64 - 1), timeout=PATIENCE_S
            )
        assert system.control.scheduler_service.term < HIGHEST_TERM
