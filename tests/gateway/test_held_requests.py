"""Requests for a model without a runner: they wait, clients see that, and the scheduler knows about them."""

import asyncio
import time

from prometheus_client import CollectorRegistry

from motet.api.v1 import scheduler_pb2
from motet.clock import FakeClock
from motet.time_split import TimePart
from motet_gateway.held_requests import HeldRequests
from motet_gateway.routes.tokens import TOKENIZER_WAIT_S
from testbed.fake_services import GROUP, fake_services
from tests.common.cpu_speed import cpu_unit_seconds
from tests.gateway.conftest import eventually, serve
from tests.gateway.test_streams import ReceivedStream, long_request, read


def split_seconds(registry: CollectorRegistry, part: TimePart) -> float:
    labels = {"tenant": "", "part": part.value}
    return registry.get_sample_value("motet_request_split_seconds_total", labels) or 0.0


async def test_requests_that_wait_for_a_first_runner_are_reported_and_placed_when_it_comes() -> None:
    async with fake_services() as cluster:
        scheduler = cluster.scheduler
        runners, scheduler.runners = scheduler.runners, []
        async with serve(cluster, ready=False, hold_seconds=0.05, keep_alive_seconds=0.05) as served:
            streams = [ReceivedStream(), ReceivedStream()]
            tasks = []
            for stream in streams:
                tasks.append(asyncio.create_task(read(served, long_request(), stream)))
                await eventually(lambda: scheduler.held and scheduler.held[-1].get(GROUP) == len(tasks))
            await eventually(lambda: "queued position=2 (waiting for a runner of tiny)" in streams[1].comments)
            assert "queued position=1 (waiting for a runner of tiny)" in streams[0].comments
            await asyncio.sleep(0.5)
            scheduler.runners = runners
            scheduler.publish()
            await asyncio.gather(*tasks)
            assert [stream.finishes for stream in streams] == [["length"], ["length"]]
            parts = {part: split_seconds(served.registry, part) for part in TimePart}
            assert parts[TimePart.QUEUE] >= len(streams) * 0.5, parts
            assert parts[TimePart.OVERHEAD] < parts[TimePart.QUEUE]
            await eventually(lambda: scheduler.held[-1] == {})


async def test_a_new_scheduler_is_sent_held_requests_without_those_of_gone_clients() -> None:
    async with fake_services() as cluster:
        scheduler = cluster.scheduler
        scheduler.runners = []
        async with serve(cluster, ready=False, hold_seconds=0.05) as served:
            task = asyncio.create_task(read(served, long_request()))
            await eventually(lambda: scheduler.held == [{GROUP: 1}])
            await scheduler.restart()
            await eventually(lambda: scheduler.held == [{GROUP: 1}, {GROUP: 1}])
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await eventually(lambda: scheduler.held[-1] == {})


async def test_a_gateway_without_a_tokenizer_asks_for_a_runner() -> None:
    """The pool has no runner. Its model is known, but only other gateways have its tokenizer on disk."""
    async with fake_services() as cluster:
        scheduler = cluster.scheduler
        groups = list(scheduler.catalog().groups)
        del groups[0].runners[:]
        scheduler.groups = groups
        async with serve(cluster, ready=False, hold_seconds=0.05, keep_alive_seconds=0.05) as served:
            stream = ReceivedStream()
            task = asyncio.create_task(read(served, long_request(), stream))
            await eventually(lambda: scheduler.held == [{GROUP: 1}])
            await eventually(lambda: "queued position=1 (fetching the tokenizer of tiny)" in stream.comments)
            scheduler.groups = None
            scheduler.publish()
            await task
            assert stream.finishes == ["length"]


async def test_tokens_are_counted_as_soon_as_a_runner_has_sent_the_tokenizer() -> None:
    """Right after the start a client should not have to try again. No runner: nobody would send it."""
    counted = {"prompt": "Hi"}
    async with fake_services() as cluster, serve(cluster, ready=False) as served:
        assert (await served.http.post("/tokenize", json=counted)).status_code == 200
    async with fake_services() as cluster:
        groups = list(cluster.scheduler.catalog().groups)
        del groups[0].runners[:]
        cluster.scheduler.groups = groups
        async with serve(cluster, ready=False) as served:
            refused = await served.http.post("/tokenize", json=counted)
            assert refused.status_code == 503
            assert refused.json()["error"]["message"].endswith("yet: fetching the tokenizer of tiny.")


