"""The scheduler's service over real gRPC, with real runner services and a real supervisor beside it."""

import asyncio
import functools
import time

import pytest

from motet.api.v1 import common_pb2, scheduler_pb2, scheduler_pb2_grpc
from motet.digest import adapter_digest
from motet.errors import ContextLengthExceeded, ModelNotFound, NoRunner
from motet.rpc import open_channel
from motet.runner_info import RequestClass
from tests.common.waiting import PATIENCE_S
from tests.support.fake_engine import FakeEngine, SlowEngines, tokens_of
from tests.support.fake_gateway import small_gateway
from tests.support.in_process_runner import write_adapter
from tests.support.in_process_services import adapter_entry, fake_operator, until
from tests.support.in_process_system import in_process_system

PROMPT = (1, 2, 3)


@pytest.fixture
async def house(folder):
    async with in_process_system(folder) as one:
        yield one


async def test_a_request_is_placed_runs_and_leaves_no_promise_behind(house):
    await house.runner("r0")
    tokens = await house.gateway.ask("a", prompt=PROMPT, max_tokens=40)
    assert tokens == tokens_of(PROMPT, 7, 40)
    await until(lambda: not house.control.scheduler.requests)
    assert house.control.scheduler.runners["r0"].ledger.promised == 0


async def test_a_request_waits_for_the_first_runner_and_gets_the_reason(house):
    answer = house.gateway.start("a", max_tokens=4)
    await until(lambda: house.gateway.asked["a"].positions)
    assert house.gateway.asked["a"].positions[0] == (1, "no runner of this model is up")
    await house.runner("r0")
    assert len(await answer) == 4


async def test_without_a_runner_the_deadline_refuses_with_its_reason(house):
    with pytest.raises(NoRunner, match="no runner of this model is up"):
        await house.gateway.ask("a", deadline=0.2)


async def test_what_can_never_fit_is_refused_at_once(house):
    await house.runner("r0", lambda: FakeEngine(pages=4))
    with pytest.raises(ContextLengthExceeded, match="Shorten one of them"):
        await house.gateway.ask("a", max_tokens=200)


async def test_an_adapter_is_checked_served_and_dropped_when_its_manifest_goes(house):
    await house.runner("r0")
    source = write_adapter(house.folder / "pirate")
    house.operator.state(adapter_entry("pirate", source))
    report = await until(lambda: (one := house.operator.adapter("pirate")) and one.serving_digest and one)
    digest = report.serving_digest
    assert report.certificate.rank == 4
    assert await house.gateway.ask("a", adapter=digest, max_tokens=20) == tokens_of(PROMPT, 7, 20, digest)
    await until(lambda: house.operator.adapter("pirate").state == scheduler_pb2.ADAPTER_READINESS_READY)
    house.operator.state()
    await until(lambda: digest not in house.control.scheduler.runners["r0"].resident, why="the runner drops it")
    assert not house.gateway.catalogs[-1].adapters


async def test_changed_bytes_move_the_name_once_they_are_certified(house):
    await house.runner("r0")
    source = write_adapter(house.folder / "pirate", seed=1)
    house.operator.state(adapter_entry("pirate", source, stamp="1"))
    old = await until(lambda: (one := house.operator.adapter("pirate")) and one.serving_digest)
    write_adapter(house.folder / "pirate", seed=2)
    house.operator.state(adapter_entry("pirate", source, stamp="2"))
    await until(lambda: house.operator.adapter("pirate").serving_digest != old)
    await until(
        lambda: house.gateway.catalogs[-1].adapters[0].digest == house.operator.adapter("pirate").serving_digest
    )


