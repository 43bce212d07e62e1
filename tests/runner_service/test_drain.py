"""A runner that is told to end: nothing new, what waits goes back, what runs may finish, and nothing is lost."""

import asyncio
import contextlib
import time

from motet.clock import FakeClock
from motet.health import Health
from motet_runner.progress import Progress
from tests.runner_service.peers import gateway_to, scheduler_at
from tests.support.control_plane import until
from tests.support.fake_engine import FakeEngine, tokens_of
from tests.support.house import open_house
from tests.support.runners import fake_runner


def slow(**how):
    return lambda: FakeEngine(step_seconds=0.005, **how)


async def test_what_runs_ends_what_waits_goes_on_elsewhere_and_nothing_new_comes(folder):
    async with open_house(folder) as house:
        leaving = await house.runner("r0", slow(max_sequences=2))
        running = [house.gateway.start(f"{n}", prompt=(n,), max_tokens=100) for n in range(2)]
        await until(lambda: all(one.tokens for one in house.gateway.live()))
        await house.runner("r1", slow())
        started = time.monotonic()
        await leaving.service.drain(30)
        assert time.monotonic() - started < 10, "it ends when all is done, not when time is up"
        for n, answer in enumerate(running):
            assert await answer == tokens_of((n,), 7, 100)
            assert house.gateway.asked[f"{n}"].moves == 0
        new = await house.gateway.ask("new", prompt=(9,), max_tokens=4)
        assert new == tokens_of((9,), 7, 4)
        assert [instance for _, instance in house.gateway.asked["new"].placements] == ["r1"]
        assert house.gateway.declines == 0, "the scheduler knows"


async def test_what_still_runs_at_the_end_moves_with_the_tokens_that_it_has(folder):
    async with open_house(folder) as house:
        leaving = await house.runner("r0", slow())
        answers = [house.gateway.start(f"{n}", prompt=(n,), max_tokens=400) for n in range(4)]
        await until(lambda: all(one.tokens for one in house.gateway.live()))
        await house.runner("r1", slow())
        await leaving.service.drain(0.3)
        assert len(leaving.service.book) == 0
        await leaving.stop()
        for n, answer in enumerate(answers):
            assert await answer == tokens_of((n,), 7, 400)
            assert [instance for _, instance in house.gateway.asked[f"{n}"].placements] == ["r0", "r1"]


async def test_what_waits_is_handed_back_at_once(folder):
    patient = {"time_scale": 1.0, "adapter_wait_seconds": 60}
    async with fake_runner(folder, engine=slow(), **patient) as runner, gateway_to(runner.address) as gateway:
        await gateway.submit("first", max_tokens=300)
        await until(lambda: gateway.tokens)
        await gateway.submit("second", max_tokens=8, adapter="sha256:" + 64 * "0")
        await until(lambda: len(runner.service.book) == 2)
        draining = asyncio.create_task(runner.service.drain(30))
        given_back = await gateway.finished("second")
        assert not given_back.tokens
        assert not draining.done()
        await gateway.submit("third")
        assert (await gateway.refusal("third")).failure.code == "declined"
        await gateway.finished("first")
        await draining
        assert len(gateway.tokens["first", 1]) == 300


async def test_a_scheduler_that_comes_while_it_drains_hears_of_it(folder):
    address = f"unix:{folder}/s.sock"
    async with fake_runner(folder, scheduler=address, engine=slow()) as runner, gateway_to(runner.address) as gateway:
        await gateway.submit("first", max_tokens=200)
        await until(lambda: gateway.tokens)
        draining = asyncio.create_task(runner.service.drain(30))
        await until(lambda: runner.service.draining)
        async with scheduler_at(address) as scheduler:
            (word,) = await until(lambda: scheduler.of("draining"))
            assert 20 < word.deadline_seconds <= 30
            draining.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await draining


async def test_ready_means_known_to_a_scheduler_and_not_draining(folder):
    address, health = f"unix:{folder}/s.sock", Health()
    async with fake_runner(folder, scheduler=address, health=health) as runner:
        assert health.unready_because() == "no scheduler has welcomed it yet"
        async with scheduler_at(address):
            await until(lambda: not health.unready_because())
        await asyncio.sleep(0.1)
        assert health.unready_because() == "", "a scheduler that goes away comes back"
        assert health.dead_because() == ""
        await runner.service.drain(5)
        assert health.unready_because() == "this runner is being drained"


def test_an_engine_is_hung_when_it_has_work_and_stands_still():
    clock = FakeClock()
    progress = Progress(60, clock)
    assert progress.hung_because() == ""
    for steps in (1, 2, 3):  # slow
        progress.saw(steps, work=True)
        clock.advance(50)
        progress.saw(steps, work=True)
        assert progress.hung_because() == ""
    progress.saw(3, work=True)
    clock.advance(11)
    assert progress.hung_because() == "no engine step for 61 s while work waits"
    progress.saw(3, work=False)
    assert progress.hung_because() == ""
    clock.advance(1000)
    progress.saw(3, work=False)  # idle for long
    progress.saw(3, work=True)
    assert progress.hung_because() == ""
