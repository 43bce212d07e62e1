"""How parked requests resume: through the scheduler's ledger, or without it while it is away."""

import pytest

from motet.domain import ParkMethod, RequestId
from motet.runner_info import RequestClass
from motet_supervisor.policy import effects, events
from tests.supervisor.builders import R0, SupervisorDriver, entry


def with_scheduler(**config):
    driver = SupervisorDriver(**config)
    driver.send(events.SchedulerConnected(1, 1))
    return driver


def test_a_parked_request_resumes_when_the_scheduler_allows_it():
    driver = with_scheduler()
    driver.connect(entry("a", 8))
    driver.parked("a", 16)
    driver.resumable("a", 16)
    assert driver.effects == [effects.Resume(R0, "a", 1, 16)]
    driver.resumed("a", 16)
    assert driver.effects == [effects.ReportResumed(R0, "a", 1, 16)]


def test_an_allowed_resume_with_another_promise_is_answered_with_the_right_one():
    driver = with_scheduler()
    driver.connect(entry("a", 8))
    driver.parked("a", 16)
    driver.resumable("a", 8)
    assert driver.effects == [effects.ReportParked(R0, "a", 1, 16, ParkMethod.RECOMPUTE)]


def test_an_allowed_resume_of_a_running_request_is_answered_as_resumed():
    driver = with_scheduler()
    driver.connect(entry("a", 8))
    assert driver.resumable("a", 8) == [effects.ReportResumed(R0, "a", 1, 8)]


def test_an_allowed_resume_of_an_earlier_epoch_is_ignored():
    driver = with_scheduler()
    driver.connect(entry("a", 8, parked=True, epoch=2))
    assert not driver.resumable("a", 8, epoch=1)


def test_a_scheduler_that_connects_gets_all_parked_requests():
    driver = SupervisorDriver()
    driver.connect(entry("a", 8, parked=True), entry("b", 4))
    driver.send(events.SchedulerConnected(1, 1))
    (everyone,) = driver.of(effects.ReportAllParked)
    assert [one.request for one in everyone.requests] == ["a"]


def test_requests_that_a_runner_parked_by_itself_are_reported_too():
    driver = with_scheduler()
    driver.connect(entry("a", 8))
    driver.parked("a", 16)
    assert driver.of(effects.ReportParked)
    driver = with_scheduler()
    driver.connect(entry("a", 8))
    driver.report(entry("a", 16, parked=True))
    assert driver.of(effects.ReportParked) == [effects.ReportParked(R0, "a", 1, 16, ParkMethod.RECOMPUTE)]


def test_a_supervisor_that_comes_back_learns_from_the_runner_who_is_parked():
    driver = with_scheduler()
    driver.connect(entry("a", 16, parked=True))
    assert driver.of(effects.ReportParked)[0].wanted == 16


def test_a_request_that_was_parked_again_while_nobody_listened_asks_for_what_it_wants_now():
    """Its runner resumed it and parked it again while the stream was down: pages of the first time would be too few."""
    driver = with_scheduler()
    driver.connect(entry("a", 2, promise_number=1))
    driver.send(events.RequestParked(R0, RequestId("a"), 1, 4, ParkMethod.RECOMPUTE, 2))
    driver.send(events.RunnerDisconnected(R0, "1"))
    again = entry("a", 8, parked=True, promise_number=4)
    driver.connect(again)
    asks = effects.ReportParked(R0, RequestId("a"), 1, 8, ParkMethod.RECOMPUTE, 4)
    assert driver.of(effects.ReportParked) == [asks]
    driver.report(again)
    assert not driver.of(effects.ReportParked), "once"
    allowed = driver.send(events.Resumable(1, R0, RequestId("a"), 1, 8, 4))
    assert allowed == [effects.Resume(R0, RequestId("a"), 1, 8, 4)]


