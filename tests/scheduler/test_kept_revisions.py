"""An earlier revision serves again although its source has lost it: by whichever runner still has its bytes."""

import pytest

from motet.domain import InstanceName, RequestId
from motet.errors import AdapterUnproved, ParameterUnavailable
from motet.runner_info import Failure, Tier
from motet_scheduler.policy import effects, events
from motet_scheduler.policy.adapters.revision_state import LACKED_BY_ALL, MAX_REFUSED_BY
from motet_scheduler.policy.values import AdapterReadiness, AdapterStage, RevisionKey
from tests.scheduler.builders import PIRATE, POET, SchedulerDriver, adapter, entry, ready, resident
from tests.scheduler.test_adapters import checks, published

LOST = Failure("adapter_fetch_failed", "The source has another digest.", 0.0, "DigestMismatch")
AWAY = Failure("adapter_fetch_failed", "The source does not answer.", 30.0)
NOT_HERE = Failure("adapter_fetch_failed", "These files are not here.")
WRONG = Failure.of(AdapterUnproved("Its results are wrong.", reason="ProofFailed"))
FULL = Failure("adapter_fetch_failed", "No space.", 5.0, "NoSpace")


def of_digest(digest=PIRATE):
    return adapter(revision=RevisionKey(source="https://acme/pirate/", expected_digest=digest))


def with_runners(*names: str) -> SchedulerDriver:
    driver = ready()
    for name in names:
        driver.attach(name)
    return driver


def answers(driver, order, failure=None):
    how = {"stage": AdapterStage.NONE, "certificate": None, "failure": failure} if failure is not None else {}
    driver.certify(digest=order.expected_digest, instance=order.instance, order=order.order, **how)


@pytest.mark.parametrize("failure", [LOST, AWAY])
def test_what_the_source_has_lost_comes_from_the_runner_that_has_it_in_its_cache(failure):
    driver = with_runners("r0", "r1", "r2")
    driver.state(of_digest())
    (first,) = checks(driver)
    assert not first.cached_only
    asked = [first.instance]
    answers(driver, first, failure)
    for _ in range(2):
        (order,) = checks(driver)
        assert order.cached_only, "the source was asked already"
        assert order.expected_digest == PIRATE
        assert published(driver)["pirate"].state is AdapterReadiness.LOADING
        asked.append(order.instance)
        answers(driver, order, NOT_HERE if len(asked) == 2 else None)
    assert sorted(asked) == ["r0", "r1", "r2"]
    assert published(driver)["pirate"].digest == PIRATE


def test_once_no_runner_has_it_the_failure_of_the_source_is_told():
    driver = with_runners("r0", "r1")
    driver.state(of_digest())
    for failure in (LOST, NOT_HERE):
        (order,) = checks(driver)
        answers(driver, order, failure)
    assert not checks(driver)
    report = driver.of(effects.ReportAdapter)[-1]
    assert (report.failure.reason, report.failure.message) == (LOST.reason, f"{LOST.message} {LACKED_BY_ALL}")
    driver.wait(600)
    assert not checks(driver), "nobody has it, and the source will not have it again"
    driver.attach("r2")
    (order,) = checks(driver)
    assert (order.instance, order.cached_only) == ("r2", True)
    answers(driver, order)
    assert published(driver)["pirate"].digest == PIRATE


def test_a_source_that_is_away_is_asked_again_in_its_time_and_no_cache_twice():
    driver = with_runners("r0", "r1")
    driver.state(of_digest())
    for failure in (AWAY, NOT_HERE):
        answers(driver, checks(driver)[0], failure)
    assert published(driver)["pirate"].state is AdapterReadiness.FAILED
    for _ in range(2):
        driver.wait(29)
        assert not checks(driver)
        driver.wait(2)
        (order,) = checks(driver)
        assert not order.cached_only
        answers(driver, order, AWAY)
        assert not checks(driver), "the other one has said that it does not have it"
    driver.attach("r2")
    driver.wait(31)
    (order,) = checks(driver)
    answers(driver, order, AWAY)
    (order,) = checks(driver)
    assert (order.instance, order.cached_only) == ("r2", True)
    assert published(driver)["pirate"].state is AdapterReadiness.FAILED, "until it is decided, it says what it said"
    driver.detach("r2")
    driver.wait(1)
    assert not checks(driver), "the runner that was asked has gone, so it has failed for now"
    driver.wait(31)
    (order,) = checks(driver)
    answers(driver, order)
    assert published(driver)["pirate"].digest == PIRATE


def test_whoever_names_no_digest_or_has_a_full_disk_asks_no_others():
    for spec, failure in ((adapter(), AWAY), (of_digest(), FULL)):
        driver = with_runners("r0", "r1")
        driver.state(spec)
        answers(driver, checks(driver)[0], failure)
        assert not checks(driver)
        assert published(driver)["pirate"].state is AdapterReadiness.FAILED


