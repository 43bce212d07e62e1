"""The scheduler's service over real gRPC, with real runner services and a real supervisor beside it."""

import asyncio
import functools
import time

import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from motet.api.v1 import common_pb2, scheduler_pb2, scheduler_pb2_grpc
from motet.digest import adapter_digest
from motet.errors import ContextLengthExceeded, ModelNotFound, NoRunner
from motet.leadership import LocalLeadership
from motet.runner_info import RequestClass
from motet.transport.over_grpc import open_channel
from motet_scheduler.metrics import Metrics
from motet_scheduler.policy import events
from motet_scheduler.policy.values import SchedulerConfig
from motet_scheduler.service import SchedulerService
from motet_simulator.fake_engine import FakeEngine, SlowEngines, tokens_of
from tests.common.waiting import PATIENCE_S
from tests.scheduler.builders import SchedulerDriver
from tests.support.fake_gateway import fake_gateway
from tests.support.in_process_runner import write_adapter
from tests.support.in_process_services import adapter_entry, fake_operator, until
from tests.support.in_process_system import in_process_system
from tests.support.surroundings import REAL

PROMPT = (1, 2, 3)


@pytest.fixture
async def system(folder):
    async with in_process_system(folder) as one:
        yield one


async def test_a_request_is_placed_runs_and_leaves_no_promise_behind(system):
    await system.runner("r0")
    tokens = await system.gateway.ask("a", prompt=PROMPT, max_tokens=40)
    assert tokens == tokens_of(PROMPT, 7, 40)
    await until(lambda: not system.control.scheduler.requests)
    assert system.control.scheduler.runners["r0"].ledger.promised == 0


async def test_a_request_waits_for_the_first_runner_and_gets_the_reason(system):
    answer = system.gateway.start("a", max_tokens=4)
    await until(lambda: system.gateway.asked["a"].positions)
    assert system.gateway.asked["a"].positions[0] == (1, "no runner of this model is up")
    await system.runner("r0")
    assert len(await answer) == 4


async def test_without_a_runner_the_deadline_refuses_with_its_reason(system):
    with pytest.raises(NoRunner, match="no runner of this model is up"):
        await system.gateway.ask("a", deadline=0.2)


async def test_a_request_that_can_never_fit_is_refused_at_once(system):
    await system.runner("r0", lambda: FakeEngine(pages=4))
    with pytest.raises(ContextLengthExceeded, match="Shorten one of them"):
        await system.gateway.ask("a", max_tokens=200)


async def test_an_adapter_is_checked_served_and_dropped_when_its_manifest_goes(system):
    await system.runner("r0")
    source = write_adapter(system.folder / "pirate")
    system.operator.state(adapter_entry("pirate", source))
    report = await until(lambda: (one := system.operator.adapter("pirate")) and one.serving_digest and one)
    digest = report.serving_digest
    assert report.certificate.rank == 4
    assert await system.gateway.ask("a", adapter=digest, max_tokens=20) == tokens_of(PROMPT, 7, 20, digest)
    await until(lambda: system.operator.adapter("pirate").state == scheduler_pb2.ADAPTER_READINESS_READY)
    system.operator.state()
    await until(lambda: digest not in system.control.scheduler.runners["r0"].adapters.tiers, why="the runner drops it")
    assert not system.gateway.catalogs[-1].adapters


async def test_a_change_of_residency_that_was_lost_is_noticed_and_all_is_told_once_more(system, monkeypatch):
    runner = await system.runner("r0")
    link, lost, reports = runner.service.loaded.scheduler.link, [], []
    send = link.send

    def lose_one(up):
        if up.HasField("residency") and not lost:
            lost.append(up)
            return True
        reports.extend([up] * up.HasField("report"))
        return send(up)

    monkeypatch.setattr(link, "send", lose_one)
    source = write_adapter(system.folder / "pirate")
    ref = common_pb2.AdapterRef(namespace="default", name="pirate")
    order = scheduler_pb2.EnsureAdapter(adapter=ref, source=source.as_uri(), stage=common_pb2.ADAPTER_STAGE_CERTIFIED)
    with capture_logs() as logs:
        life = await runner.service.loaded.adapters.ensure(order)
        await until(
            lambda: life.digest in system.control.scheduler.runners["r0"].adapters.tiers, why="a hello tells all"
        )
        told = len(reports)
        await until(lambda: len(reports) > told + 3)
        runner.service.loaded.adapters.drop(life.digest)
        await until(lambda: not system.control.scheduler.runners["r0"].adapters.tiers)
    assert lost
    assert [line["told"] for line in logs if line["event"] == "residency_differs"] == [1]


