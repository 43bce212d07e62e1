"""When a runner counts as lost: if it is silent or hangs, but not if it is slow."""

from motet_supervisor.policy import effects, events
from tests.supervisor.builders import R0, SupervisorDriver, entry


def beat(told, *, seconds, step=1.0, steps_per_beat=0, pending=True, start=0):
    """Reports every `step` seconds; the engine takes so many steps between two."""
    lost = []
    steps = start
    for _ in range(int(seconds / step)):
        told.clock.advance(step)
        steps += steps_per_beat
        told.report(entry("a", 4), steps=steps, work_pending=pending)
        told.tell(events.Tick())
        lost += told.of(effects.ReportRunnerLost)
    return lost, steps


def test_a_silent_runner_is_reported_lost_once():
    told = SupervisorDriver(heartbeat=5.0)
    told.connect()
    assert not told.wait(4.9)
    (lost,) = told.wait(0.2)
    assert (lost.identity.instance, lost.hung) == ("r0", False)
    assert not told.wait(5)


def test_a_runner_that_reports_again_can_be_lost_again():
    told = SupervisorDriver(heartbeat=5.0)
    told.connect()
    told.wait(6)
    told.report(steps=1)
    assert told.wait(6)


def test_an_engine_with_work_and_no_step_is_hung():
    told = SupervisorDriver(hang=20.0)
    told.connect()
    beat(told, seconds=5, steps_per_beat=50)
    lost, _ = beat(told, seconds=30, steps_per_beat=0, start=250)
    assert [one.hung for one in lost] == [True]


def test_an_engine_without_work_may_stand_still():
    told = SupervisorDriver(hang=20.0)
    told.connect()
    lost, _ = beat(told, seconds=120, pending=False)
    assert not lost


def test_a_slow_engine_is_not_hung():
    told = SupervisorDriver(hang=20.0, hang_steps=10.0)
    told.connect()
    lost, steps = beat(told, seconds=300, step=10.0, steps_per_beat=1)
    assert not lost
    told.heartbeat = None
    # Ten seconds a step: it may stand still for a hundred.
    lost, _ = beat(told, seconds=90, start=steps)
    assert not lost
    lost, _ = beat(told, seconds=20, start=steps)
    assert lost


def test_one_slow_step_is_forgotten():
    told = SupervisorDriver(hang=20.0, hang_steps=10.0)
    told.connect()
    beat(told, seconds=15, step=15.0, steps_per_beat=1)
    _, steps = beat(told, seconds=60, steps_per_beat=50, start=1)
    lost, _ = beat(told, seconds=30, start=steps)
    assert lost


def test_work_that_comes_after_a_long_rest_does_not_make_an_engine_hung():
    told = SupervisorDriver(hang=20.0)
    told.connect()
    _, steps = beat(told, seconds=300, pending=False)
    lost, _ = beat(told, seconds=10, start=steps)
    assert not lost


def test_a_hung_runner_gets_no_orders_until_it_moves():
    told = SupervisorDriver(hang=20.0)
    told.connect()
    beat(told, seconds=30, start=5)
    assert not told.overflow(entry("a", 4, used=4))
    told.report(entry("a", 4, used=4), steps=99, work_pending=True)
    assert told.of(effects.Extend)


def test_a_hung_runner_is_reported_again_for_a_scheduler_that_was_away():
    told = SupervisorDriver(hang=20.0, heartbeat=5.0)
    told.connect()
    lost, _ = beat(told, seconds=45, start=5)
    assert [one.again for one in lost] == [False, True, True]
    lost, _ = beat(told, seconds=15, steps_per_beat=50, start=5)
    assert not lost


def test_a_runner_whose_stream_is_down_for_long_is_forgotten():
    told = SupervisorDriver(heartbeat=5.0)
    told.connect()
    told.tell(events.RunnerDisconnected(R0, "1"))
    told.wait(6)
    assert told.of(effects.ReportRunnerLost)
    told.wait(60)
    assert not told.supervisor.runners


def test_the_end_of_an_old_stream_does_not_affect_the_new_one():
    told = SupervisorDriver()
    told.connect(incarnation="2")
    told.tell(events.RunnerDisconnected(R0, "1"))
    assert told.supervisor.runners[R0].connected


def test_an_engine_that_stands_still_after_a_silence_is_hung():
    told = SupervisorDriver(heartbeat=5.0, hang=20.0)
    told.connect()
    _, steps = beat(told, seconds=5, steps_per_beat=50)
    (silent,) = told.wait(6)
    assert not silent.hung
    lost, _ = beat(told, seconds=300, start=steps)
    assert [one.hung for one in lost if not one.again] == [True]


def test_a_silence_is_not_counted_as_standing_still():
    """A machine that was suspended: nothing ran, and nothing was heard."""
    told = SupervisorDriver(heartbeat=5.0, hang=20.0)
    told.connect()
    _, steps = beat(told, seconds=5, steps_per_beat=50)
    told.wait(600)
    lost, _ = beat(told, seconds=15, start=steps)
    assert not lost


def test_one_that_is_silent_now_and_then_and_never_moves_is_hung():
    told = SupervisorDriver(heartbeat=5.0, hang=20.0)
    told.connect()
    lost, steps = beat(told, seconds=5, steps_per_beat=50)
    for _ in range(10):
        told.wait(6)
        lost += beat(told, seconds=4, start=steps)[0]
    assert any(one.hung for one in lost)


def test_a_hung_runner_whose_stream_comes_back_is_hung_until_it_moves():
    told = SupervisorDriver(hang=20.0)
    told.connect()
    beat(told, seconds=30, start=5)
    told.connect(entry("a", 4, used=4))
    assert not told.of(effects.Extend)
    told.report(entry("a", 4, used=4), steps=5, work_pending=True)
    assert not told.of(effects.Extend)
    told.report(entry("a", 4, used=4), steps=6, work_pending=True)
    assert told.of(effects.Extend)
