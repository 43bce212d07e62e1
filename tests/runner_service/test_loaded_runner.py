"""A runner without files, processes and servers: its engine is on its event loop, its gateways are in memory."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry

from motet.api.v1 import common_pb2, runner_pb2
from motet.clock import FakeClock
from motet.domain import BASE, Digest, RequestId
from motet.settings import Addresses
from motet.transport.over_grpc import GrpcServerStream
from motet_runner import accepted_requests
from motet_runner.accepted_requests import AcceptedRequest, AcceptedRequests
from motet_runner.adapters.policy.eviction import CacheLimits
from motet_runner.adapters.registry import AdapterRegistry
from motet_runner.engine_client import EngineDied
from motet_runner.engine_messages import EngineOutputs
from motet_runner.hang_detector import HangDetector
from motet_runner.interface import EngineSequenceReport, OverflowAhead, State
from motet_runner.loaded_runner import LoadedRunner
from motet_runner.metrics import Metrics
from motet_runner.plan import preset_named
from motet_runner.runner_facts import RunnerFacts
from motet_runner.settings import Settings
from motet_simulator.fake_engine import FakeEngine, token_at
from motet_simulator.trials.engine_process import EngineProcess
from tests.runner_service.fake_peers import CheckingGateway, until
from tests.support.in_process_runner import NOWHERE
from tests.support.surroundings import REAL


class MemoryStream:
    """Both sides of a gateway's stream: what the gateway calls, and what the runner gets as requests and context."""

    def __init__(self) -> None:
        self._up: asyncio.Queue[runner_pb2.GenerateUp] = asyncio.Queue()
        self._down: asyncio.Queue[runner_pb2.GenerateDown] = asyncio.Queue()
        self.context = _Context(self._down)

    async def write(self, up: runner_pb2.GenerateUp) -> None:
        self._up.put_nowait(up)

    async def requests(self) -> AsyncIterator[runner_pb2.GenerateUp]:
        while True:
            yield await self._up.get()

    async def __aiter__(self) -> AsyncIterator[runner_pb2.GenerateDown]:
        while True:
            yield await self._down.get()


class _Context:
    def __init__(self, down: "asyncio.Queue[runner_pb2.GenerateDown]") -> None:
        self._down = down

    async def send_initial_metadata(self, _metadata: object) -> None: ...

    async def write(self, message: bytes) -> None:
        self._down.put_nowait(runner_pb2.GenerateDown.FromString(message))

    async def abort(self, code: object, details: str) -> None:
        raise AssertionError(f"{code}: {details}")


class NoAdapters:
    """A runner whose pool has no adapters asks for none."""


class Running:
    def __init__(self, step_seconds: float, hang_detector: HangDetector) -> None:
        engine = FakeEngine()
        self.engine = EngineProcess(engine, clock=REAL.clock, step_seconds=step_seconds)
        identity = common_pb2.RunnerIdentity(pool="default/demo", group="default/demo", instance="r0", incarnation="1")
        base = Digest("sha256:base")
        facts = RunnerFacts(identity, "nowhere", engine.info, base, base, preset_named("paged-chunk").promise)
        accepted, metrics = AcceptedRequests(), Metrics(CollectorRegistry(), wall=REAL.wall)
        self.runner = LoadedRunner(
            facts=facts,
            model="demo",
            engine=self.engine,
            adapters=AdapterRegistry(
                NoAdapters(),
                limits=CacheLimits(1),
                users_of=accepted.users_of,
                post=self.engine.post,
                metrics=metrics,
                surroundings=REAL,
            ),
            accepted=accepted,
            settings=Settings(instance="r0", pool="default/demo"),
            addresses=Addresses(scheduler_address=NOWHERE, supervisor_address=NOWHERE),
            metrics=metrics,
            hang_detector=hang_detector,
            surroundings=REAL,
            time_scale=0.05,
        )
        self.task = asyncio.create_task(self.runner.run())

    @asynccontextmanager
    async def gateway(self) -> AsyncIterator[CheckingGateway]:
        stream = MemoryStream()
        gateway = CheckingGateway(stream)
        served = asyncio.create_task(self.runner.serve_gateway(GrpcServerStream(stream.requests(), stream.context)))
        reader = asyncio.create_task(gateway.read())
        await gateway.send(hello=runner_pb2.GenerateHello(gateway="g0"))
        try:
            yield gateway
        finally:
            for task in (served, reader):
                task.cancel()
            await asyncio.gather(served, reader, return_exceptions=True)