def test_a_request_that_was_parked_again_waits_from_then_on():
    driver = SupervisorDriver(resume_without_scheduler=2.0, heartbeat=100.0)
    driver.connect(entry("a", 4, parked=True, promise_number=2))
    driver.wait(0.0)
    driver.clock.advance(1.5)
    driver.report(entry("a", 8, parked=True, promise_number=4))
    assert not driver.wait(1.9)
    driver.wait(0.1)
    assert driver.of(effects.Resume) == [effects.Resume(R0, RequestId("a"), 1, 8, 4)]


def test_without_a_scheduler_parked_requests_resume_after_a_while_if_enough_pages_are_free():
    driver = with_scheduler(resume_without_scheduler=2.0, resume_margin=0.1)
    driver.connect(entry("a", 30), entry("b", 60), pages=100)
    driver.parked("a", 35)
    driver.send(events.SchedulerDisconnected(1))
    driver.wait(2.1)
    assert not driver.of(effects.Resume), "40 are free, and 35 and a margin of 10 are wanted"
    driver.report(entry("a", 35, parked=True), entry("b", 50))
    driver.wait(0.1)
    assert driver.of(effects.Resume) == [effects.Resume(R0, "a", 1, 35)]


def test_with_a_scheduler_parked_requests_wait_until_it_allows_them():
    driver = with_scheduler()
    driver.connect(entry("a", 10, parked=True))
    driver.wait(4)
    assert not driver.of(effects.Resume)


def test_an_idle_runner_needs_no_margin():
    driver = SupervisorDriver(resume_without_scheduler=2.0, resume_margin=0.5)
    driver.connect(entry("a", 100, parked=True), pages=100)
    driver.wait(0.1)
    driver.wait(2.1)
    assert driver.of(effects.Resume)


def test_the_first_parked_request_is_not_overtaken_by_a_smaller_one():
    driver = SupervisorDriver(resume_without_scheduler=2.0)
    driver.connect(entry("a", 60, parked=True), entry("b", 5, parked=True), entry("c", 80), pages=100)
    driver.wait(0.1)
    driver.wait(3)
    assert not driver.of(effects.Resume)


def test_a_resume_that_had_no_effect_is_ordered_again():
    driver = SupervisorDriver(resume_without_scheduler=2.0, order_timeout=2.0)
    driver.connect(entry("a", 10, parked=True))
    driver.wait(0.1)
    driver.wait(2.1)
    assert driver.of(effects.Resume)
    driver.wait(1)
    assert not driver.of(effects.Resume)
    driver.wait(2)
    assert driver.of(effects.Resume)


def test_messages_of_a_scheduler_that_no_longer_leads_are_ignored():
    driver = with_scheduler()
    driver.connect(entry("a", 8))
    driver.parked("a", 16)
    driver.send(events.SchedulerConnected(2, term=5))
    assert driver.resumable("a", 16, term=1) == []
    assert driver.resumable("a", 16, term=5) == [effects.Resume(R0, "a", 1, 16)]


def test_orders_have_the_leaders_term_and_term_0_while_it_is_away():
    driver = with_scheduler()
    assert driver.supervisor.term == 1
    driver.send(events.SchedulerConnected(2, term=5))
    assert driver.supervisor.term == 5
    driver.send(events.TermRaised(2, term=7))
    assert driver.supervisor.term == 7
    driver.send(events.SchedulerDisconnected(2))
    assert driver.supervisor.term == 0, "the other scheduler no longer leads"
    driver.send(events.SchedulerConnected(3, term=7))
    assert driver.supervisor.term == 7


def test_a_scheduler_that_no_longer_leads_does_not_keep_requests_parked():
    driver = with_scheduler(resume_without_scheduler=2.0)
    driver.connect(entry("a", 8))
    driver.parked("a", 16)
    driver.send(events.SchedulerConnected(2, term=5))
    driver.send(events.SchedulerDisconnected(2))
    driver.wait(2.1)
    assert driver.of(effects.Resume) == [effects.Resume(R0, "a", 1, 16)]


