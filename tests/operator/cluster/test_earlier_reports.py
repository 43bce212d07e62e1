"""What a new leader leaves in a pool's status until the scheduler has said how many runners are needed."""

import pytest

from motet_operator.earlier_status import with_earlier_advice


def scaling(status: str, reason: str, **more: object) -> dict[str, object]:
    return {"type": "ScalingActive", "status": status, "reason": reason, "observedGeneration": 2, **more}


BY_ANOTHER_CLIENT = {"type": "ScalingActive", "status": "True", "reason": "Said"}


@pytest.mark.parametrize(
    ("earlier", "kept"),
    [
        (scaling("True", "FollowingDemand"), True),
        (scaling("True", "AtMaximum"), True),
        (scaling("False", "ConflictingManager"), False),
        (scaling("False", "ScalingDisabled"), False),
        (scaling("True", "FollowingDemand", observedGeneration=1), False),
        (BY_ANOTHER_CLIENT, False),
    ],
)
def test_only_advice_that_still_counts_is_left_as_it_was(earlier: dict[str, object], kept: bool) -> None:
    now = scaling("Unknown", "HoldingStaleAdvice")
    (found,) = with_earlier_advice({"conditions": [now]}, {"conditions": [earlier]}, 2)["conditions"]
    assert found == (earlier if kept else now)
