"""What happens to a request that reaches its promise, row by row of the policy's table (S3-10, S3-13)."""

import pytest

from motet.domain import ParkMethod, RequestId
from motet.runner_info import RequestClass, SequenceState
from motet_supervisor.policy import effects, events
from tests.supervisor.builders import R0, SupervisorDriver, entry


def overflowing(request, pages, **how):
    return entry(request, pages, used=pages, **how)


def test_with_free_pages_a_promise_doubles_and_the_scheduler_is_told():
    driver = SupervisorDriver()
    driver.connect()
    driver.report(overflowing("a", 4))
    assert driver.effects == [effects.Extend(R0, "a", 1, 4, 8), effects.ReportPromise(R0, "a", 1, 8)]


def test_repeated_overflows_double_the_promise():
    driver = SupervisorDriver()
    driver.connect()
    promises = []
    pages = 2
    for _ in range(3):
        driver.overflow(overflowing("a", pages))
        pages = driver.of(effects.Extend)[0].extended
        promises.append(pages)
        driver.clock.advance(10)
    assert promises == [4, 8, 16]


def test_never_more_than_prompt_and_max_tokens_can_use():
    driver = SupervisorDriver()
    driver.connect()
    driver.overflow(overflowing("a", 4, max_tokens=72))  # 80 tokens in all: five pages
    assert driver.of(effects.Extend)[0].extended == 5


def test_a_request_of_unknown_length_is_bounded_by_the_model():
    driver = SupervisorDriver()
    driver.connect(max_model_length=96)
    driver.overflow(overflowing("a", 4, max_tokens=0))
    assert driver.of(effects.Extend)[0].extended == 6


def test_without_enough_pages_to_double_a_promise_gets_the_free_ones():
    driver = SupervisorDriver()
    driver.connect(entry("b", 93), pages=100)
    driver.overflow(overflowing("a", 4))
    assert driver.of(effects.Extend)[0].extended == 7


def test_where_the_runner_admits_by_forecast_a_promise_always_doubles():
    """Its charges are parts of a forecast. It parks by itself when pages are short."""
    driver = SupervisorDriver()
    driver.connect(entry("b", 99), pages=100, by_forecast=True)
    driver.overflow(overflowing("a", 4))
    assert driver.effects == [effects.Extend(R0, "a", 1, 4, 8), effects.ReportPromise(R0, "a", 1, 8)]


@pytest.mark.parametrize(("by_forecast", "charged"), [(True, 19), (False, 39)])
def test_a_part_of_a_forecast_does_not_grow_with_a_promise_that_was_ordered(by_forecast, charged):
    """A report that was sent before the order came says what is charged; shared pages do not become more."""
    driver = SupervisorDriver()
    driver.connect(overflowing("a", 20, promise_number=1, charged_pages=18), pages=100, by_forecast=by_forecast)
    assert [one.extended for one in driver.of(effects.Extend)] == [40]
    driver.report(overflowing("a", 20, promise_number=1, charged_pages=19))
    assert driver.supervisor.runners[R0].ledger.promised == charged


def test_at_its_maximum_a_promise_is_not_extended():
    driver = SupervisorDriver()
    driver.connect()
    assert not driver.overflow(overflowing("a", 5, max_tokens=72))


def test_without_free_pages_no_request_is_parked_for_an_unneeded_page():
    driver = SupervisorDriver()
    # Prompt and answer have 33 tokens. The last one needs no memory, so two pages are enough.
    last = entry("a", 2, used=2, prompt_tokens=16, output_tokens=16, max_tokens=17)
    driver.connect(last, entry("b", 18), pages=20)
    assert not driver.of(effects.Park)
    assert not driver.overflow(last)


def test_without_free_pages_the_newest_of_the_lowest_class_is_parked():
    driver = SupervisorDriver()
    driver.connect(
        overflowing("a", 10),
        entry("old batch", 10, request_class=RequestClass.BATCH),
        entry("new batch", 10, request_class=RequestClass.BATCH),
        entry("newest", 10, request_class=RequestClass.STANDARD),
        pages=40,
    )
    (park,) = driver.of(effects.Park)
    assert (park.request, park.pages, park.doubled) == ("new batch", 10, 20)