async def test_a_runner_that_does_not_end_its_hello_begins_anew(system):
    await system.runner("r0")
    runners = system.control.scheduler.runners
    known = runners["r0"]
    known.attached, known.telling, known.forget_at = False, True, 0.0  # as if parts of its hello were missing
    with capture_logs() as logs:
        system.control.scheduler_service.handle(events.Tick())
        assert "r0" not in runners
        await until(lambda: "r0" in runners and runners["r0"].attached)
    assert [line["runner"] for line in logs if line["event"] == "runner_hello_not_ended"] == ["r0"]


async def test_changed_bytes_move_the_name_once_they_are_certified(system):
    await system.runner("r0")
    source = write_adapter(system.folder / "pirate", seed=1)
    system.operator.state(adapter_entry("pirate", source, stamp="1"))
    old = await until(lambda: (one := system.operator.adapter("pirate")) and one.serving_digest)
    write_adapter(system.folder / "pirate", seed=2)
    system.operator.state(adapter_entry("pirate", source, stamp="2"))
    await until(lambda: system.operator.adapter("pirate").serving_digest != old)
    await until(
        lambda: system.gateway.catalogs[-1].adapters[0].digest == system.operator.adapter("pirate").serving_digest
    )


async def test_an_answer_to_an_order_of_an_earlier_scheduler_is_counted_and_ignored(system, monkeypatch):
    runner = await system.runner("r0")
    link = runner.service.loaded.scheduler
    answers, send = [], link.report_adapter
    monkeypatch.setattr(link, "report_adapter", lambda state: (answers.append(state), send(state)))
    serving = lambda: (one := system.operator.adapter("pirate")) and one.serving_digest  # noqa: E731
    source = write_adapter(system.folder / "pirate", seed=1)
    system.operator.state(adapter_entry("pirate", source, stamp="1"))
    old = await until(serving)
    first = answers[-1]
    await system.control.restart_scheduler()
    write_adapter(system.folder / "pirate", seed=2)
    system.operator.state(adapter_entry("pirate", source, stamp="2"))
    await until(lambda: serving() != old)
    assert answers[-1].order != first.order
    ignored = lambda: system.control.scheduler_metrics.get_sample_value("motet_ignored_adapter_answers_total")  # noqa: E731
    before = ignored()
    send(first)
    await until(lambda: ignored() > before)
    assert serving() == system.gateway.catalogs[-1].adapters[0].digest != old


def count_copies(runners):
    """Of what runners fetch: not what they have already."""
    copied = []

    def counted(fetch):
        async def fetch_and_count(order, room):
            held = await fetch(order, room)
            if order.before is None or order.before.inode != held.inode:
                copied.append(held)
            return held

        return fetch_and_count

    for runner in runners:
        files = runner.service.loaded.adapters.files
        files.fetch = counted(files.fetch)
    return copied


async def test_row_15_while_an_adapter_flips_a_hundred_times_requests_are_answered_and_it_is_loaded_few_times(system):
    """With time scale 0.05: one check in half a second, after the first three."""
    runners = [await system.runner(name) for name in ("r0", "r1")]
    copied = count_copies(runners)
    sources = [write_adapter(system.folder / name, seed=seed) for seed, name in enumerate(("pirate", "poet"))]
    digests = {adapter_digest(source) for source in sources}
    serving = lambda: system.operator.adapter("tales").serving_digest  # noqa: E731
    in_catalog = lambda: system.gateway.catalogs[-1].adapters[0].digest  # noqa: E731
    answered = 0

    async def ask():
        nonlocal answered
        while True:
            digest, known = in_catalog(), len(system.gateway.catalogs)
            assert digest in digests
            try:
                tokens = await system.gateway.ask(f"a{answered}", adapter=digest, max_tokens=8)
            except ModelNotFound:
                assert len(system.gateway.catalogs) > known, "only a request for a replaced revision is refused"
                continue
            assert tokens == tokens_of(PROMPT, 7, 8, digest)
            answered += 1

    began = time.monotonic()
    system.operator.state(adapter_entry("tales", sources[0], min_replicas=2))
    await until(lambda: system.operator.adapter("tales") and serving() and in_catalog())
    asking = asyncio.create_task(ask())
    for flip in range(1, 101):
        system.operator.state(adapter_entry("tales", sources[flip % 2], min_replicas=2))
        await asyncio.sleep(0.01)
    system.operator.state(adapter_entry("tales", sources[1], min_replicas=2, generation=2))
    last = adapter_digest(sources[1])
    # Every second flip was to the same source: the generation tells that the last one has arrived.
    arrived = lambda: system.operator.adapter("tales").ref.generation == 2  # noqa: E731
    await until(lambda: arrived() and serving() == in_catalog() == last)
    passed = time.monotonic() - began
    before = answered
    await until(lambda: answered > before + 3)
    assert not asking.done()
    asking.cancel()
    assert await system.gateway.ask("last", adapter=last, max_tokens=8) == tokens_of(PROMPT, 7, 8, last)
    checks = len(copied)
    loads = [int(runner.service.metrics.adapter_loads.collect()[0].samples[0].value) for runner in runners]
    print(f"{checks} checks in {passed:.1f} s, {loads} loads, {answered} answers")
    assert checks <= 3 + passed / 0.5
    assert max(loads) <= checks


