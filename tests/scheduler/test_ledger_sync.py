"""The ledger against the runners' reports, and how parked requests resume."""

import pytest

from motet.domain import InstanceName, RequestId
from motet_scheduler.policy import effects, events
from motet_scheduler.policy.values import Promise
from tests.scheduler.builders import entry, ready

R0 = InstanceName("r0")
A = RequestId("a")


def park(driver, request="a", *, epoch=1, pages=10):
    return driver.send(events.RequestParked(R0, RequestId(request), epoch, Promise(pages)))


def supervised(**config):
    driver = ready(**config)
    driver.send(events.SupervisorConnected())
    return driver


def test_the_runners_promise_overrides_the_ledger():
    driver = ready()
    driver.attach()
    driver.enqueue("a")
    driver.report("r0", entry("a", 9))
    assert driver.ledger() == {("a", 1): 9}


def test_unknown_requests_of_a_runner_are_adopted():
    driver = ready()
    driver.attach()
    driver.report("r0", entry("stranger", 6))
    assert driver.ledger() == {("stranger", 1): 6}


def test_a_placement_that_no_report_lists_for_two_seconds_never_arrived():
    driver = ready()
    driver.attach()
    driver.enqueue("a")
    for _ in range(4):
        driver.clock.advance(0.5)
        driver.report("r0")
    assert driver.ledger(), "the first report was 1.5 seconds ago"
    driver.clock.advance(0.5)
    driver.report("r0")
    assert not driver.ledger()


def test_a_placement_that_was_listed_is_given_up_as_late():
    driver = ready()
    driver.attach()
    driver.enqueue("a")
    driver.report("r0")
    driver.clock.advance(1.9)
    driver.report("r0", entry("a", 5))
    driver.clock.advance(0.2)
    driver.report("r0")
    assert driver.ledger(), "the report before listed it"
    driver.clock.advance(2)
    driver.report("r0")
    assert not driver.ledger()


def test_reports_that_are_read_late_release_no_placement():
    """A scheduler that was paused reads them at once. They may be older than the placement."""
    driver = ready()
    driver.attach()
    driver.enqueue("a")
    driver.clock.advance(10)
    for _ in range(10):
        driver.report("r0")
    assert driver.ledger()


def test_a_placement_that_was_given_up_can_still_be_lost_and_placed_again():
    driver = ready()
    driver.attach()
    driver.enqueue("a")
    for _ in range(2):
        driver.clock.advance(3)
        driver.report("r0")
    driver.lose("a")
    driver.wait(1)
    assert driver.where("a") == "r0"


def test_a_report_sent_before_a_request_ended_does_not_record_it_again():
    driver = ready()
    driver.attach()
    driver.enqueue("a")
    driver.finish("a")
    driver.report("r0", entry("a", 5))
    assert not driver.ledger()


def test_a_request_that_runs_long_after_its_end_uses_pages_and_is_counted():
    driver = ready()
    driver.attach()
    driver.enqueue("a")
    driver.finish("a")
    driver.wait(3)
    driver.report("r0", entry("a", 5))
    assert driver.ledger() == {("a", 1): 5}


@pytest.mark.parametrize("parked", [[False] * 3, [True] * 3, [False, True, False]])
def test_work_that_its_gateway_does_not_know_for_two_seconds_is_cancelled(parked):
    driver = ready()
    driver.attach()
    for is_parked in (parked[0], parked[1], parked[1], parked[1]):  # reports may come at once
        driver.report("r0", entry("orphan", 5, parked=is_parked))
        assert not driver.of(effects.CancelAtRunner)
        driver.clock.advance(0.5)
    driver.report("r0", entry("orphan", 5, parked=parked[2]))
    assert [effect.request for effect in driver.of(effects.CancelAtRunner)] == ["orphan"]


def test_a_parked_request_that_was_placed_again_is_cancelled():
    driver = ready()
    driver.attach("r0")
    driver.attach("r1")
    driver.enqueue("a")
    assert driver.where("a") == "r1"
    driver.lose("a")
    driver.wait(3)
    driver.report("r1", entry("a", 5, epoch=1, parked=True))
    assert [(effect.instance, effect.epoch) for effect in driver.of(effects.CancelAtRunner)] == [("r1", 1)]


