"""The factor of overcommit falls while requests are parked often, and rises again while hardly any is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.domain import RequestId
from motet_supervisor.policy import effects, events
from motet_supervisor.policy.overcommit import MIN_SEQUENCES, QUIET_WINDOWS, OvercommitControl
from tests.supervisor.builders import R0, SupervisorDriver, entry

WINDOW = 10.0


def after(control, *windows, live=100):
    """The factors after windows with this number of parks each."""
    factors = []
    for parks in windows:
        for _ in range(parks):
            control.note_park()
        control.look(live, control.began + WINDOW)
        factors.append(control.factor)
    return factors


def test_many_parks_halve_the_excess_and_few_raise_it_in_small_steps_after_a_while():
    control = OvercommitControl(2.0, WINDOW, 0.0)
    assert after(control, 6, 6, 6) == [1.5, 1.25, 1.125]
    rises = [1.125] * (QUIET_WINDOWS - 1) + [1.225, 1.325]
    assert after(control, *[0] * (QUIET_WINDOWS + 1)) == pytest.approx(rises)


def test_between_the_two_shares_nothing_changes():
    control = OvercommitControl(2.0, WINDOW, 0.0)
    after(control, 6)
    assert set(after(control, *[3] * 20)) == {1.5}


@given(st.floats(1, 4), st.lists(st.tuples(st.integers(0, 200), st.integers(0, 200), st.floats(0, 30))))
def test_the_factor_stays_within_its_bounds_and_changes_once_a_window_at_most(most, turns):
    control, now, changed = OvercommitControl(most, WINDOW, 0.0), 0.0, -WINDOW
    for parks, live, later in turns:
        now += later
        for _ in range(parks):
            control.note_park()
        if control.look(live, now):
            assert now - changed >= WINDOW
            changed = now
        assert 1.0 <= control.factor <= most


def test_it_comes_down_to_one_and_back_to_the_most():
    control = OvercommitControl(1.5, WINDOW, 0.0)
    assert after(control, *[50] * 10)[-1] == 1.0
    assert after(control, *[0] * 15)[-1] == pytest.approx(1.5)


def test_a_window_goes_on_until_it_has_seen_enough_sequences():
    control = OvercommitControl(2.0, WINDOW, 0.0)
    control.note_park()
    assert not control.look(MIN_SEQUENCES - 1, 100.0)
    control.note_end()
    assert not control.look(MIN_SEQUENCES - 1, 100.0), "one of twenty is not more than one in twenty"
    control.note_park()
    control.note_park()
    assert control.look(MIN_SEQUENCES, 120.0)


def parked_often(driver):
    names = [f"q{number}" for number in range(MIN_SEQUENCES)]
    driver.connect(*(entry(name, 4) for name in names), pages=100)
    for name in names[:3]:
        driver.parked(name, 8)


def test_a_lower_factor_is_told_to_the_scheduler_first_and_limits_extensions():
    driver = SupervisorDriver(overcommit=1.5)
    parked_often(driver)
    driver.wait(WINDOW)
    told = [one for one in driver.effects if isinstance(one, effects.ReportOvercommit | effects.SetOvercommit)]
    assert told == [
        effects.ReportOvercommit("default/demo", 1.25),
        effects.SetOvercommit(R0, "default/demo", 1.25),
    ]
    assert driver.supervisor.runners[R0].ledger.limit == 125
    driver.connect(incarnation="2")
    assert driver.of(effects.SetOvercommit) == [effects.SetOvercommit(R0, "default/demo", 1.25)], "the present one"
    driver.send(events.SchedulerConnected(1, 1))
    assert driver.of(effects.ReportOvercommit) == [effects.ReportOvercommit("default/demo", 1.25)]


def test_a_larger_factor_is_told_to_the_runners_first():
    driver = SupervisorDriver(overcommit=1.5, most_heartbeats=1e9, heartbeat=1e9, hang=1e9)
    parked_often(driver)
    driver.wait(WINDOW)
    told = []
    while not told:
        driver.wait(WINDOW)
        told = [
            type(one) for one in driver.effects if isinstance(one, effects.ReportOvercommit | effects.SetOvercommit)
        ]
    assert told == [effects.SetOvercommit, effects.ReportOvercommit]


def test_without_overcommit_nothing_is_controlled():
    driver = SupervisorDriver()
    parked_often(driver)
    driver.wait(WINDOW)
    assert not driver.of(effects.SetOvercommit)


def test_a_pool_without_runners_begins_anew():
    driver = SupervisorDriver(overcommit=1.5)
    parked_often(driver)
    driver.wait(WINDOW)
    driver.send(events.RunnerDisconnected(R0, "1"))
    driver.wait(100)
    assert driver.supervisor.overcommit_of("default/demo").factor == 1.5
    driver.send(events.RequestEnded(R0, RequestId("q1"), 1))
