"""When a runner counts as lost: if it is silent or hangs, but not if it is slow."""

import pytest

from motet.runner_info import Capacity, RunnerIdentity
from motet_supervisor.policy import effects, events
from tests.supervisor.builders import R0, SupervisorDriver, entry


def report_for(driver, *, seconds, step=1.0, steps_per_report=0, pending=True, start=0):
    """Report every `step` seconds. Between two reports the engine makes `steps_per_report` steps."""
    lost = []
    steps = start
    for _ in range(int(seconds / step)):
        driver.clock.advance(step)
        steps += steps_per_report
        driver.report(entry("a", 4), steps=steps, work_pending=pending)
        driver.send(events.Tick())
        lost += driver.of(effects.ReportRunnerLost)
    return lost, steps


def test_a_silent_runner_is_reported_lost_once():
    driver = SupervisorDriver(heartbeat=5.0)
    driver.connect()
    assert not driver.wait(4.9)
    (lost,) = driver.wait(0.2)
    assert (lost.identity.instance, lost.hung) == ("r0", False)
    assert not driver.wait(5)


def test_a_runner_may_be_silent_for_its_whole_time():
    driver = SupervisorDriver(heartbeat=5.0, forget=50.0)
    driver.connect()
    assert not driver.wait(5.0)
    driver.send(events.RunnerDisconnected(R0, "1"))
    assert driver.wait(45.0)
    assert R0 in driver.supervisor.runners
    driver.wait(0.1)
    assert not driver.supervisor.runners


def test_a_runner_that_reports_again_can_be_lost_again():
    driver = SupervisorDriver(heartbeat=5.0)
    driver.connect()
    driver.wait(6)
    driver.report(steps=1)
    assert driver.wait(6)


def test_a_heartbeat_is_a_sign_of_life_like_a_report():
    driver = SupervisorDriver(heartbeat=2.0)
    driver.connect()
    for _ in range(20):
        assert not driver.wait(0.4)
        driver.send(events.HeartbeatReceived(R0))
    assert not driver.wait(1.9)
    (lost,) = driver.wait(0.2)
    assert lost.silent_seconds == pytest.approx(2.1)
    driver.send(events.HeartbeatReceived(R0))
    assert not driver.supervisor.runners[R0].unhealthy


def test_heartbeats_alone_do_not_show_that_an_engine_works():
    driver = SupervisorDriver(heartbeat=2.0, hang=20.0)
    driver.connect()
    driver.report(entry("a", 4), steps=5, work_pending=True)
    lost = []
    for _ in range(60):
        driver.send(events.HeartbeatReceived(R0))
        lost += driver.wait(0.4)
    assert [(one.hung, one.silent_seconds) for one in lost] == [(True, 0.0)]


def test_a_supervisor_that_did_not_run_condemns_nobody():
    """As on a machine that was suspended, or whose cores others took: what came meanwhile is read after the tick."""
    driver = SupervisorDriver(heartbeat=2.0, hang=20.0)
    driver.connect()
    driver.report(entry("a", 4), steps=5, work_pending=True)
    driver.clock.advance(300)
    assert not driver.send(events.Tick(late=299.6))
    driver.wait(0.2)
    driver.report(entry("a", 4), steps=6, work_pending=True)
    assert not driver.wait(2.1)
    assert driver.wait(2.9), "from then on, time counts again"


def test_a_supervisor_that_is_always_late_still_finds_a_silent_runner():
    driver = SupervisorDriver(heartbeat=2.0)
    driver.connect()
    lost = []
    for _ in range(15):
        driver.clock.advance(1.0)
        lost += driver.send(events.Tick(late=0.6))
    assert len(lost) == 1


def test_where_the_supervisor_runs_late_runners_may_too():
    driver = SupervisorDriver(heartbeat=2.0, lateness_factor=4.0)
    driver.connect()
    driver.clock.advance(0.5)
    driver.send(events.Tick(late=0.3))
    driver.send(events.HeartbeatReceived(R0))
    lost = []
    while not lost:
        lost = driver.wait(0.2)
    assert 2.2 < lost[0].silent_seconds < 2.0 + 4 * 0.3
    driver.send(events.HeartbeatReceived(R0))
    for _ in range(50):
        driver.wait(0.2)
        driver.send(events.HeartbeatReceived(R0))
    assert not driver.wait(2.0)
    assert driver.wait(0.1), "it has been in time since then"


def test_a_runner_without_heartbeats_has_the_time_of_a_few_reports():
    driver = SupervisorDriver(heartbeat=2.0)
    identity = RunnerIdentity(instance="r0", incarnation="1", pool="default/demo")
    driver.send(events.RunnerConnected(identity, Capacity(pages=100), heartbeats=False))
    assert not driver.wait(4.9)
    assert driver.wait(0.2)


