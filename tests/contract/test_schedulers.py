"""What a scheduler sends to a gateway: the real one and the fake of the gateway's tests pass the same tests."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from motet.api.v1 import scheduler_pb2, scheduler_pb2_grpc
from motet.errors import BaseModelReplaced, ModelNotFound
from motet.transport.over_grpc import open_channel
from motet_simulator.fake_engine import SlowEngines
from testbed.fake_services import GROUP as SMALL_GROUP
from testbed.fake_services import fake_services
from tests.common.waiting import PATIENCE_S
from tests.support.fake_gateway import GROUP, FakeGateway, fake_gateway
from tests.support.in_process_runner import short_folder
from tests.support.in_process_services import until
from tests.support.in_process_system import in_process_system

SLOW = 0.1
"""Seconds of a step with which an answer of 200 tokens lasts until the test ends"""

INSTANCES = {"runner-0", "runner-1"}


@dataclass
class SystemUnderTest:
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
async def small(_: Path) -> AsyncIterator[SystemUnderTest]:
    async with fake_services(runners=2) as cluster:
        runners = {runner.instance: runner for runner in cluster.runners}

        def pace(step_seconds: float) -> None:
            for runner in cluster.runners:
                runner.step_seconds = step_seconds

        address = cluster.scheduler.address
        async with fake_gateway("g0", scheduler=address) as gateway:
            stop = lambda name: runners[name].stop()  # noqa: E731
            yield SystemUnderTest(gateway, SMALL_GROUP, address, cluster.scheduler.restart, stop, pace)


@asynccontextmanager
async def real(folder: Path) -> AsyncIterator[SystemUnderTest]:
    async with AsyncExitStack() as stack:
        in_process = await stack.enter_async_context(in_process_system(folder))
        engines = SlowEngines(0.0)
        for name in sorted(INSTANCES):
            await in_process.runner(name, engines)
        control = in_process.control
        stop = lambda name: in_process.runners[name].stop()  # noqa: E731
        yield SystemUnderTest(
            in_process.gateway, GROUP, control.scheduler_address, control.restart_scheduler, stop, engines.hurry
        )


@pytest.fixture(params=[small, real], ids=["small", "real"])
async def system(request: pytest.FixtureRequest) -> AsyncIterator[SystemUnderTest]:
    with short_folder() as folder:
        async with request.param(folder) as one:
            await until(lambda: one.catalog)
            yield one


async def test_the_catalog_lists_a_groups_runners_and_their_digests(system):
    group = system.catalog
    assert {runner.instance for runner in group.runners} == INSTANCES
    assert all(runner.address for runner in group.runners)
    assert group.base_digest.startswith("sha256:")
    assert group.asset_digest.startswith("sha256:")
    assert group.max_model_length > 0


async def test_a_request_is_placed_under_the_leaders_term_with_a_promise(system):
    assert len(await system.start("a", max_tokens=20)) == 20
    asked = system.gateway.asked["a"]
    ((epoch, instance),) = asked.placements
    assert epoch == 1
    assert instance in INSTANCES
    assert asked.placed.term == system.gateway.term >= 1
    assert asked.placed.incarnation
    assert asked.placed.promise.pages > 0
    assert asked.placed.base_digest == system.catalog.base_digest
    assert asked.placed.address == next(one.address for one in system.catalog.runners if one.instance == instance)


async def test_requests_of_a_lost_runner_continue_elsewhere_under_a_higher_epoch(system):
    whole = await system.start("whole", max_tokens=200)
    system.pace(SLOW)
    answer = system.start("a", max_tokens=200)
    asked = system.gateway.asked["a"]
    await until(lambda: asked.tokens)
    ((epoch, instance),) = asked.placements
    await system.stop(instance)
    system.pace(0.0)
    assert await answer == whole
    assert asked.placements[-1][0] > epoch
    assert asked.placements[-1][1] == (INSTANCES - {instance}).pop()


async def test_a_new_scheduler_has_a_higher_term_and_running_requests_go_on(system):
    term = system.gateway.term
    system.pace(SLOW)
    answer = system.start("a", max_tokens=300)
    await until(lambda: system.gateway.asked["a"].tokens)
    await system.restart()
    await until(lambda: system.gateway.term > term)
    system.pace(0.0)
    assert len(await answer) == 300
    assert len(system.gateway.asked["a"].placements) == 1
    assert len(await system.start("b", max_tokens=5)) == 5
    assert system.gateway.asked["b"].placed.term == system.gateway.term


async def test_a_revision_that_no_runner_serves_is_refused(system):
    with pytest.raises(ModelNotFound):
        await system.start("a", adapter="sha256:" + "0" * 64)


async def test_a_request_for_a_base_model_that_no_runner_has_is_refused(system):
    with pytest.raises(BaseModelReplaced):
        await system.start("a", base="sha256:" + "0" * 64)
    assert len(await system.start("b", base=system.catalog.base_digest, max_tokens=5)) == 5


async def test_a_stream_that_begins_without_a_hello_is_refused(system):
    async with open_channel(system.address) as channel:
        call = scheduler_pb2_grpc.SchedulerStub(channel).Serve()
        await call.write(scheduler_pb2.ServeUp(enqueue=scheduler_pb2.Enqueue(request="a", group=system.group)))
        with pytest.raises(grpc.aio.AioRpcError) as error:
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    await call.read()
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
