"""Who finds the queue full is told when there is room for him."""

import pytest

from motet.domain import Tenant
from motet_scheduler.policy import effects
from motet_scheduler.policy.departures import MAX_RETRY_SECONDS, MIN_RETRY_SECONDS, UNKNOWN_SECONDS, Departures
from tests.scheduler.builders import SchedulerDriver, ready

QUEUE = 8


def full(seconds_each: float) -> tuple[SchedulerDriver, list[str]]:
    """A full queue before one runner that takes one request at a time, and who runs there."""
    driver = ready(queue_limit=QUEUE)
    driver.attach(max_sequences=1)
    running = []
    for number in range(QUEUE + 1):
        driver.enqueue(f"r{number}")
        running += [placed.request for placed in driver.of(effects.SendPlaced)]
    for number in range(20):
        driver.clock.advance(seconds_each)
        one_ends(driver, running)
        driver.enqueue(f"more{number}")
    return driver, running


def one_ends(driver: SchedulerDriver, running: list[str]) -> None:
    driver.finish(running.pop())
    running += [placed.request for placed in driver.of(effects.SendPlaced)]


def hint(driver: SchedulerDriver) -> float:
    driver.enqueue("too many")
    (refused,) = driver.of(effects.SendRefused)
    assert refused.failure.code == "pool_saturated"
    return refused.failure.retry_after


def test_each_that_is_refused_is_told_when_one_more_has_left():
    driver, _ = full(seconds_each=3.0)
    assert [hint(driver) for _ in range(4)] == pytest.approx([3.0, 6.0, 9.0, 12.0])


def test_those_that_come_when_they_were_told_to_find_room():
    driver, running = full(seconds_each=3.0)
    hints = [hint(driver) for _ in range(4)]
    for number, (before, seconds) in enumerate(zip([0.0, *hints], hints, strict=False)):
        driver.clock.advance(seconds - before)
        one_ends(driver, running)
        driver.enqueue(f"again{number}")
        assert not driver.of(effects.SendRefused)


def test_no_hint_is_shorter_than_clients_can_wait_or_longer_than_they_do():
    driver, _ = full(seconds_each=0.01)
    assert hint(driver) == MIN_RETRY_SECONDS
    driver, _ = full(seconds_each=25.0)
    assert [hint(driver) for _ in range(4)][-1] == MAX_RETRY_SECONDS


def test_a_queue_that_nobody_has_left_has_no_rate():
    driver = ready(queue_limit=1)
    driver.enqueue("waits for the first runner")
    assert hint(driver) == hint(driver) == UNKNOWN_SECONDS


def test_a_queue_that_stands_still_is_slower_than_it_was():
    driver, _ = full(seconds_each=1.0)
    driver.clock.advance(200.0)
    assert hint(driver) > 8.0


def test_times_when_nobody_waited_say_nothing_about_how_fast_a_queue_empties():
    driver = ready(queue_limit=QUEUE)
    driver.attach(max_sequences=1)
    running: list[str] = []
    for number in range(80):
        driver.enqueue(f"quiet{number}")
        running += [placed.request for placed in driver.of(effects.SendPlaced)]
        driver.clock.advance(60.0)
        driver.finish(running.pop())
    for number in range(QUEUE + 1):
        driver.enqueue(f"r{number}")
        running += [placed.request for placed in driver.of(effects.SendPlaced)]
    for number in range(4):
        driver.clock.advance(2.0)
        one_ends(driver, running)
        driver.enqueue(f"more{number}")
    assert hint(driver) == pytest.approx(2.0)


def test_a_tenant_that_does_not_wait_as_it_was_told_delays_no_other():
    departures = Departures()
    departures.begin(0.0)
    for number in range(20):
        departures.note(float(number + 1))
    for _ in range(200):
        last = departures.retry_after(Tenant("zeta"), 20.0)
    assert last == MAX_RETRY_SECONDS
    assert departures.retry_after(Tenant("acme"), 20.0) == pytest.approx(2.0)