def test_without_a_scheduler_a_parked_request_waits_for_pages_and_not_only_for_promises():
    driver = with_scheduler(resume_without_scheduler=2.0, overcommit=1.5)
    driver.connect(entry("a", 10), entry("b", 9, used=8), entry("c", 9, used=8), pages=20)
    driver.parked("a", 10)
    driver.send(events.SchedulerDisconnected(1))
    driver.wait(2.1)
    assert not driver.of(effects.Resume), "12 may be promised, and 4 are free"
    driver.report(entry("a", 10, parked=True), entry("b", 9, used=8))
    driver.wait(0.1)
    assert driver.of(effects.Resume) == [effects.Resume(R0, "a", 1, 10)]


def test_a_request_that_is_parked_when_its_runner_connects_waits_from_then_on():
    driver = SupervisorDriver(resume_without_scheduler=2.0)
    driver.wait(0.0)
    driver.wait(10)
    driver.connect(entry("a", 8, parked=True))
    assert not driver.wait(1.9)
    driver.wait(0.1)
    assert driver.of(effects.Resume) == [effects.Resume(R0, "a", 1, 8)]


def test_a_request_that_a_report_shows_as_parked_waits_from_then_on():
    driver = SupervisorDriver(resume_without_scheduler=2.0, heartbeat=100.0)
    driver.connect(entry("a", 8))
    driver.wait(0.0)
    driver.wait(10)
    driver.report(entry("a", 8, parked=True))
    assert not driver.wait(1.9)
    driver.wait(0.1)
    assert driver.of(effects.Resume)


def test_a_parked_request_waits_for_its_time_also_when_the_scheduler_is_long_away():
    driver = SupervisorDriver(resume_without_scheduler=2.0, heartbeat=100.0)
    driver.connect(entry("a", 8))
    driver.wait(0.0)
    driver.wait(10)
    driver.parked("a", 16)
    assert not driver.wait(1.9)
    driver.wait(0.1)
    assert driver.of(effects.Resume) == [effects.Resume(R0, "a", 1, 16)]


def test_when_another_scheduler_than_the_leader_goes_requests_stay_parked():
    driver = with_scheduler(resume_without_scheduler=2.0)
    driver.send(events.SchedulerConnected(2, term=5))
    driver.connect(entry("a", 8, parked=True))
    driver.send(events.SchedulerDisconnected(1))
    assert not driver.wait(2.0)
    driver.send(events.HeartbeatReceived(R0))
    assert not driver.wait(2.0)


def test_the_time_without_a_leader_counts_from_when_the_leader_went():
    driver = with_scheduler(resume_without_scheduler=2.0)
    driver.send(events.SchedulerConnected(2, term=5))
    driver.connect(entry("a", 8, parked=True))
    driver.send(events.SchedulerDisconnected(2))
    driver.clock.advance(1.5)
    driver.send(events.SchedulerDisconnected(1))
    assert not driver.wait(0.4)
    driver.wait(0.1)
    assert driver.of(effects.Resume)


def test_a_leader_that_comes_back_ends_the_time_without_one():
    driver = with_scheduler(resume_without_scheduler=2.0)
    driver.connect(entry("a", 8, parked=True))
    driver.send(events.SchedulerDisconnected(1))
    driver.wait(1.5)
    driver.send(events.SchedulerConnected(2, 1))
    driver.wait(0.4)
    driver.send(events.SchedulerDisconnected(2))
    driver.send(events.HeartbeatReceived(R0))
    assert not driver.wait(1.9)


def test_the_same_term_still_leads():
    driver = with_scheduler()
    driver.connect(entry("a", 8, parked=True))
    driver.send(events.TermRaised(1, term=3))
    assert not driver.resumable("a", 8, term=2)
    assert driver.resumable("a", 8, term=3)


