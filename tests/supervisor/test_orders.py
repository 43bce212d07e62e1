"""An order under way: what ends it, what is decided meanwhile, and what messages of requests say that are not known."""

import pytest

from motet.domain import InstanceName, ParkMethod, RequestId
from motet.runner_info import RequestClass, SequenceState
from motet_supervisor.policy import effects, events
from motet_supervisor.settings import Settings
from tests.supervisor.builders import R0, SupervisorDriver, entry

A = RequestId("a")


def overflowing(request, pages, **how):
    return entry(request, pages, used=pages, **how)


def test_an_extended_request_at_its_new_promise_is_extended_at_once():
    """Its announcement shows that the order was carried out."""
    driver = SupervisorDriver()
    driver.connect()
    assert [driver.overflow(overflowing("a", pages))[0].extended for pages in (2, 4, 8)] == [4, 8, 16]


@pytest.mark.parametrize(("waited", "orders"), [(1.9, 0), (2.0, 1)])
def test_an_announcement_with_the_old_promise_counts_after_the_time_of_an_order(waited, orders):
    driver = SupervisorDriver(order_timeout=2.0)
    driver.connect()
    driver.overflow(overflowing("a", 4))
    driver.clock.advance(waited)
    driver.overflow(overflowing("a", 4))
    assert driver.of(effects.Extend) == [effects.Extend(R0, A, 1, 4, 8)] * orders


def test_an_announcement_says_what_the_promise_is_now():
    driver = SupervisorDriver()
    driver.connect(entry("a", 4))
    driver.overflow(overflowing("a", 6))
    assert driver.of(effects.Extend) == [effects.Extend(R0, A, 1, 6, 12)]


def test_an_announcement_keeps_the_length_that_an_earlier_report_named():
    driver = SupervisorDriver()
    driver.connect(entry("a", 4, max_tokens=72))  # 80 tokens in all: five pages
    driver.overflow(overflowing("a", 4, max_tokens=0))
    assert [one.extended for one in driver.of(effects.Extend)] == [5]


def test_a_report_during_an_order_does_not_undo_the_promise():
    driver = SupervisorDriver(order_timeout=2.0)
    driver.connect(pages=60)
    driver.overflow(overflowing("a", 4))
    driver.report(overflowing("a", 4), overflowing("b", 50))
    assert [(one.request, one.extended) for one in driver.of(effects.Extend)] == [("b", 52)], "a has eight pages"


def test_after_the_time_of_an_order_a_tick_decides_by_the_counters_of_the_last_report():
    driver = SupervisorDriver(order_timeout=2.0)
    driver.connect()
    driver.overflow(overflowing("a", 4))
    assert not driver.report(overflowing("a", 8)), "the extension is under way until a second report"
    assert not driver.wait(1.9)
    driver.wait(0.1)
    assert driver.of(effects.Extend) == [effects.Extend(R0, A, 1, 8, 16)]


def test_a_report_that_is_sent_again_is_not_a_second_one():
    """An engine that is busy makes none: the runner sends its last one again, with the same number."""
    driver = SupervisorDriver(order_timeout=10.0)
    driver.connect()
    driver.report(overflowing("a", 4), sequence=7)
    assert driver.of(effects.Extend) == [effects.Extend(R0, A, 1, 4, 8)]
    for _ in range(3):
        assert not driver.report(overflowing("a", 4), sequence=7)
    assert not driver.report(overflowing("a", 4), sequence=8), "it may have been made before the order came"
    assert driver.report(overflowing("a", 4), sequence=9)


def test_a_report_with_a_later_promise_ends_the_order():
    """The runner numbers the promises, so one report shows that the order was carried out."""
    driver = SupervisorDriver(order_timeout=2.0)
    driver.connect()
    driver.overflow(overflowing("a", 4, promise_number=3))
    assert driver.of(effects.Extend) == [effects.Extend(R0, A, 1, 4, 8, 3)]
    assert not driver.report(overflowing("a", 4, promise_number=3)), "it was sent before the order came"
    driver.report(overflowing("a", 8, promise_number=4))
    assert driver.of(effects.Extend) == [effects.Extend(R0, A, 1, 8, 16, 4)]