def test_work_of_a_gateway_that_is_away_is_left_alone():
    driver = ready()
    driver.attach()
    for _ in range(5):
        driver.report("r0", entry("a", 5, gateway="elsewhere"))
        assert not driver.of(effects.CancelAtRunner)


def test_an_earlier_placement_that_still_runs_is_cancelled_and_counted():
    driver = ready()
    driver.attach("r0")
    driver.attach("r1")
    driver.enqueue("a")
    assert driver.where("a") == "r1"
    driver.lose("a")
    driver.wait(3)
    driver.report("r1", entry("a", 5, epoch=1))
    assert [(effect.instance, effect.epoch) for effect in driver.of(effects.CancelAtRunner)] == [("r1", 1)]
    assert driver.ledger("r1") == {("a", 1): 5}


def test_a_parked_request_frees_its_promise_and_is_resumed_before_new_requests():
    driver = supervised()
    driver.attach(pages=12)
    driver.enqueue("a", max_tokens=48)
    driver.enqueue("b", max_tokens=48)
    park(driver, pages=10)
    assert driver.ledger() == {("b", 1): 4}
    driver.enqueue("c", max_tokens=16)
    assert driver.where("c") == "", "two pages are free, but the parked request comes first"
    driver.finish("b")
    assert driver.of(effects.AllowResume) == [effects.AllowResume(R0, A, 1, Promise(10))]
    assert driver.where("c") == "r0"


def test_without_a_supervisor_the_runner_resumes_parked_requests_itself():
    driver = ready()
    driver.attach()
    driver.report("r0", entry("a", 8, parked=True))
    assert not driver.of(effects.AllowResume)
    driver.report("r0", entry("a", 8))
    assert driver.ledger() == {("a", 1): 8}


def test_parked_requests_resume_by_class_then_age():
    driver = supervised()
    driver.attach(pages=20)
    for name in ("a", "b"):
        driver.enqueue(name, max_tokens=16)
        driver.clock.advance(0.1)
    driver.report("r0", entry("a", 2), entry("b", 2), entry("big", 16))
    park(driver, "b", pages=12)
    park(driver, "a", pages=12)
    driver.report("r0", entry("a", 12, parked=True), entry("b", 12, parked=True))
    driver.clock.advance(3)
    driver.report("r0", entry("a", 12, parked=True), entry("b", 12, parked=True))
    assert [effect.request for effect in driver.of(effects.AllowResume)] == ["a"]


def test_of_very_many_parked_requests_some_resume_in_each_event_the_oldest_first():
    """A runner may claim thousands, and capacity for them."""
    driver = supervised()
    driver.attach(pages=1000, max_sequences=1000)
    names = [f"{number:03}" for number in range(100)]
    for name in names:
        driver.clock.advance(0.001)
        driver.enqueue(name)
    resumed = []
    for _ in range(4):
        left = (entry(name, 2, parked=True) for name in reversed(names) if name not in resumed)
        driver.report("r0", *(entry(name, 2) for name in resumed), *left)
        allowed = [one.request for one in driver.of(effects.AllowResume)]
        assert len(allowed) <= 32
        resumed += allowed
    assert resumed == names


def overcommitted(*requests):
    """Three halves of the pages are promised."""
    driver = supervised()
    driver.attach(pages=20)
    driver.send(events.OvercommitSet("default/demo", 1.5))
    for name in requests:
        driver.enqueue(name, prompt=1, max_tokens=160)
    return driver


def test_with_overcommit_a_parked_request_resumes_when_its_pages_are_free_and_not_only_promisable():
    driver = overcommitted("b", "c", "a")
    assert driver.ledger() == dict.fromkeys([("a", 1), ("b", 1), ("c", 1)], 10)
    running = [entry("b", 10, pages_used=7), entry("c", 10, pages_used=7)]
    driver.report("r0", *running, entry("a", 10, pages_used=6), pages_free=10)
    park(driver, pages=10)
    assert not driver.of(effects.AllowResume), "it was parked for lack of pages, so those reported before are gone"
    driver.report("r0", *running, entry("a", 10, parked=True), pages_free=6)
    assert not driver.of(effects.AllowResume), "it would be parked again at once"
    driver.finish("b")
    driver.report("r0", running[1], entry("a", 10, parked=True), pages_free=13)
    assert driver.of(effects.AllowResume) == [effects.AllowResume(R0, A, 1, Promise(10))]