@pytest.mark.parametrize(("running", "resumes"), [(60, True), (61, False)])
def test_a_request_resumes_alone_where_it_and_the_margin_just_fit(running, resumes):
    driver = SupervisorDriver(resume_without_scheduler=2.0, resume_margin=0.1)
    driver.connect(entry("a", 30, parked=True), entry("b", running), pages=100)
    driver.wait(0.0)
    driver.wait(2.0)
    assert bool(driver.of(effects.Resume)) is resumes


@pytest.mark.parametrize(("running", "resumes"), [(5, True), (6, False)])
def test_the_margin_is_a_page_at_least(running, resumes):
    driver = SupervisorDriver(resume_without_scheduler=2.0, resume_margin=0.05)
    driver.connect(entry("a", 4, parked=True), entry("b", running), pages=10)
    driver.wait(0.0)
    driver.wait(2.0)
    assert bool(driver.of(effects.Resume)) is resumes


def shared_by(count, *, pages, shared):
    """`count` requests with `pages` pages each, of which `shared` are the same for all. The first pays for these."""
    charged = [pages, *[pages - shared] * (count - 1)]
    return [entry(f"r{at}", pages, used=pages - 1, charged_pages=one) for at, one in enumerate(charged)]


@pytest.mark.parametrize(("free", "resumes"), [(45, True), (44, False)])
def test_pages_that_requests_share_are_in_use_once(free, resumes):
    """Each of forty has the same ten pages: their numbers of pages add up to more than there are."""
    driver = SupervisorDriver(resume_without_scheduler=2.0, resume_margin=0.05, heartbeat=100.0)
    running, parked = shared_by(40, pages=15, shared=10), entry("p", 20, parked=True)
    driver.connect(*running, parked, pages=500)
    driver.wait(0.0)
    driver.clock.advance(2.0)
    driver.report(*running, parked, pages_free=free)
    driver.wait(0.0)
    assert bool(driver.of(effects.Resume)) is resumes, "it and a margin of 25 pages have to be free"


def test_pages_of_what_came_back_are_not_free_although_no_report_has_said_so():
    driver = SupervisorDriver(resume_without_scheduler=2.0, resume_margin=0.05, heartbeat=100.0, overcommit=2.0)
    live = entry("r", 60, used=70), entry("a", 20, parked=True), entry("b", 20, parked=True)
    driver.connect(*live, pages=100)
    driver.wait(0.0)
    driver.clock.advance(2.0)
    driver.report(*live)
    driver.wait(0.0)
    assert [one.request for one in driver.of(effects.Resume)] == ["a"]
    driver.resumed("a", 20)
    assert not driver.wait(0.1), "ten pages are left"


def alone_beside(*running, parked, free=None):
    """A supervisor without a scheduler, and what a runner of a hundred pages has reported. Two hundred may be
    promised."""
    driver = SupervisorDriver(resume_without_scheduler=2.0, resume_margin=0.05, heartbeat=100.0, overcommit=2.0)
    driver.connect(*running, parked, pages=100)
    driver.wait(0.0)
    driver.clock.advance(2.0)
    driver.report(*running, parked, **({} if free is None else {"pages_free": free}))
    driver.wait(0.0)
    assert not driver.of(effects.Resume)
    return driver


@pytest.mark.parametrize(("wanted", "resumes"), [(75, True), (76, False)])
def test_pages_of_what_has_ended_are_free_although_no_report_has_said_so(wanted, resumes):
    """Its engine may be busy for long, and its last report is repeated."""
    small, big, waits = entry("small", 20, used=20), entry("big", 80, used=60), entry("p", wanted, parked=True)
    driver = alone_beside(small, big, parked=waits)
    driver.send(events.RequestEnded(R0, RequestId("big"), 1))
    driver.wait(0.1)
    assert bool(driver.of(effects.Resume)) is resumes
    driver.report(small, waits, pages_free=20)
    driver.wait(2.5)
    assert bool(driver.of(effects.Resume)) is resumes