def test_a_scheduler_that_means_an_earlier_promise_is_told_the_one_of_now():
    """It was parked, resumed and parked again with as many pages, and an old word of the scheduler comes late."""
    driver = SupervisorDriver()
    driver.connect(entry("a", 16))
    driver.send(events.RequestParked(R0, A, 1, 16, ParkMethod.SWAP, 5))
    assert driver.send(events.Resumable(1, R0, A, 1, 16, 3)) == [effects.ReportParked(R0, A, 1, 16, ParkMethod.SWAP, 5)]
    assert driver.send(events.Resumable(1, R0, A, 1, 16, 5)) == [effects.Resume(R0, A, 1, 16, 5)]


@pytest.mark.parametrize("ordered", [True, False])
def test_a_park_that_a_report_shows_before_its_event_counts_once(ordered):
    """A command takes effect at once, and a report that is asked for in the same turn leaves before the event."""
    driver = SupervisorDriver()
    driver.connect(overflowing("b", 10), entry("a", 10, promise_number=1), pages=20 if ordered else 100)
    assert bool(driver.of(effects.Park)) is ordered
    driver.report(entry("b", 10), entry("a", 20, parked=True, parked_times=1, promise_number=2))
    assert len(driver.of(effects.ReportParked)) == 1
    assert not driver.send(events.RequestParked(R0, A, 1, 20, ParkMethod.SWAP, 2)), "the scheduler has been told"
    assert driver.supervisor.runners[R0].sequences[A].entry.parked_times == 1
    driver.send(events.SchedulerConnected(1, 1))
    (everyone,) = driver.of(effects.ReportAllParked)
    assert everyone.requests == (effects.ReportParked(R0, A, 1, 20, ParkMethod.SWAP, 2),), "only the event says how"


def test_events_that_are_older_than_the_report_before_them_change_nothing():
    driver = SupervisorDriver()
    driver.connect(entry("a", 4, promise_number=1))
    driver.report(entry("a", 16, promise_number=4, parked_times=1))
    known = driver.supervisor.runners[R0].sequences[A]
    now = known.entry
    for event in (
        events.OverflowAnnounced(R0, overflowing("a", 4, promise_number=1)),
        events.RequestParked(R0, A, 1, 8, ParkMethod.SWAP, 2),
        events.RequestResumed(R0, A, 1, 8, 3),
    ):
        assert not driver.send(event)
        assert known.entry == now


def test_an_event_is_not_older_than_the_report_of_an_earlier_placement():
    driver = SupervisorDriver()
    driver.connect(entry("a", 16, promise_number=4))
    driver.overflow(overflowing("a", 4, promise_number=1, epoch=2))
    assert driver.of(effects.Extend) == [effects.Extend(R0, A, 2, 4, 8, 1)]


def test_a_request_that_no_longer_nears_its_promise_is_not_extended():
    driver = SupervisorDriver()
    driver.connect(entry("a", 10), entry("b", 10), pages=20)
    driver.report(overflowing("a", 10), entry("b", 10))
    assert driver.of(effects.Park)
    driver.report(entry("a", 10), entry("b", 10))
    driver.parked("b", 20)
    assert not driver.of(effects.Extend)


@pytest.mark.parametrize(("waited", "victim"), [(1.9, "old"), (2.0, "new")])
def test_a_request_that_an_order_is_under_way_to_is_no_victim(waited, victim):
    driver = SupervisorDriver(order_timeout=2.0)
    driver.connect(entry("old", 10), overflowing("new", 6), pages=20)
    assert [one.extended for one in driver.of(effects.Extend)] == [10]
    driver.clock.advance(waited)
    driver.overflow(overflowing("old", 10))
    assert [one.request for one in driver.of(effects.Park)] == [victim]


@pytest.mark.parametrize(("waited", "orders"), [(1.9, 0), (2.0, 1)])
def test_the_first_report_after_the_time_of_an_order_counts(waited, orders):
    driver = SupervisorDriver(order_timeout=2.0)
    driver.connect()
    driver.overflow(overflowing("a", 4))
    driver.clock.advance(waited)
    driver.report(overflowing("a", 4))
    assert driver.of(effects.Extend) == [effects.Extend(R0, A, 1, 4, 8)] * orders


