"""The supervisor's service over real gRPC, with real runner services and the real scheduler."""

import time
from math import inf

import pytest
from prometheus_client import CollectorRegistry

from motet.clock import FakeClock
from motet.runner_info import Capacity, RunnerIdentity
from motet_scheduler.settings import Settings as SchedulerSettings
from motet_simulator.fake_engine import FakeEngine, SlowEngines, tokens_of
from motet_supervisor.metrics import Metrics
from motet_supervisor.policy import events
from motet_supervisor.service import SupervisorService
from motet_supervisor.settings import Settings as SupervisorSettings
from tests.support.in_process_services import until
from tests.support.in_process_system import in_process_system
from tests.support.metric_values import value_of

STREAMS = 6
LENGTH = 150
PATIENT = 1000.0
"""Seconds (× 0.05) until a runner protects itself: longer than any pause of the test machine."""


def engines_with_little_memory(preset="paged-promises"):
    return SlowEngines(0.05, pages=20, preset=preset)


async def ask_long_ones(system, engines, streams=STREAMS, length=LENGTH):
    """Start long answers with short estimates, so that together they outgrow the runner."""
    answers = [system.gateway.start(f"{n}", prompt=(n,), max_tokens=length, q80=8) for n in range(streams)]
    await until(lambda: all(one.tokens for one in system.gateway.live()))
    # An overflow is announced 16 steps ahead. The supervisor's answer must come within these, or all sequences stand at
    # the end of their promises and the engine decides alone.
    engines.hurry(0.01)
    return answers


async def all_right(answers, length=LENGTH):
    for n, answer in enumerate(answers):
        assert await answer == tokens_of((n,), 7, length)


def count(system, name):
    return system.control.supervisor_metrics.get_sample_value(f"motet_{name}_total") or 0


def ordered_parks(system, method):
    return system.control.supervisor_metrics.get_sample_value("motet_park_orders_total", {"method": method}) or 0


def test_a_tick_says_for_how_long_the_supervisor_did_not_run():
    clock = FakeClock()
    settings = SupervisorSettings(heartbeat_seconds=2.0)
    service = SupervisorService(settings.config(1.0), metrics=Metrics(CollectorRegistry()), clock=clock)
    identity = RunnerIdentity(instance="r0", incarnation="1", pool="default/demo")
    service.supervisor.handle(events.RunnerConnected(identity, Capacity(pages=100)), clock())
    clock.advance(300)
    service.tick()
    (runner,) = service.supervisor.runners.values()
    assert not runner.silent, "its messages of that time may wait to be read"
    for _ in range(25):
        clock.advance(0.2)
        service.tick()
    assert runner.silent


def test_levels_are_taken_once_a_second_however_many_ticks_there_are():
    """They take tens of milliseconds where there are many runners. The last ones are those of the end."""
    clock, registry = FakeClock(), CollectorRegistry()
    service = SupervisorService(SupervisorSettings().config(1.0), metrics=Metrics(registry), clock=clock)

    def watched():
        return registry.get_sample_value("motet_watched_runners")

    service.tick()
    identity = RunnerIdentity(instance="r0", incarnation="1", pool="default/demo")
    service.supervisor.handle(events.RunnerConnected(identity, Capacity(pages=100)), clock())
    for _ in range(3):
        clock.advance(0.25)
        service.tick()
    assert watched() == 0
    clock.advance(0.25)
    service.tick()
    assert watched() == 1

    service.supervisor.runners.clear()
    clock.advance(0.25)
    service.tick()
    assert watched() == 1
    clock.now = service.next_due()
    service.tick()
    assert watched() == 0
    assert service.next_due() == inf


async def test_sequences_that_outgrow_their_promises_are_extended_then_parked_and_all_finish(folder):
    async with in_process_system(folder) as system:
        engines = engines_with_little_memory()
        runner = await system.runner("r0", engines, supervisor_answer_seconds=PATIENT)
        await until(lambda: "r0" in system.control.supervisor_service.supervisor.runners)
        await all_right(await ask_long_ones(system, engines))
        assert count(system, "promise_extensions") > 0
        assert ordered_parks(system, "swap") + ordered_parks(system, "recompute") > 0
        assert count(system, "resume_orders") > 0
        assert value_of(runner.service.metrics.self_parks) == 0, (
            "the runner protected itself although a supervisor was connected"
        )
        await system.ledgers_agree()
        assert not any(one.parked for one in system.control.scheduler.runners.values())


async def test_by_forecast_promises_are_extended_the_runner_parks_and_all_finish(folder):
    """The supervisor has no say in who is parked there: what it knows of the pages is older than an iteration."""
    async with in_process_system(folder) as system:
        engines = engines_with_little_memory("paged-chunk")
        runner = await system.runner("r0", engines, supervisor_answer_seconds=PATIENT)
        await until(lambda: "r0" in system.control.supervisor_service.supervisor.runners)
        await all_right(await ask_long_ones(system, engines))
        assert count(system, "promise_extensions") > 0
        assert ordered_parks(system, "swap") + ordered_parks(system, "recompute") == 0
        assert value_of(runner.service.metrics.self_parks) > 0
        assert count(system, "resume_orders") > 0
        await system.ledgers_agree()
        assert not any(one.parked for one in system.control.scheduler.runners.values())


