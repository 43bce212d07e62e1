"""The figures of quotas, over less time."""

from benchmarks.quotas import measure


def test_quotas_and_the_times_to_come_again_hold_while_the_scheduler_is_killed():
    figures = measure(6)
    assert {one.name.rpartition("_")[0] for one in figures} == {"quota_error", "retry_error"}
    assert [one.name for one in figures if one.holds is False] == []