def test_the_overflowing_request_is_extended_as_soon_as_the_other_is_parked():
    driver = SupervisorDriver()
    driver.connect(overflowing("a", 10), entry("b", 10), pages=20)
    assert [one.request for one in driver.of(effects.Park)] == ["b"]
    driver.parked("b", 20)
    assert driver.of(effects.ReportParked) == [effects.ReportParked(R0, "b", 1, 20, ParkMethod.RECOMPUTE)]
    assert driver.of(effects.Extend) == [effects.Extend(R0, "a", 1, 10, 20)]


def test_the_overflowing_request_is_parked_itself_if_it_is_the_newest():
    driver = SupervisorDriver()
    driver.connect(entry("a", 10), overflowing("b", 10), pages=20)
    assert [(one.request, one.doubled) for one in driver.of(effects.Park)] == [("b", 20)]


def test_while_a_park_is_pending_no_other_request_is_parked():
    driver = SupervisorDriver()
    driver.connect(entry("a", 10), entry("b", 10), entry("c", 10), pages=30)
    driver.overflow(overflowing("a", 10))
    assert [one.request for one in driver.of(effects.Park)] == ["c"]
    assert not driver.overflow(overflowing("b", 10))
    driver.parked("c", 20)
    assert [one.request for one in driver.of(effects.Extend)] == ["a"]
    # That took all free pages; b waits.
    assert [one.request for one in driver.of(effects.Park)] == ["b"]


def test_one_page_that_will_be_free_is_waited_for_too():
    driver = SupervisorDriver()
    driver.connect(entry("a", 10), overflowing("b", 8), entry("c", 1), pages=19)
    assert [one.request for one in driver.of(effects.Park)] == ["c"]
    assert not driver.overflow(overflowing("a", 10))


def test_a_request_that_was_parked_twice_is_not_parked_for_others():
    driver = SupervisorDriver()
    driver.connect(overflowing("a", 10), entry("b", 10), entry("c", 10, parked_times=2), pages=30)
    assert [one.request for one in driver.of(effects.Park)] == ["b"]


def test_when_all_were_parked_twice_the_overflowing_request_is_parked_with_its_maximum():
    driver = SupervisorDriver()
    driver.connect(overflowing("a", 10, parked_times=2, max_tokens=312), entry("b", 10, parked_times=2), pages=20)
    assert [(one.request, one.doubled) for one in driver.of(effects.Park)] == [("a", 20)]


def test_no_parked_request_wants_more_pages_than_the_runner_has():
    driver = SupervisorDriver()
    driver.connect(overflowing("a", 15), entry("b", 15), pages=30)
    assert driver.of(effects.Park)[0].doubled == 30


def test_a_sequence_that_waits_for_its_adapter_is_not_parked():
    driver = SupervisorDriver()
    driver.connect(overflowing("a", 10), entry("b", 10, state=SequenceState.LOADING), pages=20)
    assert [one.request for one in driver.of(effects.Park)] == ["a"]


def test_a_late_overflow_announcement_is_not_answered_twice():
    driver = SupervisorDriver()
    driver.connect()
    driver.overflow(overflowing("a", 4))
    assert not driver.overflow(overflowing("a", 4))


def test_a_report_that_left_before_the_order_arrived_does_not_undo_it():
    driver = SupervisorDriver()
    driver.connect()
    driver.overflow(overflowing("a", 4))
    assert not driver.report(overflowing("a", 4))


def test_an_order_that_had_no_effect_is_decided_again():
    driver = SupervisorDriver()
    driver.connect()
    driver.overflow(overflowing("a", 4))
    driver.report(overflowing("a", 4))
    driver.report(overflowing("a", 4))
    assert driver.of(effects.Extend) == [effects.Extend(R0, "a", 1, 4, 8)]


def test_an_overflow_that_was_not_announced_is_seen_in_the_report():
    driver = SupervisorDriver()
    driver.connect(entry("a", 4))
    assert not driver.of(effects.Extend)
    driver.report(overflowing("a", 4))
    assert driver.of(effects.Extend)


def test_a_request_that_ends_frees_pages_for_one_that_waits():
    driver = SupervisorDriver()
    driver.connect(entry("a", 10, parked_times=2), entry("b", 10, state=SequenceState.LOADING), pages=20)
    driver.overflow(overflowing("a", 10, parked_times=2))
    (park,) = driver.of(effects.Park)
    assert park.request == "a"
    driver = SupervisorDriver()
    driver.connect(entry("a", 10), entry("b", 10), entry("c", 10), pages=30)
    driver.overflow(overflowing("a", 10))  # c is to be parked
    driver.send(events.RequestEnded(R0, RequestId("b"), 1))
    assert [one.request for one in driver.of(effects.Extend)] == ["a"]