def test_an_engine_with_work_and_no_step_is_hung():
    driver = SupervisorDriver(hang=20.0)
    driver.connect()
    report_for(driver, seconds=5, steps_per_report=50)
    lost, _ = report_for(driver, seconds=30, steps_per_report=0, start=250)
    assert [one.hung for one in lost] == [True]


def test_an_engine_without_work_may_stand_still():
    driver = SupervisorDriver(hang=20.0)
    driver.connect()
    lost, _ = report_for(driver, seconds=120, pending=False)
    assert not lost


def test_a_slow_engine_is_not_hung():
    driver = SupervisorDriver(hang=20.0, hang_steps=10.0)
    driver.connect()
    lost, steps = report_for(driver, seconds=300, step=10.0, steps_per_report=1)
    assert not lost
    driver.heartbeat = None
    # With ten seconds a step, the limit is a hundred seconds.
    lost, _ = report_for(driver, seconds=90, start=steps)
    assert not lost
    lost, _ = report_for(driver, seconds=20, start=steps)
    assert lost


def test_one_slow_step_does_not_raise_the_limit_for_long():
    driver = SupervisorDriver(hang=20.0, hang_steps=10.0)
    driver.connect()
    report_for(driver, seconds=15, step=15.0, steps_per_report=1)
    _, steps = report_for(driver, seconds=60, steps_per_report=50, start=1)
    lost, _ = report_for(driver, seconds=30, start=steps)
    assert lost


def test_an_engine_that_hangs_again_after_a_step_is_found_as_soon():
    driver = SupervisorDriver(hang=20.0, hang_steps=10.0)
    driver.connect()
    report_for(driver, seconds=5, steps_per_report=50)
    lost, _ = report_for(driver, seconds=60, start=250)
    assert lost
    report_for(driver, seconds=1, steps_per_report=1, start=250)
    lost, _ = report_for(driver, seconds=21, start=251)
    assert [one.hung for one in lost] == [True]


def test_an_engine_whose_every_step_takes_longer_than_a_hang_is_slow():
    driver = SupervisorDriver(hang=20.0, hang_steps=10.0)
    driver.connect()
    hangs = []
    for steps in range(10):
        lost, _ = report_for(driver, seconds=30, start=steps)
        hangs.append(any(not one.again for one in lost))
        report_for(driver, seconds=1, steps_per_report=1, start=steps)
    assert hangs == [True, True] + [False] * 8


def test_no_step_raises_the_limit_above_five_hangs():
    driver = SupervisorDriver(hang=20.0, hang_steps=10.0)
    driver.connect()
    report_for(driver, seconds=19, pending=True)
    report_for(driver, seconds=1, steps_per_report=1)
    lost, _ = report_for(driver, seconds=99, start=1)
    assert not lost
    lost, _ = report_for(driver, seconds=3, start=1)
    assert lost


def test_work_after_a_long_idle_time_does_not_make_an_engine_hung():
    driver = SupervisorDriver(hang=20.0)
    driver.connect()
    _, steps = report_for(driver, seconds=300, pending=False)
    lost, _ = report_for(driver, seconds=10, start=steps)
    assert not lost


def test_a_hung_runner_gets_no_orders_until_it_moves():
    driver = SupervisorDriver(hang=20.0)
    driver.connect()
    report_for(driver, seconds=30, start=5)
    assert not driver.overflow(entry("a", 4, used=4))
    driver.report(entry("a", 4, used=4), steps=99, work_pending=True)
    assert driver.of(effects.Extend)


def test_a_hung_runner_is_reported_again_for_a_scheduler_that_was_away():
    driver = SupervisorDriver(hang=20.0, heartbeat=5.0)
    driver.connect()
    lost, _ = report_for(driver, seconds=45, start=5)
    assert [one.again for one in lost] == [False, True, True]
    lost, _ = report_for(driver, seconds=15, steps_per_report=50, start=5)
    assert not lost


def test_a_silent_runner_is_reported_again_for_a_scheduler_that_was_away():
    driver = SupervisorDriver(heartbeat=5.0, remind=10.0)
    driver.connect()
    lost = []
    for _ in range(26):
        driver.wait(1.0)
        lost += driver.of(effects.ReportRunnerLost)
    assert [(one.again, one.hung, one.silent_seconds) for one in lost] == [(False, False, 6), (True, False, 17)]
    driver.report()
    driver.wait(4.0)
    assert not driver.of(effects.ReportRunnerLost)


@pytest.mark.parametrize("hung", [True, False])
def test_a_scheduler_that_connects_is_told_at_once_who_is_unhealthy(hung):
    driver = SupervisorDriver(hang=3.0, heartbeat=5.0)
    driver.connect(instance="r1")
    driver.connect()
    driver.report(work_pending=True)
    driver.wait(4.0 if hung else 5.1)
    driver.report(instance="r1")
    driver.send(events.SchedulerConnected(1, 1))
    (lost,) = driver.of(effects.ReportRunnerLost)
    assert (lost.identity.instance, lost.hung, lost.again) == ("r0", hung, True)


