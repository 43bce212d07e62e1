"""A scheduler that does not lead names the leader, and its clients connect there."""

import asyncio
import time
from contextlib import AsyncExitStack, asynccontextmanager

import grpc
import pytest
from prometheus_client import CollectorRegistry

from motet.api.v1 import scheduler_pb2, scheduler_pb2_grpc
from motet.rpc import FIRST_RETRY_SECONDS, LAST_RETRY_SECONDS, Link
from motet.transport.methods import SERVE
from motet.transport.over_grpc import GrpcNetwork, is_healthy, open_channel
from motet_scheduler import predecessor
from motet_scheduler.leader_only import LeaderOnly
from motet_scheduler.metrics import Metrics
from motet_scheduler.policy import events
from motet_scheduler.service import SchedulerService
from motet_scheduler.settings import Settings
from tests.common.waiting import PATIENCE_S
from tests.support.fake_gateway import fake_gateway
from tests.support.in_process_runner import in_process_runner
from tests.support.in_process_services import until
from tests.support.surroundings import REAL


class CountingFront(LeaderOnly):
    """Counts the streams that gateways open."""

    def __init__(self, leader_address):
        super().__init__(leader_address)
        self.asked = 0

    async def stream(self, method, stream):
        self.asked += method is SERVE
        await super().stream(method, stream)


class SlowLease:
    """A leadership whose higher term counts once the test has called `write`."""

    def __init__(self, term):
        self.term = self.wanted = term
        self.waiting = []

    def raise_term_above(self, seen, then):
        self.wanted = max(self.wanted, seen + 1)
        self.waiting.append(then)

    def write(self):
        self.term = self.wanted
        while self.waiting:
            self.waiting.pop()()


class Replica:
    """One of several schedulers in this process. `lead` makes it the leader."""

    def __init__(self, folder, name):
        self.address = f"unix:{folder}/{name}.sock"
        self.leader_address = ""
        self.front = CountingFront(lambda: self.leader_address)
        self._folder = folder / name

    def lead(self, term):
        self.yielded = []
        self.lease = SlowLease(term)
        leadership = self.lease
        leadership.step_down_for = self.yielded.append
        service = SchedulerService(
            Settings().config(0.05),
            leadership=leadership,
            metrics=Metrics(CollectorRegistry()),
            supervisor_address=f"unix:{self._folder}/nowhere.sock",
            catalog_file=None,
            surroundings=REAL,
        )
        self.front.open(service)
        return service

    @asynccontextmanager
    async def up(self):
        async with GrpcNetwork().serving(self.address, self.front.handlers, grace=0):
            yield


async def test_a_standby_sends_its_clients_to_the_leader_at_once(folder):
    first, second = Replica(folder, "a"), Replica(folder, "b")
    leader = first.lead(1)
    second.leader_address = first.address
    async with second.up():
        assert await is_healthy(second.address), "a standby is ready"
        async with (
            first.up(),
            fake_gateway("g0", scheduler=second.address) as gateway,
            in_process_runner(folder, scheduler=second.address),
        ):
            await until(lambda: gateway.term == 1 and leader.scheduler.runners)
            assert second.front.asked == 1


async def test_when_the_leader_dies_its_clients_reconnect_at_their_first_address(folder):
    first, second = Replica(folder, "a"), Replica(folder, "b")
    first.lead(1)
    second.leader_address = first.address
    async with second.up(), AsyncExitStack() as clients:
        async with first.up():
            gateway = await clients.enter_async_context(fake_gateway("g0", scheduler=second.address))
            await clients.enter_async_context(in_process_runner(folder, scheduler=second.address))
            await until(lambda: gateway.term == 1)
        follower = second.lead(2)
        await until(lambda: gateway.term == 2 and follower.scheduler.runners)


