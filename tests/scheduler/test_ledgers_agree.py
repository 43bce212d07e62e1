"""Three runners that decline at random, report late and restart, under a random load: the ledger follows them. One has
larger pages."""

import asyncio
import random

import pytest

from motet_scheduler.settings import Settings
from motet_simulator.fake_engine import FakeEngine, tokens_of
from tests.support.in_process_services import until
from tests.support.in_process_system import in_process_system
from tests.support.metric_values import value_of


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_after_every_quiet_moment_the_ledger_equals_the_runners_reports(folder, seed):
    chance = random.Random(seed)
    # A placement that never arrived is released after a quarter of a second.
    async with in_process_system(folder, scheduler=Settings(unsubmitted_seconds=5)) as system:
        await system.runner(
            "declines", lambda: FakeEngine(pages=24, step_seconds=0.002, decline_rate=0.3, seed=seed), report_seconds=1
        )
        await system.runner("late", lambda: FakeEngine(pages=16, page_tokens=32, step_seconds=0.002), report_seconds=3)
        restarts = await system.runner("restarts", lambda: FakeEngine(pages=40, step_seconds=0.002))
        answers = {}
        for round_ in range(4):
            for n in range(12):
                name = f"{round_}.{n}"
                prompt = (round_, n, *range(chance.randrange(40)))
                length = chance.randrange(1, 150)
                answers[name] = (
                    prompt,
                    length,
                    system.gateway.start(name, prompt=prompt, max_tokens=length, q80=chance.randrange(1, 150)),
                )
                await asyncio.sleep(chance.random() * 0.01)
            for name in chance.sample(sorted(answers), 2):
                if not answers[name][2].done():
                    system.gateway.cancel(name)
            if round_ % 2:
                await restarts.restart()
            await system.ledgers_agree()
        for prompt, length, answer in answers.values():
            if not answer.cancelled():
                assert await answer == tokens_of(prompt, 7, length)
        await until(lambda: not system.control.scheduler.requests)
        await system.ledgers_agree()
        system.control.scheduler.check()
        assert all(not runner.entries and not runner.parked for runner in system.control.scheduler.runners.values())


async def test_a_runner_without_a_supervisor_parks_by_itself_and_the_ledgers_still_agree(folder):
    async with in_process_system(folder) as system:
        await system.runner("alone", lambda: FakeEngine(pages=20, step_seconds=0.001), supervised=False)
        answers = [system.gateway.start(f"{n}", prompt=(n,), max_tokens=150, q80=8) for n in range(6)]
        await system.ledgers_agree()
        for n, answer in enumerate(answers):
            assert await answer == tokens_of((n,), 7, 150)
        await system.ledgers_agree()
        metrics = system.runners["alone"].service.metrics
        assert value_of(metrics.self_parks) > 0
