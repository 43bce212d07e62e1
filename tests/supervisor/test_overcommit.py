"""How far promises may exceed the pages: the supervisor sets the factor, runners and schedulers follow it."""

import pytest
from pydantic import ValidationError

from motet_simulator.fake_engine import FakeEngine, SlowEngines, tokens_of
from motet_supervisor.policy import effects, events
from motet_supervisor.settings import Settings
from tests.supervisor.builders import R0, SupervisorDriver, entry
from tests.support.in_process_services import until
from tests.support.in_process_system import in_process_system
from tests.support.metric_values import value_of

LENGTH = 159
"""With a prompt of one token, a request of this length takes exactly ten pages."""


def test_a_runner_that_connects_gets_the_factor_before_the_scheduler():
    driver = SupervisorDriver(overcommit=1.5)
    driver.connect()
    assert driver.effects[:2] == [
        effects.SetOvercommit(R0, "default/demo", 1.5),
        effects.ReportOvercommit("default/demo", 1.5),
    ]


def test_a_scheduler_that_connects_gets_the_factor_of_every_pool():
    driver = SupervisorDriver(overcommit=1.5)
    driver.connect(instance="r0")
    driver.connect(instance="r1")
    driver.send(events.SchedulerConnected(1, 1))
    assert driver.of(effects.ReportOvercommit) == [effects.ReportOvercommit("default/demo", 1.5)]


def test_promises_are_extended_up_to_the_larger_limit():
    driver = SupervisorDriver(overcommit=1.5)
    driver.connect(entry("a", 4), entry("b", 8), pages=10)
    driver.overflow(entry("a", 4, used=4))
    assert [one.extended for one in driver.of(effects.Extend)] == [7]


@pytest.mark.parametrize(("reported", "extended"), [(0, 7), (9, 5), (8, None), (11, 7)])
def test_promises_are_extended_within_the_pages_that_the_runner_reports(reported, extended):
    driver = SupervisorDriver(overcommit=1.5)
    driver.connect(entry("a", 4), entry("b", 8), pages=10)
    driver.report(entry("a", 4, used=3), entry("b", 8), pages=reported)
    driver.overflow(entry("a", 4, used=4))
    assert [one.extended for one in driver.of(effects.Extend)] == ([] if extended is None else [extended])


@pytest.mark.parametrize("factor", ["0.9", "4.1"])
def test_a_factor_out_of_bounds_is_refused(factor):
    with pytest.raises(ValidationError, match="overcommit"):
        Settings(overcommit=factor)


async def test_the_runner_accepts_what_the_scheduler_promises(folder):
    engines = SlowEngines(0.05, pages=20)
    async with in_process_system(folder, supervisor=Settings(overcommit=1.5)) as system:
        runner = await system.runner("r0", engines)
        known = system.control.scheduler.runners["r0"]
        await until(lambda: engines.made[0].ledger.limit == known.ledger.limit == 30)
        answers = [system.gateway.start(f"{n}", prompt=(n,), max_tokens=LENGTH, q80=LENGTH) for n in range(6)]
        await until(lambda: known.ledger.promised == 30, why="three requests of ten pages on twenty")
        await until(lambda: sum(bool(one.tokens) for one in system.gateway.live()) == 3)
        engines.hurry(0.01)  # the supervisor gets time, also on a busy machine
        for n, answer in enumerate(answers):
            assert await answer == tokens_of((n,), 7, LENGTH)
        parks = value_of(runner.service.metrics.self_parks)
        assert parks > 0, "the pages never ran out"
        assert parks <= len(answers), "requests resumed without pages, and were parked again"
        assert all(len(asked.placements) == 1 for asked in system.gateway.asked.values()), "a request was declined"
        await system.ledgers_agree()


async def test_a_new_incarnation_and_a_new_scheduler_hear_the_factor_again(folder):
    engines = []

    def engine():
        engines.append(FakeEngine())
        return engines[-1]

    async with in_process_system(folder, supervisor=Settings(overcommit=2.0)) as system:
        runner = await system.runner("r0", engine)
        await until(lambda: engines[0].ledger.overcommit == 2.0)
        await runner.restart()
        await until(lambda: engines[1].ledger.overcommit == 2.0)
        await system.control.restart_scheduler()
        await until(lambda: (one := system.control.scheduler.runners.get("r0")) and one.ledger.overcommit == 2.0)


async def test_with_the_supervisor_away_both_ledgers_keep_the_last_factor(folder):
    engines = []

    def engine():
        engines.append(FakeEngine())
        return engines[-1]

    async with in_process_system(folder, supervisor=Settings(overcommit=2.0)) as system:
        runner = await system.runner("r0", engine)
        known = system.control.scheduler.runners["r0"]
        await until(lambda: engines[0].ledger.overcommit == known.ledger.overcommit == 2.0)
        await system.control.supervisor_part.stop()
        await until(lambda: not system.control.scheduler_service.supervisor.connected)
        assert await system.gateway.ask("a", max_tokens=20)
        assert engines[0].ledger.overcommit == known.ledger.overcommit == 2.0
        await runner.restart()
        await until(lambda: system.control.scheduler.runners["r0"] is not known)
        assert system.control.scheduler.runners["r0"].ledger.overcommit == engines[1].ledger.overcommit == 1.0
