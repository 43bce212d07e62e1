"""How long a new leader waits for what a scheduler has to report."""

from motet_operator.awaited_reports import AWAITED_SECONDS, AwaitedReports
from motet_scheduler.policy.catalog import MAX_CHECK_PATIENCE
from motet_scheduler.policy.values import SchedulerConfig
from tests.operator.builders import name

DEMO, OTHER = name("demo"), name("other")


def test_a_scheduler_has_said_what_it_has_reported_before_the_operator_gives_up() -> None:
    assert MAX_CHECK_PATIENCE * SchedulerConfig().forget_runner < AWAITED_SECONDS


def test_reports_are_awaited_group_by_group() -> None:
    awaited = AwaitedReports(patience=120.0)
    awaited.scheduler_speaks(0.0)
    awaited.reported_all([DEMO, OTHER])
    awaited.keep_only([DEMO])
    assert awaited.reported_groups(119.0) == {DEMO}


def test_a_scheduler_that_never_says_that_it_has_reported_all_is_awaited_for_a_while() -> None:
    """As one of the release before. Then it is as if it had."""
    awaited = AwaitedReports(patience=120.0)
    awaited.scheduler_speaks(1000.0)
    assert awaited.reported_groups(1119.0) == frozenset()
    awaited.stream_closed(1200.0)
    assert awaited.reported_groups(1500.0) == frozenset(), "nobody speaks"
    awaited.scheduler_speaks(2000.0)
    awaited.scheduler_speaks(2100.0)  # it says its term again
    assert awaited.reported_groups(2119.0) == frozenset(), "each has its own time"
    assert awaited.reported_groups(2120.0) is None
    awaited.stream_closed(2121.0)
    assert awaited.reported_groups(2121.0) is None, "what it has reported stays known"


def test_advice_is_awaited_for_a_while_from_the_beginning_of_the_lead() -> None:
    awaited = AwaitedReports(patience=120.0)
    assert awaited.advice_is_awaited(9999.0), "it does not lead yet"
    awaited.leader_begins(10_000.0)
    assert awaited.advice_is_awaited(10_119.0)
    assert not awaited.advice_is_awaited(10_120.0)


def test_a_leader_that_loses_its_scheduler_awaits_advice_for_a_while_again() -> None:
    awaited = AwaitedReports(patience=120.0)
    awaited.leader_begins(0.0)
    awaited.scheduler_speaks(1.0)
    awaited.stream_closed(10_000.0)
    assert awaited.advice_is_awaited(10_119.0)
    awaited.stream_closed(10_100.0)  # of a stream on which nobody has spoken
    assert not awaited.advice_is_awaited(10_120.0)


def test_the_end_of_each_wait_is_known_before() -> None:
    awaited = AwaitedReports(patience=120.0)
    assert awaited.ends_in(0.0) is None
    awaited.leader_begins(0.0)
    awaited.scheduler_speaks(50.0)
    assert awaited.ends_in(100.0) == 20.0
    assert awaited.ends_in(130.0) == 40.0
    assert awaited.reported_groups(170.0) is None
    assert awaited.ends_in(170.0) is None