def test_a_runner_whose_stream_is_down_for_long_is_forgotten():
    driver = SupervisorDriver(heartbeat=5.0)
    driver.connect()
    driver.send(events.RunnerDisconnected(R0, "1"))
    driver.wait(6)
    assert driver.of(effects.ReportRunnerLost)
    driver.wait(60)
    assert not driver.supervisor.runners


def test_the_end_of_an_old_stream_does_not_affect_the_new_one():
    driver = SupervisorDriver()
    driver.connect(incarnation="2")
    driver.send(events.RunnerDisconnected(R0, "1"))
    assert driver.supervisor.runners[R0].connected


def test_an_engine_that_stands_still_after_a_silence_is_hung():
    driver = SupervisorDriver(heartbeat=5.0, hang=20.0)
    driver.connect()
    _, steps = report_for(driver, seconds=5, steps_per_report=50)
    (silent,) = driver.wait(6)
    assert not silent.hung
    lost, _ = report_for(driver, seconds=300, start=steps)
    assert [one.hung for one in lost if not one.again] == [True]


def test_time_without_reports_does_not_count_as_a_hang():
    """As on a machine that was suspended."""
    driver = SupervisorDriver(heartbeat=5.0, hang=20.0)
    driver.connect()
    _, steps = report_for(driver, seconds=5, steps_per_report=50)
    driver.wait(600)
    lost, _ = report_for(driver, seconds=15, start=steps)
    assert not lost


def test_a_runner_with_gaps_in_its_reports_and_no_step_is_hung():
    driver = SupervisorDriver(heartbeat=5.0, hang=20.0)
    driver.connect()
    lost, steps = report_for(driver, seconds=5, steps_per_report=50)
    for _ in range(10):
        driver.wait(6)
        lost += report_for(driver, seconds=4, start=steps)[0]
    assert any(one.hung for one in lost)


def test_a_hung_runner_whose_stream_comes_back_is_hung_until_it_moves():
    driver = SupervisorDriver(hang=20.0)
    driver.connect()
    report_for(driver, seconds=30, start=5)
    driver.connect(entry("a", 4, used=4))
    assert not driver.of(effects.Extend)
    driver.report(entry("a", 4, used=4), steps=5, work_pending=True)
    assert not driver.of(effects.Extend)
    driver.report(entry("a", 4, used=4), steps=6, work_pending=True)
    assert driver.of(effects.Extend)


def test_a_runner_whose_stream_comes_back_is_not_silent():
    driver = SupervisorDriver(heartbeat=2.0)
    driver.connect()
    driver.send(events.RunnerDisconnected(R0, "1"))
    assert driver.wait(2.1)
    driver.connect()
    assert not driver.supervisor.runners[R0].unhealthy
    assert not driver.wait(2.0)
    assert driver.wait(0.1)


def test_the_time_without_a_stream_says_nothing_about_steps():
    driver = SupervisorDriver(heartbeat=100.0, hang=5.0)
    driver.connect()
    driver.report(steps=1, work_pending=True)
    driver.clock.advance(4)
    driver.connect()
    assert not driver.wait(5)
    (lost,) = driver.wait(0.1)
    assert lost.hung


@pytest.mark.parametrize(
    ("steps", "seconds", "limit"), [(1, 3.0, 30.0), (2, 3.0, 15.0), (1, 1.0, 10.0), (4, 2.0, 10.0)]
)
def test_an_engine_hangs_after_ten_of_its_slowest_steps_but_no_sooner_than_hang(steps, seconds, limit):
    driver = SupervisorDriver(heartbeat=100.0, hang=10.0, hang_steps=10.0)
    driver.connect()
    driver.clock.advance(seconds)
    driver.report(steps=steps, work_pending=True)
    assert not driver.wait(limit)
    (lost,) = driver.wait(0.1)
    assert lost.hung


def test_the_slowest_step_decays_by_a_tenth_with_each_report_of_steps():
    driver = SupervisorDriver(heartbeat=100.0, hang=8.0, hang_steps=10.0)
    driver.connect()
    driver.clock.advance(4.0)
    driver.report(steps=1, work_pending=True)
    driver.clock.advance(1.0)
    driver.report(steps=2, work_pending=True)
    driver.report(steps=2, work_pending=True)  # no step, no decay
    assert not driver.wait(35.9)
    assert driver.wait(0.2)


def test_an_engine_that_reads_an_adapter_does_not_hang():
    driver = SupervisorDriver(heartbeat=100.0, hang=8.0, hang_steps=10.0)
    driver.connect()
    for part in range(1, 5):
        driver.clock.advance(7.0)
        driver.report(load_parts=part, work_pending=True)
        assert not driver.of(effects.ReportRunnerLost)
    assert not driver.wait(8.0)
    (lost,) = driver.wait(0.1)
    assert lost.hung