def test_a_request_that_the_report_no_longer_lists_frees_its_pages():
    """Its end was not announced, as when the stream broke."""
    driver = SupervisorDriver()
    driver.connect(entry("a", 10), entry("b", 10), pages=20)
    driver.report(overflowing("a", 10))
    assert driver.effects == [effects.Extend(R0, "a", 1, 10, 20), effects.ReportPromise(R0, "a", 1, 20)]


def test_a_report_that_shows_a_park_says_who_pays_for_the_shared_pages():
    """Whoever is listed first: all others are charged what the report says."""
    driver = SupervisorDriver()
    driver.connect(entry("b", 10, charged_pages=6), entry("c", 10, charged_pages=6), entry("a", 10), pages=24)
    driver.report(overflowing("b", 10), entry("c", 10, charged_pages=6), entry("a", 20, parked=True))
    assert [one.extended for one in driver.of(effects.Extend)] == [18], "16 of 24 pages are promised"


def test_a_runner_whose_stream_is_down_gets_no_orders():
    driver = SupervisorDriver()
    driver.connect()
    driver.send(events.RunnerDisconnected(R0, "1"))
    assert not driver.overflow(overflowing("a", 4))


MEASURED = {"prefill_seconds_per_token": 0.001, "swap_seconds_per_page": 0.001}


@pytest.mark.parametrize(
    ("report", "forced", "expected"),
    [
        (MEASURED, None, ParkMethod.SWAP),
        (MEASURED | {"swap_seconds_per_page": 0.1}, None, ParkMethod.RECOMPUTE),
        (MEASURED | {"host_bytes_free": 100}, None, ParkMethod.RECOMPUTE),
        (MEASURED, ParkMethod.RECOMPUTE, ParkMethod.RECOMPUTE),
        (MEASURED | {"swap_seconds_per_page": 0.1}, ParkMethod.SWAP, ParkMethod.SWAP),
        (MEASURED | {"host_bytes_free": 100}, ParkMethod.SWAP, ParkMethod.RECOMPUTE),
        ({}, None, ParkMethod.SWAP),
        ({"swap_seconds_per_page": 0.1}, None, ParkMethod.SWAP),
        # 80 tokens against five pages there and back, in numbers that floats hold exactly.
        ({"prefill_seconds_per_token": 1 / 1024, "swap_seconds_per_page": 8 / 1024}, None, ParkMethod.SWAP),
        ({"prefill_seconds_per_token": 1 / 1024, "swap_seconds_per_page": 9 / 1024}, None, ParkMethod.RECOMPUTE),
        (MEASURED | {"host_bytes_free": 5 * 1024}, None, ParkMethod.SWAP),
        (MEASURED | {"host_bytes_free": 5 * 1024 - 1}, None, ParkMethod.RECOMPUTE),
    ],
)
def test_the_cheaper_way_of_parking_is_taken_if_host_memory_is_free(report, forced, expected):
    driver = SupervisorDriver(park_method=forced)
    driver.connect(pages=20)
    driver.report(entry("a", 10), entry("b", 10), **report)
    driver.overflow(overflowing("a", 10))
    assert driver.of(effects.Park)[0].method is expected


def test_pages_of_a_run_without_tokens_are_not_copied():
    driver = SupervisorDriver()
    driver.connect(pages=20)
    live = [entry(name, 10, used=10, prompt_tokens=8, output_tokens=16) for name in "ab"]
    driver.report(*live, host_bytes_free=2 * 1024, **MEASURED)
    driver.overflow(overflowing("a", 10))
    assert driver.of(effects.Park)[0].method is ParkMethod.SWAP
    assert driver.supervisor.runners[R0].host_bytes_free == 0


def test_host_memory_that_was_given_away_is_not_given_twice():
    driver = SupervisorDriver()
    driver.connect(pages=20)
    driver.report(entry("a", 10), entry("b", 10), host_bytes_free=6 * 1024, **MEASURED)
    driver.overflow(overflowing("a", 10))
    assert driver.of(effects.Park)[0].method is ParkMethod.SWAP
    runner = driver.supervisor.runners[R0]
    assert runner.host_bytes_free == 1024