async def test_row_15_while_an_adapter_flips_a_hundred_times_requests_are_answered_and_it_is_loaded_few_times(house):
    """Pauses are a twentieth here: one check in half a second, after the first three."""
    runners = [await house.runner(name) for name in ("r0", "r1")]
    sources = [write_adapter(house.folder / name, seed=seed) for seed, name in enumerate(("pirate", "poet"))]
    digests = {adapter_digest(source) for source in sources}
    serving = lambda: house.operator.adapter("tales").serving_digest  # noqa: E731
    in_catalog = lambda: house.gateway.catalogs[-1].adapters[0].digest  # noqa: E731
    answered = 0

    async def ask():
        nonlocal answered
        while True:
            digest, known = in_catalog(), len(house.gateway.catalogs)
            assert digest in digests
            try:
                tokens = await house.gateway.ask(f"a{answered}", adapter=digest, max_tokens=8)
            except ModelNotFound:
                assert len(house.gateway.catalogs) > known, "only one that the name has left meanwhile is refused"
                continue
            assert tokens == tokens_of(PROMPT, 7, 8, digest)
            answered += 1

    began = time.monotonic()
    house.operator.state(adapter_entry("tales", sources[0], min_replicas=2))
    await until(lambda: house.operator.adapter("tales") and serving() and in_catalog())
    asking = asyncio.create_task(ask())
    for flip in range(1, 101):
        house.operator.state(adapter_entry("tales", sources[flip % 2], min_replicas=2))
        await asyncio.sleep(0.01)
    house.operator.state(adapter_entry("tales", sources[1], min_replicas=2))
    last = adapter_digest(sources[1])
    await until(lambda: serving() == in_catalog() == last)
    passed = time.monotonic() - began
    before = answered
    await until(lambda: answered > before + 3)
    assert not asking.done()
    asking.cancel()
    assert await house.gateway.ask("last", adapter=last, max_tokens=8) == tokens_of(PROMPT, 7, 8, last)
    checks = sum(runner.service._loaded().adapters.fetcher.copies for runner in runners)
    loads = [int(runner.service.metrics.adapter_loads.collect()[0].samples[0].value) for runner in runners]
    print(f"{checks} checks in {passed:.1f} s, {loads} loads, {answered} answers")
    assert checks <= 3 + passed / 0.5
    assert max(loads) <= checks


async def test_a_broken_revision_is_reported_and_never_takes_over(house):
    await house.runner("r0")
    source = write_adapter(house.folder / "pirate", seed=1)
    house.operator.state(adapter_entry("pirate", source, stamp="1"))
    old = await until(lambda: (one := house.operator.adapter("pirate")) and one.serving_digest)
    (house.folder / "pirate" / "adapter_config.json").write_text('{"peft_type": "IA3"}')
    house.operator.state(adapter_entry("pirate", source, stamp="2"))
    report = await until(lambda: (one := house.operator.adapter("pirate")).HasField("failure") and one)
    assert report.serving_digest == old
    assert await house.gateway.ask("a", adapter=old, max_tokens=4)


async def test_a_runner_that_dies_loses_nothing_that_a_client_sees(house):
    one = await house.runner("r0", SlowEngines())
    answers = [house.gateway.start(f"a{n}", max_tokens=100, prompt=(n, 1)) for n in range(6)]
    await until(lambda: all(asked.tokens for asked in house.gateway.live()))
    await house.runner("r1")
    one.crash()
    for n, answer in enumerate(answers):
        assert await answer == tokens_of((n, 1), 7, 100)
    for asked in house.gateway.asked.values():
        assert [epoch for epoch, _ in asked.placements] == list(range(1, len(asked.placements) + 1))
        assert asked.placements[0] == (1, "r0")
        assert asked.placements[-1][1] == "r1"


async def test_a_drained_runner_finishes_its_work_and_is_reported(house):
    runner = await house.runner("r0", engines := SlowEngines())
    answer = house.gateway.start("a", max_tokens=150)
    await until(lambda: house.gateway.asked["a"].tokens)
    house.operator.drain(runner.service.identity, seconds=PATIENCE_S)
    await house.runner("r1")
    assert await house.gateway.ask("b", max_tokens=4)
    assert house.gateway.asked["b"].placements == [(1, "r1")]
    assert not house.operator.of("drained")
    engines.hurry()
    await answer
    drained = await until(lambda: house.operator.of("drained"))
    assert drained[0].runner.instance == "r0"


async def test_a_drain_that_is_taken_back_lets_the_runner_work_again(house):
    runner = await house.runner("r0")
    house.operator.drain(runner.service.identity)
    await until(lambda: runner.service.draining)
    waiting = house.gateway.start("a", max_tokens=4)
    await until(lambda: house.gateway.asked["a"].positions)
    house.operator.take_back("r0")
    assert len(await waiting) == 4
    assert not runner.service.draining
    assert house.gateway.declines == 0


