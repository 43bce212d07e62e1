"""Peers that send wrong terms and epochs, over real gRPC: they are refused, and all others are served."""

from typing import Any

import grpc
import pytest

from motet.api.v1 import scheduler_pb2, scheduler_pb2_grpc, supervisor_pb2, supervisor_pb2_grpc
from motet.rpc import open_channel
from tests.common.waiting import PATIENCE_S
from tests.support.fake_gateway import fake_gateway
from tests.support.in_process_system import in_process_system

LARGEST = 2**64 - 1


@pytest.fixture
async def system(folder):
    async with in_process_system(folder) as one:
        await one.runner("r0")
        yield one


async def refusal(address: str, open_stream: Any, *messages: Any) -> str:
    async with open_channel(address) as channel:
        call = open_stream(channel)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            for message in messages:
                await call.write(message)
            async for _ in call:
                pass
        call.cancel()
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    return str(refused.value.details())


async def assert_working(system) -> None:
    assert system.control.scheduler_service.term < 2**32
    assert len(await system.gateway.ask("after", max_tokens=4)) == 4
    async with fake_gateway("late", scheduler=system.control.scheduler_address) as late:
        assert late.term < 2**32
        assert len(await late.ask("late", max_tokens=4)) == 4


@pytest.mark.parametrize(
    ("method", "up"),
    [
        ("Serve", scheduler_pb2.ServeUp(hello={"gateway": "evil", "highest_term": LARGEST})),
        ("Attach", scheduler_pb2.AttachUp(hello={"identity": {"instance": "evil"}, "highest_term": LARGEST})),
        ("Sync", scheduler_pb2.SyncUp(term=LARGEST, snapshot={})),
    ],
)
async def test_the_largest_term_is_refused_and_not_adopted(system, method, up):
    error = await refusal(
        system.control.scheduler_address,
        lambda channel: getattr(scheduler_pb2_grpc.SchedulerStub(channel), method)(),
        up,
    )
    assert f"has term {LARGEST}, which is not possible" in error
    await assert_working(system)


async def test_a_leader_does_not_yield_to_an_impossible_term(system):
    async with open_channel(system.control.scheduler_address) as channel:
        with pytest.raises(grpc.aio.AioRpcError, match="not possible"):
            await scheduler_pb2_grpc.SchedulerStub(channel).Succeed(
                scheduler_pb2.SucceedRequest(term=LARGEST), timeout=PATIENCE_S
            )
    await assert_working(system)


async def test_a_supervisor_does_not_follow_a_scheduler_of_the_last_term(system):
    error = await refusal(
        system.control.supervisor_address,
        lambda channel: supervisor_pb2_grpc.SupervisorStub(channel).Advise(),
        supervisor_pb2.AdviseUp(hello=supervisor_pb2.AdviseHello(term=LARGEST)),
    )
    assert "not possible" in error
    assert system.control.supervisor_service.supervisor.highest_term < 2**32
    await assert_working(system)


async def test_the_largest_epoch_ends_only_its_own_request(system):
    enqueue = scheduler_pb2.ServeUp(enqueue={"request": "x", "epoch": 2**32 - 1, "group": "default/demo"})
    async with open_channel(system.control.scheduler_address) as channel:
        call = scheduler_pb2_grpc.SchedulerStub(channel).Serve()
        await call.write(scheduler_pb2.ServeUp(hello={"gateway": "evil"}))
        await call.write(enqueue)
        async for down in call:
            if down.HasField("refused"):
                break
        assert "the highest possible one" in down.refused.failure.message
        assert not call.done()
        call.cancel()
    await assert_working(system)
