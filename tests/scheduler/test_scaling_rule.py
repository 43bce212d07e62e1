"""The scaling rule, on numbers alone: how many runners a load requires, and how fast the advice follows."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet_scheduler.policy.scaling_rule import (
    DesiredReplicas,
    PoolLoad,
    ReplicaBounds,
    ReplicaStabilizer,
    RequiredReplicas,
    RunnerSize,
    ScaleDownBlock,
    required_replicas,
)

RUNNER_SIZE = RunnerSize(pages=100, sequences=10, adapter_slots=4)
STALE = ScaleDownBlock("ReportsMissing", "r0 does not report", stale=True)
WINDOW = 30.0


def load(**how) -> PoolLoad:
    return PoolLoad(**({"runner_size": RUNNER_SIZE, "serving": 1, "starting": 1} | how))


@pytest.mark.parametrize(
    ("what", "replicas", "code"),
    [
        ({}, 0, "Idle"),
        ({"requests": 1, "pages": 10}, 1, "Requests"),
        ({"requests": 8, "pages": 80}, 1, "Requests"),
        ({"requests": 9, "pages": 90}, 2, "Requests"),  # more than 80% of the pages
        ({"requests": 9, "pages": 9}, 2, "Requests"),  # more than 80% of the batch
        ({"requests": 4, "pages": 240}, 4, "Requests"),  # a runner holds only one request of 60 pages
        ({"requests": 2, "pages": 198}, 2, "Requests"),  # above the target, but it fits
        ({"requests": 7, "pages": 0, "runner_size": None, "serving": 0}, 1, "Requests"),
        ({"held": 3, "serving": 0, "starting": 0}, 1, "HeldRequests"),
        ({"adapters": 9}, 3, "Adapters"),
        ({"adapters": 3, "min_replicas_of_adapters": 2}, 2, "Adapters"),
        ({"adapters": 9, "runner_size": None}, 1, "Adapters"),
        ({"requests": 1, "waiting": 1, "waited": 6.0, "pages": 1}, 2, "Queue"),
        ({"requests": 1, "waiting": 1, "waited": 4.0, "pages": 1}, 1, "Requests"),
        ({"requests": 1, "waiting": 1, "waited": 6.0, "pages": 1, "starting": 2}, 1, "Requests"),  # one is starting
        ({"requests": 1, "waiting": 1, "waited": 6.0, "pages": 1, "serving": 0}, 1, "Requests"),
    ],
)
def test_a_load_needs_a_number_of_replicas(what, replicas, code):
    need = required_replicas(load(**what), queue_patience=5.0)
    assert (need.replicas, need.code) == (replicas, code)


def test_the_reason_contains_the_numbers():
    assert required_replicas(load(requests=9, pages=90), queue_patience=5).reason == (
        "9 requests run or wait; a runner takes 8 such requests at 80% load"
    )
    assert required_replicas(load(requests=1, pages=90), queue_patience=5).reason == (
        "1 request runs or waits; a runner takes 1 such request at 80% load"
    )
    assert required_replicas(load(adapters=9), queue_patience=5).reason == "adapters need 9 slots; a runner has 4"


def test_the_guides_example_is_right():
    """docs/guides/autoscaling.md."""
    runner_size = RunnerSize(pages=1000, sequences=32, adapter_slots=32)
    assert runner_size.fits(25) == 25
    assert required_replicas(load(requests=90, pages=90 * 25, runner_size=runner_size), queue_patience=5).replicas == 4
    assert (
        required_replicas(
            load(requests=90, pages=90 * 25, adapters=130, runner_size=runner_size), queue_patience=5
        ).replicas
        == 5
    )


def advise(
    pace: ReplicaStabilizer, replicas: int, now: float, *, hold: ScaleDownBlock | None = None, **bounds
) -> DesiredReplicas:
    return pace.advise(RequiredReplicas(replicas, "Requests", "many requests"), ReplicaBounds(**bounds), now, hold)


def test_a_pool_doubles_at_most_once_in_a_window():
    pace = ReplicaStabilizer(1, 0.0)
    advised = [advise(pace, 9, float(second)).replicas for second in range(100)]
    assert advised == [2] * 30 + [4] * 30 + [8] * 30 + [9] * 10


def test_the_first_runner_comes_at_once():
    pace = ReplicaStabilizer(0, 0.0)
    assert advise(pace, 5, 0.1).replicas == 1


def test_a_pool_shrinks_to_the_most_that_was_needed_in_the_whole_window():
    pace = ReplicaStabilizer(4, 0.0)
    needed = [1] * 200 + [2] + [1] * 400
    advised = [advise(pace, replicas, float(at)).replicas for at, replicas in enumerate(needed)]
    assert advised.index(2) == 300  # after the first advice
    assert advised.index(1) == 500
    assert set(advised) == {4, 2, 1}


def test_no_runner_leaves_while_information_is_missing_and_the_window_restarts():
    pace = ReplicaStabilizer(2, 0.0)
    for at in range(250):
        advise(pace, 1, float(at))
    held = advise(pace, 1, 250.0, hold=STALE)
    assert (held.replicas, held.code, held.stale) == (2, "ReportsMissing", True)
    assert [advise(pace, 1, float(at)).replicas for at in range(251, 550)] == [2] * 299
    assert advise(pace, 1, 550.0).replicas == 1


@pytest.mark.parametrize(
    ("needed", "bounds", "code"),
    [
        (1, {}, "Requests"),
        (0, {}, "Stabilizing"),
        (0, {"minimum": 1}, "AtMinimum"),
        (2, {"maximum": 1}, "AtMaximum"),
        (4, {}, "Pacing"),
    ],
)
def test_each_advice_has_a_reason(needed, bounds, code):
    advice = advise(ReplicaStabilizer(1, 0.0), needed, 1.0, **bounds)
    assert advice.code == code
    assert advice.reason


# ------------------------------------------------------------------------------------------- whatever happens


LOOKS = st.lists(
    st.tuples(st.floats(0.0, 60.0), st.integers(0, 40), st.booleans()),
    min_size=1,
    max_size=80,
)
BOUNDS = st.builds(
    lambda low, extra, window: ReplicaBounds(minimum=low, maximum=max(1, low + extra), stabilization=window),
    st.integers(0, 8),
    st.integers(0, 30),
    st.sampled_from([0.0, 30.0, 300.0]),
)


@given(start=st.integers(0, 20), steps=LOOKS, bounds=BOUNDS)
def test_advice_respects_bounds_stale_information_and_the_growth_rate(start, steps, bounds):
    pace = ReplicaStabilizer(start, 0.0)
    now, before = 0.0, start
    history = [(0.0, start)]
    for pause, needed, stale in steps:
        now += pause
        advice = met(pace, needed, bounds, now, STALE if stale else None)
        assert bounds.minimum <= advice.replicas <= (bounds.maximum or 0)
        if stale:
            assert advice.replicas >= min(before, bounds.maximum or 0), "stale information removed a runner"
        # The advice at the start of the window counts, and all advice since.
        begun = max((index for index, (at, _) in enumerate(history) if now - at >= WINDOW), default=0)
        least = min(replicas for _, replicas in history[begun:])
        assert advice.replicas <= max(1, 2 * least, bounds.minimum), "the pool more than doubled within the window"
        history.append((now, advice.replicas))
        before = advice.replicas


def met(
    pace: ReplicaStabilizer, needed: int, bounds: ReplicaBounds, now: float, hold: ScaleDownBlock | None
) -> DesiredReplicas:
    return pace.advise(RequiredReplicas(needed, "Requests", "many requests"), bounds, now, hold)


@given(start=st.integers(0, 40), needed=st.integers(0, 40), bounds=BOUNDS, step=st.sampled_from([0.5, 1.0, 7.0]))
def test_a_constant_need_is_met_and_then_nothing_changes(start, needed, bounds, step):
    pace = ReplicaStabilizer(start, 0.0)
    advised = [met(pace, needed, bounds, step * look, None).replicas for look in range(int(800 / step))]
    assert advised[-1] == bounds.apply(needed)
    changes = [b - a for a, b in pairwise(advised) if b != a]
    assert all(change > 0 for change in changes) or all(change < 0 for change in changes), "it went back and forth"


@given(
    requests=st.integers(0, 60),
    pages=st.integers(1, 100),
    start_seconds=st.integers(0, 60),
    slots=st.integers(1, 4),
    distinct=st.integers(0, 10),
    begin=st.integers(0, 5),
)
def test_a_constant_load_never_flaps_however_long_runners_take_to_start(
    *, requests, pages, start_seconds, slots, distinct, begin
):
    """A constant number of clients send requests. Runners start late and end at once."""
    runner_size = RunnerSize(pages=100, sequences=10, adapter_slots=slots)
    adapters = min(distinct, requests)
    pace, ordered = ReplicaStabilizer(begin, 0.0), begin
    ready = [0.0] * begin
    waits_since: float | None = None
    advised = []
    for now in range(1500):
        serving = sum(at <= now for at in ready)
        taken = min(requests, serving * min(10, 100 // pages))
        waiting = requests - taken
        waits_since = None if not waiting else (float(now) if waits_since is None else waits_since)
        need = required_replicas(
            PoolLoad(
                requests=requests,
                pages=requests * pages,
                waiting=waiting,
                waited=now - waits_since if waits_since is not None else 0.0,
                adapters=adapters,
                serving=serving,
                starting=ordered,
                runner_size=runner_size,
            ),
            queue_patience=5.0,
        )
        ordered = pace.advise(need, ReplicaBounds(), float(now)).replicas
        advised.append(ordered)
        ready = sorted(ready)[:ordered] + [now + float(start_seconds)] * (ordered - len(ready))
    falls = [at for at in range(1, len(advised)) if advised[at] < advised[at - 1]]
    rises = [at for at in range(1, len(advised)) if advised[at] > advised[at - 1]]
    assert not (falls and rises), "it went back and forth"
    assert advised[-1] == advised[-700], "the advice still changes"
    serving = sum(at <= 1500 for at in ready)
    assert requests <= serving * min(10, 100 // pages), "a request waits for ever"