def test_a_park_that_two_reports_do_not_show_is_ordered_again():
    driver = SupervisorDriver()
    live = (overflowing("a", 10), entry("b", 10))
    driver.connect(*live, pages=20)
    assert not driver.report(*live)
    driver.report(*live)
    assert [(one.request, one.doubled) for one in driver.of(effects.Park)] == [("b", 20)]


def test_a_report_that_shows_an_ordered_park_does_not_report_it_twice():
    driver = SupervisorDriver()
    driver.connect(overflowing("a", 10), entry("b", 10), pages=20)
    assert driver.of(effects.Park)
    driver.report(overflowing("a", 10), entry("b", 20, parked=True))
    assert not driver.of(effects.ReportParked)
    driver.parked("b", 20)
    assert len(driver.of(effects.ReportParked)) == 1
    driver.report(entry("a", 20), entry("b", 20, parked=True))
    assert not driver.of(effects.ReportParked)


def test_a_park_whose_message_was_lost_is_seen_in_the_second_report():
    driver = SupervisorDriver()
    driver.connect(overflowing("a", 10), entry("b", 10), pages=20)
    driver.report(overflowing("a", 10), entry("b", 20, parked=True))
    driver.report(overflowing("a", 10), entry("b", 20, parked=True))
    assert driver.of(effects.ReportParked) == [effects.ReportParked(R0, "b", 1, 20, ParkMethod.RECOMPUTE)]
    assert [one.request for one in driver.of(effects.Extend)] == ["a"]


def test_a_runner_that_said_too_many_pages_of_a_parked_request_is_believed_when_it_says_fewer():
    driver = SupervisorDriver()
    driver.send(events.SchedulerConnected(1, 1))
    driver.connect(entry("a", 8, promise_number=1))
    driver.send(events.RequestParked(R0, A, 1, 2**31, ParkMethod.RECOMPUTE, 2))
    driver.report(entry("a", 5, parked=True, promise_number=2))
    assert driver.of(effects.ReportParked)[-1] == effects.ReportParked(R0, A, 1, 5, ParkMethod.RECOMPUTE, 2)
    assert driver.resumable("a", 5) == [effects.Resume(R0, A, 1, 5, 2)]


def test_a_report_without_numbers_does_not_change_what_a_parked_request_wants():
    driver = SupervisorDriver()
    driver.send(events.SchedulerConnected(1, 1))
    driver.connect(entry("a", 8))
    driver.parked("a", 16)
    driver.report(entry("a", 8, parked=True))
    assert driver.resumable("a", 16) == [effects.Resume(R0, A, 1, 16)]


def test_a_new_stream_forgets_the_orders_of_the_old_one():
    driver = SupervisorDriver()
    driver.connect(overflowing("a", 4))
    assert driver.of(effects.Extend)
    driver.connect(overflowing("a", 4))
    assert driver.of(effects.Extend) == [effects.Extend(R0, A, 1, 4, 8)]


def test_a_new_incarnation_begins_with_nothing():
    driver = SupervisorDriver()
    driver.connect(entry("a", 30), pages=50)
    driver.connect(overflowing("b", 30), incarnation="2", pages=50)
    assert [one.extended for one in driver.of(effects.Extend)] == [50]


def test_a_request_under_a_new_epoch_is_the_newest_and_has_no_order():
    driver = SupervisorDriver()
    driver.connect(entry("a", 10), entry("b", 10), pages=20)
    driver.report(entry("a", 10, epoch=2), entry("b", 10))
    driver.overflow(overflowing("b", 10))
    assert [(one.request, one.epoch) for one in driver.of(effects.Park)] == [("a", 2)]
    driver = SupervisorDriver()
    driver.connect(overflowing("a", 4))
    driver.overflow(overflowing("a", 4, epoch=2))
    assert driver.of(effects.Extend) == [effects.Extend(R0, A, 2, 4, 8)]


def test_the_one_that_has_waited_longest_is_extended_first():
    driver = SupervisorDriver()
    driver.connect(entry("a", 10), entry("b", 10), entry("c", 10, state=SequenceState.LOADING), pages=30)
    driver.overflow(overflowing("b", 10))
    assert [one.request for one in driver.of(effects.Park)] == ["b"]
    driver = SupervisorDriver()
    driver.connect(entry("a", 10), entry("b", 10), entry("c", 10), pages=30)
    driver.overflow(overflowing("b", 10))  # c is to be parked
    driver.clock.advance(0.5)
    driver.overflow(overflowing("a", 10))
    driver.send(events.RequestEnded(R0, RequestId("c"), 1))
    assert [(one.request, one.extended) for one in driver.of(effects.Extend)] == [("b", 20)]


