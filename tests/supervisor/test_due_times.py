"""A supervisor whose ticks come when `next_due` says so misses nothing: no runner is reported or forgotten before."""

from math import inf

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import rule

from motet_supervisor.policy import effects, events
from tests.supervisor.builders import R0, SupervisorDriver, entry
from tests.supervisor.test_random_events import RandomEvents
from tests.support.quick_copy import quick_copy

MOMENT = 1e-6


def pass_time(driver, seconds, carry_out=lambda _: None):
    """Send the ticks that are due. Returns those that reported or forgot a runner, and when."""
    said, end = [], driver.clock() + seconds
    while (due := driver.supervisor.next_due()) <= end:
        assert due >= driver.clock()
        try_ticks_before(driver, due)
        driver.clock.now = due
        known = set(driver.supervisor.runners)
        carry_out(driver.send(events.Tick()))
        assert driver.supervisor.next_due() > driver.clock(), "a tick was of no use"
        if driver.of(effects.ReportRunnerLost) or known - set(driver.supervisor.runners):
            said.append(driver.clock())
    try_ticks_before(driver, end)
    driver.clock.now = end
    return said


def try_ticks_before(driver, due):
    """Before its time a tick neither reports nor forgets a runner."""
    for now in filter(lambda at: driver.clock() < at < due, ((driver.clock() + due) / 2, due - MOMENT)):
        copy = quick_copy(driver.supervisor)
        lost = [one for one in copy.handle(events.Tick(), now) if isinstance(one, effects.ReportRunnerLost)]
        assert not lost
        assert copy.runners.keys() == driver.supervisor.runners.keys()


class DueTimes(RandomEvents):
    promises_fit_the_runner = None  # `RandomEvents` checks it

    @rule(seconds=st.sampled_from((0.1, 1.0, 3.0, 30.0)))
    def wait(self, seconds):
        pass_time(self.driver, seconds, self.carry_out_all)

    @rule()
    def runner_disconnects(self):
        self.send(events.RunnerDisconnected(R0, "1"))

    @rule()
    def heartbeat(self):
        self.send(events.HeartbeatReceived(R0))

    def teardown(self):
        self.runner_reconnects()
        super().teardown()


TestDueTimes = pytest.mark.timeout(600)(DueTimes.TestCase)
TestDueTimes.settings = settings(
    max_examples=25, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


def test_a_supervisor_without_runners_sleeps():
    driver = SupervisorDriver(heartbeat=2.0, forget=50.125)
    assert driver.supervisor.next_due() == inf
    driver.connect()
    driver.send(events.RunnerDisconnected(R0, "1"))
    began = driver.clock()
    assert pass_time(driver, 100)[-1] == pytest.approx(began + 50.125)
    assert driver.supervisor.next_due() == driver.supervisor.tick_by == inf


def test_a_runner_is_reported_when_its_time_is_over_and_again_later():
    driver = SupervisorDriver(heartbeat=2.125, remind=10.25)
    driver.connect()
    began = driver.clock()
    assert pass_time(driver, 15) == pytest.approx([began + 2.125, began + 12.375])


def test_an_engine_is_reported_when_it_hangs():
    driver = SupervisorDriver(heartbeat=100.0, hang=20.125)
    driver.connect()
    driver.report(entry("a", 4), steps=1, work_pending=True)
    began = driver.clock()
    assert pass_time(driver, 25) == pytest.approx([began + 20.125])


def test_with_a_runner_a_tick_comes_so_often_that_it_shows_a_pause():
    driver = SupervisorDriver(heartbeat=100.0, max_sleep=0.5)
    driver.connect()
    began = driver.clock()
    for n in range(1, 4):
        assert driver.supervisor.next_due() == driver.supervisor.tick_by == began + 0.5 * n
        driver.clock.now += 0.25
        driver.send(events.HeartbeatReceived(R0))
        driver.clock.now += 0.25
        driver.send(events.Tick())


def test_time_without_runners_is_no_pause():
    driver = SupervisorDriver(max_sleep=0.5)
    driver.connect()
    driver.send(events.RunnerDisconnected(R0, "1"))
    pass_time(driver, 1000)
    driver.connect()
    assert driver.supervisor.tick_by == driver.clock() + 0.5


def test_a_runner_that_was_silent_for_long_is_forgotten_when_it_disconnects():
    driver = SupervisorDriver(forget=50.0)
    driver.connect()
    pass_time(driver, 60)
    driver.send(events.RunnerDisconnected(R0, "1"))
    assert driver.supervisor.next_due() == driver.clock()
    driver.send(events.Tick())
    assert not driver.supervisor.runners
