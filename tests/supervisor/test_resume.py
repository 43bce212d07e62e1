"""How parked requests resume: through the scheduler's ledger, or without it while it is away."""

from motet.domain import ParkMethod
from motet_supervisor.policy import effects, events
from tests.supervisor.builders import R0, SupervisorDriver, entry


def with_scheduler(**config):
    told = SupervisorDriver(**config)
    told.tell(events.SchedulerConnected(1, 1))
    return told


def test_a_parked_request_resumes_when_the_scheduler_allows_it():
    told = with_scheduler()
    told.connect(entry("a", 8))
    told.parked("a", 16)
    told.resumable("a", 16)
    assert told.effects == [effects.Resume(R0, "a", 1, 16)]
    told.resumed("a", 16)
    assert told.effects == [effects.ReportResumed(R0, "a", 1, 16)]


def test_an_allowed_resume_with_another_promise_is_answered_with_the_right_one():
    told = with_scheduler()
    told.connect(entry("a", 8))
    told.parked("a", 16)
    told.resumable("a", 8)
    assert told.effects == [effects.ReportParked(R0, "a", 1, 16, ParkMethod.RECOMPUTE)]


def test_an_allowed_resume_of_a_running_request_is_answered_as_resumed():
    told = with_scheduler()
    told.connect(entry("a", 8))
    assert told.resumable("a", 8) == [effects.ReportResumed(R0, "a", 1, 8)]


def test_an_allowed_resume_of_an_earlier_epoch_is_ignored():
    told = with_scheduler()
    told.connect(entry("a", 8, parked=True, epoch=2))
    assert not told.resumable("a", 8, epoch=1)


def test_a_scheduler_that_connects_gets_all_parked_requests():
    told = SupervisorDriver()
    told.connect(entry("a", 8, parked=True), entry("b", 4))
    told.tell(events.SchedulerConnected(1, 1))
    (everyone,) = told.of(effects.ReportAllParked)
    assert [one.request for one in everyone.requests] == ["a"]


def test_requests_that_a_runner_parked_by_itself_are_reported_too():
    told = with_scheduler()
    told.connect(entry("a", 8))
    told.parked("a", 16, by_itself=True)
    assert told.of(effects.ReportParked)
    told = with_scheduler()
    told.connect(entry("a", 8))
    told.report(entry("a", 16, parked=True))
    assert told.of(effects.ReportParked) == [effects.ReportParked(R0, "a", 1, 16, ParkMethod.RECOMPUTE)]


def test_a_supervisor_that_comes_back_learns_from_the_runner_who_is_parked():
    told = with_scheduler()
    told.connect(entry("a", 16, parked=True))
    assert told.of(effects.ReportParked)[0].wanted == 16


def test_without_a_scheduler_parked_requests_resume_after_a_while_if_enough_pages_are_free():
    told = with_scheduler(resume_without_scheduler=2.0, resume_margin=0.1)
    told.connect(entry("a", 30), entry("b", 60), pages=100)
    told.parked("a", 35)
    told.tell(events.SchedulerDisconnected(1))
    told.wait(2.1)
    assert not told.of(effects.Resume), "40 are free, and 35 and a margin of 10 are wanted"
    told.report(entry("a", 35, parked=True), entry("b", 50))
    told.wait(0.1)
    assert told.of(effects.Resume) == [effects.Resume(R0, "a", 1, 35)]


def test_with_a_scheduler_parked_requests_wait_until_it_allows_them():
    told = with_scheduler()
    told.connect(entry("a", 10, parked=True))
    told.wait(4)
    assert not told.of(effects.Resume)


def test_an_idle_runner_needs_no_margin():
    told = SupervisorDriver(resume_without_scheduler=2.0, resume_margin=0.5)
    told.connect(entry("a", 100, parked=True), pages=100)
    told.wait(0.1)
    told.wait(2.1)
    assert told.of(effects.Resume)


def test_the_first_parked_request_is_not_overtaken_by_a_smaller_one():
    told = SupervisorDriver(resume_without_scheduler=2.0)
    told.connect(entry("a", 60, parked=True), entry("b", 5, parked=True), entry("c", 80), pages=100)
    told.wait(0.1)
    told.wait(3)
    assert not told.of(effects.Resume)


def test_a_resume_that_had_no_effect_is_ordered_again():
    told = SupervisorDriver(resume_without_scheduler=2.0, order_timeout=2.0)
    told.connect(entry("a", 10, parked=True))
    told.wait(0.1)
    told.wait(2.1)
    assert told.of(effects.Resume)
    told.wait(1)
    assert not told.of(effects.Resume)
    told.wait(2)
    assert told.of(effects.Resume)


def test_messages_of_a_scheduler_that_no_longer_leads_are_ignored():
    told = with_scheduler()
    told.connect(entry("a", 8))
    told.parked("a", 16)
    told.tell(events.SchedulerConnected(2, term=5))
    assert told.resumable("a", 16, term=1) == []
    assert told.resumable("a", 16, term=5) == [effects.Resume(R0, "a", 1, 16)]


def test_orders_have_the_leaders_term_and_term_0_while_it_is_away():
    told = with_scheduler()
    assert told.supervisor.term == 1
    told.tell(events.SchedulerConnected(2, term=5))
    assert told.supervisor.term == 5
    told.tell(events.TermRaised(2, term=7))
    assert told.supervisor.term == 7
    told.tell(events.SchedulerDisconnected(2))
    assert told.supervisor.term == 0, "the other one does not lead any more"
    told.tell(events.SchedulerConnected(3, term=7))
    assert told.supervisor.term == 7


def test_a_scheduler_that_no_longer_leads_does_not_keep_requests_parked():
    told = with_scheduler(resume_without_scheduler=2.0)
    told.connect(entry("a", 8))
    told.parked("a", 16)
    told.tell(events.SchedulerConnected(2, term=5))
    told.tell(events.SchedulerDisconnected(2))
    told.wait(2.1)
    assert told.of(effects.Resume) == [effects.Resume(R0, "a", 1, 16)]