def test_of_two_that_overflow_in_one_report_the_older_is_first():
    driver = SupervisorDriver()
    driver.connect(entry("a", 10), entry("b", 10), pages=25)
    driver.report(overflowing("b", 10), overflowing("a", 10))
    assert [(one.request, one.extended) for one in driver.of(effects.Extend)] == [("a", 15)]


def test_no_request_is_chosen_as_a_victim_a_third_time():
    driver = SupervisorDriver()
    driver.connect(entry("a", 10, parked_times=2), entry("b", 10), pages=20)
    victims = []
    for _ in range(3):
        driver.overflow(overflowing("a", 10, parked_times=2))
        (park,) = driver.of(effects.Park)
        victims.append((park.request, park.doubled))
        if park.request == "b":
            driver.parked("b", 10)
            for _ in range(2):  # a was not extended
                driver.report(entry("a", 10, parked_times=2), entry("b", 10, parked=True, parked_times=len(victims)))
            driver.resumed("b", 10)
    assert victims == [("b", 20), ("b", 20), ("a", 20)]


def test_a_park_of_the_runner_itself_counts():
    driver = SupervisorDriver()
    driver.connect(entry("a", 10), entry("b", 10, parked_times=1), pages=20)
    driver.parked("b", 10)
    driver.resumed("b", 10)
    driver.overflow(overflowing("a", 10))
    assert [one.request for one in driver.of(effects.Park)] == ["a"], "b was parked twice"


def test_how_often_a_parked_request_was_parked_is_what_its_runner_says():
    driver = SupervisorDriver()
    driver.connect(entry("a", 10), entry("b", 10), pages=20)
    driver.parked("b", 10)
    driver.report(entry("a", 10), entry("b", 10, parked=True, parked_times=2))
    driver.resumed("b", 10)
    driver.overflow(overflowing("a", 10))
    assert [one.request for one in driver.of(effects.Park)] == ["a"]


def test_a_resumed_request_is_charged_its_whole_promise():
    driver = SupervisorDriver()
    driver.connect(entry("a", 5), entry("b", 10), pages=20)
    driver.parked("b", 12)
    driver.resumed("b", 12)
    driver.overflow(overflowing("a", 5))
    assert [one.extended for one in driver.of(effects.Extend)] == [8], "17 of 20 pages are promised"


def test_an_extended_request_still_shares_its_pages():
    driver = SupervisorDriver()
    driver.connect(entry("a", 10), overflowing("b", 10, charged_pages=4), pages=40)
    assert [one.extended for one in driver.of(effects.Extend)] == [20]
    driver.overflow(overflowing("b", 20))
    assert [one.extended for one in driver.of(effects.Extend)] == [36], "of 40 pages, 10 and 14 are charged"


def test_a_parked_request_that_used_host_memory_says_so_to_every_scheduler():
    driver = SupervisorDriver()
    driver.connect(entry("a", 8))
    driver.send(events.RequestParked(R0, A, 1, 16, ParkMethod.SWAP))
    parked = effects.ReportParked(R0, A, 1, 16, ParkMethod.SWAP)
    assert driver.effects == [parked]
    driver.send(events.SchedulerConnected(1, 1))
    assert driver.of(effects.ReportAllParked) == [effects.ReportAllParked((parked,))]


def test_a_request_that_waited_for_pages_and_was_parked_waits_no_longer():
    driver = SupervisorDriver()
    driver.connect(overflowing("a", 10), entry("b", 10), pages=20)
    driver.parked("a", 20)
    driver.send(events.RequestEnded(R0, RequestId("b"), 1))
    driver.resumed("a", 20)
    assert not driver.wait(1.9)


@pytest.mark.parametrize("urgent", list(RequestClass)[:-1])
def test_the_lowest_class_is_parked_before_a_newer_request(urgent):
    driver = SupervisorDriver()
    low = entry("low", 10, request_class=RequestClass.BATCH)
    driver.connect(low, overflowing("urgent", 10, request_class=urgent), pages=20)
    assert [one.request for one in driver.of(effects.Park)] == ["low"]


