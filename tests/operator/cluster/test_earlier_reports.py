"""What a new leader leaves in a pool's status until the scheduler has reported all."""

import pytest

from motet_operator.cluster.status_documents import with_earlier_reports


def scaling(status: str, reason: str, generation: int = 2) -> dict[str, object]:
    return {"type": "ScalingActive", "status": status, "reason": reason, "observedGeneration": generation}


@pytest.mark.parametrize(
    ("earlier", "kept"),
    [
        (scaling("True", "FollowingDemand"), True),
        (scaling("True", "AtMaximum"), True),
        (scaling("False", "ConflictingManager"), False),
        (scaling("False", "ScalingDisabled"), False),
        (scaling("True", "FollowingDemand", generation=1), False),
    ],
)
def test_only_advice_that_still_counts_is_left_as_it_was(earlier: dict[str, object], kept: bool) -> None:
    now = scaling("Unknown", "HoldingStaleAdvice")
    pool = {"metadata": {"generation": 2}, "status": {"conditions": [earlier], "adapters": {"registered": 1}}}
    (found,) = with_earlier_reports({"conditions": [now], "adapters": {"registered": 2}}, pool)["conditions"]
    assert found == (earlier if kept else now)
