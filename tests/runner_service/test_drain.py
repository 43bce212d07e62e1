"""A runner drains: it accepts no new requests, returns those that wait, finishes those that run, and loses none."""

import asyncio
import contextlib
from dataclasses import replace

from motet.api.v1 import common_pb2, scheduler_pb2
from motet.clock import FakeClock
from motet.domain import BASE
from motet.health import Health
from motet_runner.accepted_requests import AcceptedRequest, AcceptedRequests
from motet_runner.hang_detector import HangDetector
from motet_runner.interface import EngineSequenceReport, State
from motet_simulator.fake_engine import FakeEngine, SlowEngines, tokens_of
from tests.common.waiting import PATIENCE_S
from tests.runner_service.fake_peers import gateway_to, scheduler_at
from tests.support.in_process_runner import in_process_runner
from tests.support.in_process_services import until
from tests.support.in_process_system import in_process_system


async def test_in_a_drain_running_requests_end_waiting_ones_move_and_no_new_ones_come(folder):
    async with in_process_system(folder) as system:
        leaving = await system.runner("r0", engines := SlowEngines(max_sequences=2))
        running = [system.gateway.start(f"{n}", prompt=(n,), max_tokens=100) for n in range(2)]
        await until(lambda: all(one.tokens for one in system.gateway.live()))
        await system.runner("r1")
        draining = asyncio.create_task(leaving.service.drain(3600))
        await until(lambda: leaving.service.draining)
        assert len(leaving.service.accepted) == 2
        engines.hurry()
        await asyncio.wait_for(draining, PATIENCE_S)  # it ends once all requests have ended
        for n, answer in enumerate(running):
            assert await answer == tokens_of((n,), 7, 100)
            assert system.gateway.asked[f"{n}"].moves == 0
        new = await system.gateway.ask("new", prompt=(9,), max_tokens=4)
        assert new == tokens_of((9,), 7, 4)
        assert [instance for _, instance in system.gateway.asked["new"].placements] == ["r1"]
        assert system.gateway.declines == 0, "the scheduler knows"


async def test_requests_that_run_at_the_deadline_move_with_their_tokens(folder):
    async with in_process_system(folder) as system:
        leaving = await system.runner("r0", SlowEngines())
        answers = [system.gateway.start(f"{n}", prompt=(n,), max_tokens=150) for n in range(4)]
        await until(lambda: all(one.tokens for one in system.gateway.live()))
        await system.runner("r1")
        await leaving.service.drain(0.3)
        assert len(leaving.service.accepted) == 0
        await leaving.stop()
        for n, answer in enumerate(answers):
            assert await answer == tokens_of((n,), 7, 150)
            assert [instance for _, instance in system.gateway.asked[f"{n}"].placements] == ["r0", "r1"]


async def test_waiting_requests_are_returned_at_once(folder):
    patient = {"time_scale": 1.0, "adapter_wait_seconds": 60}
    engines = SlowEngines()
    async with in_process_runner(folder, engine=engines, **patient) as runner, gateway_to(runner.address) as gateway:
        await gateway.submit("first", max_tokens=300)
        await until(lambda: gateway.tokens)
        await gateway.submit("second", max_tokens=8, adapter="sha256:" + 64 * "0")
        await until(lambda: len(runner.service.accepted) == 2)
        draining = asyncio.create_task(runner.service.drain(3600))
        given_back = await gateway.finished("second")
        assert not given_back.tokens
        assert not draining.done()
        await gateway.submit("third")
        assert (await gateway.refusal("third")).failure.code == "declined"
        engines.hurry()
        await gateway.finished("first")
        await draining
        assert len(gateway.tokens["first", 1]) == 300


def test_a_request_whose_adapter_is_still_read_is_handed_back():
    """On a slow disk it would hold up the drain."""
    accepted, entries = AcceptedRequests(), []
    for name, state in (("l", State.LOADING), ("w", State.WAITING), ("p", State.PARKED), ("d", State.DECODE)):
        standard = common_pb2.REQUEST_CLASS_STANDARD
        promise = common_pb2.Promise(pages=2)
        accepted.add(AcceptedRequest(name, 1, promise, 3, 0, "t", BASE, standard, "g0", 1, in_engine=True))
        entries.append(EngineSequenceReport(name, 1, 2, 1, state, 3, 4, BASE, "t", 0, 0, promise_number=1))
    idle = accepted.idle(replace(FakeEngine().report(), sequences=entries))
    assert [one.request for one in idle] == ["l", "w", "p"]


async def test_a_scheduler_that_connects_during_a_drain_is_told(folder):
    address = f"unix:{folder}/s.sock"
    slow = SlowEngines()
    async with (
        in_process_runner(folder, scheduler=address, engine=slow) as runner,
        gateway_to(runner.address) as gateway,
    ):
        await gateway.submit("first", max_tokens=200)
        await until(lambda: gateway.tokens)
        draining = asyncio.create_task(runner.service.drain(3600))
        await until(lambda: runner.service.draining)
        async with scheduler_at(address) as scheduler:
            (word,) = await until(lambda: scheduler.of("draining"))
            assert 3600 - PATIENCE_S < word.deadline_seconds <= 3600
            draining.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await draining