@pytest.mark.parametrize("parts", [0, 1, 5])
def test_adapters_that_are_read_beside_steps_do_not_change_how_long_a_step_takes(parts):
    driver = SupervisorDriver(heartbeat=100.0, hang=8.0, hang_steps=10.0)
    driver.connect()
    driver.clock.advance(4.0)
    driver.report(steps=1, load_parts=parts, work_pending=True)
    for second in range(1, 21):
        driver.clock.advance(1.0)
        driver.report(steps=1 + second // 4, load_parts=(1 + second) * parts, work_pending=True)
    assert not driver.wait(40.0)
    assert driver.wait(0.1)


def test_a_slow_engine_that_reads_adapters_all_the_time_does_not_hang_when_they_are_there():
    driver = SupervisorDriver(heartbeat=100.0, hang=8.0, hang_steps=10.0)
    driver.connect()
    for second in range(1, 17):
        driver.clock.advance(1.0)
        driver.report(steps=second // 4, load_parts=second, work_pending=True)
    assert not driver.wait(40.0)
    assert driver.wait(0.1)


def test_an_engine_whose_work_begins_is_given_its_whole_time():
    driver = SupervisorDriver(heartbeat=100.0, hang=10.0)
    driver.connect()
    driver.clock.advance(50)
    driver.report(steps=0, work_pending=False)
    driver.clock.advance(5)
    driver.report(steps=0, work_pending=True)
    assert not driver.wait(5)
    assert driver.wait(0.1)


@pytest.mark.parametrize("late", [0.0, 3.0])
def test_time_in_which_nobody_listened_delays_a_hang_too(late):
    driver = SupervisorDriver(heartbeat=100.0, hang=10.0)
    driver.connect()
    driver.report(steps=1, work_pending=True)
    driver.clock.advance(4)
    driver.send(events.Tick(late=late))
    assert not driver.wait(6 + late)
    assert driver.wait(0.1)


def test_a_tick_that_was_later_than_the_last_message_excuses_no_more_than_until_now():
    driver = SupervisorDriver(heartbeat=2.0, lateness_factor=0.0)
    driver.connect()
    driver.clock.advance(1)
    driver.send(events.Tick(late=50))
    assert not driver.wait(2.0)
    assert driver.wait(0.1)


def test_a_runner_that_is_silent_says_why_and_for_how_long():
    driver = SupervisorDriver(heartbeat=2.0)
    driver.connect()
    (lost,) = driver.wait(2.5)
    assert (lost.why, lost.silent_seconds, lost.again) == ("it has sent nothing for 2.5 seconds", 2.5, False)


def test_a_hang_is_reported_again_after_its_time_and_not_before():
    driver = SupervisorDriver(heartbeat=100.0, hang=5.0, remind=10.0)
    driver.connect()
    driver.report(steps=1, work_pending=True)
    (first,) = driver.wait(6)
    assert first.why == "its engine has work and took no step for 6.0 seconds"
    assert not driver.wait(10)
    (again,) = driver.wait(0.1)
    assert (again.why, again.hung, again.again) == (first.why, True, True)
    assert not driver.wait(10)


def test_a_connected_runner_is_not_forgotten():
    driver = SupervisorDriver(heartbeat=2.0, forget=50.0)
    driver.connect()
    driver.wait(60)
    assert R0 in driver.supervisor.runners


def test_lateness_halves_with_each_heartbeats_time():
    driver = SupervisorDriver(heartbeat=2.0, most_heartbeats=10.0, lateness_factor=1.0)
    driver.connect()
    driver.send(events.Tick(late=1.0))
    driver.clock.advance(2.0)
    driver.send(events.Tick())
    driver.send(events.HeartbeatReceived(R0))  # runners may be silent for 2.5 seconds now, and less later
    driver.clock.advance(2.0)
    driver.send(events.Tick())
    assert not driver.wait(0.2)
    assert driver.wait(0.1)


def test_no_lateness_gives_a_runner_more_than_a_few_heartbeats():
    driver = SupervisorDriver(heartbeat=2.0, most_heartbeats=2.5, lateness_factor=4.0)
    driver.connect()
    driver.send(events.Tick(late=1.9))
    driver.send(events.HeartbeatReceived(R0))
    assert driver.wait(5.1)


def test_a_runner_without_heartbeats_that_comes_back_with_them_has_their_time():
    driver = SupervisorDriver(heartbeat=2.0)
    identity = RunnerIdentity(instance="r0", incarnation="1", pool="default/demo")
    driver.send(events.RunnerConnected(identity, Capacity(pages=100), heartbeats=False))
    driver.connect()
    assert driver.wait(2.1)