def test_with_overcommit_the_pages_of_a_resumed_request_are_kept_for_it():
    driver = overcommitted("a", "b", "c")
    driver.report("r0", entry("c", 10, pages_used=8), entry("a", 10, parked=True), entry("b", 10, parked=True))
    a = entry("a", 10, pages_used=1, parked_times=1)
    driver.report(
        "r0", entry("c", 10, pages_used=8), entry("a", 10, parked=True), entry("b", 10, parked=True), pages_free=12
    )
    assert [one.request for one in driver.of(effects.AllowResume)] == ["a"], "twelve are free, and a will take ten"
    driver.report("r0", entry("c", 10, pages_used=8), a, entry("b", 10, parked=True), pages_free=11)
    assert not driver.of(effects.AllowResume), "eleven are free, and a will take nine more"
    driver.finish("c")
    driver.report("r0", a, entry("b", 10, parked=True), pages_free=19)
    assert [one.request for one in driver.of(effects.AllowResume)] == ["b"]


def test_with_overcommit_a_parked_request_resumes_when_nothing_runs():
    driver = overcommitted("a")
    driver.report("r0", entry("a", 10, parked=True), pages_free=0)
    assert driver.of(effects.AllowResume)


def test_a_resume_that_never_happened_is_ordered_again():
    driver = supervised()
    driver.attach()
    driver.enqueue("a")
    park(driver)
    assert driver.of(effects.AllowResume)
    for _ in range(3):
        driver.clock.advance(0.5)
        driver.report("r0", entry("a", 10, parked=True))
        assert not driver.of(effects.AllowResume), "on its way"
    driver.clock.advance(1)
    driver.report("r0", entry("a", 10, parked=True))
    assert driver.of(effects.AllowResume)


def test_a_promise_that_the_supervisor_enlarged_is_in_the_ledger_at_once():
    driver = supervised()
    driver.attach()
    driver.enqueue("a")
    driver.send(events.PromiseChanged(R0, A, 1, Promise(20)))
    assert driver.ledger() == {("a", 1): 20}


def test_news_of_an_ended_request_changes_nothing():
    driver = supervised()
    driver.attach()
    driver.send(events.PromiseChanged(R0, A, 1, Promise(20)))
    park(driver)
    driver.send(events.RequestResumed(R0, A, 1, Promise(20)))
    assert not driver.ledger()
    assert not driver.scheduler.runners[R0].parked


@pytest.mark.parametrize("late", [events.RequestParked, events.RequestResumed])
def test_what_the_supervisor_says_of_an_earlier_placement_changes_nothing(late):
    """The runner's own report was faster: it shows the request there again, and parked."""
    driver = ready()
    driver.attach()
    driver.enqueue("a")
    driver.lose("a")
    driver.wait(9.0)
    assert driver.of(effects.SendPlaced)[0].epoch == 2
    driver.report("r0", entry("a", 20, epoch=2, parked=True))
    runner = driver.scheduler.runners[R0]
    before = dict(runner.parked)
    assert before[A].epoch == 2
    driver.send(late(R0, A, 1, Promise(8)))
    assert (runner.parked, driver.ledger()) == (before, {})


def test_an_older_park_than_the_one_that_the_runner_reports_changes_nothing():
    driver = ready()
    driver.attach()
    driver.enqueue("a")
    driver.report("r0", entry("a", 20, parked=True, promise_number=4))
    driver.send(events.RequestParked(R0, A, 1, Promise(8, number=2)))
    wanted = driver.scheduler.runners[R0].parked[A].wanted
    assert (wanted.pages, wanted.number) == (20, 4)


def test_a_request_whose_resume_is_refused_waits_again_and_was_parked_once():
    driver = supervised()
    driver.attach()
    driver.enqueue("a")
    for _ in range(100):
        park(driver)
        assert [one.request for one in driver.of(effects.AllowResume)] == ["a"]
    driver.finish("a")
    story = [event for _, event, _ in driver.scheduler.timelines.of(A)]
    assert story == ["queued", "placed", "parked", "finished"]


def test_a_parked_request_that_moves_is_removed_from_its_old_runner():
    driver = supervised()
    driver.attach(pages=8)
    driver.report("r0", entry("x", 6))
    driver.gateway("g0", driver.live("a", pages=2))
    park(driver, pages=8)
    driver.lose("a")
    assert not driver.scheduler.runners[R0].parked