@pytest.mark.parametrize(
    "event",
    [
        kind(InstanceName(instance), RequestId(request), epoch, *values)
        for instance, request, epoch in (("r1", "a", 1), ("r0", "b", 1), ("r0", "a", 2))
        for kind, values in (
            (events.RequestParked, (8, ParkMethod.SWAP)),
            (events.RequestResumed, (8,)),
            (events.RequestEnded, ()),
        )
    ]
    + [
        events.Resumable(1, InstanceName("r1"), A, 1, 4),
        events.Resumable(1, R0, RequestId("b"), 1, 4),
        events.Resumable(1, R0, A, 2, 4),
        events.OverflowAnnounced(InstanceName("r1"), overflowing("a", 4)),
        events.HeartbeatReceived(InstanceName("r1")),
        events.RunnerDisconnected(InstanceName("r1"), "1"),
    ],
    ids=lambda event: type(event).__name__,
)
def test_a_message_about_what_is_not_known_changes_nothing(event):
    driver = SupervisorDriver()
    driver.connect(entry("a", 4))
    assert not driver.send(event)
    runner = driver.supervisor.runners[R0]
    assert (runner.connected, list(runner.sequences), dict(runner.ledger)) == (True, ["a"], {"a": 4})
    assert not runner.sequences[A].parked
    assert list(driver.supervisor.runners) == ["r0"]


def test_a_report_of_a_runner_that_is_not_known_changes_nothing():
    driver = SupervisorDriver()
    assert not driver.report(overflowing("a", 4), instance="r1")
    assert not driver.supervisor.runners


def test_the_policy_of_the_tests_is_that_of_the_settings():
    assert Settings().config(time_scale=1.0) == SupervisorDriver().supervisor.config


def test_times_of_the_policy_follow_the_time_scale():
    config, plain = Settings().config(time_scale=0.5), Settings().config(time_scale=1.0)
    for name in ("heartbeat", "remind", "forget", "hang", "order_timeout", "resume_without_scheduler"):
        assert getattr(config, name) == getattr(plain, name) / 2, name


def refused(driver, number):
    return driver.send(events.OrderRefused(R0, A, 1, number))


def test_after_a_refused_extension_the_next_report_says_what_is_true():
    """Without the refusal, the first report might have been sent before the order came."""
    driver = SupervisorDriver()
    driver.connect(overflowing("a", 4, promise_number=1))
    assert driver.of(effects.Extend)
    assert not refused(driver, 1), "what is true now is in no message yet"
    driver.report(overflowing("a", 4, promise_number=1))
    assert driver.of(effects.Extend) == [effects.Extend(R0, A, 1, 4, 8, 1)]


def test_after_a_refused_park_nobody_counts_as_parked():
    driver = SupervisorDriver()
    driver.connect(overflowing("b", 10), entry("a", 10, promise_number=1), pages=20)
    assert [one.request for one in driver.of(effects.Park)] == ["a"]
    refused(driver, 1)
    driver.report(entry("b", 10), entry("a", 10, promise_number=1))
    sequence = driver.supervisor.runners[R0].sequences[A]
    assert (sequence.entry.parked_times, sequence.freeing, sequence.ordered_at) == (0, 0, None)


@pytest.mark.parametrize(("number", "told"), [(3, 1), (2, 0)])
def test_of_a_refused_resume_the_scheduler_hears_with_the_next_report(number, told):
    """It believes that the request comes back. A refusal of an earlier order says nothing about this one."""
    driver = SupervisorDriver()
    driver.send(events.SchedulerConnected(1, 1))
    parked = entry("a", 8, parked=True, promise_number=3)
    driver.connect(parked)
    assert driver.send(events.Resumable(1, R0, A, 1, 8, 3)) == [effects.Resume(R0, A, 1, 8, 3)]
    assert not refused(driver, number)
    driver.report(parked)
    again = effects.ReportParked(R0, A, 1, 8, ParkMethod.RECOMPUTE, 3)
    assert driver.of(effects.ReportParked) == [again] * told
    driver.report(parked)
    assert not driver.of(effects.ReportParked), "once"