async def test_a_runner_is_ready_when_attached_and_not_draining(folder):
    address, health = f"unix:{folder}/s.sock", Health()
    async with in_process_runner(folder, scheduler=address, health=health) as runner:
        assert health.unready_reason() == "no scheduler has accepted this runner yet"
        async with scheduler_at(address):
            await until(lambda: not health.unready_reason())
        await until(lambda: not runner.service.loaded.scheduler.link.connected)
        assert health.unready_reason() == "", "a scheduler that goes away comes back"
        assert health.dead_reason() == ""
        await runner.service.drain(5)
        assert health.unready_reason() == "this runner is draining and takes no new requests"


def drain(term: int = 1) -> scheduler_pb2.AttachDown:
    return scheduler_pb2.AttachDown(drain=scheduler_pb2.Drain(term=term))


def take_work(term: int = 1) -> scheduler_pb2.AttachDown:
    return scheduler_pb2.AttachDown(take_work=scheduler_pb2.TakeWork(term=term))


async def test_a_runner_whose_drain_is_taken_back_takes_work_again_and_is_ready(folder):
    address, health = f"unix:{folder}/s.sock", Health()
    async with (
        scheduler_at(address) as scheduler,
        in_process_runner(folder, scheduler=address, health=health) as runner,
        gateway_to(runner.address) as gateway,
    ):
        await until(lambda: not health.unready_reason())
        scheduler.send(drain())
        await until(lambda: health.unready_reason() == "this runner is draining and takes no new requests")
        await gateway.submit("a")
        assert (await gateway.refusal("a")).failure.code == "declined"
        scheduler.send(take_work())
        await until(lambda: not health.unready_reason())
        await gateway.submit("b")
        await gateway.finished("b")


async def test_an_ending_runner_declines_requests_also_when_its_drain_is_taken_back(folder):
    address, health = f"unix:{folder}/s.sock", Health()
    async with (
        scheduler_at(address) as scheduler,
        in_process_runner(folder, scheduler=address, health=health) as runner,
        gateway_to(runner.address) as gateway,
    ):
        await until(lambda: scheduler.of("hello"))
        await runner.service.drain(5)
        seen = len(scheduler.of("report"))
        scheduler.send(take_work())
        scheduler.send(scheduler_pb2.AttachDown(welcome={"term": 2}))
        await until(lambda: runner.service.accepted.highest_term == 2 and len(scheduler.of("report")) > seen + 1)
        assert health.unready_reason() == "this runner is draining and takes no new requests"
        await gateway.submit("a")
        assert (await gateway.refusal("a")).failure.code == "declined"


async def test_the_last_drain_order_holds_while_no_scheduler_is_connected(folder):
    address = f"unix:{folder}/s.sock"
    async with in_process_runner(folder, scheduler=address) as runner:
        async with scheduler_at(address) as scheduler:
            await until(lambda: scheduler.of("hello"))
            scheduler.send(drain())
            await until(lambda: runner.service.draining)
        await until(lambda: not runner.service.loaded.scheduler.link.connected)
        assert runner.service.draining
        async with scheduler_at(address):  # from a version that sends it no more, and does not say that the drain ended
            await until(lambda: not runner.service.draining)


async def test_a_message_of_a_past_term_does_not_take_a_drain_back(folder):
    address = f"unix:{folder}/s.sock"
    async with scheduler_at(address) as scheduler, in_process_runner(folder, scheduler=address) as runner:
        await until(lambda: scheduler.of("hello"))
        scheduler.send(scheduler_pb2.AttachDown(welcome={"term": 9}))
        scheduler.send(drain(9))
        await until(lambda: runner.service.draining)
        scheduler.send(take_work(8))
        scheduler.send(scheduler_pb2.AttachDown(welcome={"term": 8}))
        seen = len(scheduler.of("report"))
        await until(lambda: len(scheduler.of("report")) > seen + 1)
        assert runner.service.draining


def test_an_engine_with_work_and_no_iteration_is_hung():
    clock = FakeClock()
    progress = HangDetector(60, clock)
    assert progress.hung_reason() == ""
    for steps in (1, 2, 3):  # slow
        progress.observe(steps, work=True)
        clock.advance(50)
        progress.observe(steps, work=True)
        assert progress.hung_reason() == ""
    progress.observe(3, work=True)
    clock.advance(11)
    assert progress.hung_reason() == (
        "the engine has work, and for 61 s it has completed no step and read no part of an adapter"
    )
    progress.observe(3, work=False)
    assert progress.hung_reason() == ""
    clock.advance(1000)
    progress.observe(3, work=False)  # idle for long
    progress.observe(3, work=True)
    assert progress.hung_reason() == ""