async def test_the_next_scheduler_orders_a_draining_runner_to_drain_again(house):
    runner = await house.runner("r0", engines := SlowEngines())
    answer = house.gateway.start("a", max_tokens=200)
    await until(lambda: house.gateway.asked["a"].tokens)
    house.operator.drain(runner.service.identity, seconds=PATIENCE_S)
    await until(lambda: runner.service.draining)
    await house.control.restart_scheduler()
    await until(
        lambda: (one := house.control.scheduler.runners.get("r0")) is not None and one.requested_drain is not None
    )
    await until(lambda: runner.service.draining)
    assert not house.operator.of("drained"), "it still has a request"
    engines.hurry()
    await answer
    await until(lambda: house.operator.of("drained"))
    assert house.gateway.asked["a"].moves == 0


async def test_a_drain_that_takes_too_long_moves_what_is_left(house):
    runner = await house.runner("r0", SlowEngines())
    answer = house.gateway.start("a", max_tokens=150)
    await until(lambda: house.gateway.asked["a"].tokens)
    await house.runner("r1")
    house.operator.drain(runner.service.identity, seconds=0.1)
    assert await answer == tokens_of(PROMPT, 7, 150)
    assert house.gateway.asked["a"].moves == 1


async def test_an_operator_of_a_past_term_is_rejected_with_the_reason(house):
    known = lambda: {str(name) for name in house.control.scheduler.adapters.by_name}  # noqa: E731
    async with fake_operator(house.control.scheduler_address) as successor:
        successor.term = 7
        successor.state(adapter_entry("new", write_adapter(house.folder / "new")))
        await until(lambda: known() == {"default/new"})
        house.operator.state(adapter_entry("old", write_adapter(house.folder / "old")))
        await until(lambda: house.operator.of("outranked"))
        assert house.operator.of("outranked")[0].term == 7
        assert known() == {"default/new"}
        house.operator.term = 8  # won again
        house.operator.state(adapter_entry("old", house.folder / "old"))
        await until(lambda: known() == {"default/old"})


async def test_tenant_and_class_of_a_request_are_known_wherever_it_is(house):
    """While it waits, where it runs, to whoever protects the runner, and to the next scheduler."""

    def known():
        one = house.control.scheduler.requests.get("a")
        return one and (one.tenant, one.request_class)

    theirs = ("acme", RequestClass.BATCH)
    house.gateway.start("a", tenant="acme", request_class=common_pb2.REQUEST_CLASS_BATCH, max_tokens=2000)
    assert await until(known) == theirs
    runner = await house.runner("r0", functools.partial(FakeEngine, step_seconds=0.02))
    placement = await until(lambda: runner.service.accepted.get("a"))
    assert (placement.tenant, placement.request_class) == theirs
    (computed,) = await until(lambda: (report := runner.service._last_report) and report.sequences)
    assert (computed.tenant, computed.priority) == theirs
    sequences = house.control.supervisor_service.supervisor.runners["r0"].sequences
    entry = (await until(lambda: sequences.get("a"))).entry
    assert (entry.tenant, entry.request_class) == theirs
    await house.control.restart_scheduler()
    assert await until(known) == theirs


async def test_explain_returns_the_whole_timeline(house):
    await house.runner("r0")
    await house.gateway.ask("a", max_tokens=4)
    await until(lambda: not house.control.scheduler.requests)
    async with open_channel(house.control.scheduler_address) as channel:
        stub = scheduler_pb2_grpc.SchedulerStub(channel)
        story = await stub.Explain(scheduler_pb2.ExplainRequest(request="a"), timeout=PATIENCE_S)
    assert [entry.event for entry in story.entries] == ["queued", "placed", "finished"]


async def test_cancelling_a_waiting_request_takes_it_out_of_the_queue(house):
    house.gateway.start("a")
    await until(lambda: house.control.scheduler.queued() == 1)
    house.gateway.cancel("a")
    await until(lambda: house.control.scheduler.queued() == 0)
    assert not house.control.scheduler.requests


async def test_a_gateway_that_leaves_takes_its_waiting_requests_along(house):
    async with small_gateway("g1", scheduler=house.control.scheduler_address) as other:
        other.start("b")
        await until(lambda: house.control.scheduler.queued() == 1)
    await until(lambda: house.control.scheduler.queued() == 0)


async def test_a_stream_without_a_hello_is_refused(house):
    async with open_channel(house.control.scheduler_address) as channel:
        call = scheduler_pb2_grpc.SchedulerStub(channel).Serve()
        await call.write(scheduler_pb2.ServeUp(finished=scheduler_pb2.Finished(request="a")))
        with pytest.raises(Exception, match="must be a hello"):
            async for _ in call:
                pass
        call.cancel()
    await asyncio.sleep(0)
