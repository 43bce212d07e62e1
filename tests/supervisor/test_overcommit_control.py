"""The factor of overcommit falls while requests are parked often, and rises again while hardly any is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.domain import RequestId
from motet_supervisor.policy import effects, events
from motet_supervisor.policy.overcommit import MANY_PARKED, MIN_SEQUENCES, QUIET_WINDOWS, OvercommitControl
from tests.supervisor.builders import R0, SupervisorDriver, entry

WINDOW = 10.0
MANY = round(MANY_PARKED * MIN_SEQUENCES)
"""One more is too many."""


def after(control, *windows, ended=100):
    """The factors after windows in which this number of those that ended was parked."""
    factors = []
    for parked in windows:
        for number in range(ended):
            control.note_end(parked=number < parked)
        control.look(control.began + WINDOW)
        factors.append(control.factor)
    return factors


def test_many_parked_halve_the_excess_and_few_raise_it_in_small_steps_after_a_while():
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
    for parked, others, later in turns:
        now += later
        for number in range(parked + others):
            control.note_end(parked=number < parked)
        if control.look(now):
            assert now - changed >= WINDOW
            changed = now
        assert 1.0 <= control.factor <= most


def test_it_comes_down_to_one_and_back_to_the_most():
    control = OvercommitControl(1.5, WINDOW, 0.0)
    assert after(control, *[50] * 10)[-1] == 1.0
    assert after(control, *[0] * 15)[-1] == pytest.approx(1.5)


def test_a_window_goes_on_until_enough_sequences_have_ended():
    control = OvercommitControl(2.0, WINDOW, 0.0)
    after(control, 0, ended=MIN_SEQUENCES - 1)
    assert control.began == 0.0
    after(control, 0, ended=1)
    assert control.began == WINDOW
    assert after(control, MANY, ended=MIN_SEQUENCES) == [2.0], "one of twenty is not more than one in twenty"


def test_a_window_ends_early_when_many_were_parked_for_certain():
    control = OvercommitControl(2.0, WINDOW, 0.0)
    assert after(control, MANY, 1, ended=MANY) == [2.0, 1.5]


def enough_end(driver, *, parked):
    names = [f"q{number}" for number in range(MIN_SEQUENCES)]
    driver.connect(*(entry(name, 4) for name in names), pages=100)
    for name in names[:parked]:
        driver.parked(name, 8)
    for name in names:
        driver.send(events.RequestEnded(R0, RequestId(name), 1))


def parked_often(driver):
    enough_end(driver, parked=MANY + 1)


LIVE = 40


@pytest.mark.parametrize("life", [10.0, 200.0])
@pytest.mark.parametrize(("one_in", "factor"), [(5, 1.0), (50, 1.5), (1000, 2.0)], ids=["many", "some", "none"])
def test_however_long_answers_are_the_share_of_parked_ones_decides(life, one_in, factor):
    """A long answer stands in many windows and is parked in one of them."""
    driver = SupervisorDriver(overcommit=2.0, most_heartbeats=1e9, heartbeat=1e9, hang=1e9)
    live = {f"q{number}": entry(f"q{number}", 4) for number in range(1, LIVE + 1)}
    driver.connect(*live.values(), pages=1000)
    control = driver.supervisor.overcommit_of("default/demo")
    control.factor = 1.5
    for number in range(LIVE + 1, LIVE + 800):
        driver.wait(life / LIVE)
        oldest, new = next(iter(live)), f"q{number}"
        driver.send(events.RequestEnded(R0, RequestId(oldest), 1))
        del live[oldest]
        live[new] = entry(new, 4)
        driver.report(*live.values(), pages=1000)
        if number % one_in == 0:
            driver.parked(new, 8)
            driver.resumed(new, 8)
            live[new] = live[new]._replace(pages=8, parked_times=1)
    assert control.factor == factor


def test_a_park_that_was_ordered_and_did_not_happen_is_none():
    driver = SupervisorDriver(overcommit=1.5)
    names = [f"q{number}" for number in range(MIN_SEQUENCES)]
    driver.connect(*(entry(name, 4) for name in names), pages=4 * MIN_SEQUENCES * 2 // 3)
    driver.overflow(entry(names[0], 4, used=4))
    assert len(driver.of(effects.Park)) == 1
    for name in names[1 : MANY + 1]:
        driver.parked(name, 8)  # by itself
    for name in names:
        driver.send(events.RequestEnded(R0, RequestId(name), 1))
    driver.wait(WINDOW)
    assert driver.supervisor.overcommit_of("default/demo").factor == 1.5, "one of twenty was parked"


def test_requests_that_ended_before_a_report_named_them_count():
    driver = SupervisorDriver(overcommit=1.5)
    parked_often(driver)
    for number in range(2 * MIN_SEQUENCES):
        driver.send(events.RequestEnded(R0, RequestId(f"short{number}"), 1))
    driver.wait(WINDOW)
    assert driver.supervisor.overcommit_of("default/demo").factor == 1.5, "two in a hundred were parked"


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
        enough_end(driver, parked=0)
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


def factors_told(driver):
    return [one.factor for one in driver.effects if isinstance(one, effects.ReportOvercommit | effects.SetOvercommit)]


def test_a_supervisor_that_starts_begins_at_the_lowest_factor_that_runners_keep():
    driver = SupervisorDriver(overcommit=3.0)
    driver.connect(instance="r0", overcommit=1.5)
    assert set(factors_told(driver)) == {1.5}
    driver.connect(instance="r1", overcommit=2.0)
    assert set(factors_told(driver)) == {1.5}
    driver.connect(instance="r2")  # none, or it is of an earlier version
    assert set(factors_told(driver)) == {1.5}
    driver.connect(instance="r3", overcommit=0.5)
    assert set(factors_told(driver)) == {1.0}
    assert {runner.ledger.limit for runner in driver.supervisor.runners.values()} == {100}
    told = [one.instance for one in driver.of(effects.SetOvercommit)]
    assert sorted({*told}) == ["r0", "r1", "r2", "r3"]
    assert isinstance(driver.effects[0], effects.ReportOvercommit), "the scheduler first: it asks for less from now on"


def test_a_runner_keeps_no_more_than_the_setting_allows():
    driver = SupervisorDriver(overcommit=1.5)
    driver.connect(overcommit=4.0)
    assert set(factors_told(driver)) == {1.5}


def test_a_runner_that_was_away_does_not_change_what_has_been_learned_since():
    driver = SupervisorDriver(overcommit=1.5)
    parked_often(driver)
    driver.wait(WINDOW)
    driver.connect(instance="r1", overcommit=1.0)
    assert set(factors_told(driver)) == {1.25}
