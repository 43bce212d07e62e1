"""The lifecycle alone: events in, effects out."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.processes.lifecycle import (
    LIVENESS_FAILURE_THRESHOLD,
    SETUP_FAILED,
    STARTUP_FAILURE_THRESHOLD,
    Died,
    Effect,
    Event,
    Lifecycle,
    LifecycleConfig,
    LivenessProbed,
    Phase,
    ReadinessProbed,
    Started,
    StopRequested,
    TimePassed,
    new_lifecycle,
    step,
)
from motet.processes.restart_backoff import RestartBackoff

BACKOFF = RestartBackoff(first_delay=1, last_delay=8, stable_after=20)
CONFIG = LifecycleConfig(stop_grace=10, backoff=BACKOFF)


def follow(*moments: tuple[float, Event], life: Lifecycle | None = None) -> tuple[Lifecycle, list[Effect]]:
    life = life or new_lifecycle(0)
    effects: list[Effect] = []
    for now, event in moments:
        life, more = step(life, event, now, CONFIG)
        effects += more
    return life, effects


UP: tuple[tuple[float, Event], ...] = ((0, TimePassed()), (0, Started()), (1, ReadinessProbed(True)))


def test_a_start_is_due_at_once_and_ready_when_the_probe_says_so() -> None:
    life, effects = follow(*UP)
    assert life.phase is Phase.READY
    assert effects == [Effect.START]


def test_the_first_restart_does_not_wait() -> None:
    life, _ = follow(*UP, (5, Died(-9, "killed")))
    assert (life.phase, life.due, life.restarts) == (Phase.WAITING, 5, 1)


def test_a_restart_waits_as_long_as_asked_and_no_shorter_than_its_back_off() -> None:
    life, _ = follow(*UP, (5, Died(-9, "killed", wait=2.0)))
    assert (life.phase, life.due) == (Phase.WAITING, 7)
    life, effects = follow((6.9, TimePassed()), (7, TimePassed()), life=life)
    assert effects == [Effect.START]
    again = Died(1, "", jitter=0.5, wait=0.25)
    life, _ = follow((7, Started()), (8, again), life=life)
    assert life.due == 8 + BACKOFF.delay(2, needs_a_person=False, jitter=0.5)


def test_restart_delays_double_up_to_the_maximum() -> None:
    waits = [BACKOFF.delay(failures, needs_a_person=False, jitter=0.5) for failures in range(1, 8)]
    assert waits == [0, 1, 2, 4, 8, 8, 8]


def test_a_setup_error_delays_the_first_restart() -> None:
    life, _ = follow((0, TimePassed()), (0, Started()), (1, Died(SETUP_FAILED, "no model")))
    assert life.due == 2


def test_a_stable_run_resets_the_failures() -> None:
    life, _ = follow(
        *UP, (2, Died(1, "")), (2, TimePassed()), (2, Started()), (3, ReadinessProbed(True)), (30, Died(1, ""))
    )
    assert (life.failures, life.restarts, life.due) == (1, 2, 30)


def test_a_long_start_that_never_got_ready_is_no_stable_run() -> None:
    life, _ = follow(*UP, (2, Died(1, "")), (2, TimePassed()), (2, Started()), (99, Died(1, "")))
    assert life.failures == 2


def test_a_stop_asks_once_and_kills_when_the_grace_is_over() -> None:
    life, effects = follow(*UP, (5, StopRequested()), (6, StopRequested()), (14.9, TimePassed()), (15, TimePassed()))
    assert effects == [Effect.START, Effect.TERMINATE, Effect.KILL]
    life, effects = follow((15.1, Died(-9, "")), life=life)
    assert (life.phase, effects) == (Phase.GONE, [])


def test_a_process_that_waits_for_its_restart_stops_at_once() -> None:
    life, effects = follow(*UP, (5, Died(1, "")), (6, StopRequested()))
    assert life.phase is Phase.GONE
    assert effects == [Effect.START]


def test_an_adopted_process_keeps_its_readiness() -> None:
    life, _ = follow((0, Started(adopted=True)), life=replace(new_lifecycle(0), was_ready=True))
    assert life.phase is Phase.READY
    life, _ = follow((0, Started(adopted=True)))
    assert life.phase is Phase.STARTING


def test_a_silent_probe_takes_readiness_back() -> None:
    life, _ = follow(*UP, (2, ReadinessProbed(False)))
    assert life.phase is Phase.STARTING
    assert follow((3, ReadinessProbed(True)), life=life)[0].phase is Phase.READY


events = st.one_of(
    st.just(TimePassed()),
    st.just(Started()),
    st.builds(ReadinessProbed, st.booleans()),
    st.builds(Died, st.sampled_from([None, 0, 1, 2, -9]), st.just(""), st.floats(0, 1)),
    st.just(StopRequested()),
)


@given(st.lists(st.tuples(st.floats(0, 10), events), max_size=40))
def test_no_sequence_of_events_leaves_a_process_stuck_or_revives_it(history: list[tuple[float, Event]]) -> None:
    life, now = new_lifecycle(0), 0.0
    for pause, event in history:
        if isinstance(event, Started) and life.phase is not Phase.WAITING:
            continue  # the process manager starts only what waits
        now += pause
        before = life
        life, effects = step(life, event, now, CONFIG)
        if before.phase is Phase.GONE:
            assert (life, effects) == (before, ())
        if life.phase is Phase.STOPPING:
            assert life.due is not None, "somebody must kill it one day"
        if life.phase is Phase.WAITING and Effect.START not in effects and before.due is not None:
            assert life.due is not None, "somebody must start it one day"
        assert life.restarts >= before.restarts


@pytest.mark.parametrize("failures", [1, 2, 50, 5000])
def test_jitter_is_at_most_a_quarter_each_way(failures: int) -> None:
    low, high = (BACKOFF.delay(failures, needs_a_person=True, jitter=jitter) for jitter in (0.0, 1.0))
    assert high == pytest.approx(low / 0.75 * 1.25)


EACH = CONFIG.liveness_period


def silence(probes: int, *, since: float) -> list[tuple[float, Event]]:
    """One probe after the other, each without an answer in time."""
    return [(since + (n + 1) * EACH, LivenessProbed(alive=False, at=since + n * EACH)) for n in range(probes)]


ANSWERED: tuple[tuple[float, Event], ...] = (*UP, (2, LivenessProbed(alive=True, at=2)))


def test_a_process_that_stops_answering_is_replaced() -> None:
    life, effects = follow(*ANSWERED, *silence(LIVENESS_FAILURE_THRESHOLD - 1, since=2))
    assert effects == [Effect.START]
    life, effects = follow(*silence(1, since=2 + (LIVENESS_FAILURE_THRESHOLD - 1) * EACH), life=life)
    assert effects == [Effect.REPLACE]


def test_one_answer_resets_the_missed_probes() -> None:
    moments = [*ANSWERED]
    for _ in range(10):
        since = moments[-1][0]
        moments += silence(LIVENESS_FAILURE_THRESHOLD - 1, since=since)
        moments.append((moments[-1][0], LivenessProbed(alive=True, at=moments[-1][0])))
    assert follow(*moments)[1] == [Effect.START]


def no_answer(since: float, seconds: float, *, each: float, stopped: bool = True) -> list[tuple[float, Event]]:
    """Readiness probes without an answer, the first and the last of them `seconds` apart."""
    probes = round(seconds / each)
    return [(since + n * each, ReadinessProbed(healthy=False, stopped=stopped)) for n in range(probes + 1)]


LONG = CONFIG.stopped_seconds
EACH_PROBE = pytest.mark.parametrize("each", [0.0625, 0.5, 1.5], ids=["starts", "answers late", "busy machine"])


@EACH_PROBE
@pytest.mark.parametrize("up", [ANSWERED, UP[:2]], ids=["ready", "starts"])
def test_a_stopped_process_is_replaced_after_seconds_however_often_it_is_probed(
    up: tuple[tuple[float, Event], ...], each: float
) -> None:
    life, effects = follow(*up, *no_answer(3, LONG - each, each=each))
    assert (life.phase, effects) == (Phase.STARTING, [Effect.START])
    assert follow((3 + LONG, ReadinessProbed(healthy=False, stopped=True)), life=life)[1] == [Effect.REPLACE_STOPPED]


@pytest.mark.parametrize("continued", [ReadinessProbed(healthy=True), ReadinessProbed(healthy=False), Started()])
def test_a_process_that_was_continued_is_not_replaced(continued: Event) -> None:
    before, after = no_answer(3, LONG - 0.5, each=0.5), no_answer(3.5 + LONG, LONG - 0.5, each=0.5)
    _, effects = follow(*ANSWERED, *before, (3 + LONG, continued), *after)
    assert effects == [Effect.START]


def test_a_process_is_not_replaced_for_the_time_in_which_the_process_manager_was_stopped_too() -> None:
    life, effects = follow(*ANSWERED, *no_answer(3, LONG - 0.5, each=0.5), *no_answer(3600, LONG - 0.5, each=0.5))
    assert effects == [Effect.START]
    assert follow(*no_answer(3600 + LONG, 0, each=0.5), life=life)[1] == [Effect.REPLACE_STOPPED]


def test_a_process_that_runs_may_fail_any_number_of_readiness_probes() -> None:
    assert follow(*ANSWERED, *no_answer(3, 100, each=0.5, stopped=False))[1] == [Effect.START]


def test_a_starting_process_may_miss_more_probes() -> None:
    _, effects = follow(*UP, *silence(STARTUP_FAILURE_THRESHOLD - 1, since=0))
    assert effects == [Effect.START]
    _, effects = follow(*UP, *silence(STARTUP_FAILURE_THRESHOLD, since=0))
    assert effects == [Effect.START, Effect.REPLACE]


def test_probes_that_failed_while_the_process_manager_was_paused_prove_nothing() -> None:
    """The whole machine was paused, during a probe or between two. All processes are probed again."""
    life, _ = follow(*ANSWERED, *silence(LIVENESS_FAILURE_THRESHOLD - 1, since=2))
    then = 2 + (LIVENESS_FAILURE_THRESHOLD - 1) * EACH
    for paused in (
        (then + 3600, LivenessProbed(alive=False, at=then)),
        (then + 3600 + EACH, LivenessProbed(alive=False, at=then + 3600)),
    ):
        woken, effects = follow(paused, life=life)
        assert effects == []
        _, effects = follow(*silence(LIVENESS_FAILURE_THRESHOLD - 1, since=paused[0]), life=woken)
        assert effects == []
        _, effects = follow(*silence(LIVENESS_FAILURE_THRESHOLD, since=paused[0]), life=woken)
        assert effects == [Effect.REPLACE]


def test_a_stopping_process_is_not_probed() -> None:
    life, effects = follow(*ANSWERED, (3, StopRequested()), *silence(LIVENESS_FAILURE_THRESHOLD, since=3))
    assert (life.phase, effects) == (Phase.STOPPING, [Effect.START, Effect.TERMINATE])
