"""Wrong promises cost time only where they lead to parks."""

from benchmarks.misprediction import CASES, OVERHEAD_MS, Case, share_of
from benchmarks.virtual_plan import Request, Workload


def test_penalty_grows_with_the_share_of_promises_that_are_too_small() -> None:
    workload = Workload("alike", 2048, [Request(16, 600)] * 64)
    none, some, all_ = (share_of(workload, Case("case", share, CASES[1].cut, 1.0)) for share in (0.0, 0.3, 1.0))
    assert 0 < none < OVERHEAD_MS / 1000, "without parks there is only overhead"
    assert none < some < all_