@pytest.mark.parametrize("method", ["swap", "recompute"])
async def test_the_method_of_parking_can_be_forced(folder, method):
    async with in_process_system(folder, supervisor=SupervisorSettings(park_method=method)) as system:
        engines = engines_with_little_memory()
        runner = await system.runner("r0", engines, supervisor_answer_seconds=PATIENT)
        await until(lambda: "r0" in system.control.supervisor_service.supervisor.runners)
        await all_right(await ask_long_ones(system, engines))
        assert ordered_parks(system, method) > 0
        assert value_of(runner.service.metrics.resumes.labels(method)) > 0


@pytest.mark.parametrize(("page_tokens", "promises"), [(16, [1, 2, 4, 8, 11]), (32, [1, 2, 4, 6])])
async def test_a_promise_forced_to_one_page_doubles_at_each_overflow(folder, page_tokens, promises):
    """166 tokens: the longest possible answer limits the last doubling."""
    settings = SchedulerSettings(force_promise_pages=1)
    seen = []

    class Recording(FakeEngine):
        def add(self, sequence):
            seen.append(sequence.promise)
            super().add(sequence)

        def extend(self, request, epoch, promise, extended, *, number=0):
            done = super().extend(request, epoch, promise, extended, number=number)
            if done:
                seen.append(extended)
            return done

    async with in_process_system(folder, scheduler=settings) as system:
        await system.runner(
            "r0", lambda: Recording(step_seconds=0.002, page_tokens=page_tokens), supervisor_answer_seconds=PATIENT
        )
        await until(lambda: "r0" in system.control.supervisor_service.supervisor.runners)
        await system.gateway.ask("a", prompt=tuple(range(6)), max_tokens=160)
    assert seen == promises


async def test_with_the_supervisor_away_runners_park_by_themselves(folder):
    async with in_process_system(folder, supervised=False) as system:
        engines = engines_with_little_memory()
        runner = await system.runner("r0", engines)
        await all_right(await ask_long_ones(system, engines))
        assert value_of(runner.service.metrics.self_parks) > 0
        await system.ledgers_agree()


async def test_a_supervisor_that_dies_and_comes_back_loses_no_parked_request(folder):
    async with in_process_system(folder) as system:
        engines = engines_with_little_memory()
        await system.runner("r0", engines)
        await until(lambda: "r0" in system.control.supervisor_service.supervisor.runners)
        answers = await ask_long_ones(system, engines)
        await until(lambda: count(system, "park_orders") or any(system.control.scheduler.runners["r0"].parked))
        await system.control.supervisor_part.stop()
        await system.control.supervisor_part.start()
        await all_right(answers)
        await system.ledgers_agree()


async def test_without_a_scheduler_parked_requests_still_resume(folder):
    async with in_process_system(folder) as system:
        engines = engines_with_little_memory()
        await system.runner("r0", engines)
        await until(lambda: "r0" in system.control.supervisor_service.supervisor.runners)
        answers = await ask_long_ones(system, engines)
        await until(lambda: any(system.control.scheduler.runners["r0"].parked))
        await system.control.scheduler_part.stop()
        placed = [one for one in system.gateway.live() if one.placed is not None]
        assert placed
        for one in placed:
            await one.done
        await system.control.scheduler_part.start()
        await all_right(answers)
        await system.ledgers_agree()


class Stubborn(FakeEngine):
    def step(self):
        while getattr(self, "hung", False):
            time.sleep(0.01)
        return super().step()


def ask(system, streams):
    return [system.gateway.start(f"{n}", prompt=(n,), max_tokens=LENGTH) for n in range(streams)]


async def test_a_hung_engine_is_noticed_and_its_requests_go_on_elsewhere(folder):
    engines = []

    def stubborn():
        engines.append(Stubborn(step_seconds=0.05))
        return engines[-1]

    settings = SupervisorSettings(hang_seconds=10)
    async with in_process_system(folder, supervisor=settings) as system:
        await system.runner("r0", stubborn)
        await until(lambda: "r0" in system.control.supervisor_service.supervisor.runners)
        answers = ask(system, streams=3)
        await until(lambda: all(one.tokens for one in system.gateway.live()))
        await system.runner("r1")
        engines[0].hung = True
        try:
            await all_right(answers)
        finally:
            engines[0].hung = False
        assert all(asked.moves == 1 for asked in system.gateway.asked.values())
        assert (
            system.control.supervisor_metrics.get_sample_value("motet_runners_unhealthy_total", {"reason": "hung"}) == 1
        )


async def test_a_scheduler_that_was_away_hears_of_a_hung_runner_and_tells_the_operator(folder):
    engines = []

    def stubborn():
        engines.append(Stubborn(step_seconds=0.02))
        return engines[-1]

    async with in_process_system(folder, supervisor=SupervisorSettings(hang_seconds=4)) as system:
        await system.runner("r0", stubborn)
        await until(lambda: "r0" in system.control.supervisor_service.supervisor.runners)
        (answer,) = ask(system, streams=1)
        await until(lambda: all(one.tokens for one in system.gateway.live()))
        engines[0].hung = True
        try:
            await until(lambda: system.control.scheduler.runners["r0"].hung)
            await system.control.restart_scheduler()
            await until(lambda: "r0" in system.control.scheduler.runners)
            await until(lambda: system.control.scheduler.runners["r0"].hung, why="it is said again")
            await until(lambda: system.operator.of("runner")[-1].unhealthy)
        finally:
            engines[0].step_seconds = 0.0
            engines[0].hung = False
        assert await answer == tokens_of((0,), 7, LENGTH)