async def test_a_broken_revision_is_reported_and_never_takes_over(system):
    await system.runner("r0")
    source = write_adapter(system.folder / "pirate", seed=1)
    system.operator.state(adapter_entry("pirate", source, stamp="1"))
    old = await until(lambda: (one := system.operator.adapter("pirate")) and one.serving_digest)
    (system.folder / "pirate" / "adapter_config.json").write_text('{"peft_type": "IA3"}')
    system.operator.state(adapter_entry("pirate", source, stamp="2"))
    report = await until(lambda: (one := system.operator.adapter("pirate")).HasField("failure") and one)
    assert report.serving_digest == old
    assert await system.gateway.ask("a", adapter=old, max_tokens=4)


async def test_a_runner_that_dies_loses_nothing_that_a_client_sees(system):
    one = await system.runner("r0", SlowEngines())
    answers = [system.gateway.start(f"a{n}", max_tokens=100, prompt=(n, 1)) for n in range(6)]
    await until(lambda: all(asked.tokens for asked in system.gateway.live()))
    await system.runner("r1")
    one.crash()
    for n, answer in enumerate(answers):
        assert await answer == tokens_of((n, 1), 7, 100)
    for asked in system.gateway.asked.values():
        assert [epoch for epoch, _ in asked.placements] == list(range(1, len(asked.placements) + 1))
        assert asked.placements[0] == (1, "r0")
        assert asked.placements[-1][1] == "r1"


async def test_a_drained_runner_finishes_its_work_and_is_reported(system):
    runner = await system.runner("r0", engines := SlowEngines())
    answer = system.gateway.start("a", max_tokens=150)
    await until(lambda: system.gateway.asked["a"].tokens)
    system.operator.drain(runner.service.identity, seconds=PATIENCE_S)
    await system.runner("r1")
    assert await system.gateway.ask("b", max_tokens=4)
    assert system.gateway.asked["b"].placements == [(1, "r1")]
    assert not system.operator.of("drained")
    engines.hurry()
    await answer
    drained = await until(lambda: system.operator.of("drained"))
    assert drained[0].runner.instance == "r0"


async def test_a_drain_that_is_taken_back_lets_the_runner_work_again(system):
    runner = await system.runner("r0")
    system.operator.drain(runner.service.identity)
    await until(lambda: runner.service.draining)
    waiting = system.gateway.start("a", max_tokens=4)
    await until(lambda: system.gateway.asked["a"].positions)
    system.operator.take_back("r0")
    assert len(await waiting) == 4
    assert not runner.service.draining
    assert system.gateway.declines == 0


async def test_the_next_scheduler_orders_a_draining_runner_to_drain_again(system):
    runner = await system.runner("r0", engines := SlowEngines())
    answer = system.gateway.start("a", max_tokens=200)
    await until(lambda: system.gateway.asked["a"].tokens)
    system.operator.drain(runner.service.identity, seconds=PATIENCE_S)
    await until(lambda: runner.service.draining)
    await system.control.restart_scheduler()
    await until(
        lambda: (one := system.control.scheduler.runners.get("r0")) is not None and one.requested_drain is not None
    )
    await until(lambda: runner.service.draining)
    assert not system.operator.of("drained"), "it still has a request"
    engines.hurry()
    await answer
    await until(lambda: system.operator.of("drained"))
    assert system.gateway.asked["a"].moves == 0


async def test_a_drain_that_takes_too_long_moves_what_is_left(system):
    runner = await system.runner("r0", SlowEngines())
    answer = system.gateway.start("a", max_tokens=150)
    await until(lambda: system.gateway.asked["a"].tokens)
    await system.runner("r1")
    system.operator.drain(runner.service.identity, seconds=0.1)
    assert await answer == tokens_of(PROMPT, 7, 150)
    assert system.gateway.asked["a"].moves == 1