@asynccontextmanager
async def gateway_link(address, *, name="g0", seen=0):
    """Yields the messages that the gateway has received."""
    received = []
    link = Link(
        "scheduler",
        address,
        SERVE,
        network=GrpcNetwork(),
        greet=lambda: [scheduler_pb2.ServeUp(hello=scheduler_pb2.GatewayHello(gateway=name, highest_term=seen))],
        receive=received.append,
    )
    running = asyncio.create_task(link.run())
    try:
        yield received
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def min_wait(count):
    """The shortest time that `count` slow retries take."""
    return 0.75 * sum(min(FIRST_RETRY_SECONDS * 2**turn, LAST_RETRY_SECONDS) for turn in range(count))


async def test_without_a_leader_clients_retry_slowly(folder):
    alone = Replica(folder, "a")
    async with alone.up(), gateway_link(alone.address) as received:
        began = time.monotonic()
        await until(lambda: alone.front.asked > 5)
        assert time.monotonic() - began >= min_wait(4)
        assert received == []
        alone.lead(1)
        await until(lambda: received)
        assert received[0].welcome.term == 1


async def test_clients_of_two_standbys_that_name_each_other_retry_slowly(folder):
    first, second = Replica(folder, "a"), Replica(folder, "b")
    first.leader_address, second.leader_address = second.address, first.address
    async with first.up(), second.up(), gateway_link(first.address) as received:
        began = time.monotonic()
        await until(lambda: first.front.asked + second.front.asked > 6)  # the first two at once
        assert time.monotonic() - began >= min_wait(4)
        assert received == []


async def test_a_standby_refuses_explain(folder):
    alone = Replica(folder, "a")
    alone.leader_address = "10.0.0.7:7101"
    async with alone.up(), open_channel(alone.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError, match=r"is a standby; the leader is 10\.0\.0\.7:7101"):
            await scheduler_pb2_grpc.SchedulerStub(channel).Explain(scheduler_pb2.ExplainRequest(request="a"))


async def test_a_new_leader_notifies_its_predecessor_until_it_answers(folder):
    before = Replica(folder, "a")
    before.lead(1)
    telling = asyncio.create_task(
        predecessor.tell_predecessor(before.address, 2, network=GrpcNetwork(), time_scale=0.05)
    )
    await asyncio.sleep(0.2)  # the predecessor is not up yet
    async with before.up():
        await asyncio.wait_for(telling, PATIENCE_S)
        assert before.yielded == [2]


async def test_a_dead_predecessor_is_not_waited_for(folder):
    await asyncio.wait_for(
        predecessor.tell_predecessor(f"unix:{folder}/nobody.sock", 2, network=GrpcNetwork(), time_scale=0.01),
        PATIENCE_S,
    )
    await asyncio.wait_for(predecessor.tell_predecessor("", 2, network=GrpcNetwork()), PATIENCE_S)


async def test_a_higher_term_is_announced_only_once_it_is_written(folder):
    alone = Replica(folder, "a")
    service = alone.lead(1)
    async with alone.up(), gateway_link(alone.address, name="plain") as plain:
        await until(lambda: plain)
        async with gateway_link(alone.address, seen=41) as received:
            await until(lambda: len(alone.lease.waiting) > 1)  # it was refused and has come back
            assert (received, [down.welcome.term for down in plain]) == ([], [1])
            assert service.term == 1
            alone.lease.write()
            await until(lambda: received)
            assert received[0].welcome.term == 42
            assert [down.welcome.term for down in plain if down.HasField("welcome")] == [1, 42], "told once"


async def test_a_catalog_of_before_a_higher_term_is_sent_again_under_it(folder):
    """Else a gateway would serve one of a lower term than it has seen, which counts as older."""

    def catalogs(link):
        return [(down.catalog.term, down.catalog.revision) for down in link if down.HasField("catalog")]

    alone = Replica(folder, "a")
    service = alone.lead(1)
    async with alone.up(), gateway_link(alone.address, name="plain") as plain:
        service.handle(events.CatalogReplaced((), ()))
        await until(lambda: any(down.HasField("catalog") for down in plain))
        async with gateway_link(alone.address, seen=41) as received:
            await until(lambda: alone.lease.waiting)
            alone.lease.write()
            await until(lambda: catalogs(received) and catalogs(plain)[-1][0] == 42)
            assert catalogs(plain)[0][0] == 1
            assert catalogs(received)[0] == catalogs(plain)[-1]