async def test_tokens_of_an_adapter_that_is_being_checked_are_not_waited_for() -> None:
    """That may take long, and a tenant decides how long."""
    async with fake_services() as cluster:
        checked = scheduler_pb2.CatalogAdapter(model_name="slow", state=scheduler_pb2.ADAPTER_READINESS_LOADING)
        checked.ref.namespace, checked.ref.name, checked.group = "alpha", "slow", GROUP
        cluster.scheduler.adapters = [checked]
        async with serve(cluster) as served:
            began = time.monotonic()
            refused = await served.http.post("/tokenize", json={"model": "alpha/slow", "prompt": "Hi"})
            assert time.monotonic() - began < TOKENIZER_WAIT_S / 2
            assert refused.status_code == 503
            assert refused.json()["error"]["message"].endswith("yet: checking adapter alpha/slow.")


async def test_after_the_deadline_and_above_the_limit_errors_say_when_to_retry() -> None:
    async with fake_services() as cluster:
        cluster.scheduler.runners = []
        body = long_request(stream=False)
        async with serve(cluster, ready=False, max_live_requests=1) as served:
            waiting = asyncio.create_task(served.http.post("/v1/completions", json=body))
            await eventually(lambda: cluster.scheduler.held)
            refused = await served.http.post("/v1/completions", json=body)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            await eventually(lambda: cluster.scheduler.held[-1] == {})
        async with serve(cluster, ready=False, deadline_seconds=0.1) as served:
            await eventually(lambda: served.gateway.catalog.known)
            gave_up = await served.http.post("/v1/completions", json=body)
            for answer, code in ((refused, "overloaded"), (gave_up, "no_runner")):
                assert answer.status_code == 503
                assert answer.json()["error"]["code"] == code
                assert int(answer.headers["retry-after"]) >= 1
            message = gave_up.json()["error"]["message"]
            assert "No runner was available within 0.1 s: the request was number 1 in the queue (waiting" in message
            unknown = await served.http.post("/v1/completions", json=body | {"model": "nobody"})
            assert unknown.status_code == 404


def test_positions_count_within_a_group_and_move_up() -> None:
    changes: list[int] = []
    held = HeldRequests(lambda: changes.append(len(held)), FakeClock())
    held.enter("a", "x")
    held.enter("b", "y")
    held.enter("c", "x")
    held.enter("c", "x")
    assert [held.position(one) for one in "abcd"] == [1, 1, 2, 0]
    held.leave("a")
    held.leave("a")
    assert held.position("c") == 1
    assert held.by_group() == {"x": 1, "y": 1}
    assert changes == [1, 2, 3, 2]
    assert "c" in held
    assert "a" not in held
    held.enter("c", "y")
    assert held.position("c") == 2
    assert held.by_group() == {"y": 2}


def test_positions_are_numbered_once_a_second_however_many_ask() -> None:
    clock = FakeClock()
    held = HeldRequests(lambda: None, clock)
    for request in "abcd":
        held.enter(request, "x")
    held.leave("a")
    assert held.position("d") == 3
    held.leave("b")
    assert held.position("d") == 3
    clock.advance(1.0)
    assert [held.position(one) for one in "cd"] == [1, 2]


def test_ten_thousand_held_requests_cost_little_time() -> None:
    held = HeldRequests(lambda: None, FakeClock())
    requests = [f"request {number}" for number in range(10_000)]
    began = time.process_time()
    for request in requests:
        assert request not in held
        held.enter(request, "x")
        held.position(request)
    for request in requests:
        held.position(request)
        held.by_group()
    for request in requests:
        held.leave(request)
        held.position(requests[-1])
    assert time.process_time() - began < 20 * cpu_unit_seconds()
    assert len(held) == 0


async def test_a_request_whose_adapter_is_being_checked_counts_as_demand() -> None:
    async with fake_services() as cluster:
        adapter = cluster.add_adapter("fresh", digest="", state=scheduler_pb2.ADAPTER_READINESS_LOADING)
        async with serve(cluster, hold_seconds=0.05, keep_alive_seconds=0.05) as served:
            stream = ReceivedStream()
            task = asyncio.create_task(read(served, long_request(model="fresh"), stream))
            await eventually(lambda: cluster.scheduler.held == [{GROUP: 1}])
            await eventually(lambda: "checking adapter default/fresh" in stream.comments)
            adapter.digest = "sha256:" + "f" * 64
            adapter.state = scheduler_pb2.ADAPTER_READINESS_COLD
            cluster.scheduler.publish()
            await task
            assert stream.finishes == ["length"]
            await eventually(lambda: cluster.scheduler.held[-1] == {})