def test_the_runner_that_had_it_before_is_asked_first():
    driver = with_runners("r0", "r1")
    driver.state(of_digest())
    answers(driver, checks(driver)[0])
    driver.report("r1", resident=resident(PIRATE, Tier.DISK))
    driver.report("r0")
    driver.state(of_digest(POET))
    (order,) = checks(driver)
    assert order.instance == "r0"
    answers(driver, order)
    assert [one.digest for one in driver.of(effects.DropAdapter)] == [PIRATE, PIRATE]
    driver.report("r1", resident={})
    driver.wait(60)
    driver.state(of_digest())
    (order,) = checks(driver)
    assert order.instance == "r1"


def test_runners_hear_whose_earlier_revision_they_drop():
    driver = with_runners("r0")
    driver.state(of_digest())
    answers(driver, checks(driver)[0])
    driver.state(of_digest(POET))
    answers(driver, checks(driver)[0])
    assert [(one.digest, one.ref.name) for one in driver.of(effects.DropAdapter)] == [(PIRATE, "pirate")]
    driver.state()
    assert [(one.digest, one.ref.name) for one in driver.of(effects.DropAdapter)] == [(POET, "")], "it has gone"


def test_a_request_goes_on_where_the_adapter_is_if_another_runner_cannot_get_it():
    driver = with_runners("r0", "r1")
    driver.state(of_digest())
    answers(driver, checks(driver)[0])
    driver.report("r0", resident=resident(PIRATE, Tier.DISK))
    driver.enqueue("a", digest=PIRATE, avoid=("r0",))
    assert driver.where("a") == "r1"
    driver.send(events.RunnerDeclined(InstanceName("r1"), RequestId("a"), 1, LOST))
    driver.lose("a", 1)
    assert not driver.of(effects.SendRefused)
    driver.wait(0.2)
    assert driver.where("a") == "r0"
    driver.lose("a", 2)
    driver.wait(0.05)
    assert driver.where("a") == "", "not at once where it cannot be loaded"
    driver.wait(1)
    assert driver.where("a") == "r0"
    driver.report("r0", resident={})
    driver.send(events.RunnerDeclined(InstanceName("r0"), RequestId("a"), 3, LOST))
    driver.lose("a", 3)
    assert [one.failure.code for one in driver.of(effects.SendRefused)] == [LOST.code], "nobody has it"


def both_report(driver, seconds):
    """→ What was ordered meanwhile."""
    ordered = []
    for _ in range(seconds):
        driver.report("r0")
        driver.report("r1")
        driver.wait(1)
        ordered += checks(driver)
    return ordered


def test_a_runner_that_never_answers_keeps_nobody_from_the_source():
    driver = with_runners("r0", "r1")
    driver.state(of_digest())
    (first,) = checks(driver)
    answers(driver, first, AWAY)
    assert [order.cached_only for order in checks(driver)] == [True]
    assert not both_report(driver, 39), "the source is not asked before its time"
    assert published(driver)["pirate"].state is AdapterReadiness.FAILED
    assert driver.scheduler.state.orders.next_due() == driver.clock() + 1, "it comes without another event"
    (again,) = both_report(driver, 2)
    assert (again.instance, again.cached_only) == (first.instance, False)
    answers(driver, again, AWAY)
    (silent,) = checks(driver)
    assert (silent.instance, silent.cached_only) == ("r1", True), "its answer may have been lost"
    both_report(driver, 11)
    assert published(driver)["pirate"].state is AdapterReadiness.FAILED
    answers(driver, silent)
    assert published(driver)["pirate"].digest == PIRATE, "a late answer counts"


def test_a_late_answer_about_a_cache_is_none_about_the_source():
    driver = with_runners("r0", "r1")
    driver.state(of_digest())
    answers(driver, checks(driver)[0], AWAY)
    (silent,) = checks(driver)
    both_report(driver, 12)
    answers(driver, silent, NOT_HERE)
    assert not checks(driver)
    assert [order.cached_only for order in both_report(driver, 31)][:1] == [False]


@pytest.mark.parametrize("failure", [LOST, AWAY])
def test_what_the_source_said_outlives_the_runner_that_asked_it(failure):
    driver = with_runners("r0", "r1")
    driver.state(of_digest())
    (first,) = checks(driver)
    answers(driver, first, failure)
    (second,) = checks(driver)
    driver.attach(first.instance, incarnation="2")
    answers(driver, second, NOT_HERE)
    (third,) = checks(driver)
    assert (third.instance, third.cached_only) == (first.instance, True)
    answers(driver, third, NOT_HERE)
    report = driver.of(effects.ReportAdapter)[-1]
    assert (report.failure.reason, report.failure.message) == (failure.reason, f"{failure.message} {LACKED_BY_ALL}")
    driver.wait(31)
    assert [order.cached_only for order in checks(driver)] == ([False] if failure is AWAY else [])


def is_on_the_only_one(driver):
    """The adapter is on r1 alone, and so is the request."""
    driver.state(of_digest())
    answers(driver, checks(driver)[0])
    driver.report("r1", resident=resident(PIRATE, Tier.DISK))
    driver.enqueue("a", digest=PIRATE, avoid=("r0",), deadline=30.0)
    assert driver.where("a") == "r1"


