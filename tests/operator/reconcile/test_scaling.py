"""Who decides how many runners a pool has, and what holds it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.resources.status import MAX_MESSAGE
from motet_operator.reconcile.scaling import Scaling, ScalingAdvice, decide_replicas
from tests.operator.builders import pool


def scaled(mode="Builtin", *, replicas=1, low=0, high=10, **how) -> Scaling:
    bounds = {} if mode == "Disabled" else {"minReplicas": low, "maxReplicas": high}
    resource = pool(replicas=replicas, autoscaling={"mode": mode, **bounds}).resource
    return decide_replicas(resource, **({"current": 3} | how))


def verdict(scaling: Scaling) -> tuple[int, str, str]:
    return scaling.replicas, scaling.condition.status, scaling.condition.reason


def test_mode_disabled_follows_spec_replicas_whatever_the_advice():
    found = scaled("Disabled", replicas=4, advice=ScalingAdvice(replicas=9), writers=["kubectl"])
    assert verdict(found) == (4, "False", "ScalingDisabled")


@pytest.mark.parametrize(
    ("written", "expected"),
    [(4, (4, "True", "External")), (0, (1, "True", "AtMinimum")), (12, (10, "True", "AtMaximum"))],
)
def test_external_is_what_the_autoscaler_wrote_within_the_bounds(written, expected):
    found = scaled(
        "External", replicas=written, low=1, writers=["kube-controller-manager"], advice=ScalingAdvice(replicas=9)
    )
    assert verdict(found) == expected


@pytest.mark.parametrize(
    ("advice", "expected"),
    [
        (ScalingAdvice(replicas=5, reason="5 requests"), (5, "True", "FollowingDemand")),
        (ScalingAdvice(replicas=1), (2, "True", "AtMinimum")),
        (ScalingAdvice(replicas=2, code="AtMinimum"), (2, "True", "AtMinimum")),
        (ScalingAdvice(replicas=11), (6, "True", "AtMaximum")),
        (ScalingAdvice(replicas=6, code="AtMaximum"), (6, "True", "AtMaximum")),
        (None, (3, "Unknown", "HoldingStaleAdvice")),
        (ScalingAdvice(replicas=2, stale=True), (3, "Unknown", "HoldingStaleAdvice")),
        (ScalingAdvice(replicas=5, stale=True), (5, "Unknown", "HoldingStaleAdvice")),
    ],
)
def test_builtin_follows_advice_and_holds_without_it(advice, expected):
    assert verdict(scaled(low=2, high=6, advice=advice)) == expected


def test_the_schedulers_reason_is_the_conditions_message():
    found = scaled(advice=ScalingAdvice(replicas=5, reason="9 requests; a runner takes 2"))
    assert found.condition.message == "9 requests; a runner takes 2"


def test_a_rollout_keeps_runners_and_may_still_add_some():
    assert verdict(scaled(advice=ScalingAdvice(replicas=1), rolling_out=True)) == (3, "True", "HoldingForRollout")
    assert verdict(scaled(advice=ScalingAdvice(replicas=5), rolling_out=True)) == (5, "True", "FollowingDemand")


def test_a_second_writer_stops_builtin_scaling_and_is_named():
    found = scaled(advice=ScalingAdvice(replicas=9), writers=["kube-controller-manager"])
    assert verdict(found) == (3, "False", "ConflictingManager")
    assert found.condition.message.startswith("kube-controller-manager writes spec.replicas")


def test_many_writers_leave_room_for_what_to_do():
    writers = [f"{number:02d}{'w' * 126}" for number in range(20)]
    message = scaled(writers=writers).condition.message
    assert "and 17 others write spec.replicas" in message
    assert len(message) <= MAX_MESSAGE


def test_a_message_counts_one_runner_and_many():
    def message(current, **how):
        return scaled(current=current, **how).condition.message

    for how in ({}, {"advice": ScalingAdvice(replicas=1, stale=True)}, {"writers": ["kubectl"]}):
        assert "the pool keeps 1 runner" in message(1, **how)
        assert "1 runners" not in message(1, **how)
        assert "the pool keeps 3 runners" in message(3, **how)
    held = message(3, advice=ScalingAdvice(replicas=1), rolling_out=True)
    assert held == "1 runner would be enough; the pool keeps 3 runners until the rollout is complete"
    assert message(1, writers=["a", "b"]).startswith("a and b write spec.replicas")


def test_a_new_pool_begins_with_its_replicas_within_the_bounds():
    assert scaled(replicas=5, high=3, current=None).replicas == 3
    assert scaled(replicas=1, low=0, current=None).replicas == 1


ADVICE = st.none() | st.builds(ScalingAdvice, replicas=st.integers(0, 20), stale=st.booleans())


@given(
    advice=ADVICE,
    current=st.none() | st.integers(0, 20),
    low=st.integers(0, 10),
    extra=st.integers(0, 10),
    rolling_out=st.booleans(),
    writers=st.sampled_from([(), ("hpa",)]),
)
def test_never_outside_the_bounds_and_never_fewer_on_missing_or_stale_advice(
    *, advice, current, low, extra, rolling_out, writers
):
    high = max(1, low + extra)
    found = scaled(low=low, high=high, advice=advice, current=current, rolling_out=rolling_out, writers=writers)
    assert low <= found.replicas <= high
    held = max(low, min(high, 1 if current is None else current))
    if advice is None or advice.stale or rolling_out or writers:
        assert found.replicas >= held
    if advice is None or writers:
        assert found.replicas == held