async def test_an_operator_of_a_past_term_is_rejected_with_the_reason(system):
    known = lambda: {str(name) for name in system.control.scheduler.adapters.by_name}  # noqa: E731
    async with fake_operator(system.control.scheduler_address) as successor:
        successor.term = 7
        successor.state(adapter_entry("new", write_adapter(system.folder / "new")))
        await until(lambda: known() == {"default/new"})
        system.operator.state(adapter_entry("old", write_adapter(system.folder / "old")))
        await until(lambda: system.operator.of("outranked"))
        assert system.operator.of("outranked")[0].term == 7
        assert known() == {"default/new"}
        system.operator.term = 8  # it won the election again
        system.operator.state(adapter_entry("old", system.folder / "old"))
        await until(lambda: known() == {"default/old"})


async def test_what_an_operators_earlier_stream_still_brings_is_dropped(system):
    """A stream may seem alive here for a while after its operator has opened another one."""
    known = lambda: {str(name) for name in system.control.scheduler.adapters.by_name}  # noqa: E731
    async with fake_operator(system.control.scheduler_address) as later:
        later.state(adapter_entry("new", write_adapter(system.folder / "new")))
        await until(lambda: known() == {"default/new"})
        system.operator.state(adapter_entry("old", write_adapter(system.folder / "old")))
        await until(lambda: not system.operator.link.connected)
        assert known() == {"default/new"}


async def test_tenant_and_class_of_a_request_are_known_wherever_it_is(system):
    """In the queue, on its runner, and in the next scheduler; in the supervisor, which needs no tenant, its class."""

    def known():
        one = system.control.scheduler.requests.get("a")
        return one and (one.tenant, one.request_class)

    theirs = ("acme", RequestClass.BATCH)
    system.gateway.start("a", tenant="acme", request_class=common_pb2.REQUEST_CLASS_BATCH, max_tokens=2000)
    assert await until(known) == theirs
    runner = await system.runner("r0", functools.partial(FakeEngine, step_seconds=0.02))
    placement = await until(lambda: runner.service.accepted.get("a"))
    assert (placement.tenant, placement.request_class) == theirs
    (computed,) = await until(lambda: (report := runner.service.loaded.last_report) and report.sequences)
    assert (computed.tenant, computed.priority) == theirs
    sequences = system.control.supervisor_service.supervisor.runners["r0"].sequences
    entry = (await until(lambda: sequences.get("a"))).entry
    assert entry.request_class is RequestClass.BATCH
    await system.control.restart_scheduler()
    assert await until(known) == theirs


async def test_explain_returns_the_whole_timeline(system):
    await system.runner("r0")
    await system.gateway.ask("a", max_tokens=4)
    await until(lambda: not system.control.scheduler.requests)
    async with open_channel(system.control.scheduler_address) as channel:
        stub = scheduler_pb2_grpc.SchedulerStub(channel)
        story = await stub.Explain(scheduler_pb2.ExplainRequest(request="a"), timeout=PATIENCE_S)
    assert [entry.event for entry in story.entries] == ["queued", "placed", "finished"]


async def test_cancelling_a_waiting_request_takes_it_out_of_the_queue(system):
    system.gateway.start("a")
    await until(lambda: system.control.scheduler.queued() == 1)
    system.gateway.cancel("a")
    await until(lambda: system.control.scheduler.queued() == 0)
    assert not system.control.scheduler.requests


async def test_a_gateway_that_leaves_takes_its_waiting_requests_along(system):
    async with fake_gateway("g1", scheduler=system.control.scheduler_address) as other:
        other.start("b")
        await until(lambda: system.control.scheduler.queued() == 1)
    await until(lambda: system.control.scheduler.queued() == 0)


async def test_a_stream_without_a_hello_is_refused(system):
    async with open_channel(system.control.scheduler_address) as channel:
        call = scheduler_pb2_grpc.SchedulerStub(channel).Serve()
        await call.write(scheduler_pb2.ServeUp(finished=scheduler_pb2.Finished(request="a")))
        with pytest.raises(Exception, match="must be a hello"):
            async for _ in call:
                pass
        call.cancel()
    await asyncio.sleep(0)


async def test_requests_that_an_event_left_untried_are_tried_before_the_next_tick(folder):
    with LocalLeadership(folder / "term", REAL) as leadership:
        service = SchedulerService(
            SchedulerConfig(tenants_examined=2),
            leadership=leadership,
            metrics=Metrics(CollectorRegistry()),
            supervisor_address=f"unix:{folder}/supervisor.sock",
            catalog_file=None,
            surroundings=REAL,
        )
        driver = SchedulerDriver()
        driver.send = service.handle
        driver.gateway()
        driver.state()
        for n in range(20):
            driver.enqueue(f"too large {n}", tenant="a", max_tokens=200 * 16)
        driver.enqueue("small", tenant="b")
        driver.attach()
        async with asyncio.timeout(PATIENCE_S):
            while service.scheduler.more_to_try:
                await asyncio.sleep(0)
        (left,) = service.scheduler.requests.values()
        assert left.id == "small"
        assert left.placement