def test_pages_of_what_was_parked_are_free_although_no_report_has_said_so():
    small, big = entry("small", 20, used=20), entry("big", 80, used=60, request_class=RequestClass.BATCH)
    driver = alone_beside(small, big, parked=entry("p", 75, parked=True))
    driver.parked("big", 80)
    driver.wait(0.1)
    assert [one.request for one in driver.of(effects.Resume)] == ["p"]


def test_pages_that_others_share_are_not_free_when_one_that_has_them_ends():
    """Of the pages that are in use, the two share thirty."""
    both = [entry(name, 40, used=40, charged_pages=charged) for name, charged in (("a", 40), ("b", 10))]
    driver = alone_beside(*both, parked=entry("p", 60, parked=True), free=50)
    driver.send(events.RequestEnded(R0, RequestId("a"), 1))
    driver.wait(0.1)
    assert not driver.of(effects.Resume), "sixty pages are free, and five more are wanted"


@pytest.mark.parametrize(("wanted", "resumed"), [(60, ["a"]), (61, [])])
def test_what_came_back_has_the_pages_that_it_was_promised_although_no_report_has_said_so(wanted, resumed):
    running = entry("a", 70, used=70, request_class=RequestClass.BATCH)
    driver = alone_beside(running, parked=entry("p", 35, parked=True))
    driver.parked("a", wanted)
    driver.wait(0.1)
    assert [one.request for one in driver.of(effects.Resume)] == ["p"]
    driver.resumed("p", 35)
    driver.wait(2.5)
    assert [one.request for one in driver.of(effects.Resume)] == resumed


@pytest.mark.parametrize(("pages", "resumed"), [(16, ["a", "b"]), (15, ["a"])])
def test_several_requests_resume_alone_in_order_as_long_as_they_fit(pages, resumed):
    """On an idle runner, without a margin."""
    driver = SupervisorDriver(resume_without_scheduler=2.0)
    driver.connect(
        entry("b", 6, parked=True, request_class=RequestClass.BATCH), entry("a", 10, parked=True), pages=pages
    )
    driver.wait(0.0)
    driver.wait(2.0)
    assert [one.request for one in driver.of(effects.Resume)] == resumed


def test_pages_of_a_resume_that_is_under_way_are_not_given_twice():
    driver = SupervisorDriver(resume_without_scheduler=2.0, order_timeout=2.0)
    driver.connect(entry("a", 10, parked=True), entry("b", 6, parked=True), pages=15)
    driver.wait(0.0)
    driver.wait(2.0)
    assert [one.request for one in driver.of(effects.Resume)] == ["a"]
    driver.report(entry("a", 10, parked=True), entry("b", 5, parked=True))
    assert not driver.wait(1.0), "b wants six pages of five"


def test_a_resumed_request_that_is_resumed_again_needs_a_new_order():
    driver = with_scheduler()
    driver.connect(entry("a", 8))
    driver.parked("a", 16)
    driver.resumable("a", 16)
    assert driver.resumed("a", 12) == [effects.ReportResumed(R0, "a", 1, 12)]
    assert driver.resumable("a", 16) == [effects.ReportResumed(R0, "a", 1, 12)]


def test_a_runner_that_comes_back_is_not_without_a_scheduler_before_it_says_so():
    driver = with_scheduler(resume_without_scheduler=2.0, heartbeat=100.0)
    parked = entry("p", 20, parked=True)
    driver.connect(parked, pages=100)
    driver.report(parked, has_scheduler=False)
    driver.send(events.RunnerDisconnected(R0, "1"))
    driver.clock.advance(5.0)
    driver.connect(parked, pages=100)
    driver.wait(0.1)
    assert not driver.of(effects.Resume)
    driver.report(parked, has_scheduler=False)
    driver.wait(2.1)
    assert [one.request for one in driver.of(effects.Resume)] == ["p"]