def declines_of_r0(driver, delivered, seconds=300):
    """→ After how many seconds, and then the refusals."""
    declined = []
    for second in range(seconds):
        request = driver.scheduler.requests[RequestId("a")]
        if driver.where("a") == "r0":
            declined.append(second)
            epoch = request.placement.epoch
            driver.send(events.RunnerDeclined(InstanceName("r0"), RequestId("a"), epoch, LOST))
            driver.lose("a", epoch, delivered)
            if refused := driver.of(effects.SendRefused):
                return declined, refused
        driver.report("r0")
        driver.report("r1", entry("z", 100, gateway="gx"), resident=resident(PIRATE, Tier.DISK))
        driver.wait(1)
        if refused := driver.of(effects.SendRefused):
            return declined, refused
    return declined, []


def test_a_stream_does_not_circle_while_the_only_one_that_has_its_adapter_hangs():
    driver = with_runners("r0", "r1")
    is_on_the_only_one(driver)
    identity = driver.scheduler.runners[InstanceName("r1")].identity
    driver.send(events.RunnerUnhealthy(identity, "its engine hangs", hung=True))
    driver.lose("a", 1, 5)
    declined, refused = declines_of_r0(driver, 5)
    assert len(declined) == 1
    assert [one.failure for one in refused] == [LOST]


def test_who_can_never_take_a_request_keeps_it_from_no_refusal():
    driver = with_runners("r0")
    driver.attach("r1", pool="default/other")
    is_on_the_only_one(driver)
    never = Failure.of(ParameterUnavailable("This runner is older."))
    driver.send(events.RunnerDeclined(InstanceName("r1"), RequestId("a"), 1, never))
    driver.lose("a", 1)
    declined, refused = declines_of_r0(driver, 0)
    assert len(declined) == 1
    assert [one.failure for one in refused] == [LOST]


def test_a_stream_does_not_circle_while_the_only_one_that_has_its_adapter_is_full():
    driver = with_runners("r0", "r1")
    is_on_the_only_one(driver)
    driver.report("r1", entry("z", 100, gateway="gx"), resident=resident(PIRATE, Tier.DISK))
    driver.lose("a", 1, 5)
    assert not declines_of_r0(driver, 5, seconds=25)[1]
    driver.lose("a", 1, 6)
    declined, refused = declines_of_r0(driver, 6)
    assert len(declined) > 1, "r1 may have room again, as it had before the last token"
    assert declined[-1] - declined[0] >= 30, "as long as anything waits"
    assert [one.failure for one in refused] == [LOST]


def test_a_source_that_is_away_for_a_while_is_asked_again_also_if_another_runner_has_refused_the_bytes():
    driver = with_runners("r0", "r1")
    driver.state(of_digest())
    for failure in (AWAY, WRONG):
        (order,) = checks(driver)
        answers(driver, order, failure)
    assert published(driver)["pirate"].state is AdapterReadiness.FAILED
    assert not checks(driver), "its source was asked just now"
    for _ in range(2):
        driver.wait(AWAY.retry_after + 1)
        (again,) = checks(driver)
        assert (again.instance, again.cached_only) == ("r0", False)
        answers(driver, again, AWAY)
        assert not checks(driver)
    driver.wait(AWAY.retry_after + 1)
    (again,) = checks(driver)
    answers(driver, again)
    assert published(driver)["pirate"].digest == PIRATE


def test_a_source_that_has_lost_refused_bytes_is_not_asked_again():
    driver = with_runners("r0", "r1")
    driver.state(of_digest())
    for failure in (LOST, WRONG):
        (order,) = checks(driver)
        answers(driver, order, failure)
    driver.wait(100)
    assert not checks(driver)
    driver.attach("r2")
    (order,) = checks(driver)
    assert (order.instance, order.cached_only) == ("r2", True)


def test_of_more_runners_than_are_asked_those_come_first_that_tell_that_they_have_the_bytes():
    driver = with_runners(*(f"r{number:03}" for number in range(MAX_REFUSED_BY + 5)))
    last = f"r{MAX_REFUSED_BY + 4:03}"
    driver.report(last, resident=resident(PIRATE, tier=Tier.DISK))
    driver.state(of_digest())
    (first,) = checks(driver)
    assert first.instance == last
    answers(driver, first)
    assert published(driver)["pirate"].digest == PIRATE


def test_a_failure_says_how_many_runners_have_been_asked_if_there_are_more():
    driver = with_runners(*(f"r{number:03}" for number in range(MAX_REFUSED_BY + 5)))
    driver.state(of_digest())
    for number in range(MAX_REFUSED_BY):
        (order,) = checks(driver)
        answers(driver, order, NOT_HERE if number else LOST)
    assert not checks(driver)
    assert published(driver)["pirate"].failure.message.endswith(
        f"{MAX_REFUSED_BY} runners were asked and do not have these files in their disk caches."
    )
