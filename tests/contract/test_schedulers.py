"""What a scheduler sends to a gateway: the real one and the fake of the gateway's tests pass the same tests."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from motet.api.v1 import scheduler_pb2, scheduler_pb2_grpc
from motet.errors import ModelNotFound
from motet.rpc import open_channel
from tests.common.waiting import PATIENCE_S
from tests.support.fake_engine import SlowEngines
from tests.support.fake_gateway import GROUP, FakeGateway, small_gateway
from tests.support.fake_services import GROUP as SMALL_GROUP
from tests.support.fake_services import mini_cluster
from tests.support.in_process_runner import short_folder
from tests.support.in_process_services import until
from tests.support.in_process_system import in_process_system

SLOW = 0.1
"""With steps of so many seconds, an answer of 200 tokens lasts until the test ends."""

INSTANCES = {"runner-0", "runner-1"}


@dataclass
class Fleet:
    gateway: FakeGateway
    group: str
    address: str
    restart: Callable[[], Awaitable[object]]
    stop: Callable[[str], Awaitable[object]]
    """Start a runner with this name."""
    pace: Callable[[float], object]
    """Set how long a step takes on all runners."""

    def start(self, request: str, **how) -> "asyncio.Future[list[int]]":
        return self.gateway.start(request, group=self.group, **how)

    @property
    def catalog(self) -> scheduler_pb2.CatalogGroup | None:
        groups = self.gateway.catalogs[-1].groups if self.gateway.catalogs else []
        return next((one for one in groups if one.group == self.group and len(one.runners) == 2), None)


@asynccontextmanager
async def small(_: Path) -> AsyncIterator[Fleet]:
    async with mini_cluster(runners=2) as cluster:
        runners = {runner.instance: runner for runner in cluster.runners}

        def pace(step_seconds: float) -> None:
            for runner in cluster.runners:
                runner.step_seconds = step_seconds

        address = cluster.scheduler.address
        async with small_gateway("g0", scheduler=address) as gateway:
            stop = lambda name: runners[name].stop()  # noqa: E731
            yield Fleet(gateway, SMALL_GROUP, address, cluster.scheduler.restart, stop, pace)


@asynccontextmanager
async def real(folder: Path) -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as stack:
        house = await stack.enter_async_context(in_process_system(folder))
        engines = SlowEngines(0.0)
        for name in sorted(INSTANCES):
            await house.runner(name, engines)
        control = house.control
        stop = lambda name: house.runners[name].stop()  # noqa: E731
        yield Fleet(house.gateway, GROUP, control.scheduler_address, control.restart_scheduler, stop, engines.hurry)


@pytest.fixture(params=[small, real], ids=["small", "real"])
async def fleet(request: pytest.FixtureRequest) -> AsyncIterator[Fleet]:
    with short_folder() as folder:
        async with request.param(folder) as one:
            await until(lambda: one.catalog)
            yield one


async def test_the_catalog_lists_a_groups_runners_and_their_digests(fleet):
    group = fleet.catalog
    assert {runner.instance for runner in group.runners} == INSTANCES
    assert all(runner.address for runner in group.runners)
    assert group.base_digest.startswith("sha256:")
    assert group.asset_digest.startswith("sha256:")
    assert group.max_model_length > 0


async def test_a_request_is_placed_under_the_leaders_term_with_a_promise(fleet):
    assert len(await fleet.start("a", max_tokens=20)) == 20
    asked = fleet.gateway.asked["a"]
    ((epoch, instance),) = asked.placements
    assert epoch == 1
    assert instance in INSTANCES
    assert asked.placed.term == fleet.gateway.term >= 1
    assert asked.placed.incarnation
    assert asked.placed.promise.pages > 0
    assert asked.placed.address == next(one.address for one in fleet.catalog.runners if one.instance == instance)


async def test_requests_of_a_lost_runner_continue_elsewhere_under_a_higher_epoch(fleet):
    whole = await fleet.start("whole", max_tokens=200)
    fleet.pace(SLOW)
    answer = fleet.start("a", max_tokens=200)
    asked = fleet.gateway.asked["a"]
    await until(lambda: asked.tokens)
    ((epoch, instance),) = asked.placements
    await fleet.stop(instance)
    fleet.pace(0.0)
    assert await answer == whole
    assert asked.placements[-1][0] > epoch
    assert asked.placements[-1][1] == (INSTANCES - {instance}).pop()


async def test_a_new_scheduler_has_a_higher_term_and_running_requests_go_on(fleet):
    term = fleet.gateway.term
    fleet.pace(SLOW)
    answer = fleet.start("a", max_tokens=300)
    await until(lambda: fleet.gateway.asked["a"].tokens)
    await fleet.restart()
    await until(lambda: fleet.gateway.term > term)
    fleet.pace(0.0)
    assert len(await answer) == 300
    assert len(fleet.gateway.asked["a"].placements) == 1
    assert len(await fleet.start("b", max_tokens=5)) == 5
    assert fleet.gateway.asked["b"].placed.term == fleet.gateway.term


async def test_a_revision_that_no_runner_serves_is_refused(fleet):
    with pytest.raises(ModelNotFound):
        await fleet.start("a", adapter="sha256:" + "0" * 64)


async def test_a_stream_that_begins_without_a_hello_is_refused(fleet):
    async with open_channel(fleet.address) as channel:
        call = scheduler_pb2_grpc.SchedulerStub(channel).Serve()
        await call.write(scheduler_pb2.ServeUp(enqueue=scheduler_pb2.Enqueue(request="a", group=fleet.group)))
        with pytest.raises(grpc.aio.AioRpcError) as error:
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    await call.read()
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