@asynccontextmanager
async def running(step_seconds: float = 0.0, hang_detector: HangDetector | None = None) -> AsyncIterator[Running]:
    one = Running(step_seconds, hang_detector or HangDetector(60, REAL.clock))
    try:
        yield one
    finally:
        one.task.cancel()
        await asyncio.gather(one.task, return_exceptions=True)
        await one.runner.close()


async def test_an_engine_on_the_same_event_loop_answers():
    async with running() as one, one.gateway() as gateway:
        await gateway.submit("a", prompt=(1, 2, 3), max_tokens=20, seed=7)
        last = await gateway.finished("a")
    assert last.finish == common_pb2.FINISH_REASON_LENGTH
    assert gateway.tokens["a", 1] == [token_at((1, 2, 3), 7, index) for index in range(20)]


async def test_its_engine_reports_by_itself():
    async with running() as one:
        await until(lambda: one.runner.last_report)
        assert one.runner.last_report.pages == 256
        assert one.runner.unready_reason() == "no scheduler has accepted this runner yet"


async def test_a_drain_lets_what_runs_end_and_takes_no_more():
    async with running(step_seconds=0.01) as one, one.gateway() as gateway:
        await gateway.submit("a", max_tokens=20)
        await until(lambda: gateway.tokens.get(("a", 1)))
        refused = asyncio.Event()

        async def take_no_more() -> None:
            assert one.runner.draining
            refused.set()

        draining = asyncio.create_task(one.runner.drain(3600, take_no_more=take_no_more))
        await refused.wait()
        await gateway.submit("b")
        await gateway.refusal("b")
        await draining
        assert len(gateway.tokens["a", 1]) == 20


async def test_gateways_hear_why_an_engine_died():
    async with running(step_seconds=0.01) as one, one.gateway() as gateway:
        await gateway.submit("a", max_tokens=2000)
        await until(lambda: gateway.tokens.get(("a", 1)))
        one.engine.die("killed by signal 9")
        await until(lambda: gateway.engine_died)
        assert "signal 9" in gateway.engine_died
        with pytest.raises(EngineDied):
            await one.task


async def test_a_slow_load_is_no_hang_for_the_runner_and_its_supervisor(monkeypatch):
    """All its requests wait for one adapter, and the disk is slow."""
    clock = FakeClock()
    detector = HangDetector(60, clock)
    async with running(hang_detector=detector) as one:
        told = []
        monkeypatch.setattr(one.runner.supervisor.link, "send", lambda up: told.append(up.memory))
        waiting = replace(FakeEngine().report(), steps=7, waiting=1)
        for parts in range(4):
            one.runner.on_batch(EngineOutputs(report=replace(waiting, load_parts=parts)))
            assert detector.hung_reason() == ""
            clock.advance(50)
        assert [(it.steps, it.load_parts) for it in told if it.steps] == [(7, 0), (7, 1), (7, 2), (7, 3)]
        one.runner.on_batch(EngineOutputs(report=replace(waiting, load_parts=3)))
        clock.advance(11)
        assert detector.hung_reason(), "the disk does not answer"


async def test_a_report_lists_each_request_once_for_both_links_and_an_overflow_only_its_own(monkeypatch):
    """They come from the loop that passes all tokens on: a list for each overflow would be quadratic."""
    listed = []
    entry_of = accepted_requests.entry_of
    monkeypatch.setattr(accepted_requests, "entry_of", lambda one, of: listed.append(one.request) or entry_of(one, of))
    async with running() as one:
        runner = one.runner
        names = [RequestId(f"r{number}") for number in range(50)]
        for name in names:
            promise = common_pb2.Promise(pages=2)
            standard = common_pb2.REQUEST_CLASS_STANDARD
            runner.accepted.add(
                AcceptedRequest(name, 1, promise, 3, 0, "t", BASE, standard, "g0", 1, max_tokens=9, in_engine=True)
            )
        runner.on_batch(EngineOutputs(report=FakeEngine().report()))
        assert sorted(listed) == sorted(names)
        listed.clear()
        entry = EngineSequenceReport(names[7], 1, 2, 1, State.DECODE, 3, 4, BASE, "t", 0, 0, promise_number=1)
        runner.on_batch(EngineOutputs(events=[OverflowAhead(entry)]))
        assert listed == [names[7]]
